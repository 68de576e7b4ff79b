"""The look of the report: one palette for the page and its plots, and the page's style sheet."""

# Name: (light, dark). `drawing` draws in the light colours and replaces each by `var(--name)` in the page, so a plot
# follows the reader's colour scheme. Therefore the light ones must all differ.
PALETTE = {
    "page": ("#fcfcfa", "#16181b"),
    "card": ("#f3f3ef", "#1e2125"),
    "line": ("#dcdcd5", "#34383e"),
    "ink": ("#22252a", "#e4e4e0"),
    "faint": ("#666b73", "#9aa0a8"),
    "floor": ("#7d828a", "#8b9199"),
    "warning": ("#b3261e", "#ff8a80"),
    "run0": ("#2364aa", "#6fb1f5"),
    "run1": ("#d1600a", "#ff9d52"),
    "run2": ("#2b8a57", "#63cf95"),
    "run3": ("#8a4fb0", "#c594ea"),
    "run4": ("#b8336a", "#f284b0"),
    "run5": ("#7a6a12", "#d3c25a"),
}
RUN_COLORS = 6
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)))  # after RUN_COLORS runs the colours repeat in another dash


def light(name: str) -> str:
    return PALETTE[name][0]


def variables(scheme: int) -> str:
    return "".join(f"--{name}:{colors[scheme]};" for name, colors in PALETTE.items())


def style_sheet() -> str:
    """The whole CSS of the page. Paper always gets the light colours."""
    return f"""
:root {{ color-scheme: light; {variables(0)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {variables(1)} }} }}
{RULES}"""


RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 920px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .6rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.6rem 0 .8rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .4rem; }
p { margin: 0 0 .8rem; max-width: 46rem; overflow-wrap: anywhere; }
.faint, figcaption { color: var(--faint); font-size: .85rem; line-height: 1.4; }
.warning { color: var(--warning); }
.swatch { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .45em; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.4rem 0; }
.tile { background: var(--card); border-radius: 8px; padding: .75rem .9rem; }
.tile dt { color: var(--faint); font-size: .8rem; line-height: 1.3; }
.tile dd { margin: 0; }
.tile .value { font-size: 1.5rem; line-height: 1.35; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile .note { color: var(--faint); font-size: .78rem; line-height: 1.3; }
.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 1.6rem 1.4rem; }
.plots .wide { grid-column: 1 / -1; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { margin-top: .2rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: inherit !important; }
.wide svg.small { display: none; }
.scroll { overflow-x: auto; margin: 0 0 .8rem; }
button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
.axes { display: flex; flex-wrap: wrap; gap: .4rem; align-items: baseline; color: var(--faint); font-size: .85rem; }
.axes[hidden] { display: none; }
.axes button { padding: .1rem .7rem; border: 1px solid var(--line); border-radius: 99px; }
.axes button[aria-pressed="true"] { background: var(--card); color: var(--ink); border-color: var(--faint); }
.own { fill: var(--faint); }
.cursor { stroke: var(--faint); stroke-width: .6; pointer-events: none; }
.hover { position: fixed; z-index: 1; pointer-events: none; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px; padding: .3rem .6rem; font-size: .78rem; line-height: 1.45; font-variant-numeric: tabular-nums;
  box-shadow: 0 2px 8px #0003; max-width: 90vw; }
.hover div:first-child { color: var(--faint); }
.live { color: var(--faint); font-size: .85rem; margin-bottom: 1rem; }
.live::before { content: "● "; color: var(--run2); }
.live[data-ended="1"]::before { color: var(--faint); }
.live.lost::before { color: var(--warning); }
.live.lost::after { content: " No answer from handgrad watch: this is its last state."; color: var(--warning); }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem 1.3rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; }
thead th { color: var(--faint); font-weight: 500; overflow-wrap: anywhere; }
tbody th { font-weight: 400; color: var(--faint); white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
.sortable th:first-child { position: sticky; left: 0; background: var(--page); white-space: nowrap; }
.sortable thead th { vertical-align: bottom; overflow-wrap: normal; }
.broad { width: fit-content; min-width: 100%; max-width: calc(50% + min(620px, 50vw - 1.2rem)); }
.broad thead th { max-width: 5.5rem; line-height: 1.25; white-space: normal; }
.sortable th, .sortable td { padding-right: 1rem; }
.sortable td { white-space: nowrap; }
.sortable button { text-align: inherit; }
.sortable [aria-sort="ascending"] button::after { content: " ↑"; }
.sortable [aria-sort="descending"] button::after { content: " ↓"; }
.cards thead th, .notes thead th { overflow-wrap: normal; }
.cards td:nth-child(2) { min-width: 6rem; }
.cards tbody th, .notes tbody th { white-space: normal; }
tr.total td, tr.total th { font-weight: 600; border-bottom: 0; }
pre { background: var(--card); border-radius: 8px; padding: .8rem .95rem; margin: 0 0 .9rem;
  white-space: pre-wrap; overflow-wrap: anywhere;
  font: .84rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.sample { margin: 0 0 .8rem; }
.sample pre { margin: .15rem 0 0; }
details { margin: 0 0 .6rem; }
summary { cursor: pointer; padding: .2rem 0; }
footer { margin-top: 3rem; color: var(--faint); font-size: .8rem; }
@media (max-width: 640px) {
  main { padding: 1.4rem .9rem 3rem; }
  h1 { font-size: 1.45rem; }
  .plots { grid-template-columns: 1fr; }
  .wide svg.large { display: none; }
  .wide svg.small { display: block; }
  .tiles { grid-template-columns: 1fr 1fr; gap: .5rem; }
  .tile .value { font-size: 1.25rem; }
  th, td { padding-right: .8rem; }
  .broad { width: auto; max-width: none; }
  .sortable th:first-child { min-width: 7.5rem; white-space: normal; overflow-wrap: anywhere; }
  .cards, .cards tbody, .cards tr { display: block; }
  .cards thead { display: none; }
  .cards tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .cards td, .cards th { display: grid; grid-template-columns: 6rem 1fr; border: 0; padding: .08rem 0; color: var(--ink);
    text-align: left; white-space: normal; overflow-wrap: anywhere; }
  .cards [data-label]::before { content: attr(data-label); color: var(--faint); }
}
@media print {
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  .tile, pre { border: 1px solid var(--line); }
  .scroll { overflow: visible; }
  .axes { display: none; }
  h2, h3 { break-after: avoid; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); }
  .tiles, .sample, pre, table { break-inside: avoid; }
}
"""

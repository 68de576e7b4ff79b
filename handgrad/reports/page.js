// Values under the pointer, the choice of the x axis, sortable tables.
"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];
const state = { axis: "steps", pointer: null, sorted: new Map() };

// Numbers as text, as in results.short_text.
const short = (value) => {
  const sizes = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, unit] = sizes.find(([size]) => Math.abs(value) >= size) || [1, ""];
  return parseFloat((value / size).toPrecision(3)) + unit;
};
const shown = (value) => (Math.abs(value) >= 1e5 ? short(value) : String(parseFloat(value.toPrecision(5))));

// The x axis. Points are drawn by step, and moved for another axis.
const runs = () => JSON.parse(document.querySelector(".axes").dataset.runs);
const interpolate = ([from, to], x) => {
  const last = from.length - 1;
  if (x <= from[0]) return (to[0] * Math.max(0, x)) / from[0];
  let i = from.findIndex((value) => value >= x);
  if (i < 0) i = last;
  const slope = i ? (to[i] - to[i - 1]) / (from[i] - from[i - 1]) : 0;
  return to[i] + slope * (x - from[i]);
};
const mapping = (run) => { // step -> value on the chosen axis, or null where the run does not know it
  if (state.axis === "tokens" && Array.isArray(run.tokens)) return (step) => interpolate(run.tokens, step);
  if (state.axis === "tokens") return run.tokens ? (step) => step * run.tokens : null;
  if (state.axis === "time") return run.clock && ((step) => interpolate(run.clock, step));
  return (step) => step;
};
const range = (svg) => {
  const [left, right, top, bottom, low, high] = JSON.parse(svg.dataset.frame);
  if (state.axis === "steps" || !svg.closest("[data-by-step]")) return { left, right, top, bottom, low, high };
  const known = runs();
  const ends = JSON.parse(svg.closest("figure").dataset.series).flatMap(({ run, x }) => {
    const to = mapping(known[run]);
    return to && x.length ? [to(x[x.length - 1])] : [];
  });
  const end = Math.max(...ends, 1e-9);
  return { left, right, top, bottom, low: -0.015 * end, high: 1.015 * end, end };
};
const unit = (end) => {
  if (state.axis === "tokens") return [1, "tokens"];
  const units = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]];
  return units.find(([seconds]) => end >= 2 * seconds) || units[3];
};
const ticks = (svg, { left, right, low, high, end }) => {
  const [size, name] = unit(end), model = svg.querySelector(".xtick text"), label = svg.querySelector(".xlabel text");
  label.textContent = name;
  const rough = end / size / (right - left > 350 ? 8 : 4), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power * size;
  for (let value = 0; value <= end; value += step) {
    const tick = model.cloneNode();
    tick.setAttribute("x", left + ((value - low) / (high - low)) * (right - left));
    tick.removeAttribute("transform");
    tick.setAttribute("class", "own");
    tick.textContent = short(value / size);
    label.parentNode.append(tick);
  }
};
const redraw = (svg) => {
  all(".cursor", svg).forEach((line) => line.remove());
  svg.original ??= svg.innerHTML;
  svg.innerHTML = svg.original;
  if (state.axis === "steps") return;
  const [left, right, , , low, high] = JSON.parse(svg.dataset.frame), now = range(svg), known = runs();
  for (const group of all("g.run", svg)) {
    const to = mapping(known[group.dataset.run]);
    if (!to) { group.remove(); continue; }
    const moved = (x) => {
      const step = low + ((x - left) / (right - left)) * (high - low);
      return (left + ((to(step) - now.low) / (now.high - now.low)) * (right - left)).toFixed(2);
    };
    for (const path of all("path", group).filter((path) => !path.closest("defs"))) {
      const points = path.getAttribute("d").replace(/([ML]) ?(-?[\d.]+)/g, (_, letter, x) => `${letter} ${moved(x)}`);
      path.setAttribute("d", points);
    }
    for (const use of all("use", group)) use.setAttribute("x", moved(use.getAttribute("x")));
  }
  for (const group of all("g.name, g.leader", svg).filter((group) => group.dataset.run)) {
    const to = mapping(known[group.dataset.run]), path = group.querySelector("path"); // a leader's begins at its curve's end
    const begin = (x) => left + ((to(low + ((x - left) / (right - left)) * (high - low)) - now.low) / (now.high - now.low)) * (right - left);
    if (!to) group.remove();
    else if (path) path.setAttribute("d", path.getAttribute("d").replace(/M ?(-?[\d.]+)/, (_, x) => `M ${begin(x).toFixed(2)}`));
  }
  for (const tick of all(".xtick", svg)) tick.style.display = "none";
  ticks(svg, now);
};
const chooseAxis = (axis) => {
  state.axis = axis;
  for (const button of all(".axes button")) button.setAttribute("aria-pressed", button.dataset.axis === axis);
  all("[data-by-step] svg").forEach(redraw);
};

// Values under the pointer.
const box = document.createElement("div");
box.className = "hover";
box.hidden = true;
document.body.append(box);
const hover = () => {
  all(".cursor").forEach((line) => line.remove());
  box.hidden = true;
  const svg = state.pointer && document.elementFromPoint(...state.pointer)?.closest("figure[data-series] svg");
  if (!svg) return;
  const figure = svg.closest("figure"), { left, right, top, bottom, low, high, end } = range(svg);
  const x = new DOMPoint(...state.pointer).matrixTransform(svg.getScreenCTM().inverse()).x;
  if (x < left || x > right) return;
  const at = low + ((x - left) / (right - left)) * (high - low), known = figure.dataset.byStep === undefined ? null : runs();
  const rows = JSON.parse(figure.dataset.series).flatMap(({ run, name, color, x, y }) => {
    const to = known ? mapping(known[run]) : (value) => value;
    if (!to) return [];
    const far = (i) => (y[i] === null ? Infinity : Math.abs(to(x[i]) - at));
    const best = x.reduce((best, _, i) => (far(i) < far(best) ? i : best), 0);
    return far(best) < 0.02 * (high - low) ? [{ name, color, dash: runs()[run].dash, step: x[best], value: y[best] }] : [];
  });
  if (!rows.length) return;
  const [size, name] = known && state.axis !== "steps" ? unit(end) : [1, svg.querySelector(".xlabel text").textContent];
  const line = (text, color, dash) => {
    const row = box.appendChild(document.createElement("div"));
    if (color) row.innerHTML = `<svg class="swatch" viewBox="0 0 24 8"><path d="M0 4H24" stroke="var(--${color})" stroke-dasharray="${dash}"/></svg>`;
    row.append(text);
  };
  box.replaceChildren();
  line(`${name} ${state.axis === "steps" || !known ? Math.round(at).toLocaleString("en") : shown(at / size)}`);
  for (const { name, color, dash, step, value } of rows) line(`${name} ${shown(value)}${known ? ` (${step})` : ""}`, color, dash);
  box.hidden = false;
  const [pageX, pageY] = state.pointer, { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, pageX + 14 + width > innerWidth ? pageX - 14 - width : pageX + 14)}px`;
  box.style.top = `${Math.max(4, Math.min(pageY + 14, innerHeight - height - 4))}px`;
  const cursor = svg.appendChild(document.createElementNS(svg.namespaceURI, "path"));
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("d", `M ${x} ${top} L ${x} ${bottom}`);
};
const point = (event) => { state.pointer = event && [event.clientX, event.clientY]; hover(); };
addEventListener("pointermove", point);
addEventListener("pointerdown", point);
addEventListener("scroll", () => point(null), { passive: true });
document.addEventListener("pointerleave", () => point(null));

// Sortable tables: unknown values last.
const sort = (table, column, down) => {
  const key = (row) => JSON.parse(row.cells[column].dataset.key);
  const order = (a, b) => (a === null) - (b === null) || (a < b ? -1 : a > b ? 1 : 0) * (down && a !== null ? -1 : 1);
  const rows = [...table.tBodies[0].rows].sort((a, b) => order(key(a), key(b)));
  table.tBodies[0].append(...rows);
  all("th", table.tHead).forEach((th, i) => th.setAttribute("aria-sort", i !== column ? "none" : down ? "descending" : "ascending"));
};
document.addEventListener("click", ({ target }) => {
  if (target.dataset?.axis) chooseAxis(target.dataset.axis);
  const th = target.closest?.(".sortable thead th"), table = th?.closest("table");
  if (!th) return;
  const down = th.getAttribute("aria-sort") === "ascending", index = all(".sortable").indexOf(table);
  state.sorted.set(index, [th.cellIndex, down]);
  sort(table, th.cellIndex, down);
});
const dress = () => { // what the script adds to a page from the server
  for (const choice of all(".axes")) choice.hidden = false;
  if (document.querySelector(".axes")) chooseAxis(state.axis);
  all(".sortable").forEach((table, i) => state.sorted.has(i) && sort(table, ...state.sorted.get(i)));
  hover();
};
dress();

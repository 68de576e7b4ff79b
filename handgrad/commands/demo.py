"""handgrad demo: to a trained model, a report and a sample, in two to three minutes from stories, four from sprites."""

from argparse import Namespace
from pathlib import Path

import handgrad
from handgrad.commands.prepare import prepare_with_progress, show_prepared
from handgrad.data import sprites
from handgrad.data.codes import parts_of
from handgrad.data.prepare import PrepareOptions
from handgrad.data.recipe import SPRITES, STORIES
from handgrad.files import check_above
from handgrad.generation.pictures import form_of
from handgrad.reports.page import write_report
from handgrad.run.folder import check_place
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.storage.run_files import REPORT_FILE

DOCUMENTS = {STORIES: 60_000, SPRITES: 12_000}
CAPTION = "a red cat top left, a blue fish bottom right, on cream"
PRESETS = {STORIES: "demo", SPRITES: "sprites"}
DRAWN, HELD_OUT_SEED = 32, 1  # pictures that are drawn and checked, for captions of a corpus that training does not read
WRONG_PIXELS = 5  # of a place: up to so many, no other caption is as near
NEXT = {
    STORIES: """\
  handgrad sample {out} --prompt "Once upon a time"   # let it write
  handgrad serve {out}   # or write with it in the browser
  handgrad evaluate {out}   # how good is it
  handgrad prepare MY_TEXT.txt --out shards/mine   # your own text
  handgrad train --data shards/mine --out runs/mine   # a model of your own""",
    SPRITES: f"""\
  handgrad sample {{out}} --image-out sheet.png --samples 16 --temperature 0.5   # let it draw, and describe what it draws
  handgrad sample {{out}} --image-out cat.png --temperature 0 --prompt "{CAPTION}"   # let it draw this
  handgrad evaluate {{out}}   # nats per pixel
  handgrad prepare --images MY_PICTURES --out shards/mine   # your own pictures
  handgrad train --data shards/mine --out runs/mine   # a model of your own""",
}


def pictures_right(run: str) -> int:
    """The number of `DRAWN` pictures, for captions of another corpus, that the checker reads as their captions."""
    captions = [sprites.sprite(HELD_OUT_SEED, number).caption for number in range(DRAWN)]
    model = handgrad.load(run)
    codes = form_of(model.tokenizer)
    texts = model.generate([f"{caption}\n" for caption in captions], max_tokens=codes.count, temperature=0, batch=DRAWN)
    right = 0
    for caption, text in zip(captions, texts, strict=True):
        pictures = [part for part in parts_of(text, codes) if not isinstance(part, str)]
        right += bool(pictures) and sprites.read(pictures[0], WRONG_PIXELS) == caption
    return right


def run(parsed: Namespace) -> int:
    corpus = SPRITES if parsed.images else STORIES
    out, data = parsed.out or f"runs/{PRESETS[corpus]}", parsed.data or f"shards/{corpus}"
    check_place(Path(out))
    check_above(Path(out))
    tokenizer = "auto" if parsed.images else "bpe:1024"
    options = PrepareOptions(corpus, Path(data), tokenizer=tokenizer, documents=DOCUMENTS[corpus], validation_fraction=0.01)
    show_prepared(prepare_with_progress(options))
    print()
    steps = {"steps": parsed.steps} if parsed.steps else {}
    train(run_config(PRESETS[corpus], "", "", {"data": data, "out": out, **steps}))
    if parsed.images:
        print(f"drawings   {pictures_right(out)} of {DRAWN} show what their captions say, each token the likeliest")
    print(f"""
The report is {write_report([Path(out)], Path(out) / REPORT_FILE).absolute().as_uri()}
What to try next (after `source .venv/bin/activate`, if make did the set-up):
{NEXT[corpus].format(out=out)}""")
    return 0

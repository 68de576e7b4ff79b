"""handgrad demo: from the built-in stories to a trained model, a report and a story, in two to three minutes."""

from argparse import Namespace
from pathlib import Path

from handgrad.commands.prepare import prepare_with_progress, show_prepared
from handgrad.data.prepare import PrepareOptions
from handgrad.files import check_above
from handgrad.reports.page import write_report
from handgrad.run.folder import check_place
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.storage.run_files import REPORT_FILE

DEMO_DOCUMENTS = 60_000
DEMO_TOKENIZER = "bpe:1024"


def run(parsed: Namespace) -> int:
    check_place(Path(parsed.out))
    check_above(Path(parsed.out))
    options = PrepareOptions(
        "stories", Path(parsed.data), tokenizer=DEMO_TOKENIZER, documents=DEMO_DOCUMENTS, validation_fraction=0.01
    )
    show_prepared(prepare_with_progress(options))
    print()
    train(run_config("demo", "", "", {"data": parsed.data, "out": parsed.out, "steps": parsed.steps}))
    page = write_report([Path(parsed.out)], Path(parsed.out) / REPORT_FILE)
    print(f"""
The report is {page.absolute().as_uri()}
What to try next (after `source .venv/bin/activate`, if make did the set-up):
  handgrad sample {parsed.out} --prompt "Once upon a time"   # let it write
  handgrad serve {parsed.out}   # or write with it in the browser
  handgrad evaluate {parsed.out}   # how good is it
  handgrad prepare MY_TEXT.txt --out shards/mine   # your own text
  handgrad train --data shards/mine --out runs/mine   # a model of your own""")
    return 0

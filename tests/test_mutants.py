"""The table of mutants fits the code; `python -m tests.mutants` plants them, which takes too long for every day."""

from pathlib import Path

from tests import mutants

TESTS = Path(__file__).parent


def test_every_mutant_can_be_planted() -> None:
    targets = mutants.read_table(mutants.TABLE.read_text())
    mutants.check(targets)
    named = {word for target in targets for word in target.tests if word.endswith(".py")}
    assert not [name for name in named if not (TESTS.parent / name).exists()]

"""The tables of known mistakes: each is a mistake, and a reader who makes it is told this one."""

import pytest
import torch

from handgrad.tools import climb

TABLES = [step for step in climb.STEPS if not step.startswith("15")]  # that one has no cases of tensors alone


def drawn(step: str):
    table, draw = climb.table_of(step), torch.Generator().manual_seed(0)
    cases = list(table.cases(lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=draw)))
    return table, cases, [table.answers(case) for case in cases]


@pytest.mark.nightly(but=[step for step in TABLES if step != "10_block"])  # whose parts have tables of their own
@pytest.mark.parametrize("step", TABLES)
def test_every_known_mistake_is_told_apart(step: str) -> None:
    """Its output is wrong, and its own words come back, unless an earlier row gives the same numbers in all cases."""
    table, cases, right = drawn(step)
    wrong = []
    for output, words, formula in table.MISTAKES:
        pairs = [(formula(case), answer[output]) for case, answer in zip(cases, right, strict=True)]
        assert all(mine.shape == theirs.shape for mine, theirs in pairs), (output, words)
        found = climb.diagnosis(table, output, cases, pairs)
        if found != words:
            wrong.append((output, words, found))
    if step == "10_block":  # each mistake there is followed through all outputs, and spoils some of them
        told = {(output, words) for output, words, _ in table.MISTAKES} - {row[:2] for row in wrong}
        wrong = [words for _, words, _ in table.MISTAKES if words not in {words for _, words in told}]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("step", [step for step in TABLES if hasattr(climb.table_of(step), "TERMS")])
def test_terms_add_to_the_output(step: str) -> None:
    table, cases, right = drawn(step)
    for output, terms in table.TERMS.items():
        for case, answer in zip(cases, right, strict=True):
            torch.testing.assert_close(sum(terms(case).values()), answer[output], rtol=1e-10, atol=1e-12)

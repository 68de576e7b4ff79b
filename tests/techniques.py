"""Lists of techniques for tests."""

from handgrad.networks.modern import EARLIER, TECHNIQUES, changed, listed

USUAL = EARLIER  # a list that does not follow the defaults


def toggled(names: str) -> str:
    """The usual list with these names, separated by commas, taken away where they are there and added where not."""
    usual = USUAL
    given = [name for name in names.split(",") if name]
    assert TECHNIQUES.keys() >= set(given)
    without, added = (",".join(name for name in given if (name in usual) == there) for there in (True, False))
    return changed(listed(usual), without, added)

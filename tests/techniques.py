"""Lists of techniques for tests."""

from handgrad.techniques import TECHNIQUES, changed, default, listed


def toggled(names: str) -> str:
    """The default list with these names, separated by commas, taken away where they are there and added where not."""
    usual = default()
    given = [name for name in names.split(",") if name]
    assert TECHNIQUES.keys() >= set(given)
    without, added = (",".join(name for name in given if (name in usual) == there) for there in (True, False))
    return changed(listed(usual), without, added)

"""`handgrad recipes`: lists the shipped recipes and launch templates, or prints one, to be kept and changed."""

import argparse

from handgrad import recipes
from handgrad.errors import UsageError
from handgrad.names import nearest_name


def run(args: argparse.Namespace) -> int:
    shipped = recipes.shipped()
    if not args.name:
        width = max(map(len, shipped))
        for name, path in shipped.items():
            print(f"{name:<{width}}  {recipes.first_comment(path)}")
        print("\ntrain one: handgrad train --config NAME; change one: handgrad recipes NAME > mine.toml")
        return 0
    name = args.name.split("/")[-1]
    found = shipped.get(name) or shipped.get(name.rpartition(".")[0])
    if found is None:
        raise UsageError(f"no recipe {args.name!r}{nearest_name(name, shipped)}; `handgrad recipes` lists all")
    print(found.read_text(encoding="utf-8"), end="")
    return 0

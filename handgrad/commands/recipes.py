"""`handgrad recipes`: lists the shipped recipes and launch templates, or prints one, to save and change."""

import argparse

from handgrad.errors import UsageError
from handgrad.names import nearest_name
from handgrad.settings import recipes


def run(args: argparse.Namespace) -> int:
    shipped = recipes.shipped()
    if not args.name:
        lines = {name: f"{name:<{max(map(len, shipped))}}  {recipes.first_comment(path)}" for name, path in shipped.items()}
        trained = recipes.recipe_names()
        print(*(lines[name] for name in trained), sep="\n")
        print("train one: handgrad train --config NAME; change one: handgrad recipes NAME > mine.toml\n")
        print(*(line for name, line in lines.items() if name not in trained), sep="\n")
        print("launch with one: handgrad recipes NAME > FILE; its first lines say how")
        return 0
    name = args.name.split("/")[-1]
    recipe = shipped.get(name) or shipped.get(name.rpartition(".")[0])
    if recipe is None:
        raise UsageError(f"no recipe {args.name!r}{nearest_name(name, shipped)}; `handgrad recipes` lists all")
    print(recipe.read_text(encoding="utf-8"), end="")
    return 0

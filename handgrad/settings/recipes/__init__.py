"""The recipes and launch templates that ship, found by name: `--config gpt2-124m`, `handgrad recipes slurm`."""

from pathlib import Path

from handgrad.errors import UsageError
from handgrad.names import nearest_name

FOLDER = Path(__file__).parent


def shipped() -> dict[str, Path]:
    """Every recipe, then every launch template, by its file's name without the ending."""
    return {path.stem: path for path in (*sorted(FOLDER.glob("*.toml")), *sorted((FOLDER / "launch").iterdir()))}


def recipe_names() -> list[str]:
    return [name for name, path in shipped().items() if path.suffix == ".toml"]


def find(name: str) -> str:
    """The path of a recipe: `name` itself if that is a file, else the shipped one of this name, with or without
    `.toml`. Raises `UsageError` if there is neither."""
    shipped_as = name.removesuffix(".toml")
    if Path(name).exists():
        return name
    if shipped_as in shipped() and shipped_as not in recipe_names():
        raise UsageError(f"{name} is a launch file, not a recipe: `handgrad recipes {name}` prints it")
    if shipped_as not in recipe_names():
        near = nearest_name(Path(name).stem, recipe_names())
        raise UsageError(f"config file {name} does not exist{near}; `handgrad recipes` lists what ships")
    return str(shipped()[shipped_as])


def first_comment(path: Path) -> str:
    """The first sentence of a file's opening comment: a title for a list."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line.lstrip("# ") for line in lines if line.startswith("# ")).partition(". ")[0].rstrip(".:")

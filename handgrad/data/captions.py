"""Captions of pictures: a .jsonl file, each row with the "image" (a path within the source) and its "caption"."""

from pathlib import Path

from handgrad.data.pictures import name_of
from handgrad.data.sources import SourceFile
from handgrad.errors import DataError, storage_errors
from handgrad.parsing import numbered_lines, parse_record


def captions_of(path: str, files: list[SourceFile], counts: list[int]) -> list[str]:
    """The caption of each picture, in the order of `files`, which hold `counts` pictures each. Raises DataError: a bad
    row, a picture without a caption, a caption without a picture; StorageError: unreadable."""
    captions = read_captions(Path(path))
    names = [name_of(file, n, count) for file, count in zip(files, counts, strict=True) for n in range(count)]
    if lacking := [name for name in names if name not in captions]:
        raise DataError(
            f"expected a caption in {path} for each picture, found none for {lacking[0]} and {len(lacking) - 1} more; add"
            " them, or move these pictures away"
        )
    if lost := sorted(captions.keys() - names):
        raise DataError(
            f"expected a picture for each caption in {path}, found none for {lost[0]} and {len(lost) - 1} more; an image is"
            " a path within the source, like cats/1.png"
        )
    return [captions[name] for name in names]


def read_captions(path: Path) -> dict[str, str]:
    """The caption of each image in a file. Raises `DataError` naming a bad line, `StorageError` for an unreadable file."""
    with storage_errors(f"reading {path}"):
        content = path.read_bytes()
    captions = dict[str, str]()
    for line, where in numbered_lines(content, path):
        row = parse_record(line, where)
        image, caption = row.text("image"), row.text("caption").strip()
        if image in captions:
            raise DataError(f"expected one caption for each image, found a second for {image} in {where}; leave one out")
        if not caption or "\n" in caption:
            raise DataError(f"expected a caption of one line, found {caption[:40]!r} in {where}; write it in one")
        captions[image] = caption
    return captions

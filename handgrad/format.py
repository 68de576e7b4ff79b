"""Numbers and tables in human-readable form."""

import math
from collections.abc import Sequence


def human_count(number: float) -> str:
    """124475904 -> '124.5M'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.4g}"


def human_flops(operations: float) -> str:
    """9.8e9 -> '9.8 GFLOP'."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if operations >= size:
            return f"{operations / size:.1f} {unit}FLOP"
    return f"{operations / 1e6:.1f} MFLOP"


def human_bytes(size: float) -> str:
    """1536 -> '1.5 KiB'."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size:.0f} B"


def human_seconds(seconds: float) -> str:
    """3725 -> '1:02:05', 604800 -> '7.0 days'."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def human_age(seconds: float) -> str:
    """7300 -> '2 h'."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def round_number(number: float) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, ... not above `number`; 1 below: 1372 -> 1000."""
    power = 10 ** max(0, math.floor(math.log10(max(1, number))))
    return max(first * power for first in (1, 2, 5) if first == 1 or first * power <= number)


def table(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """A line per row, with aligned columns: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if number < left else ">" for number in range(len(widths))]
    return ["  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths, strict=True)) for row in rows]


def memory_table(columns: list[dict[str, int]]) -> list[str]:
    """One line per kind of memory, with its bytes in each column, and a line of totals."""
    totals = ("total", [sum(column.values()) for column in columns])
    rows = [*((kind, [column[kind] for column in columns]) for kind in columns[0]), totals]
    return [f"  {kind:<16}" + "".join(f"{human_bytes(size):>16}" for size in sizes) for kind, sizes in rows]


def speed(tokens_per_second: float, flops_per_token: float, peak_flops: float | None) -> str:
    """'48.3% MFU' against a known peak, else '152 GFLOP/s'."""
    achieved = tokens_per_second * flops_per_token
    return f"{achieved / peak_flops:.1%} MFU" if peak_flops else f"{achieved / 1e9:.0f} GFLOP/s"

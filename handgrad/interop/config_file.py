"""A config.json of transformers or PEFT, whose values are checked as they are read."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handgrad.errors import DataError

# A key that decides the mathematics, the default there, the values that mean our model.
Known = tuple[str, Any, tuple[Any, ...]]
QUANTISED = "give the model in 16 or 32 bits (under adapters of PEFT: `handgrad import ADAPTERS --base MODEL`)"


@dataclass(frozen=True)
class Config:
    """The content of a config.json."""

    content: dict[str, Any]
    path: Path
    remedy: str = "handgrad has no such model"

    def refused(self, key: str, wanted: str, found: Any) -> DataError:
        remedy = QUANTISED if key == "quantization_config" else self.remedy
        return DataError(f"expected {key} {wanted} in {self.path}, found {found!r:.80}; {remedy}")

    def expect(self, known: Iterable[Known]) -> None:
        """Raises `DataError` for a key with another value."""
        for key, default, ours in known:
            if (value := self.content.get(key, default)) not in ours:
                raise self.refused(key, json.dumps(ours[0]), value)

    def whole(self, key: str, default: int | None = None) -> int:
        """A number of 1 or more; the default for null and none. Raises `DataError`."""
        value: Any = self.content.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refused(key, "of 1 or more", value)
        return value

    def number(self, key: str, default: float | None, table: dict[str, Any]) -> float:
        """A finite number above 0 of a `table` in the content, as `whole`."""
        value: Any = table.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refused(key, "above 0", value)
        return float(value)

"""AdamW for a network with a codebook, which moving averages teach (`handgrad.ops.reference.vq`)."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from handgrad.memory.rows import ParameterRow
from handgrad.optimizers import Owned
from handgrad.optimizers.adamw import AdamW


@dataclass(frozen=True)
class CodebookAdamW(AdamW):
    decay: float = 0.99  # of the averages, as in the paper's appendix

    def state(self, row: ParameterRow) -> dict[str, tuple[int, ...]]:
        """A codebook holds its own averages: its m and v stay zero."""
        return {"m": row.shape[:1], "v": row.shape[:1]} if self.whole(row) else super().state(row)

    def whole(self, row: ParameterRow) -> bool:
        return row.group == "codebook"

    def update(
        self, ops: ModuleType, owned: Iterable[Owned], controls: Tensor, results: Tensor, scratch: Tensor | None
    ) -> None:
        """Updates the flat ranges by AdamW, then a codebook, which has two dimensions. `results` holds the verdict."""
        owned = list(owned)
        super().update(ops, [part for part in owned if part.weight.ndim == 1], controls, results, scratch)
        for part in owned:
            if part.weight.ndim == 2:
                ops.vq_update(part.published, part.weight, part.gradient, controls, results, decay=self.decay)

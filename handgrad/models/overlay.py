"""Operations of a backend with some of them replaced: so the rooms beside the plain path join it."""

from types import ModuleType
from typing import Any


class Overlay(ModuleType):
    """The operations `ops` but for those that a subclass, or an attribute of it, has in their place."""

    def __init__(self, ops: Any):
        super().__init__(ops.__name__)
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

"""A backend with some operations replaced: dropout, documents, adapters and fp8 join the plain path by it."""

from types import ModuleType
from typing import Any


class Overlay(ModuleType):
    """The operations `ops`, unless a subclass or an attribute replaces them."""

    def __init__(self, ops: Any):
        super().__init__(ops.__name__)
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

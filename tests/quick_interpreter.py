"""Triton's interpreter without the work that changes no result: more than half of the time of these tests."""

import dataclasses
import functools
from typing import Any

import pytest


def install(patch: pytest.MonkeyPatch) -> None:
    """Patches the interpreter, if Triton is installed."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    replace, builder = interpreter._patch_lang, interpreter.interpreter_builder

    def replace_once(fn: Any) -> Any:
        """The functions of its language, when a kernel begins, and not whenever the kernel calls another function."""
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return replace(fn) if any(tl.core.is_builtin(language.load) for language in languages) else None

    patch.setattr(interpreter, "_patch_lang", replace_once)
    # Sums and products of integers are made in int64 as well and compared, for an assertion that only `debug` makes.
    assert not builder.options.debug
    patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    # It makes a table of all types whenever it looks for one.
    of_scalar = functools.cache(interpreter._get_np_dtype)
    pointer = of_scalar(tl.uint64)
    patch.setattr(interpreter, "_get_np_dtype", lambda kind: pointer if kind.scalar.is_ptr() else of_scalar(kind.scalar))

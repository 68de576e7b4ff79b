"""Triton's interpreter without the work that changes no result: more than half of the time of these tests."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def quickened() -> Iterator[None]:
    """Patches the interpreter, if Triton is installed."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as replaced:
        replace_once(patch, tl, interpreter, replaced)
        # Sums and products of integers are made in int64 as well and compared, for an assertion that only `debug` makes.
        assert not builder.options.debug
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        # It makes a table of all types whenever it looks for one.
        of_scalar = functools.cache(interpreter._get_np_dtype)
        pointer = of_scalar(tl.uint64)
        patch.setattr(
            interpreter, "_get_np_dtype", lambda kind: pointer if kind.scalar.is_ptr() else of_scalar(kind.scalar)
        )
        make_types_once(patch, tl.core, interpreter.interpreter_semantic)
        yield


def replace_once(patch: pytest.MonkeyPatch, tl: Any, interpreter: Any, replaced: contextlib.ExitStack) -> None:
    """The functions of its language, by the first kernel that has it, and not by every launch and every call."""
    replace, semantic = interpreter._patch_lang, interpreter.interpreter_semantic

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def replace_language(fn: Any) -> contextlib.ExitStack:
        if any(tl.core.is_builtin(language.load) for language in languages(fn)):
            replaced.callback(replace(fn).restore)
        return kept

    def replace_function(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        made = getattr(member, "__wrapped__", member)  # behind the one that asks for `_semantic`

        def function(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return made(*given, **named)

        scope.set_attr(owner, name, function)

    kept = contextlib.ExitStack()
    kept.restore = kept.close  # type: ignore[attr-defined]
    patch.setattr(interpreter, "_patch_lang", replace_language)
    patch.setattr(interpreter, "_patch_attr", replace_function)


def make_types_once(patch: pytest.MonkeyPatch, core: Any, semantic: Any) -> None:
    """The type of a block, and what a tensor has of it, which it makes anew for every operand of every operation."""
    constexpr, block_type = core.constexpr, core.block_type
    make_type, to_ir = block_type.__init__, block_type.to_ir
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    types: dict[Any, dict[str, Any]] = {}
    constants: dict[Any, Any] = {}
    of_scalars = core.tuple([]), constexpr(1)

    def make(kind: Any, element: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        sizes = tuple([size.value if type(size) is constexpr else size for size in sizes])
        key = element.name, getattr(element, "address_space", None), sizes
        if (found := types.get(key)) is None:
            make_type(kind, element, list(sizes))
            kind.of_tensors = core.tuple([constexpr(size) for size in sizes]), constexpr(kind.numel)
            kind.sizes, kind.others = sizes, {}
            types[key] = found = kind.__dict__
        kind.__dict__ = found

    def with_element(kind: Any, element: Any) -> Any:
        key = element.name, getattr(element, "address_space", None)
        if (found := kind.others.get(key)) is None:
            found = kind.others[key] = block_type(element, kind.shape)
        return found

    def make_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = kind.of_tensors if type(kind) is block_type else of_scalars

    def of_one_shape(left: Any, right: Any) -> tuple[Any, Any]:
        one, other = left.type, right.type
        if type(one) is block_type and type(other) is block_type and one.sizes == other.sizes:
            return left, right
        return broadcast(left, right)

    def of_one_type(left: Any, right: Any, *given: Any, **named: Any) -> tuple[Any, Any]:
        """Two tensors of one type are an operation's operands as they are, but of a quotient; so are a pointer and an
        integer. A number becomes the same tensor each time."""
        if type(left) is type(right) is core.tensor:
            one, other = left.type, right.type
            kind = type(one)
            if kind is type(other):
                if not given[3:] and "div_or_mod" not in named:
                    if kind is block_type and one.__dict__ is other.__dict__ and not one.element_ty.is_ptr():
                        return left, right
                    if kind is core.dtype and one.name == other.name:
                        return left, right
            elif kind is core.pointer_type and type(other) is core.dtype and given == (True, True) and other.is_int():
                return left, right
        elif type(right) in (int, float) and type(left) is core.tensor:
            return of_number(left, right, True, given, named)
        elif type(left) in (int, float) and type(right) is core.tensor:
            return of_number(right, left, False, given, named)
        return check(left, right, *given, **named)

    def of_number(tensor: Any, number: float, first: bool, given: tuple, named: dict[str, Any]) -> tuple[Any, Any]:
        """A tensor, `first` or not, and a number. The number's tensor is kept where the other one stays as it is."""
        kind = tensor.type
        of_kind = id(kind.__dict__) if type(kind) is block_type else kind.name
        key = of_kind, type(number), repr(number), first, given, *named.items()
        if (constant := constants.get(key)) is None:
            operands = check(tensor, number, *given, **named) if first else check(number, tensor, *given, **named)
            same, constant = operands if first else operands[::-1]
            if same is not tensor:
                return operands
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return (tensor, constant) if first else (constant, tensor)

    patch.setattr(block_type, "__init__", make)
    patch.setattr(block_type, "with_element_ty", with_element)
    patch.setattr(block_type, "to_ir", lambda kind, builder: kind if builder is semantic.builder else to_ir(kind, builder))
    patch.setattr(core.tensor, "__init__", make_tensor)
    patch.setattr(semantic, "broadcast_impl_value", of_one_shape)
    patch.setattr(semantic, "binary_op_type_checking_impl", of_one_type)

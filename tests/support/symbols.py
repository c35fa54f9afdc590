"""An exporter in small: sizes that stand for others as well, by which nothing may be decided.

The arrays are those of the standard's reference. torch's own exporter takes seconds for what this does in none, and
notices less: it guards what was decided, and goes on.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import array_api_strict
import pytest

from relskew_core import backends
from relskew_core._array import known
from relskew_core._kernel import problem
from relskew_core.backends._path import PORTABLE, Path

CONSTANT = 20  # sizes of arrays up to this one are no symbols: heads, widths, rows of tables


class SymInt(int):  # the code recognises torch's symbols by this name
    """A size: what it is at hand, and what it is elsewhere."""

    values: tuple[int, ...]

    def __new__(cls, *values: int) -> SymInt:
        """Name the size at hand first."""
        symbol = super().__new__(cls, values[0])
        symbol.values = values
        return symbol

    def __bool__(self) -> bool:
        """Whether it is not zero, here and elsewhere."""
        return self != 0

    __hash__ = int.__hash__


_here: dict[int, Any] = {}  # the symbols of the program, by the size at hand, by which an array's sizes are found

_decides = [False]  # whether what is at hand may decide: in an operator, which every size goes through


def size(*values: int) -> int:
    """Return a symbol for a size that has these values, the first of them at hand; a number if they are all one."""
    if len(set(values)) == 1:
        return values[0]
    symbol = SymInt(*values)
    if values[0] > CONSTANT and _here.setdefault(values[0], symbol).values != values:
        raise AssertionError(f"take other sizes: {values} and {_here[values[0]].values} look the same")
    return symbol


def _everywhere(operation: Callable[..., Any], operands: Any) -> list[Any]:
    """Return what an operation gives of the values here and elsewhere."""
    count = next(len(x.values) for x in operands if isinstance(x, SymInt))
    return [operation(*each) for each in zip(*(getattr(x, "values", (x,) * count) for x in operands), strict=True)]


def _computed(operation: Callable[..., int], *, turned: bool = False) -> Callable[..., int]:
    def apply(*operands: int) -> int:
        if not all(isinstance(x, int) for x in operands):
            return NotImplemented
        return size(*_everywhere(operation, operands[::-1] if turned else operands))

    return apply


def _compared(operation: Callable[..., bool]) -> Callable[..., bool]:
    def apply(*operands: int) -> bool:
        if not all(isinstance(x, int) for x in operands):
            return NotImplemented
        answers = _everywhere(operation, operands)
        if len(set(answers)) > 1 and not _decides[0] and not _asked_by_the_library():
            told = [getattr(x, "values", x) for x in operands]
            raise AssertionError(f"{operation.__name__} of {told} decides about a program for every size")
        return bool(answers[0])

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "neg"):
    setattr(SymInt, f"__{_name}__", _computed(getattr(operator, _name)))
for _name in ("add", "sub", "mul"):
    setattr(SymInt, f"__r{_name}__", _computed(getattr(operator, _name), turned=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(SymInt, f"__{_name}__", _compared(getattr(operator, _name)))


def _asked_by_the_library() -> bool:
    """Whether its own code compares: whether a slice is within bounds, which its arrays of known sizes say."""
    return str(sys._getframe(2).f_globals["__name__"]).startswith("array_api_strict")


@contextmanager
def exporting() -> Iterator[None]:
    """Export what is computed meanwhile with arrays of the standard's reference."""
    array: Any = type(array_api_strict.asarray(0))
    shape = array.shape.fget

    def symbolic(x: Any) -> tuple[int, ...]:
        return shape(x) if _decides[0] else tuple(_here.get(size, size) for size in shape(x))

    def path(_: str, call: Any, *__: Any) -> Path:
        if call.options.sides:
            return backends.GRIDS
        return Path(_operator(PORTABLE.attention), _operator(PORTABLE.attention_vjp))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array, "shape", property(symbolic))
        for module in (known, problem):
            patch.setattr(module, "exporting", lambda: not _decides[0])
        patch.setattr(backends, "path", path)
        try:
            yield
        finally:
            _here.clear()


def _operator(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Make one operator of a kernel, of which no program sees the inside."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _decides[0] = True
        try:
            return kernel(*args, **kwargs)
        finally:
            _decides[0] = False

    return call

"""Argument checks: every error names the argument, what came and what was expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any


def check_int(name: str, value: Any, *, minimum: int | None = None) -> int:
    """Return ``value`` as an ``int``; booleans, floats and arrays with axes are refused."""
    if isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int, got {describe(value)}")
    try:
        # A length that torch.export traces knows how to be compared; an index would make a constant of it.
        result = value if type(value).__name__ == "SymInt" else operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an int, got {describe(value)}") from None
    if minimum is not None and result < minimum:
        raise ValueError(f"`{name}` must be an int >= {minimum}, got {result}")
    return result


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a ``value`` that is not one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}")


def check_bool(name: str, value: Any) -> bool:
    """Return ``value`` if it is a ``bool``."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be a bool, got {describe(value)}")
    return value


def check_real(name: str, value: Any, *, positive: bool = False) -> float:
    """Return ``value`` as a finite Python float (above zero if ``positive``)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a Python int or float, got {describe(value)}")
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"`{name}` must be a finite number{' > 0' if positive else ''}, got {value!r}")
    return float(value)


def check_window(name: str, value: Any) -> tuple[int | None, int | None] | None:
    """Return ``value`` as ``(left, right)`` with ``None`` for unbounded sides, or ``None``."""
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"`{name}` must be None or a pair (left, right) of ints >= 0 or None, got {describe(value)}")
    left, right = (
        None if side is None else check_int(f"{name}[{index}]", side, minimum=0) for index, side in enumerate(value)
    )
    return None if left is None and right is None else (left, right)


def describe(value: Any) -> str:
    """Name what came: an array by type, dtype and shape, anything else by type and value."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} of dtype {dtype} and shape {tuple(shape)}"
    return f"{type(value).__name__} {value!r}"

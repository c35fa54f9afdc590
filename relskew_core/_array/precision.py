"""The precision in which sums are accumulated, and that of the results."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from relskew_core._array.checks import wraps
from relskew_core._array.namespace import device, is_compiling, is_floating, is_torch
from relskew_core._array.typing import Array, Namespace


def wide(dtype: Any, *, xp: Namespace) -> Any:
    """Return the dtype in which arrays are summed: float16 and bfloat16 are never accumulated.

    NumPy's dtypes in the other byte order are not those of results.
    """
    dtype = dtype.newbyteorder("=") if hasattr(dtype, "newbyteorder") else dtype
    half = any(dtype == getattr(xp, name) for name in ("float16", "bfloat16") if hasattr(xp, name))
    return xp.float32 if half else dtype


def widened(arrays: Iterable[Array | None], dtype: Any, *, xp: Namespace) -> list[Any]:
    """Return the arrays of ``dtype`` in the dtype in which they are summed; others are unchanged."""
    return [x if x is None or x.dtype != dtype else cast(x, wide(dtype, xp=xp), xp=xp) for x in arrays]


def cast(x: Array, dtype: Any, *, xp: Namespace) -> Array:
    return x if x.dtype == dtype else xp.astype(x, dtype)


def settled(x: Array, dtype: Any, *, xp: Namespace) -> Array:
    """Return an array in a dtype if JAX says that it has none yet: made of Python's floats, as by ``jnp.where``."""
    weak = x.dtype != dtype and getattr(x, "weak_type", False) and xp.isdtype(x.dtype, "real floating")
    return cast(x, dtype, xp=xp) if weak else x


def from_doubles(rows: Iterable[list[float]], *, xp: Namespace, dtype: Any = None, device: Any = None) -> Array:
    """Make an array (rows, columns) of ``dtype``, or of the library's default floating dtype.

    The numbers go through a buffer: nested lists take JAX ten times as long.
    """
    dtype = floating(dtype, xp=xp)
    code, buffered = ("d", xp.float64) if wide(dtype, xp=xp) == xp.float64 else ("f", xp.float32)
    if is_compiling():  # torch.compile supports no buffers
        return cast(xp.asarray(list(rows), dtype=buffered, device=device), dtype, xp=xp)
    numbers: array[float] = array(code)
    count = 0
    for row in rows:
        numbers.fromlist(row)
        count += 1
    made = xp.reshape(xp.asarray(numbers, dtype=buffered, device=device), (count, -1))
    return cast(made, dtype, xp=xp)


def floating(dtype: Any, *, xp: Namespace) -> Any:
    # torch 2.8 exports no constant that nothing uses
    made = xp.empty(0, dtype=dtype, device="meta") if xp.__name__.endswith("torch") else xp.asarray(0.0, dtype=dtype)
    if not is_floating(made, xp=xp):
        raise TypeError(f"`dtype` must be a real floating dtype of the library, got {made.dtype}")
    return made.dtype


def integer(xp: Namespace) -> Any:
    """Return the default integer dtype; sums and differences of smaller or unsigned integers would wrap."""
    if xp.__name__.endswith("torch"):  # its compiler would trace an array
        return xp.int64
    if xp.__name__ == "jax.numpy":  # JAX would compile a program for an array
        return xp.result_type(int)
    return xp.asarray(0).dtype


def integers(start: int, stop: int, *, device: object, xp: Namespace) -> Array:
    return xp.arange(start, stop, dtype=integer(xp), device=device)


def bits_of(dtype: Any, *, xp: Namespace) -> int:
    return 32 if dtype == xp.int32 else 64


def widest(x: Array, *, xp: Namespace) -> Array:
    """Return integers in that dtype; unsigned ones that exceed its maximum become the maximum."""
    dtype = integer(xp)
    if x.dtype == dtype:
        return x
    bits = bits_of(dtype, xp=xp)
    if str(x.dtype).endswith(f"uint{bits}") and not is_torch(x):  # torch does not compare these
        greatest = 2 ** (bits - 1) - 1
        x = xp.where(x > greatest, xp.asarray(greatest, dtype=x.dtype, device=device(x)), x)
    return xp.astype(x, dtype)


def shifted(x: Array, by: int, *, xp: Namespace) -> Array:
    """Return ``x + by`` for an int of any size, clipped to the dtype's range instead of wrapping."""
    if by == 0:
        return x
    end = 2 ** (bits_of(x.dtype, xp=xp) - 1)
    by = max(2 - 2 * end, min(by, 2 * end - 2))
    last = (end - 1 if by > 0 else -end) - by
    x = xp.where(x > last if by > 0 else x < last, last, x)
    half = by // 2 if abs(by) >= end else 0  # each number that is added must fit the dtype, too
    return (x + half if half else x) + (by - half)


def blocks(x: Array, size: int, *, xp: Namespace) -> Array:
    return x // size if size < 2 ** (bits_of(x.dtype, xp=xp) - 1) else xp.where(x < 0, -1, 0)


F = TypeVar("F", bound=Callable[..., Any])


def casts(function: F) -> F:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(enumerate(args)) | kwargs
        cast = autocast(given)
        if cast is given:
            return function(*args, **kwargs)
        with undisturbed(_first(cast.values())):
            return function(*(cast[place] for place in range(len(args))), **{name: cast[name] for name in kwargs})

    return call  # type: ignore[return-value]


def autocast(arrays: dict[Any, Any]) -> dict[Any, Any]:
    """Cast floating arrays, also those in sequences and mappings, to the dtype of the surrounding autocast region.

    torch's attention does so.
    """
    torch, first = sys.modules.get("torch"), _first(arrays.values())
    if torch is None or first is None or not _casts(torch, first.device.type):
        return arrays
    dtype, lower = torch.get_autocast_dtype(first.device.type), (torch.float32, torch.float16, torch.bfloat16)

    def cast(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: cast(each) for name, each in x.items()}
        if isinstance(x, (tuple, list)):
            return getattr(type(x), "_make", type(x))([cast(each) for each in x])
        return x.to(dtype) if is_torch(x) and x.dtype in lower else x

    return {name: cast(x) for name, x in arrays.items()}


def undisturbed(x: Any) -> AbstractContextManager[Any]:
    """Return a context in which the region does not round widened arrays, so that sums stay in float32."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or not _casts(torch, x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _first(values: Iterable[Any]) -> Any:
    for x in values:  # torch 2.8 does not compile `next`
        found = _first(x.values() if isinstance(x, Mapping) else x) if isinstance(x, (tuple, list, Mapping)) else x
        if is_torch(found):
            return found
    return None


def _casts(torch: Any, device: str) -> bool:
    return device != "meta" and bool(torch.is_autocast_enabled(device))  # torch raises an error for meta

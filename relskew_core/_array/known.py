"""Values that are known at no cost: in host memory and not traced."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from relskew_core._array.namespace import device, is_compiling, is_torch, on_cpu, private
from relskew_core._array.typing import Array, Namespace


def varies(x: Any) -> bool:
    """Whether ``torch.compile`` traces a float because its value differs between calls."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.compiler.is_compiling() or not isinstance(x, float):
        return False
    return not torch.fx.experimental.symbolic_shapes.has_static_value(x)


def exporting() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_exporting()


def symbolic(*sizes: Any) -> bool:
    """Whether torch traces a program in which one of these sizes varies between calls."""
    if not is_compiling():
        return any(type(size).__name__ == "SymInt" for size in sizes)
    shapes = sys.modules["torch"].fx.experimental.symbolic_shapes
    return not all(shapes.has_static_value(size) for size in sizes)


def compiled_for_any(*sizes: Any) -> bool:
    """Whether ``torch.compile``, and not an export, makes a program in which one of these sizes varies."""
    if not is_compiling() or not symbolic(*sizes):
        return False
    compiler = sys.modules["torch"].compiler  # torch 2.8 compiles `is_exporting()` as True
    return not getattr(compiler, "_is_exporting_flag", compiler.is_exporting())


def exported(*sizes: Any) -> bool:
    """Whether torch exports a program for other sizes, too, so that nothing may depend on the present ones.

    ``torch.compile`` guards what was decided, and a program of ``torch.export`` says it; ONNX forgets it.
    """
    return exporting() and symbolic(*sizes)


def holds(comparison: Any) -> bool:
    """Whether a comparison of sizes holds. For sizes that depend on data, the torch program checks it at run time."""
    if not (exporting() and type(comparison).__name__ == "SymBool"):
        return bool(comparison)
    torch = sys.modules["torch"]
    if not torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(comparison):
        return bool(comparison)
    getattr(torch, "_check", bool)(comparison)
    return True


def comparable(number: int) -> bool:
    """Whether an int can be compared while ``torch.compile`` traces it, which one that a program computes cannot."""
    if not is_compiling():
        return True
    return sys.modules["torch"].fx.experimental.symbolic_shapes.guard_or_false(number < 2**62)


def same_length(n: Any, m: Any) -> bool:
    if not exported(n, m):
        return bool(n == m)
    return bool(sys.modules["torch"].fx.experimental.symbolic_shapes.statically_known_true(n == m))


def known_values(x: Array) -> Any:
    """Return an array's numbers as nested lists, ``None`` if reading them is not free."""
    if is_torch(x):
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or type(x) is not torch.Tensor:  # otherwise it is a fake tensor
            return None
        if private("_C._functorch.is_functorch_wrapped_tensor", lambda _: True)(x):
            return None
    if not on_cpu(x):
        return None
    try:  # under jit, JAX would trace any other operation on a known array
        return x.tolist() if hasattr(x, "tolist") else None
    except ValueError:  # raised by MLX while it compiles or maps
        return None


def nothing(shape: tuple[int, ...], of: Iterable[Array | None], *, value: float = 0, xp: Namespace) -> Array:
    """Return an array with one value that depends on all arrays, with the dtype and device of the first."""
    arrays = [x for x in of if x is not None]
    made = xp.full(shape, value, dtype=arrays[0].dtype, device=device(arrays[0]))
    return depending(made, arrays, xp=xp)


def depending(x: Array, others: Iterable[Any], *, xp: Namespace) -> Array:
    """Return an array unchanged, but depending on those of the other arrays that can be learned.

    torch goes by what is computed, and takes sums of none of their entries for it; other libraries go by arguments.
    """
    for other in others:
        if is_torch(other) and other.dtype.is_floating_point:
            x = x + xp.sum(other[None, ...][:0, ...])
    return x


def in_turn(arrays: Any, names: Sequence[str], done: list[Array], *, xp: Namespace) -> Any:
    """Return arrays, the named ones of which wait until others are computed, in libraries that compute lazily.

    MLX would compute many pieces side by side, and keep what each needs.
    """
    wait = getattr(xp, "after", None)
    if wait is None or not done:
        return arrays
    given = {name: x for name in names if (x := getattr(arrays, name)) is not None}
    return arrays._replace(**{name: wait(x, done) for name, x in given.items()})


def ranges(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of ``size`` numbers, and a last one of the rest, that ``0 … n - 1`` consists of.

    A program of ``torch.compile`` depends on how many there are, but not on ``n``; ``range`` would make it a constant.
    """
    start = 0
    while start + size < n:
        yield start, start + size
        start += size
    if start < n:
        yield start, n


def joined(pieces: list[Array], *, axis: int, xp: Namespace) -> Array:
    return xp.concat(pieces, axis=axis) if len(pieces) > 1 else pieces[0]

"""CuPy's memory, cuBLAS and the softmax kernel, each on CuPy's current stream."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from relskew_core._array.typing import Array, Namespace
from relskew_core.backends._cupy.softmax import NAME, NO_END, SOURCE, THREADS

REALS = {"float32": "float", "float64": "double"}


class Cuda:
    """The operations of :class:`relskew_core.backends._cupy.blas.Device`, in CuPy."""

    def __init__(self, xp: Namespace) -> None:
        self.xp = xp

    def view(self, x: Array, start: int, shape: tuple[int, ...], pitches: tuple[int, ...]) -> Array:
        """Return a view of a contiguous array's memory, pitches in elements."""
        strides = tuple(x.itemsize * pitch for pitch in pitches)
        return self.library().lib.stride_tricks.as_strided(x.reshape(-1)[start:], shape, strides)

    def library(self) -> Any:  # pragma: gpu only
        """Return CuPy itself, which has more functions than the standard."""
        return import_module("cupy")

    def multiply(self, alpha: float, a: Array, b: Array, beta: float, c: Array) -> None:
        """Write ``alpha · a b + beta · c`` into ``c`` in place: (P or 1, n, k), (P or 1, k, m), (P, n, m).

        cuBLAS is column-major, so it gets the transposed product ``cᵀ = bᵀ aᵀ``, all memory as it is.
        """
        if 0 in c.shape:
            return
        (of_b, ld_b, next_b), (of_a, ld_a, next_a), (_, ld_c, next_c) = map(_layout, (b, a, c))
        factors = np.asarray([alpha, beta], c.dtype)
        self.gemm(c.dtype)(
            self.handle(), of_b, of_a, c.shape[-1], c.shape[-2], a.shape[-1],
            factors.ctypes.data, self.pointer(b), ld_b, next_b, self.pointer(a), ld_a, next_a,
            factors.ctypes.data + factors.itemsize, self.pointer(c), ld_c, next_c, c.shape[0],
        )  # fmt: skip

    def softmax(self, x: Array, lse: Array, mask: Array | None, numbers: dict[str, Any]) -> None:
        """Turn logits into weights in place, a block for every row."""
        start = numbers.pop("mask_start")
        masked = x if mask is None else mask.reshape(-1)[start:]
        kinds = {"softcap": x.dtype.type, "head_pitch": np.int64, "pitch": np.int64, "lse_pitch": np.int64}
        kinds |= dict.fromkeys(("mask_b", "mask_h", "mask_i", "mask_j"), np.int64)
        arguments = (kinds.get(name, np.int32)(value) for name, value in numbers.items())
        self.launch(str(x.dtype), x.shape[0] * numbers["n"], (x, lse, masked, *arguments))

    def launch(self, dtype: str, blocks: int, arguments: tuple[Any, ...]) -> None:  # pragma: gpu only
        """Run the softmax on CuPy's current stream."""
        _kernel(self.library(), dtype)((blocks,), (THREADS,), arguments)

    def gemm(self, dtype: Any) -> Any:  # pragma: gpu only
        """Return cuBLAS's batched product."""
        cublas = import_module("cupy_backends.cuda.libs.cublas")
        return cublas.sgemmStridedBatched if dtype == "float32" else cublas.dgemmStridedBatched

    def handle(self) -> int:  # pragma: gpu only
        """Return cuBLAS's handle on the current device, set to the current stream."""
        return int(self.library().cuda.device.get_cublas_handle())

    def pointer(self, x: Array) -> int:  # pragma: gpu only
        """Return the address of an array."""
        return int(x.data.ptr)


def code(dtype: str) -> str:
    """Return the softmax's source for a dtype."""
    return f"#define real {REALS[dtype]}\n#define NO_END {NO_END}\n{SOURCE}"


@cache
def _kernel(cupy: Any, dtype: str) -> Any:  # pragma: gpu only
    return cupy.RawKernel(code(dtype), NAME)


def _layout(x: Array) -> tuple[int, int, int]:
    """Return whether cuBLAS must transpose (P, rows, columns), and the pitch within a matrix and between matrices."""
    batch, row, column = (stride // x.itemsize for stride in x.strides)
    transposed = x.shape[-1] > 1 and column != 1
    pitch, least = (column, x.shape[-2]) if transposed else (row, x.shape[-1])
    if transposed and x.shape[-2] > 1 and row != 1:
        raise ValueError(f"one of the last two strides must be 1, got {x.strides} bytes of {x.itemsize}")
    return int(transposed), max(pitch, least), 0 if x.shape[0] == 1 else batch

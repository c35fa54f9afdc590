"""The matrix of array libraries, every row tested or skipped with its reason; docs/accuracy.md shows it.

``python tests/support/libraries.py`` prints the table.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import array_api_compat
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from relskew_core.backends import _compiled

Array = Any
Function = Callable[..., Any]

GATES = {"float64": 1e-12, "float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}
"""Relative L2 error that a result may have against float64, by dtype."""

NATIVE: Any = "auto" if _compiled.kernels is None else "native"
"""The way of calls that the compiled kernels are to serve, which a machine may not have."""
needs_kernels = pytest.mark.skipif(_compiled.kernels is None, reason="the kernels were not compiled at installation")


def unchanged(function: Function) -> Function:
    return function


@dataclass(frozen=True)
class Library:
    name: str  # of a test's id and of the table
    module: str  # must be importable
    tested: str  # how it is tested, for the table
    dtypes: tuple[str, ...]  # floating dtypes that are held to :data:`GATES`
    from_numpy: Callable[[NDArray[Any], str | None], Array]  # on the row's device, in a dtype by name or the data's own
    to_numpy: Callable[[Array], NDArray[Any]]  # floating results in float64
    device: Callable[[], Any]  # what :func:`device_of` must say of every result
    array_type: Callable[[], Any]  # what every result must be an instance of
    wrap: Callable[[Function], Function] = unchanged  # compiles a function of arrays
    setting: Callable[[], AbstractContextManager[object]] = nullcontext  # the library's flags while a test runs
    gpu: bool = False  # needs a CUDA device

    def __str__(self) -> str:
        return self.name

    @property
    def traced(self) -> bool:
        """Whether functions are compiled, so that values are unknown while they run."""
        return self.wrap is not unchanged

    @property
    def compiled(self) -> bool:
        """Whether calls wait for a compiler: JAX has one for single operations too."""
        return self.traced or self.module == "jax"

    def dtypes_of(self, place: int) -> tuple[str, ...]:
        """Return the dtypes in which to try the case at this place: in turn, where calls wait for a compiler."""
        return (self.dtypes[place % len(self.dtypes)],) if self.compiled else self.dtypes

    def namespace(self) -> Any:
        inside = {"jax": "jax.numpy", "dask": "dask.array", "mlx": "mlx.core"}
        return importlib.import_module(inside.get(self.module, self.module))

    def missing(self) -> str | None:
        """Why the row cannot be tested on this machine; ``None`` if it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        if self.name == "array-api-strict, second device" and np.lib.NumpyVersion(np.__version__) < "2.0.0":
            return "array-api-strict has devices of its own with NumPy 2 alone"
        return _no_cuda(self.module) if self.gpu else None

    def needed(self) -> None:
        if (reason := self.missing()) is not None:
            pytest.skip(reason)

    def asarray(self, data: ArrayLike, dtype: str | None = None) -> Array:
        return self.from_numpy(np.asarray(data), dtype)

    def call(self, function: Function, arrays: dict[str, Array], **options: Any) -> Any:
        """Call ``function`` on arrays by name, in the row's way of use; options are constants of the compiled code."""
        return self.wrap(lambda given: function(**given, **options))(arrays)


def device_of(x: Array) -> Any:
    """Return the device of a result, ``None`` of a library whose arrays have none."""
    return None if type(x).__module__ == "mlx.core" else array_api_compat.device(x)


def _no_cuda(module: str) -> str | None:
    library = importlib.import_module(module)
    if module == "torch":
        return None if library.cuda.is_available() else "torch sees no CUDA device"
    try:
        count = library.cuda.runtime.getDeviceCount()
    except library.cuda.runtime.CUDARuntimeError as error:
        return f"cupy sees no CUDA device: {error}"
    return None if count else "cupy sees no CUDA device"


imported = importlib.import_module
WIDE = ("float64", "float32")
HALF = (*WIDE, "float16")
EVERY = (*HALF, "bfloat16")


@contextmanager
def _strictest() -> Iterator[None]:
    flags = {"boolean_indexing": False, "data_dependent_shapes": False, "enabled_extensions": ()}
    with imported("array_api_strict").ArrayAPIStrictFlags(**flags):
        yield


def _strict_on(device: str) -> dict[str, Any]:
    xp = partial(imported, "array_api_strict")
    return {
        "from_numpy": lambda x, of: xp().asarray(x, dtype=of and getattr(xp(), of), device=xp().Device(device)),
        "to_numpy": lambda x: np.asarray(x.to_device(xp().Device("CPU_DEVICE"))),
        "device": lambda: xp().Device(device), "array_type": lambda: imported("array_api_strict._array_object").Array,
    }  # fmt: skip


def _torch_on(device: str) -> dict[str, Any]:
    torch = partial(imported, "torch")
    return {
        "from_numpy": lambda x, dtype: torch().tensor(x, dtype=dtype and getattr(torch(), dtype), device=device),
        "to_numpy": lambda x: np.asarray(x.detach().cpu().double() if x.is_floating_point() else x.detach().cpu()),
        "device": lambda: torch().device(device), "array_type": lambda: torch().Tensor,
    }  # fmt: skip


def _torch_compile(function: Function) -> Function:
    torch = imported("torch")
    torch.compiler.reset()  # a case is compiled separately, not as a recompilation of the previous one
    # This tests the tracer; the C++ compiler that Inductor needs is not on every machine.
    compiled: Function = torch.compile(function, fullgraph=True, backend="aot_eager")
    return compiled


def _numpy(x: NDArray[Any], dtype: str | None) -> Array:
    return x if dtype is None else x.astype(dtype)


def _mlx(x: NDArray[Any], dtype: str | None) -> Array:
    mx = imported("mlx.core")
    return mx.array(x, dtype=getattr(mx, dtype or str(x.dtype).replace("bool", "bool_")))


def _mlx_to_numpy(x: Array) -> NDArray[Any]:
    mx = imported("mlx.core")
    return np.asarray(x.astype(mx.float64) if mx.issubdtype(x.dtype, mx.floating) else x)


NUMPY: dict[str, Any] = {
    "from_numpy": _numpy, "to_numpy": np.asarray, "device": lambda: "cpu", "array_type": lambda: np.ndarray,
}  # fmt: skip
JAX: dict[str, Any] = {
    "from_numpy": lambda x, dtype: imported("jax.numpy").asarray(x, dtype=dtype),
    "to_numpy": lambda x: np.asarray(x if x.dtype == bool or "int" in str(x.dtype) else x.astype("float64")),
    "device": lambda: imported("jax").devices()[0], "array_type": lambda: imported("jax").Array,
}  # fmt: skip
MLX: dict[str, Any] = {
    "from_numpy": _mlx, "to_numpy": _mlx_to_numpy, "device": lambda: None,
    "array_type": lambda: imported("mlx.core").array,
}  # fmt: skip
CUPY: dict[str, Any] = {
    "from_numpy": lambda x, dtype: imported("cupy").asarray(x, dtype=dtype),
    "to_numpy": lambda x: imported("cupy").asnumpy(x), "device": lambda: imported("cupy").cuda.Device(0),
    "array_type": lambda: imported("cupy").ndarray,
}  # fmt: skip
DASK: dict[str, Any] = {
    "from_numpy": lambda x, dtype: imported("dask.array").from_array(_numpy(x, dtype), chunks=-1),
    "to_numpy": lambda x: np.asarray(x.compute()), "device": lambda: "cpu",
    "array_type": lambda: imported("dask.array").Array,
}  # fmt: skip
ON_CUDA = "eager; if there is a CUDA device"
TRACED = "compiled, values unknown while tracing"

LIBRARIES = (
    Library("numpy", "numpy", "eager", HALF, **NUMPY),
    Library("array-api-strict", "array_api_strict", "the standard's own reference, nothing outside it allowed", WIDE,
            **_strict_on("CPU_DEVICE")),
    Library("array-api-strict, strictest flags", "array_api_strict",
            "no data-dependent shapes, no boolean indexing, no extensions", WIDE,
            **_strict_on("CPU_DEVICE"), setting=_strictest),
    Library("array-api-strict, second device", "array_api_strict", "a device that is not the default one", WIDE,
            **_strict_on("device1")),
    Library("torch, CPU", "torch", "eager", EVERY, **_torch_on("cpu")),
    Library("torch.compile", "torch", "`fullgraph=True`: one graph, no breaks", ("float32", "bfloat16"),
            **_torch_on("cpu"), wrap=_torch_compile),
    Library("torch, CUDA", "torch", ON_CUDA, EVERY, **_torch_on("cuda:0"), gpu=True),
    Library("CuPy", "cupy", ON_CUDA, HALF, **CUPY, gpu=True),
    Library("JAX", "jax", "eager", ("float32", "bfloat16"), **JAX),
    Library("jax.jit", "jax", TRACED, HALF, **JAX, wrap=lambda f: imported("jax").jit(f)),
    Library("MLX", "mlx", "lazy, on the CPU", EVERY, **MLX),
    Library("mx.compile", "mlx", TRACED, ("float32", "float16"), **MLX, wrap=lambda f: imported("mlx.core").compile(f)),
    Library("dask", "dask", "lazy, one block per array", WIDE, **DASK),
)  # fmt: skip


def table() -> str:
    rows = [("library", "tested", "held to the tolerances of float64 in"), ("---",) * 3]
    rows += [(library.name, library.tested, ", ".join(library.dtypes)) for library in LIBRARIES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def of_name(name: str) -> Library:
    """Return a row of the matrix, or skip the test with the reason why it cannot be tested."""
    row = next(row for row in LIBRARIES if row.name == name)
    row.needed()
    return row


if __name__ == "__main__":
    print(table(), end="")

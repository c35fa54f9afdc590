"""``relskew info``: array libraries and ONNX runtimes of this machine, with the operations that ``verify`` needs."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from importlib import metadata
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relskew_core import __version__, backends
from relskew_core._array.extras import to_install
from relskew_core.backends._compiled.availability import availability
from relskew_core.cli._console import reason


@dataclass(frozen=True, slots=True)
class ArrayLibrary:
    """An array library on one device.

    ``make`` turns a NumPy float64 array into one of the library in a dtype, given as a string; ``finish`` waits until a
    list of arrays is computed and returns it, ``to_numpy`` returns an array as NumPy float64, ``compiled`` is what
    people do to a function before they run it, and ``setting`` what must hold while the library computes.
    """

    name: str
    device: str
    version: str
    dtypes: tuple[str, ...]
    make: Callable[[Any, str], Any]
    to_numpy: Callable[[Any], Any]
    finish: Callable[[Any], Any] = lambda result: result
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    setting: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


@dataclass(frozen=True, slots=True)
class Missing:
    name: str
    reason: str


ALL = ("float64", "float32", "float16", "bfloat16")


def _numpy() -> Iterator[ArrayLibrary]:
    yield ArrayLibrary("numpy", "cpu", np.__version__, ALL[:3], np.asarray, _float64)


def _strict() -> Iterator[ArrayLibrary]:
    xp = importlib.import_module("array_api_strict")

    def make(array: Any, dtype: str) -> Any:
        return xp.asarray(array, dtype=getattr(xp, dtype))

    yield ArrayLibrary("array-api-strict", "cpu", xp.__version__, ALL[:2], make, _float64)


def _torch() -> Iterator[ArrayLibrary | Missing]:
    torch = importlib.import_module("torch")

    def on(device: str, **more: Any) -> ArrayLibrary:
        def make(array: Any, dtype: str) -> Any:
            # A copy, because torch warns about sharing read-only memory.
            return torch.asarray(array, dtype=getattr(torch, dtype), device=device, copy=True)

        def to_numpy(tensor: Any) -> Any:
            return tensor.to(device="cpu", dtype=torch.float64).numpy()

        return ArrayLibrary("torch", device, torch.__version__, ALL, make, to_numpy, setting=torch.no_grad, **more)

    yield on("cpu")
    if not torch.cuda.is_available():
        yield Missing("torch cuda", "this torch sees no CUDA device")
    else:  # pragma: gpu only

        def finish(result: Any) -> Any:
            torch.cuda.synchronize()
            return result

        yield on("cuda", finish=finish)


def _cupy() -> Iterator[ArrayLibrary]:
    cp = importlib.import_module("cupy")
    yield from _on_cupy(cp)  # pragma: gpu only


def _on_cupy(cp: Any) -> Iterator[ArrayLibrary]:  # pragma: gpu only
    cp.cuda.runtime.getDeviceCount()  # raises if there is no device or no driver

    def finish(result: Any) -> Any:
        cp.cuda.Device().synchronize()
        return result

    def to_numpy(array: Any) -> Any:
        return _float64(array.get())

    yield ArrayLibrary("cupy", "cuda", cp.__version__, ALL[:3], cp.asarray, to_numpy, finish)


def _jax() -> Iterator[ArrayLibrary]:
    jax = importlib.import_module("jax")
    jnp = importlib.import_module("jax.numpy")

    def setting() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.default_matmul_precision("highest"))
        return stack

    def make(array: Any, dtype: str) -> Any:
        return jnp.asarray(array, dtype=dtype)

    # Compiled, because eager JAX compiles each operation separately, which takes longer than all other libraries
    # together.
    more = {"finish": jax.block_until_ready, "compiled": jax.jit, "setting": setting}
    yield ArrayLibrary("jax jit", jax.default_backend(), jax.__version__, ALL, make, _float64, **more)


def _mlx() -> Iterator[ArrayLibrary]:
    mx = importlib.import_module("mlx.core")

    def make(array: Any, dtype: str) -> Any:
        return mx.array(array, dtype=getattr(mx, dtype))

    def to_numpy(array: Any) -> Any:
        return np.asarray(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array, dtype=np.float64)

    def finish(result: Any) -> Any:
        mx.eval(result)
        return result

    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    dtypes = ALL if on_cpu else ALL[1:]  # only CPUs support float64
    yield ArrayLibrary("mlx", "cpu" if on_cpu else "gpu", mx.__version__, dtypes, make, to_numpy, finish)


def _dask() -> Iterator[ArrayLibrary]:
    da = importlib.import_module("dask.array")
    dask = importlib.import_module("dask")

    def make(array: Any, dtype: str) -> Any:
        return da.from_array(array.astype(dtype), chunks=-1)

    def finish(result: Any) -> Any:
        return dask.compute(result)[0]

    yield ArrayLibrary("dask", "cpu", dask.__version__, ALL[:2], make, _float64, finish)


# Each entry yields its library once for each device; its import may fail in as many ways as there are installations.
PROBES: dict[str, Callable[[], Iterator[ArrayLibrary | Missing]]] = {
    "numpy": _numpy, "array-api-strict": _strict, "torch": _torch, "cupy": _cupy, "jax": _jax, "mlx": _mlx,
    "dask": _dask,
}  # fmt: skip


def probed(probes: Mapping[str, Callable[[], Iterator[Any]]], only: Sequence[str]) -> tuple[list[Any], list[Missing]]:
    """Return what the probes find, or the named ones, and the missing ones with the reason."""
    found: list[Any] = []
    for name, probe in probes.items():
        if not only or name in only:
            try:
                found += probe()
            except Exception as error:  # broken drivers raise all kinds of exceptions, which belong in the table
                absent = isinstance(error, ModuleNotFoundError) and (error.name or "").replace("_", "-") == name
                found.append(Missing(name, "not installed" if absent else reason(error)))
    missing = [one for one in found if isinstance(one, Missing)]
    return [one for one in found if not isinstance(one, Missing)], missing


def libraries(only: Sequence[str] = ()) -> tuple[list[ArrayLibrary], list[Missing]]:
    return probed(PROBES, only)


def _float64(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)


ENOUGH = 0.05
REPEATS = 3
"""A call is repeated for this many seconds, and this many times at most."""


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, which is there when it returns, and its median time in seconds."""
    value, times, begun = call(), list[float](), time.perf_counter()
    while len(times) < REPEATS and not (times and time.perf_counter() - begun > ENOUGH):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return value, median(times)


Session = Callable[[dict[str, Any]], list[Any]]
DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    device: str
    version: str
    profile: str
    dtypes: tuple[str, ...]
    key: str
    provider: str = ""

    def load(self, model: Any) -> Session:
        export = importlib.import_module("relskew_core.export._check.runtimes")
        runner = export.opener(self.key)(export.Source(model, None), self.provider)
        if runner.misplaced:  # pragma: gpu only
            raise RuntimeError(f"not on {self.provider}: {', '.join(runner.misplaced)}")
        return runner.run


def _onnxruntime() -> Iterator[Runtime]:
    ort = importlib.import_module("onnxruntime")
    for provider in ort.get_available_providers():
        if provider in DEVICES:
            yield Runtime("onnxruntime", DEVICES[provider], ort.__version__, "ort", ALL[:3], "onnxruntime", provider)


def _reference() -> Iterator[Runtime]:
    onnx = importlib.import_module("onnx")
    yield Runtime("onnx reference", "cpu", onnx.__version__, "ort", ALL[:2], "reference")


def _openvino() -> Iterator[Runtime]:
    openvino = importlib.import_module("relskew_core.export._check.runtimes").import_openvino()
    yield Runtime("openvino", "cpu", openvino.__version__.partition("-")[0], "portable", ("float32",), "openvino")


RUNTIME_PROBES: dict[str, Callable[[], Iterator[Runtime]]] = {
    "onnxruntime": _onnxruntime, "onnx reference": _reference, "openvino": _openvino
}  # fmt: skip


def runtimes(only: Sequence[str] = ()) -> tuple[list[Runtime], list[Missing]]:
    """Return the installed ONNX runtimes, or the named ones, and the missing ones with the reason."""
    wanted = [name for name in RUNTIME_PROBES if not only or name in only]
    try:
        importlib.import_module("relskew_core.export" if wanted else "relskew_core")
    except ImportError as error:
        return [], [Missing(name, f"the export needs {error.name}: {to_install('onnx')}") for name in wanted]
    return probed(RUNTIME_PROBES, wanted) if wanted else ([], [])


PACKAGES = ("array-api-compat", "onnx", "safetensors", "matplotlib")


def gather() -> dict[str, Any]:
    found, missing = libraries()
    graphs, missing_graphs = runtimes()
    implementations: dict[str, list[str]] = backends.available()
    ort = sys.modules.get("onnxruntime")  # imported by its probe if possible

    def about(one: Any, *names: str) -> dict[str, Any]:
        return {name: getattr(one, name) for name in ("name", "version", "device", *names)}

    served = (implementations.get(one.name.partition(" ")[0].replace("-", "_"), []) for one in found)
    return {
        "relskew": __version__, "python": platform.python_version(), "platform": platform.platform(),
        "cpus": os.cpu_count(), "packages": {name: _version(name) for name in PACKAGES},
        "libraries": [about(one) | {"dtypes": list(one.dtypes), "implementations": names}
                      for one, names in zip(found, served, strict=True)],
        "kernels": availability(), "runtimes": [about(one, "profile") for one in graphs],
        "providers": [] if ort is None else list(ort.get_available_providers()),
        "missing": [asdict(one) for one in (*missing, *missing_graphs)],
    }  # fmt: skip


def show_facts(facts: dict[str, Any], console: Console) -> None:
    machine = f"  Python {facts['python']}  {facts['platform']}"
    console.print(Text.assemble((f"relskew {facts['relskew']}", "bold"), machine))
    console.print("  ".join(f"{name} {version or 'not installed'}" for name, version in facts["packages"].items()))

    def show(title: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
        table = Table(*columns, title=title, title_justify="left")
        for one in rows:
            cells = (one["name" if column == columns[0] else column] for column in columns)
            table.add_row(*(cell if isinstance(cell, str) else ", ".join(cell) for cell in cells))
        console.print(table)

    show("Array libraries", ("library", "version", "device", "dtypes", "implementations"), facts["libraries"])
    console.print(f"compiled kernels: {facts['kernels']}", style="dim", soft_wrap=True)
    show("ONNX runtimes", ("runtime", "version", "device", "profile"), facts["runtimes"])
    if facts["providers"]:
        console.print(f"onnxruntime offers {', '.join(facts['providers'])}", style="dim")
    show_missing([Missing(**one) for one in facts["missing"]], console)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def show_missing(missing: list[Missing], console: Console) -> None:
    if missing:
        grid = Table.grid(padding=(0, 2))
        for one in missing:
            grid.add_row(Text("missing", style="yellow"), one.name, one.reason)
        console.print(grid)

"""What a compiled kernel could win: ``python -m benchmarks.compiled``.

Of a chunk of attention, 128 queries of one head against its keys, three matrix products are most of the work, and
these are compiled already. The rest is the softmax. Here it is in torch, in NumPy's passes, in C from the compiler of
the machine, and in Numba where that is installed, beside the three products; one thread.
"""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks import machine, report
from benchmarks.memory import ROOT

PAGE = ROOT / "docs" / "short.md"
QUERIES, WIDTH = 128, 64
KEYS = (256, 1024, 4096)
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math")

Softmax = Callable[[np.ndarray, np.ndarray], Callable[[], Any]]
"""Makes a call that writes the exponentials of strided logits (n, m) to another array; some divide by the sums."""


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of CPU time for one chunk."""

    what: str
    keys: int
    seconds: float


def by_torch(logits: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
    """Let torch make the softmax."""
    x, y = torch.from_numpy(logits), torch.from_numpy(out)
    return lambda: torch.softmax(x, -1, out=y)


def by_numpy(logits: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
    """Go over the logits as NumPy's native path does."""
    ones = np.ones(logits.shape[-1], logits.dtype)

    def call() -> Any:
        np.subtract(logits, logits.max(-1, keepdims=True), out=out)
        if np.count_nonzero(out < -70):
            np.copyto(out, -math.inf, where=out < -70)
        return np.exp(out, out=out) @ ones

    return call


def by_c(logits: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
    """Compile ``softmax.c`` for this processor."""
    total = np.empty(len(logits), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        source, compiled, library = Path(__file__).with_name("softmax.c"), f"{folder}/softmax.o", f"{folder}/softmax.so"
        subprocess.run(["cc", *FLAGS, "-fPIC", "-c", str(source), "-o", compiled], check=True)
        # Linked apart: with -ffast-math, gcc would have the library flush subnormal numbers in the whole process.
        subprocess.run(["cc", "-shared", compiled, "-o", library, "-lm"], check=True)
        function = ctypes.CDLL(library).exponentials
    n, m = logits.shape
    pointer, long = ctypes.c_void_p, ctypes.c_long
    stride, sizes = long(logits.strides[0] // logits.itemsize), (long(n), long(m))
    return lambda: function(
        pointer(logits.ctypes.data), stride, pointer(out.ctypes.data), pointer(total.ctypes.data), *sizes
    )


def by_numba(logits: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
    """Compile the loops of ``softmax.c`` by Numba."""
    import numba

    f = np.float32
    coefficients = [f(x) for x in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)]
    c0, c1, c2, c3, c4 = coefficients

    @numba.njit(fastmath=True, error_model="numpy")  # type: ignore[untyped-decorator]  # numba has no types
    def exponentials(x: Any, out: Any, total: Any) -> None:
        for i in range(x.shape[0]):
            largest = x[i, 0]
            for j in range(x.shape[1]):
                largest = max(largest, x[i, j])
            count = f(0)
            for j in range(x.shape[1]):
                y = max(x[i, j] - largest, f(-70))
                k = np.int32(y * f(1.44269504) - f(0.5))
                r = y - k * f(0.693359375) + k * f(2.12194440e-4)
                p = ((((f(1.9875691500e-4) * r + c0) * r + c1) * r + c2) * r + c3) * r + c4
                e = (p * r * r + r + f(1)) * np.int32((k + 127) << 23).view(np.float32)
                out[i, j] = e * f(x[i, j] - largest >= f(-70))
                count += out[i, j]
            total[i] = count

    total = np.empty(len(logits), f)
    return lambda: exponentials(logits, out, total)


def contenders() -> dict[str, Softmax]:
    """Return what this machine has."""
    found: dict[str, Softmax] = {"softmax, torch": by_torch, "softmax, NumPy": by_numpy}
    if shutil.which("cc"):
        found["softmax, C"] = by_c
    if find_spec("numba"):
        found["softmax, Numba"] = by_numba
    return found


def measure(keys: int, *, seconds: float) -> list[Row]:
    """Check that all compute the same, then let them take turns; the median counts."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    wide = 3 * rng.standard_normal((QUERIES, keys + QUERIES), dtype=np.float32)
    logits = wide[:, :keys]  # rows apart from each other, as the skew leaves them
    expected = np.exp(logits - logits.max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)
    calls = {"three products": _products(keys)}
    for what, make in contenders().items():
        out = np.empty(logits.shape, np.float32)
        calls[what] = make(logits, out)
        calls[what]()
        np.testing.assert_allclose(out / out.sum(-1, keepdims=True), expected, rtol=1e-4, atol=1e-7, err_msg=what)
    times: dict[str, list[float]] = {what: [] for what in calls}
    until = time.perf_counter() + seconds
    while len(times["three products"]) < 8 or time.perf_counter() < until:
        for what, call in calls.items():
            start = time.process_time()
            call()
            times[what].append(time.process_time() - start)
    return [Row(what, keys, float(np.median(own))) for what, own in times.items()]


def _products(keys: int) -> Callable[[], Any]:
    """Multiply queries with keys, with a table, and weights with values."""
    q, k, table = torch.randn(QUERIES, WIDTH), torch.randn(keys, WIDTH), torch.randn(keys + QUERIES, WIDTH)
    weights = torch.randn(QUERIES, keys)
    outs = [torch.empty(QUERIES, keys), torch.empty(QUERIES, keys + QUERIES), torch.empty(QUERIES, WIDTH)]

    def call() -> None:
        torch.mm(q, k.T, out=outs[0])
        torch.mm(q, table.T, out=outs[1])
        torch.mm(weights, k, out=outs[2])

    return call


def table(rows: list[Row]) -> report.Table:
    """Return times, and shares of the three products'."""
    of = {(row.what, row.keys): row.seconds for row in rows}
    lengths = sorted({row.keys for row in rows})
    lines = [
        (what, *(_text(of[what, keys], of["three products", keys]) for keys in lengths))
        for what in dict.fromkeys(row.what for row in rows)
    ]
    return report.Table("One chunk of 128 queries", ("", *(f"{keys} keys" for keys in lengths)), lines)


def _text(seconds: float, of: float) -> str:
    return f"{seconds * 1e6:.0f} µs ({seconds / of:.2f})"


def main(
    seconds: Annotated[float, typer.Option(help="How long each number of keys is measured.")] = 2.0,
    docs: Annotated[bool, typer.Option(help="Rewrite the table of docs/short.md, and store the record.")] = False,
) -> None:
    """Time the softmax of a chunk beside its products."""
    about = machine.describe()
    rows = [row for keys in KEYS for row in measure(keys, seconds=seconds)]
    report.show(table(rows), Console())
    if docs:
        path = ROOT / "benchmarks" / "records" / f"compiled-{machine.name(about)}"
        lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
        path.write_text(f'{{"machine": {json.dumps(about, indent=1)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
        where = f"{about['cpu']}, torch {torch.__version__}, one thread, {about['date'][:10]}."
        write(rows, f"{where} In brackets, of the products.")


def write(rows: list[Row], where: str) -> None:
    """Put the table between the page's marks."""
    report.put(PAGE, "benchmarks.compiled", f"{where}\n\n{report.markdown(table(rows))}")


if __name__ == "__main__":
    typer.run(main)

"""What share of a processor's multiplications the compiled kernels reach, beside a loop that does nothing else."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import as_time
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case
from relskew_core import relative_attention
from relskew_core.backends import _compiled

HEADS, WIDTH = 8, 64
LEVELS = {"base": [], "x86-64-v3": ["-mavx2", "-mfma"], "x86-64-v4": ["-mavx512f", "-mprefer-vector-width=512"]}
"""What the kernels are compiled for, and the flags of a loop for the same."""
BYTES = {"base": 16, "x86-64-v3": 32, "x86-64-v4": 64}
PRODUCTS = {False: 3, True: 3 + 8}
"""Of matrices, forward and with backward: queries by keys, queries by the table, weights by values …"""

LOOP = r"""
typedef REAL Vector __attribute__((vector_size(BYTES)));
extern "C" REAL loop(long turns, REAL factor, REAL term) {
    Vector sums[12], a = Vector{} + factor, b = Vector{} + term;
    for (int j = 0; j < 12; j++) sums[j] = Vector{} + REAL(j);
    for (long i = 0; i < turns; i++)
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) sums[j] = sums[j] * a + b;
    for (int j = 1; j < 12; j++) sums[0] += sums[j];
    return sums[0][0];
}
"""
COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)


@cache
def _loop(level: str, dtype: str) -> Any:
    real = {"float32": "float", "float64": "double"}[dtype]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loop.so")
        flags = ["-O3", "-ffp-contract=fast", "-shared", "-fPIC", f"-DREAL={real}", f"-DBYTES={BYTES[level]}"]
        command = [str(COMPILER), *flags, *LEVELS[level], "-x", "c++", "-", "-o", str(path)]
        subprocess.run(command, input=LOOP, text=True, check=True)
        return ctypes.CDLL(str(path)).loop


def peak(level: str, dtype: str) -> float:
    """Return how many multiplications with additions one thread does in a second."""
    loop, turns, best = _loop(level, dtype), 10**6, 0.0
    real = {"float32": ctypes.c_float, "float64": ctypes.c_double}[dtype]
    for _ in range(5):
        start = time.process_time()
        loop(ctypes.c_long(turns), real(0.5), real(0.25))
        best = max(best, turns / (time.process_time() - start))
    return best * 12 * BYTES[level] / {"float32": 4, "float64": 8}[dtype]


class Peak(Benchmark):
    """Causal calls of batch 1 with a table of the keys, on one thread, at each level of instructions."""

    page = "compiled.md"
    names = tuple(LEVELS)

    def cases(self) -> Iterator[Case]:
        for dtype, training, length in itertools.product(
            ("float32", "float64"), (False, True), (1024, 2048, 4096, 8192)
        ):
            yield {"dtype": dtype, "training": training, "length": length}

    def skip(self, case: Case, contender: str) -> str | None:
        if COMPILER is None:
            return "there is no compiler"
        return (
            None if _compiled.kernels and contender in _compiled.kernels.LEVELS else "not compiled for this processor"
        )

    def prepare(self, case: Case, contender: str) -> Call:
        torch.manual_seed(0)
        sizes = [(1, HEADS, case["length"], WIDTH)] * 3 + [(case["length"], WIDTH)]
        dtype, training = getattr(torch, case["dtype"]), case["training"]
        arrays: list[Any] = [torch.randn(size, dtype=dtype, requires_grad=training) for size in sizes]

        def call() -> Any:
            _compiled.kernels.use(contender)
            try:
                out: Any = relative_attention(*arrays, causal=True)
                return torch.autograd.grad(out, arrays, out) if training else out
            finally:
                _compiled.kernels.use(_compiled.kernels.LEVELS[-1])

        return call

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return {"peak": peak(contender, case["dtype"])}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            length, training = row.case["length"], row.case["training"]
            count = HEADS * WIDTH * PRODUCTS[training] * length * (length + 1) / 2
            line = f"{row.case['dtype']}, {length}{', with backward' if training else ''}"
            seconds = row.cpu or 0.0
            yield line, row.contender, f"{as_time(seconds)}, {count / seconds / row.facts['peak']:.2f}"


BENCHMARK = Peak()

"""The use of a processor by the compiled kernels: its multiplications, and a second core."""

from __future__ import annotations

import ctypes
import heapq
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.compiled import HEADS, WIDTH, after, attend, drawn, passes
from benchmarks.page import as_time
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case, distance
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends import _compiled

LEVELS = {
    "base": (16, []),
    "x86-64-v3": (32, ["-mavx2", "-mfma"]),
    "x86-64-v4": (64, ["-mavx512f", "-mprefer-vector-width=512"]),
}
"""The targets of the kernels: bytes of a vector, and the flags of an equivalent loop."""
REALS: dict[str, Any] = {"float32": ("float", ctypes.c_float), "float64": ("double", ctypes.c_double)}
PRODUCTS = {False: 3, True: 3 + 8}
"""The number of products, forward and with backward: queries by keys, queries by the table, weights by values …"""

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
    size, flags = LEVELS[level]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loop.so")
        flags = [
            *flags,
            "-O3",
            "-ffp-contract=fast",
            "-shared",
            "-fPIC",
            f"-DREAL={REALS[dtype][0]}",
            f"-DBYTES={size}",
        ]
        command = [str(COMPILER), *flags, "-x", "c++", "-", "-o", str(path)]
        subprocess.run(command, input=LOOP, text=True, check=True)
        return ctypes.CDLL(str(path)).loop


def peak(level: str, dtype: str) -> float:
    """Return the multiply-adds per second of one thread."""
    loop, turns, best, real = _loop(level, dtype), 10**6, 0.0, REALS[dtype][1]
    for _ in range(5):
        start = time.process_time()
        loop(ctypes.c_long(turns), real(0.5), real(0.25))
        best = max(best, turns / (time.process_time() - start))
    return best * 12 * LEVELS[level][0] / ctypes.sizeof(real)


class Peak(Benchmark):
    """The share of a processor's multiplications at each level, compared with a loop that does nothing else."""

    page = "compiled.md"
    names = tuple(LEVELS)

    def cases(self) -> Iterator[Case]:
        lengths = (1024, 2048, 4096, 8192)
        for dtype, training, length in itertools.product(REALS, (False, True), lengths):
            yield {"dtype": dtype, "training": training, "length": length}

    def skip(self, case: Case, contender: str) -> str | None:
        compiled = _compiled.kernels is not None and contender in _compiled.kernels.LEVELS
        reason = None if compiled else "not compiled for this processor"
        return reason if COMPILER else "there is no compiler"

    def prepare(self, case: Case, contender: str) -> Call:
        given = drawn(case["length"], case["length"], case["dtype"])
        one = passes(attend, given, training=case["training"])

        def call() -> Any:
            _compiled.kernels.use(contender)
            try:
                return one()
            finally:
                _compiled.kernels.use(_compiled.kernels.LEVELS[-1])

        return call

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return {"peak": peak(contender, case["dtype"])}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            length, training, seconds = row.case["length"], row.case["training"], row.cpu or 0.0
            count = HEADS * WIDTH * PRODUCTS[training] * length * (length + 1) / 2
            text = f"{as_time(seconds)}, {count / seconds / row.facts['peak']:.2f}"
            yield f"{row.case['dtype']}, {length}{after(training)}", row.contender, text


def cut(heads: int, queries: int, keys: int, *, backward: bool) -> tuple[int, ...]:
    """Return the pairs in each task of a head, in a causal call; with few queries, of up to 8 heads."""
    q, k = (np.empty((1, heads, n, WIDTH), np.float32) for n in (queries, keys))
    table, sums = np.empty((keys, WIDTH), np.float32), np.empty((*q.shape[:-1], 2), np.float32)
    given = problem(Arguments(q, k, k, table, causal=True, offset=keys - queries))
    x = given.operands()
    arguments = [*_compiled.Call.of(x, given.options)[:3], *_compiled._arrays(x), *_compiled.NO_INTEGERS]
    if not backward:
        return tuple(_compiled.kernels.attend(*arguments, np.empty(q.shape, np.float32), None, None, 0, 0))
    of_names = (getattr(x, name) for name in _compiled.GRADIENTS)
    gradients = [None if own is None else np.empty(own.shape, np.float32) for own in of_names]
    return tuple(_compiled.kernels.pull_back(*arguments, q, q, sums, None, *gradients, 0, 0))


def speed_up(tasks: Iterable[int], processors: int) -> float:
    """Return the speed-up of this many processors that take one task after the other."""
    busy, total = [0] * processors, 0
    for task in tasks:
        heapq.heapreplace(busy, busy[0] + task)
        total += task
    return total / max(busy)


class Cores(Benchmark):
    """The speed-up of a second processor, measured, and of more, from the sizes of the tasks."""

    page = "compiled.md"
    names = ("1", "2")
    threads = None
    tolerance = 0.0  # bit-identical

    def cases(self) -> Iterator[Case]:
        for heads in (1, 8):
            for queries, keys, training in (
                (4096, 4096, False),
                (4096, 4096, True),
                (1, 100_000, False),
                (0, 100_000, False),  # no query: reading alone
            ):
                yield {"heads": heads, "queries": queries, "keys": keys, "training": training}

    def prepare(self, case: Case, contender: str) -> Call:
        given = drawn(case["queries"], case["keys"], heads=case["heads"])
        one = passes(attend, given, training=case["training"]) if case["queries"] else partial(_read, given)

        def call() -> Any:
            torch.set_num_threads(int(contender))
            return one()

        return call

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        return None if first is None or not case["queries"] else distance(result, first)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            heads, n, m, training = case.values()
            what = f"{m} causal" if n > 1 else f"one token after {m}" if n else f"reading {m} keys, values and rows"
            line = f"{heads} {'head' if heads == 1 else 'heads'}, {what}{after(training)}"
            one, two = (rows[name].fastest or 0.0 for name in self.names)
            yield from ((line, "1 thread", as_time(one)), (line, "2 threads", f"{as_time(two)}, {two / one:.2f}"))
            if not n:
                continue
            tasks = [cut(heads, n, m, backward=backward) for backward in (False, True)[: 1 + training]]
            for processors in (16, 64, 128):
                least = min(speed_up(each * (heads if n > 1 else 1), processors) for each in tasks)
                yield line, f"{processors} processors", f"{least:.0f}×"


def _read(arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Read arrays and compute nothing but their sums: no call that reads them can take less time."""
    return [x.sum() for x in arrays]

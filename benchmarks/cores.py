"""What a second processor gains, measured; what 16, 64 and 128 would, by the sizes of the tasks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.page import as_time
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case, distance
from relskew_core import relative_attention
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends import _compiled

WIDTH = 64
PROCESSORS = (16, 64, 128)


def cut(heads: int, queries: int, keys: int, *, backward: bool) -> tuple[int, ...]:
    """Return how many pairs each task of a head has, in a causal call; where queries are few, of up to 8 heads."""
    q, k = (np.empty((1, heads, n, WIDTH), np.float32) for n in (queries, keys))
    table, lse = np.empty((keys, WIDTH), np.float32), np.empty(q.shape[:-1], np.float32)
    given = problem(Arguments(q, k, k, table, causal=True, offset=keys - queries))
    x = given.operands()
    handed = [*_compiled.Call.of(x, given.options)[:3], *_compiled._arrays(x), *_compiled.NO_INTEGERS]
    if not backward:
        return tuple(_compiled.kernels.attend(*handed, np.empty(q.shape, np.float32), None, 0, 0))
    of_names = (getattr(x, name) for name in _compiled.GRADIENTS)
    gradients = [None if own is None else np.empty(own.shape, np.float32) for own in of_names]
    return tuple(_compiled.kernels.pull_back(*handed, q, q, lse, None, *gradients, 0, 0))


def speed_up(tasks: Iterable[int], processors: int) -> float:
    """Return how many times faster so many processors are that take one task after the other."""
    busy, total = [0] * processors, 0
    for task in tasks:
        heapq.heapreplace(busy, busy[0] + task)
        total += task
    return total / max(busy)


class Cores(Benchmark):
    """Causal calls of batch 1 with a table of the keys, on one thread of torch and on two."""

    page = "compiled.md"
    names = ("1", "2")
    threads = None
    tolerance = 0.0  # the same to the bit

    def cases(self) -> Iterator[Case]:
        for heads in (1, 8):
            for queries, keys, training in ((4096, 4096, False), (4096, 4096, True), (1, 100_000, False)):
                yield {"heads": heads, "queries": queries, "keys": keys, "training": training}

    def prepare(self, case: Case, contender: str) -> Call:
        torch.manual_seed(0)
        heads, n, m, training = (case[name] for name in ("heads", "queries", "keys", "training"))
        sizes = ((1, heads, n, WIDTH), (1, heads, m, WIDTH), (1, heads, m, WIDTH), (m, WIDTH))
        arrays: list[Any] = [torch.randn(size, requires_grad=training) for size in sizes]

        def call() -> Any:
            torch.set_num_threads(int(contender))
            out: Any = relative_attention(*arrays, causal=True, offset=m - n)
            return torch.autograd.grad(out, arrays, out) if training else out

        return call

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        return None if first is None else distance(result, first)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        of = {(str(row.case), row.contender): row.fastest or 0.0 for row in record.measured()}
        for row in record.measured():
            if row.contender != "1":
                continue
            heads, n, m, training = (row.case[name] for name in ("heads", "queries", "keys", "training"))
            what = f"{m} causal" if n > 1 else f"one token after {m}"
            line = f"{heads} {'head' if heads == 1 else 'heads'}, {what}{', with backward' if training else ''}"
            one, two = (of[str(row.case), name] for name in self.names)
            yield line, "1 thread", as_time(one)
            yield line, "2 threads", f"{as_time(two)}, {two / one:.2f}"
            passes = [cut(heads, n, m, backward=backward) for backward in ((False, True) if training else (False,))]
            for processors in PROCESSORS:
                found = [speed_up(tasks * (heads if n > 1 else 1), processors) for tasks in passes]
                yield line, f"{processors} processors", f"{min(found):.0f}×"


BENCHMARK = Cores()

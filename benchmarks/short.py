"""Short calls compared with six lines of hand-written code; first calls of processes, and XLA's time to compile.

Decoding, a few more tokens, small batches and short training sequences, whose time is mostly
that of the code around the arithmetic. A cell's number is relskew's time over that of the fastest other.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.runner import ROOT, Benchmark, Call, Case, Record, Row, after, as_memory, as_time, passes, pivot
from benchmarks.textbook import attended, future, picked, skewed
from relskew_core import Span, relative_attention

REACH = 4096  # of the table for decoding
BOUND = 1.05

SQUARES = (
    (1, 8, 16, 64), (8, 8, 16, 32), (4, 8, 32, 64), (64, 8, 32, 64), (2, 16, 48, 128), (1, 8, 64, 64), (16, 4, 64, 16),
    (32, 8, 64, 64), (3, 12, 77, 64), (1, 1, 100, 32), (2, 8, 100, 64), (1, 8, 128, 64), (16, 4, 128, 16),
    (4, 12, 128, 64), (1, 16, 200, 128), (1, 8, 256, 64), (4, 4, 256, 32), (1, 8, 512, 64),
)  # fmt: skip
"""Batch, heads, length and width of whole sequences."""

STEPS = (
    (1, 8, 17, 64), (1, 12, 33, 64), (16, 8, 65, 64), (1, 8, 101, 64), (4, 4, 101, 16), (8, 8, 101, 64),
    (32, 8, 257, 64), (1, 32, 257, 128), (1, 8, 513, 64), (2, 16, 513, 32), (1, 16, 1025, 128), (1, 8, 2049, 64),
    (4, 8, 2049, 64), (1, 8, 4001, 64),
)  # fmt: skip
"""The same for one query after all keys but one."""

DRAFTS = (
    (4, 12, 3, 67, 64), (1, 8, 4, 104, 64), (8, 8, 2, 130, 64), (2, 8, 32, 160, 64), (1, 32, 6, 262, 128),
    (4, 8, 4, 516, 64), (1, 8, 64, 576, 64), (1, 16, 5, 1029, 128), (1, 8, 8, 1032, 64), (1, 8, 16, 2064, 64),
)  # fmt: skip
"""The same for several last queries: drafted tokens to verify, or a piece of a prompt."""

WHERE = (
    *((way, b, h, n, n, d) for way in ("forward", "training") for b, h, n, d in SQUARES),
    *(("decoding", b, h, 1, m, d) for b, h, m, d in STEPS), *(("continuing", *shape) for shape in DRAFTS),
)  # fmt: skip
NAMES = ("library", "way", "batch", "heads", "queries", "length", "dim", "threads")


def relskew(q: Any, k: Any, v: Any, table: Any) -> Any:
    return relative_attention(q, k, v, table, Span.causal(table.shape[0]), causal=True, offset=k.shape[2] - q.shape[2])


def by_hand(q: Any, k: Any, v: Any, table: Any) -> Any:
    """One query by hand: it sees all keys, and has the position of the last one."""
    return _attended(q, k, v, q @ table[-k.shape[2] :].mT)


def textbook(q: Any, k: Any, v: Any, table: Any) -> Any:
    length, product, xp = q.shape[2], q @ table.mT, _module(q)
    if xp is torch:
        return _attended(q, k, v, skewed(product), future(length))
    padded = xp.pad(product, ((0, 0), (0, 0), (0, 0), (1, 0)))
    relative = padded.reshape(*q.shape[:2], length + 1, length)[:, :, 1:]
    return _attended(q, k, v, relative, xp.triu(xp.ones((length, length), dtype=bool), 1))


def dense(q: Any, k: Any, v: Any, table: Any) -> Any:
    xp, n, m = _module(q), q.shape[2], k.shape[2]
    behind, rows = xp.arange(m - n, m)[:, None] - xp.arange(m)[None, :], table[-m:]
    index = (m - 1 - behind).clip(0, m - 1)
    relative = picked(q, rows, index) if xp is torch else xp.take_along_axis(q @ rows.mT, index[None, None], axis=-1)
    return _attended(q, k, v, relative, behind < 0)


FUNCTIONS = {"relskew": relskew, "by hand": by_hand, "textbook": textbook, "dense": dense}
OTHERS = {"decoding": ("by hand",), "continuing": ("dense",)}


def _attended(q: Any, k: Any, v: Any, relative: Any, hidden: Any = None) -> Any:
    logits, xp = (q @ k.mT + relative) * q.shape[-1] ** -0.5, _module(q)
    if xp is torch:
        return attended(logits, v, hidden)
    logits = logits if hidden is None else xp.where(hidden, -xp.inf, logits)
    if xp is not np:
        return import_module("jax").nn.softmax(logits) @ v
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def _module(x: Any) -> Any:
    return torch if isinstance(x, torch.Tensor) else np if isinstance(x, np.ndarray) else import_module("jax.numpy")


@functools.lru_cache(maxsize=1)
def draw(batch: int, heads: int, queries: int, length: int, dim: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    rows = length if length == queries else REACH
    content, keys = (batch, heads, queries, dim), (batch, heads, length, dim)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in (content, keys, keys, (rows, dim), content)]


class Short(Benchmark):
    """Shapes of several uses: causal, float32, with a shared table. JAX is compiled."""

    page = "development/short-calls.md"
    tolerance = 1e-4  # the size of rounding errors, including JAX's products
    seconds = 1.0
    threads = None

    def cases(self) -> Iterator[Case]:
        """Return library, use, shape and threads. There is no textbook for NumPy's gradients."""
        ways = (("torch", 1), ("torch", 2), ("numpy", 1), ("jax", 1))
        for (library, threads), where in itertools.product(ways, WHERE):
            if find_spec(library) is not None and (library, where[0]) != ("numpy", "training"):
                yield dict(zip(NAMES, (library, *where, threads), strict=True))

    def contenders(self, case: Case) -> Iterable[str]:
        return "relskew", *OTHERS.get(case["way"], ("textbook", "dense"))

    def prepare(self, case: Case, contender: str) -> Call:
        torch.set_num_threads(case["threads"])
        function, training = FUNCTIONS[contender], case["way"] == "training"
        arrays = draw(*(case[name] for name in ("batch", "heads", "queries", "length", "dim")))
        if case["library"] == "numpy":
            return partial(function, *arrays[:4])
        if case["library"] == "jax":
            import jax

            *given, d_out = map(jax.numpy.asarray, arrays)
            step = jax.jit((lambda *x: jax.vjp(function, *x)[1](d_out)) if training else function)
            return lambda: jax.block_until_ready(step(*given))
        return passes(function, [torch.from_numpy(x) for x in arrays[:4]], training)

    def doubts(self, rows: list[Row]) -> bool:
        """Repeat longer if relskew seems slow, which may be noise of the machine."""
        relskew, *others = (row.fastest or 0.0 for row in rows)
        return bool(others) and relskew > BOUND * min(others)

    def texts(self, record: Record) -> dict[str, str]:
        cells, above = list[tuple[str, str, str]](), 0
        for case, rows in record.by_case():
            library, way, batch, heads, queries, length, dim, threads = (case[name] for name in NAMES)
            relskew, *others = (row.fastest or 0.0 for row in rows.values())
            if others:
                above += (ratio := relskew / min(others)) > BOUND
                lengths = f"L{length}" if queries in (1, length) else f"Lq{queries} Lk{length}"
                of_torch = f"torch, {threads} thread{'s' * (threads > 1)}"
                column = {"numpy": "NumPy", "jax": "JAX, jit"}.get(library, of_torch)
                line = f"{way}, B{batch} H{heads} {lengths} D{dim}"
                cells.append((line, column, f"{relskew * 1e6:.0f} µs ({ratio:.2f}×)"))
        return {"": f"{record.where} {len(cells)} cells, {above} of them above {BOUND}×.\n\n{pivot(cells)}"}


LIBRARIES = {
    "torch": ("import torch; x = [torch.ones(shape, requires_grad=True) for shape in shapes]", ".sum().backward()"),
    "NumPy": ("import numpy as np; x = [np.ones(shape, 'f4') for shape in shapes]", ""),
    "JAX": ("import jax.numpy as np; x = [np.ones(shape).block_until_ready() for shape in shapes]",
            ".block_until_ready()"),
}  # fmt: skip
"""Functions that make the arrays of a call, and that wait for its end."""

SCRIPT = """
import json, os, time
def now():
    return time.process_time(), int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
shapes = [(1, 8, 512, 64)] * 3 + [(512, 64)]
{make}
before = now()
from relskew_core import relative_attention
relative_attention(*x, causal=True){end}
print(json.dumps([b - a for a, b in zip(before, now())]))
"""
TARGETS = {"torch": "0.3 s, 25 MiB", "NumPy": "0.1 s, 15 MiB", "JAX": "0.3 s", "relskew --help": "0.35 s"}
PROCESSES = 6  # the first ones may have to write bytecode


class First(Benchmark):
    """Fresh processes, of which the fastest counts; and programs in one process, compiled in turns."""

    page = "short.md"
    names = ("plain", "relskew")

    def cases(self) -> Iterator[Case]:
        yield from ({"first": name} for name in TARGETS)
        yield from ({"length": length, "training": training} for length in (512, 1024) for training in (False, True))

    def measures_of(self, case: Case) -> frozenset[str]:
        return frozenset({"memory"} if "first" in case else {"time"})

    def contenders(self, case: Case) -> tuple[str, ...]:
        return self.names[-1:] if "first" in case else self.names

    def memory(self, name: str, case: Case, contender: str) -> Case:
        seconds, sizes = zip(*(_of_a_process(case["first"]) for _ in range(PROCESSES)), strict=True)
        return {"fastest": min(seconds), "bytes": None if sizes[0] is None else statistics.median(sizes)}

    def prepare(self, case: Case, contender: str) -> Call:
        import jax

        sides = (case["length"], 8) if contender == "plain" else (8, case["length"])
        x = [jax.numpy.ones((1, *sides, 64))] * 3 + [jax.numpy.ones((case["length"], 64))] * (contender != "plain")
        attend: Any = partial(relative_attention, causal=True)
        if contender == "plain":
            attend = partial(jax.nn.dot_product_attention, is_causal=True)

        def call() -> Any:  # a new function is traced again
            function = jax.grad(lambda *x: attend(*x).sum(), range(len(x))) if case["training"] else attend
            return jax.jit(lambda *x: function(*x)).lower(*x).compile()

        return call

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            if (line := row.case.get("first")) is not None:
                memory = "" if row.bytes is None else f", {as_memory(row.bytes)}"
                text, most = f"{as_time(row.fastest or 0.0)}{memory}", TARGETS[line]
            elif row.contender == "relskew":
                line = f"`jax.jit`, {row.case['length']}{after(row.case['training'])}"
                text, most = f"{as_time(row.cpu or 0.0)}, {row.ratio:.2f} times", "1.2 times"
            else:
                continue
            yield from ((line, "measured", text), (line, "at most", most))


def _of_a_process(first: str) -> tuple[float, float | None]:
    """Return the seconds and bytes of a first call; for the command line, the seconds from its start to its end."""
    make, end = LIBRARIES.get(first, ("", ""))
    command = ["-c", SCRIPT.format(make=make, end=end)] if make else ["-m", "relskew_core.cli", "--help"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, check=True)
    return tuple(json.loads(ended.stdout)) if make else (time.perf_counter() - start, None)

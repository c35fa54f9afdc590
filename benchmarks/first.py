"""The cost of a first call in a fresh process, and XLA's time to compile one, compared with plain attention."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.runner import ROOT, Benchmark, Call, Case, Record, as_memory, as_time

LIBRARIES = {
    "torch": ("import torch; x = [torch.ones(shape, requires_grad=True) for shape in shapes]", ".sum().backward()"),
    "NumPy": ("import numpy as np; x = [np.ones(shape, 'f4') for shape in shapes]", ""),
    "JAX": (
        "import jax.numpy as jnp; x = [jnp.ones(shape).block_until_ready() for shape in shapes]",
        ".block_until_ready()",
    ),
}
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
COMPILED = "1.2 times"
PROCESSES = 6
"""The first processes may have to write bytecode."""


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
        found = [_of_a_process(case["first"]) for _ in range(PROCESSES)]
        seconds, sizes = zip(*found, strict=True)
        return {"fastest": min(seconds), "bytes": None if sizes[0] is None else statistics.median(sizes)}

    def prepare(self, case: Case, contender: str) -> Call:
        import jax

        from relskew_core import relative_attention

        x = [jax.numpy.ones((1, case["length"], 8, 64))] * 3 + [jax.numpy.ones((case["length"], 64))]
        x = x[:3] if contender == "plain" else [*(each.swapaxes(1, 2) for each in x[:3]), x[3]]

        def attend(*x: Any) -> Any:
            plain = contender == "plain"
            return jax.nn.dot_product_attention(*x, is_causal=True) if plain else relative_attention(*x, causal=True)

        def call() -> Any:  # a new function is traced again
            function = jax.grad(lambda *x: attend(*x).sum(), range(len(x))) if case["training"] else attend
            return jax.jit(lambda *x: function(*x)).lower(*x).compile()

        return call

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            if (name := row.case.get("first")) is not None:
                memory = "" if row.bytes is None else f", {as_memory(row.bytes)}"
                yield name, "measured", f"{as_time(row.fastest or 0.0)}{memory}"
                yield name, "at most", TARGETS[name]
            elif row.contender == "relskew":
                line = f"`jax.jit`, {row.case['length']}{', with backward' if row.case['training'] else ''}"
                yield line, "measured", f"{as_time(row.cpu or 0.0)}, {row.ratio:.2f} times"
                yield line, "at most", COMPILED


def _of_a_process(first: str) -> tuple[float, float | None]:
    """Return the seconds and bytes of a first call; for the command line, the seconds from its start to its end."""
    help_ = first not in LIBRARIES
    make, end = LIBRARIES.get(first, ("", ""))
    command = ["-m", "relskew_core.cli", "--help"] if help_ else ["-c", SCRIPT.format(make=make, end=end)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, check=True)
    seconds = time.perf_counter() - start
    return (seconds, None) if help_ else tuple(json.loads(ended.stdout))

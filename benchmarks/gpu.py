"""Time, speed, memory and correctness on a GPU, compared with common alternatives.

Needs torch alone. Times are medians with a cold second-level cache (``triton.testing.do_bench``); of gradients, the
backward pass alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.calls import shape_of
from benchmarks.contenders import CONTENDERS, Contender, Inputs, Shape, gradients, make_inputs, reference
from benchmarks.runner import Benchmark, Call, Case, Key, Record
from relskew_core._reference import TOLERANCES

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
POSITIONS, WIDTH = 2**14, 2048  # of a batch and of all heads; a single longer sequence has 8 heads

SHOWN = {"torch": "relskew", "sdpa-flash": "FlashAttention, no positions", "flex": "FlexAttention"}


@functools.lru_cache(maxsize=1)
def tensors(shape: Shape) -> Inputs:
    return make_inputs(shape).to_torch(gradients=True)


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward pass, or with ``backward`` also the gradients."""

    contender: Contender
    shape: Shape
    backward: bool

    def __call__(self) -> Any:
        return self.alone()()

    def alone(self) -> Call:
        """Return the timed part: for gradients, the backward pass alone."""
        x, function = tensors(self.shape), self.contender.function
        if not self.backward:
            return torch.no_grad()(lambda: function(x))
        out = function(x)
        return lambda: gradients(out, x, retain_graph=True)


class GPU(Benchmark):
    page = "gpu.md"
    names = (
        "torch", "torch-clipped", "torch-plain", "torch-paged", "torch-portable", "sdpa-flash", "sdpa-cudnn",
        "sdpa-bias", "flex", "huang",
    )  # fmt: skip
    seconds = 0.2
    legend = (
        "Median time of causal calls in bfloat16, with 16384 positions in a batch, and heads whose widths add up to "
        "2048.\n\n"
    )
    pairs = True
    fallible = True

    def cases(self) -> Iterator[Case]:
        """Return shapes, and whether the backward pass is measured; ``--set dtype=float32`` selects another type."""
        for dim, length, causal in itertools.product((64, 128), LENGTHS, (True, False)):
            shape = {"batch": max(1, POSITIONS // length), "heads": WIDTH // dim if length <= POSITIONS else 8}
            case = {"length": length, **shape, "dim": dim, "causal": causal, "dtype": "bfloat16", "device": "cuda"}
            yield from (case | {"by_head": True, "queries": None, "backward": each} for each in (False, True))
            if causal and length >= 4096:  # one query after a cache
                yield case | {"batch": 8, "heads": 8, "by_head": False, "queries": 1, "backward": False}

    def prepare(self, case: Case, contender: str) -> Pass:
        return Pass(CONTENDERS[contender], shape_of(case), case["backward"])

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        expected = reference(shape_of(case), CONTENDERS[contender].kind)
        return expected.error(result[0] if case["backward"] else result, gradient=case["backward"])

    def gate(self, case: Case) -> float:
        return TOLERANCES[case["dtype"]]

    def measures_of(self, case: Case) -> set[str]:
        return {"time", "memory"} if case["device"] == "cuda" else {"time"}

    def memory(self, name: str, case: Case, contender: str) -> Case:  # pragma: gpu only
        call: Call = self.prepare(case, contender).alone()
        call()  # the first compilation needs additional memory
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return {"bytes": torch.cuda.max_memory_allocated() - before}

    def time(self, calls: Mapping[Key, Any], seconds: float, first: Callable[[Key], Key]) -> Mapping[Key, Case]:
        if not torch.cuda.is_available():
            return super().time({key: call.alone() for key, call in calls.items()}, seconds, first)
        from triton.testing import do_bench, do_bench_cudagraph  # pragma: gpu only

        def median(call: Any) -> float:  # pragma: gpu only
            times: Any = {"rep": int(1000 * seconds), "return_mode": "median"}
            if call.shape.queries is not None:  # shorter than its launches, so they are recorded
                found = do_bench_cudagraph(torch.no_grad()(call.alone()), **times)
            else:
                found = do_bench(call.alone(), warmup=int(250 * seconds), **times)
            assert isinstance(found, float)
            return found / 1000

        found = {key: median(call) for key, call in calls.items()}  # pragma: gpu only
        base: dict[Key, Any] = {key: found.get(first(key)) for key in found}  # pragma: gpu only
        return {key: {"median": x, "ratio": x / base[key] if base[key] else None} for key, x in found.items()}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            case = row.case
            kind = ("" if case["causal"] else ", full") + (", backward" if case["backward"] else "")
            kind += ", one query" if case.get("queries") else ""
            dtype = "" if case["dtype"] == "bfloat16" else f", {case['dtype']}"
            where = f"{case['length']} positions, width {case['dim']}{dtype}{kind}"
            if row.contender in SHOWN:
                yield where, SHOWN[row.contender], f"{1e3 * (row.median or 0.0):.3f} ms"

"""What half precision costs beside float32, and beside torch's attention without positions in bfloat16."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it

from benchmarks.page import as_time
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case, distance
from relskew_core import relative_attention

HEADS, WIDTH = 8, 64
PLAIN = "torch's attention, bfloat16"


class Half(Benchmark):
    """Causal calls of batch 1 with a table of the keys, on one thread of torch."""

    page = "compiled.md"
    names = ("float32", "bfloat16", "float16", PLAIN)
    tolerance = 2e-2

    def cases(self) -> Iterator[Case]:
        for length, training in itertools.product((1024, 2048), (False, True)):
            yield {"queries": length, "keys": length, "training": training}
        for keys in (1000, 16_000):
            yield {"queries": 1, "keys": keys, "training": False}

    def prepare(self, case: Case, contender: str) -> Call:
        torch.manual_seed(0)
        n, m, training = case["queries"], case["keys"], case["training"]
        dtype = torch.bfloat16 if contender == PLAIN else getattr(torch, contender)
        sizes = ((1, HEADS, n, WIDTH), (1, HEADS, m, WIDTH), (1, HEADS, m, WIDTH), (m, WIDTH))
        arrays: list[Any] = [torch.randn(size).to(dtype).requires_grad_(training) for size in sizes]
        d_out = torch.randn(sizes[0]).to(dtype)

        def call() -> Any:
            if contender == PLAIN:
                given = arrays[:3]
                out: Any = F.scaled_dot_product_attention(*arrays[:3], is_causal=n > 1)
            else:
                given, out = arrays, relative_attention(*arrays, causal=True, offset=m - n)
            return (out, *torch.autograd.grad(out, given, d_out)) if training else out

        return call

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        if first is None or contender == PLAIN:
            return None
        found, expected = ([x.float() for x in each] if case["training"] else each.float() for each in (result, first))
        return distance(found, expected)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            n, m = row.case["queries"], row.case["keys"]
            line = f"causal, {m}" if n > 1 else f"one token after {m}"
            ratio = "" if row.contender == "float32" else f", {row.ratio:.2f}"
            line += ", with backward" if row.case["training"] else ""
            yield line, row.contender, f"{as_time(row.cpu or 0.0)}{ratio}"


BENCHMARK = Half()

"""What the compiled kernels win: calls with them, the same by the portable code, and plain attention of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from threadpoolctl import threadpool_limits

from benchmarks.page import as_time
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case, distance
from relskew_core import Span, backends, relative_attention, relative_attention_vjp
from relskew_core.backends import _compiled

HEADS, WIDTH = 8, 64
CAUSAL = {"causal": True}
KEYS = ("rel_k", "key_table")
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((128, 1024, 2048, 4096), CAUSAL),
    "every position": ((1024,), {}),
    "clipped at 16": ((1024,), {"reach": 16}),
    "clipped at 128": ((1024,), {"reach": 128}),
    "clipped at 128, with values": ((1024,), {"reach": 128, "tables": ("rel_k", "rel_v")}),
    "keys meet a table too": ((1024,), {"tables": KEYS}),
    "keys meet a table too, clipped at 255": ((2048,), {"reach": 255, "tables": KEYS}),
    "softcap": ((1024,), CAUSAL | {"softcap": 30.0}),
    "mask of keys": ((1024,), {"mask": True}),
    "8 documents": ((1024,), CAUSAL | {"segments": 8}),
    "time stamps, clipped at 64": ((1024,), CAUSAL | {"reach": 64, "positions": True}),
    "dropout": ((1024,), CAUSAL | {"dropout": 0.1, "seed": 1}),
}
"""Lengths, and what is asked for: tables (``rel_k``) that reach everywhere or are clipped, and options."""
DOUBLE = (1024, 2048)
"""Lengths of causal calls in float64."""
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}


def arguments(call: str, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a call but for queries, keys and values."""
    asked = dict(CALLS[call][1])
    last, reach = length - 1, asked.pop("reach", None)
    span = Span(last, 0 if "causal" in asked else last) if reach is None else Span.clipped(reach)
    tables = {name: torch.randn(span.rows, WIDTH, dtype=dtype) for name in asked.pop("tables", ("rel_k",))}
    if asked.get("mask"):
        asked["mask"] = torch.randn(1, 1, 1, length) < 1.3  # of ten keys, nine
    if documents := asked.get("segments"):
        asked["segments"] = torch.arange(length) * documents // length
    if asked.get("positions"):
        asked["positions"] = (torch.randint(0, 4, (length,)).cumsum(0),) * 2
    return {"span": span, **asked, **tables}


class Compiled(Benchmark):
    """Calls of batch 1, in both libraries, forward and with backward."""

    page = "compiled.md"
    names = ("compiled", "without", "plain")

    def cases(self) -> Iterator[Case]:
        calls = [(call, length, "float32") for call, (lengths, _) in CALLS.items() for length in lengths]
        calls += [("causal", length, "float64") for length in DOUBLE]
        for (call, length, dtype), library, training in itertools.product(calls, ("torch", "NumPy"), (False, True)):
            yield {"call": call, "length": length, "dtype": dtype, "library": library, "training": training}

    def skip(self, case: Case, contender: str) -> str | None:
        return "no kernels were compiled here" if contender == "compiled" and _compiled.kernels is None else None

    def prepare(self, case: Case, contender: str) -> Call:
        backends.set_numpy_threads(1)
        threadpool_limits(1, "blas")  # NumPy's own threads spin for a while after their work
        torch.manual_seed(0)
        dtype, training = getattr(torch, case["dtype"]), case["training"]
        q, k, v, d_out = torch.randn(4, 1, HEADS, case["length"], WIDTH, dtype=dtype)
        given = arguments(case["call"], case["length"], dtype)
        if contender == "plain":
            plain = partial(F.scaled_dot_product_attention, is_causal=given.get("causal", False))
            return _by_torch(plain, {"query": q, "key": k, "value": v}, d_out, training=training)
        given |= {"q": q, "k": k, "v": v, "impl": "auto" if contender == "compiled" else "portable"}
        if case["library"] == "torch":
            return _by_torch(relative_attention, given, d_out, training=training)
        return _by_numpy({name: _as_numpy(x) for name, x in given.items()}, d_out.numpy(), training=training)

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        return distance(result, first) if contender == "without" and first is not None else None

    def gate(self, case: Case) -> float:
        return TOLERANCES[case["dtype"]]

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            if "compiled" in rows:
                dtype = "" if case["dtype"] == "float32" else f", {case['dtype']}"
                training = ", with backward" if case["training"] else ""
                compiled, without, plain = (rows[name].cpu or 0.0 for name in self.names)
                text = f"{as_time(compiled)}, {compiled / plain:.2f} ({without / plain:.2f})"
                yield f"{case['call']}, {case['length']}{dtype}", f"{case['library']}{training}", text


def _by_torch(function: Callable[..., Any], given: dict[str, Any], d_out: Any, *, training: bool) -> Call:
    learned = {
        name: x.clone().requires_grad_(training)
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    given = given | learned

    def call() -> Any:
        out = function(**given)
        return torch.autograd.grad(out, list(learned.values()), d_out) if training else out

    return call


def _by_numpy(given: dict[str, Any], d_out: Any, *, training: bool) -> Call:
    def call() -> Any:
        if not training:
            return relative_attention(**given)
        out, lse = relative_attention(**given, return_lse=True)
        gradients = relative_attention_vjp(d_out, **given, out=out, lse=lse)
        return [x for x in gradients if x is not None]

    return call


def _as_numpy(x: Any) -> Any:
    if isinstance(x, tuple) and isinstance(x[0], torch.Tensor):
        return tuple(map(_as_numpy, x))
    return x.numpy() if isinstance(x, torch.Tensor) else x


BENCHMARK = Compiled()

"""Compiled kernels compared with calls without them, and half precision with float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from threadpoolctl import threadpool_limits
from torch import Tensor

from benchmarks.runner import Benchmark, Call, Case, Record, after, as_time, passes
from relskew_core import Span, backends, relative_attention, relative_attention_vjp
from relskew_core.backends import _compiled

HEADS, WIDTH = 8, 64


def drawn(queries: int, keys: int, dtype: str = "float32", heads: int = HEADS) -> list[Any]:
    """Return queries, keys, values and a table of the keys."""
    torch.manual_seed(0)
    sizes = ((1, heads, queries, WIDTH), (1, heads, keys, WIDTH), (1, heads, keys, WIDTH), (keys, WIDTH))
    return [torch.randn(size).to(getattr(torch, dtype)) for size in sizes]


def attend(q: Any, k: Any, v: Any, table: Any) -> Any:
    return relative_attention(q, k, v, table, causal=True, offset=k.shape[2] - q.shape[2])


CAUSAL = {"causal": True}
KEYS = ("rel_k", "key_table")
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((128, 1024, 2048, 4096), CAUSAL),
    "every position": ((1024,), {}),
    "clipped at 16": ((1024,), {"reach": 16}),
    "clipped at 128": ((1024,), {"reach": 128}),
    "clipped at 128, with values": ((1024,), {"reach": 128, "tables": ("rel_k", "rel_v")}),
    "a table for keys too": ((1024,), {"tables": KEYS}),
    "a table for keys too, clipped at 255": ((2048,), {"reach": 255, "tables": KEYS}),
    "softcap": ((1024,), CAUSAL | {"softcap": 30.0}),
    "mask of keys": ((1024,), {"mask": True}),
    "8 documents": ((1024,), CAUSAL | {"segments": 8}),
    "time stamps, clipped at 64": ((1024,), CAUSAL | {"reach": 64, "positions": True}),
    "dropout": ((1024,), CAUSAL | {"dropout": 0.1, "seed": 1}),
}
"""Lengths, and the arguments: tables (``rel_k``) of full reach or clipped, and options."""


def tables_and_options(call: str, length: int, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables of a call, and its other arguments except for queries, keys and values."""
    options, full = dict(CALLS[call][1]), Span.causal if "causal" in CALLS[call][1] else Span.full
    reach = options.pop("reach", None)
    options["span"] = span = full(length) if reach is None else Span.clipped(reach)
    tables = {name: torch.randn(span.rows, WIDTH, dtype=dtype) for name in options.pop("tables", ("rel_k",))}
    if "mask" in options:
        options["mask"] = torch.randn(1, 1, 1, length) < 1.3  # about nine of ten keys
    if documents := options.get("segments"):
        options["segments"] = torch.arange(length) * documents // length
    if "positions" in options:
        options["positions"] = (torch.randint(0, 4, (length,)).cumsum(0),) * 2
    return tables, options


class Compiled(Benchmark):
    """Calls with options in both libraries, compared with the portable code and with torch's plain attention."""

    page = "compiled.md"
    names = ("compiled", "without", "plain")
    unlike = ("plain",)
    tolerance = 1e-5

    def cases(self) -> Iterator[Case]:
        calls = [(call, length, "float32") for call, (lengths, _) in CALLS.items() for length in lengths]
        calls += [("causal", length, "float64") for length in (1024, 2048)]
        for (call, length, dtype), library, training in itertools.product(calls, ("torch", "NumPy"), (False, True)):
            yield {"call": call, "length": length, "dtype": dtype, "library": library, "training": training}

    def skip(self, case: Case, contender: str) -> str | None:
        return "no kernels were compiled here" if contender == "compiled" and _compiled.kernels is None else None

    def prepare(self, case: Case, contender: str) -> Call:
        backends.set_numpy_threads(1)
        threadpool_limits(1, "blas")  # NumPy's threads keep spinning for a while after their work
        length, training = case["length"], case["training"]
        q, k, v, _ = drawn(length, length, case["dtype"])
        tables, options = tables_and_options(case["call"], length, q.dtype)
        if contender == "plain":
            plain = partial(F.scaled_dot_product_attention, is_causal=options.get("causal", False))
            return passes(plain, (q, k, v), training)
        options["impl"] = "auto" if contender == "compiled" else "portable"
        arrays = {"q": q, "k": k, "v": v} | tables
        if case["library"] == "torch":
            named = lambda *given: relative_attention(**dict(zip(arrays, given, strict=True)), **options)  # noqa: E731
            return passes(named, tuple(arrays.values()), training)
        given, d_out = {name: _as_numpy(x) for name, x in (arrays | options).items()}, torch.randn_like(q).numpy()
        if not training:
            return partial(relative_attention, **given)

        def call() -> Any:
            out, lse = relative_attention(**given, return_lse=True)
            return [x for x in relative_attention_vjp(d_out, **given, out=out, lse=lse) if x is not None]

        return call

    def gate(self, case: Case) -> float:
        return self.tolerance if case["dtype"] == "float32" else 1e-12

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            if "compiled" in rows:
                dtype = "" if case["dtype"] == "float32" else f", {case['dtype']}"
                compiled, without, plain = (rows[name].cpu or 0.0 for name in self.names)
                text = f"{as_time(compiled)}, {compiled / plain:.2f} ({without / plain:.2f})"
                yield f"{case['call']}, {case['length']}{dtype}", f"{case['library']}{after(case['training'])}", text


def _as_numpy(x: Any) -> Any:
    if type(x) is tuple:
        return tuple(map(_as_numpy, x))
    return x.numpy() if isinstance(x, Tensor) else x


PLAIN = "torch's attention, bfloat16"


class Half(Benchmark):
    """Half precision compared with float32, and with torch's attention without positions in bfloat16."""

    page = "compiled.md"
    names = ("float32", "bfloat16", "float16", PLAIN)
    unlike = (PLAIN,)
    tolerance = 2e-2

    def cases(self) -> Iterator[Case]:
        for length, training in itertools.product((1024, 2048), (False, True)):
            yield {"queries": length, "keys": length, "training": training}
        yield from ({"queries": 1, "keys": keys, "training": False} for keys in (1000, 16_000))

    def prepare(self, case: Case, contender: str) -> Call:
        n, m, training = case.values()
        given = drawn(n, m, "bfloat16" if contender == PLAIN else contender)
        if contender == PLAIN:
            return passes(partial(F.scaled_dot_product_attention, is_causal=n > 1), given[:3], training)
        return passes(attend, given, training)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            n, m, training = row.case.values()
            ratio = "" if row.contender == "float32" else f", {row.ratio:.2f}"
            line = f"{f'causal, {m}' if n > 1 else f'one token after {m}'}{after(training)}"
            yield line, row.contender, f"{as_time(row.cpu or 0.0)}{ratio}"

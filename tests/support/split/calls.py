"""Calls of a split sequence, compared with the whole that every process computes as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from dense import Case, each
from relskew_core import Span, relative_attention
from relskew_core.distributed.torch import (
    _sequence,
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)

distributed: Any = torch.distributed
H, D = 6, 4
METHODS, LAYOUTS = ("ring", "gather", "heads"), ("contiguous", "zigzag", "striped")
SEQUENCES = ("q", "k", "v", "rel_q")

case = partial(Case, n=0, m=0, heads=H, d=D, own_tables=False)  # of any length
CASES = [
    case("causal", options={"causal": True}),
    case("causal, clipped, values", span=Span.clipped(3), tables="rel_k rel_v", options={"causal": True}),
    case("full, by head", tables="rel_k rel_v rel_bias", own_tables=True),
    case("zero, a shared bias", span=Span(4, 2, "zero"), tables="rel_k rel_bias"),
    case("window", span=Span.causal(6), options={"causal": True, "window": (5, None)}),
    case("window ahead, rel_q", span=Span(4, 3), rel_q_width=D, options={"window": (4, 3)}),
    case("far keys alone", span=Span.clipped(40), options={"window": (None, 2), "offset": -9}),
    case("cross, an offset", n=24, span=Span.clipped(4), tables="key_table", own_tables=True, options={"offset": 7}),
    case("no positions", tables=""),
    case("grouped, softcap, sinks", kv_heads=1, own_tables=True, by_head="sinks",
         options={"causal": True, "softcap": 3.0}),
    case("sinks by query", by_head="sinks", by_query=True, options={"causal": True}),
    case("scales", span=Span.clipped(2), by_head="scale rel_scale", options={"causal": True}),
    case("segments", options={"causal": True, "segments": "one"}),
    case("segments of padding", span=Span.clipped(2), options={"segments": "pair"}),
    case("a boolean mask", mask="boolean", options={"causal": True}),
    case("a mask far away", tables="", mask="additive", options={"causal": True, "far": True}),
    case("an additive mask", span=Span.clipped(2), mask="additive"),
    case("dropout", span=Span.clipped(30), options={"causal": True, "dropout": 0.4, "seed": 3, "offset": 2}),
]  # fmt: skip
WITH_BLOCKS = case("blocks", span=Span.causal(8), options={"block_size": 4})  # method="heads" alone


def made(length: int, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a whole call that have gradients, and everything else."""
    span = case.span or (Span.causal if case.options.get("causal") else Span.full)(length)
    case = replace(case, n=case.n or length, m=length, span=span if case.tables else case.span)
    arrays = {name: torch.tensor(x) for name, x in case.arrays().items()}
    options = {name: x for name, x in case.call().items() if x is not None}
    if case.mask == "boolean":
        options["mask"] = arrays.pop("mask")[0]
    elif case.mask is not None:  # a log-sum-exp does not hold the number of keys that a mask makes far
        arrays["mask"] = torch.full_like(arrays["mask"], -1e17) if options.pop("far", False) else arrays["mask"]
        arrays["mask"] = arrays["mask"][:, :1].clone()
    if "segments" in options:
        labels = torch.arange(length) // 5
        padded = labels * 0, -(labels == labels[-1]).long()
        options["segments"] = labels if options["segments"] == "one" else padded
    return {name: x.requires_grad_() for name, x in arrays.items()}, options


def axis_of(name: str, x: Any) -> int | None:
    """Return the axis of an argument that is split with the sequence."""
    if name in (*SEQUENCES, "mask"):
        return -2
    return -1 if name == "segments" or (name == "sinks" and x.ndim > 1) else None


def own(name: str, x: Any, group: Any, layout: Any) -> Any:
    axis = axis_of(name, x)
    return x if axis is None else each(partial(shard_sequence, group=group, axis=axis, layout=layout), x)


def whole(name: str, gradient: Tensor, group: Any, layout: Any) -> Tensor:
    """Return the whole of a gradient of which every process has a share."""
    axis = axis_of(name, gradient)
    if axis is not None:
        return unshard_sequence(gradient, group, axis=axis, layout=layout)
    distributed.all_reduce(gradient)
    return gradient


def gradients(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, arrays: dict[str, Any]) -> list[Tensor]:
    seen = lse.isfinite()
    loss = (out * d_out).sum() + (lse[seen] * d_lse[seen]).sum()
    found = torch.autograd.grad(loss, list(arrays.values()), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, arrays.values(), strict=True)]


def agrees(group: Any, length: int, case: Case, *, layout: Any, method: Any) -> None:
    """Compare a call in parts with the whole: output, log-sum-exp, every gradient."""
    torch.manual_seed(0)
    arrays, options = made(length, case)
    out, lse = relative_attention(**arrays, **options, return_lse=True)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = gradients(out, lse, d_out, d_lse, arrays)

    def row(x: Tensor) -> Tensor:
        return shard_sequence(x, group, axis=-1, layout=layout)

    parts = {name: own(name, x.detach(), group, layout).requires_grad_() for name, x in arrays.items()}
    options = {name: own(name, x, group, layout) for name, x in options.items()}
    how: dict[str, Any] = {"group": group, "layout": layout, "method": method}
    part, part_lse = context_parallel_attention(**parts, **options, **how, return_lse=True)
    torch.testing.assert_close(part, own("q", out, group, layout), rtol=0, atol=1e-12)
    torch.testing.assert_close(part_lse, row(lse), rtol=0, atol=1e-12)
    actual = gradients(part, part_lse, own("q", d_out, group, layout), row(d_lse), parts)
    for name, one, other in zip(parts, actual, expected, strict=True):
        one = whole(name, one, group, layout)
        error = float((one - other).abs().max()) if other.numel() else 0.0
        assert error < 1e-11, f"the gradient of {name}: {error}"


@contextmanager
def traffic(ranks: int) -> Iterator[list[int]]:
    """Note how many bytes this process sends."""
    sent: list[int] = []
    send, exchange, gather = distributed.batch_isend_irecv, distributed.all_to_all_single, _sequence._all_gather

    def sends(operations: list[Any]) -> Any:
        sent.append(sum(one.tensor.nbytes for one in operations if one.op is distributed.isend))
        return send(operations)

    def exchanges(found: Tensor, x: Tensor, **how: Any) -> Any:
        sent.append(x.nbytes * (ranks - 1) // ranks)
        return exchange(found, x, **how)

    def gathers(found: Tensor, x: Tensor, **how: Any) -> Any:
        sent.append(x.nbytes * (ranks - 1))
        return gather(found, x, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "batch_isend_irecv", sends)
        patch.setattr(distributed, "all_to_all_single", exchanges)
        patch.setattr(_sequence, "_all_gather", gathers)
        yield sent


def sends_what_theory_says(group: Any, p: int) -> None:
    """In units of a process's keys; and nothing that a window hides."""
    n = 8
    expected: dict[tuple[Any, Any], tuple[float, float]] = {
        ("ring", None): (2 * (p - 1), 4 * (p - 1)), ("ring", (n, None)): (2, 4), ("ring", (0, None)): (0, 0),
        ("gather", None): (2 * (p - 1), 2 * (p - 1)), ("heads", None): (4 * (p - 1) / p, 4 * (p - 1) / p),
    }  # fmt: skip
    for (method, window), theory in expected.items():
        x, y, z = (torch.randn(1, H, n, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
        how: dict[str, Any] = {"causal": True, "window": window, "group": group, "method": method, "check": False}
        with traffic(p) as there:
            out: Any = context_parallel_attention(x, y, z, **how)
        with traffic(p) as back:
            out.sum().backward()
        sent = sum(there) / x.nbytes, sum(back) / x.nbytes
        assert sent == theory, f"{method}, window={window}: {sent}, not {theory}"


def merges_in_float32(group: Any, p: int) -> None:
    """Of half precision many parts are no worse than the whole."""
    torch.manual_seed(0)
    shapes = [(1, H, 16 * p, 16)] * 3 + [(16 * p, 16)]
    q, k, v, table = (torch.randn(shape).bfloat16() for shape in shapes)
    exact: Any = relative_attention(q.double(), k.double(), v.double(), table.double(), causal=True)
    whole: Any = relative_attention(q, k, v, table, causal=True)
    layout: Any
    for layout in LAYOUTS:
        x, y, z = (shard_sequence(x, group, layout=layout) for x in (q, k, v))
        part: Any = context_parallel_attention(x, y, z, table, causal=True, group=group, layout=layout)
        assert part.dtype == torch.bfloat16
        part = unshard_sequence(part, group, layout=layout)
        error, of_whole = ((x.double() - exact).norm() for x in (part, whole))
        assert error <= 1.05 * of_whole, f"{layout}: {error}, of the whole {of_whole}"

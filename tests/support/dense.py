"""The formula of relative attention as dense torch expressions that autograd differentiates, and calls to try it on.

Nothing here comes from the library under test; only the two facts "which row serves a relative position" and "which key
a query sees" are taken from the loops in ``oracles``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import oracles
from relskew_core import Span


class Attention(NamedTuple):
    """The output and the log-sum-exp."""

    out: Tensor
    lse: Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_k: Tensor | None = None,
    rel_v: Tensor | None = None,
    rel_bias: Tensor | None = None,
    rel_q: Tensor | None = None,
    mask: Tensor | None = None,
    key_table: Tensor | None = None,
    *,
    span: oracles.SpanLike | None = None,
    causal: bool = False,
    window: oracles.Window | None = None,
    block_size: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    rel_scale: float | None = None,
    softcap: float | None = None,
    weight_of: Tensor | None = None,
) -> Attention:
    """Attend, with everything of size ``n × m`` written out; ``weight_of`` multiplies the weights (dropout)."""
    n, m = q.shape[-2], k.shape[-2]
    if q.ndim > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rel_scale = scale if rel_scale is None else rel_scale
    if span is None:
        rows_of = ((rel_k, -2), (rel_v, -2), (rel_bias, -1), (key_table, -2))
        known = [x.shape[axis] for x, axis in rows_of if x is not None]
        span = oracles.default_span(known[0], causal=causal) if known else oracles.Reach(0, 0, "zero")
    sees = {"offset": offset, "causal": causal, "window": window, "block_size": block_size}
    visible = torch.tensor([[oracles.sees(i, j, **sees) for j in range(m)] for i in range(n)], dtype=torch.bool)  # type: ignore[arg-type]
    visible = visible.reshape(n, m)
    rows = torch.full((n, m), -1)
    for i, j in visible.nonzero().tolist():
        row = oracles.row_of(j - i - offset, span)
        rows[i, j] = -1 if row is None else row

    def at_positions(table: Tensor) -> Tensor:
        """(..., R, D) -> (..., n, m, D), zeros where the table has nothing."""
        return table[..., rows.clamp(min=0), :] * (rows >= 0)[..., None]

    logits = scale * (q @ k.mT)
    if rel_k is not None:
        logits = logits + rel_scale * (at_positions(rel_k) @ (q if rel_q is None else rel_q)[..., None])[..., 0]
    if key_table is not None:
        logits = logits + rel_scale * (at_positions(key_table) * k[..., None, :, :]).sum(-1)
    if rel_bias is not None:
        logits = logits + at_positions(rel_bias[..., None])[..., 0]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    allowed = visible.expand(logits.shape)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        allowed = allowed & (mask > -math.inf)
        logits = logits + mask
    dead = ~allowed.any(-1, keepdim=True)
    logits = logits.masked_fill(~allowed, -math.inf).masked_fill(dead, 0.0)
    weights = logits.softmax(-1).masked_fill(dead, 0.0) if m else logits
    lse = logits.logsumexp(-1).masked_fill(dead[..., 0], -math.inf)
    if weight_of is not None:
        weights = weights * weight_of
    out = weights @ v
    if rel_v is not None:
        out = out + (weights[..., None, :] @ at_positions(rel_v))[..., 0, :]
    return Attention(out, lse)


def vjp(d_out: NDArray[Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return the gradient of every floating array by autograd."""
    given: dict[str, Any] = {name: torch.tensor(x) for name, x in arrays.items()}
    wanted = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point()}
    out = attention(**given, **options).out
    gradients = torch.autograd.grad(out, list(wanted.values()), torch.tensor(d_out), materialize_grads=True)
    return {name: x.numpy() for name, x in zip(wanted, gradients, strict=True)}


@dataclass(frozen=True)
class Case:
    """A call of ``relative_attention`` by its shapes: the arrays are drawn from a seed."""

    name: str
    n: int = 7
    m: int = 7
    lead: tuple[int, ...] = (2,)
    heads: int | None = 2
    kv_heads: int | None = None
    d: int = 3
    dv: int | None = None
    span: Span | None = None
    tables: str = "rel_k"
    own_tables: bool = True
    rel_q_width: int | None = None
    mask: str | None = None
    mask_shape: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def arrays(self, dtype: str = "float64") -> dict[str, Any]:
        """Draw the arrays."""
        rng = np.random.default_rng(len(self.name) * 1000 + sum(map(ord, self.name)))
        heads = () if self.heads is None else (self.heads,)
        kv_heads = heads if self.kv_heads is None else (self.kv_heads,)
        dv = self.d if self.dv is None else self.dv
        arrays: dict[str, Any] = {
            "q": rng.standard_normal((*self.lead, *heads, self.n, self.d)),
            "k": rng.standard_normal((*self.lead, *kv_heads, self.m, self.d)),
            "v": rng.standard_normal((*self.lead, *kv_heads, self.m, dv)),
        }
        rows = (self.span or Span.full(max(self.n, self.m))).rows
        of_heads = heads if self.own_tables else ()
        width = self.d if self.rel_q_width is None else self.rel_q_width
        shapes = {"rel_k": (rows, width), "rel_v": (rows, dv), "rel_bias": (rows,), "key_table": (rows, self.d)}
        for name in self.tables.split():
            arrays[name] = rng.standard_normal((*of_heads, *shapes[name]))
        if self.rel_q_width is not None:
            arrays["rel_q"] = rng.standard_normal((*self.lead, *heads, self.n, width))
        if self.mask is not None:
            shape = (*self.lead, *heads, self.n, self.m) if self.mask_shape is None else self.mask_shape
            allowed = rng.random(shape) < 0.7
            additive = np.where(allowed | (self.mask == "additive"), rng.standard_normal(shape), -np.inf)
            arrays["mask"] = allowed if self.mask == "boolean" else additive
        return {name: x if x.dtype == bool else x.astype(dtype) for name, x in arrays.items()}

    def d_out(self) -> NDArray[np.float64]:
        """Draw the gradient of the output."""
        arrays = self.arrays()
        return np.random.default_rng(5).standard_normal((*arrays["q"].shape[:-1], arrays["v"].shape[-1]))

    def call(self) -> dict[str, Any]:
        """Return the options, the span among them."""
        return {"span": self.span, **self.options}


MASK_SHAPES = [(7,), (7, 7), (7, 1), (1, 7), (1, 1), (2, 1, 7), (2, 7, 7), (2, 1, 1, 7), (1, 2, 7, 1), (2, 1, 7, 7)]

CASES = [
    Case("plain", tables=""),
    Case("full table"),
    Case("table shared by heads", own_tables=False),
    Case("causal", span=Span.causal(7), options={"causal": True}),
    Case("causal, longer table", span=Span.causal(12), options={"causal": True}),
    Case("causal, table with a future", span=Span.full(7), options={"causal": True}),
    Case("clipped", n=9, m=9, span=Span.clipped(2), tables="rel_k rel_v"),
    Case("zero beyond", n=9, m=9, span=Span(1, 3, "zero"), tables="rel_k rel_v rel_bias"),
    Case("span on the past alone, all keys ahead", n=3, m=3, span=Span(2, 0, "zero"), options={"offset": -4}),
    Case("clipped, all keys ahead", n=3, m=4, span=Span(2, 1, "clip"), tables="rel_k rel_v", options={"offset": -9}),
    Case("values with relative positions", tables="rel_v"),
    Case("all tables, shared", tables="rel_k rel_v rel_bias", own_tables=False),
    Case("all tables, by head", tables="rel_k rel_v rel_bias"),
    Case("bias alone", tables="rel_bias"),
    Case("bias alone, shared", tables="rel_bias", own_tables=False),
    Case("window", span=Span(2, 1), tables="rel_k rel_v", options={"window": (2, 1)}),
    Case("window open to the left", span=Span.full(7), options={"window": (None, 1)}),
    Case("causal window", n=12, m=12, span=Span.causal(4), options={"window": (3, None), "causal": True}),
    Case("window, no table", tables="", options={"window": (1, 1)}),
    Case("blocks", n=11, m=11, span=Span.causal(6), tables="rel_k rel_v", options={"block_size": 3}),
    Case("blocks with a past", n=4, m=11, span=Span.causal(6), options={"block_size": 3, "offset": 7}),
    Case("cross, more keys", n=4, m=9),
    Case("cross, more queries", n=9, m=4, tables="rel_k rel_v"),
    Case("decoding", n=1, m=7, span=Span.causal(7), options={"causal": True, "offset": 6}),
    Case("decoding two", n=2, m=7, span=Span.causal(9), options={"causal": True, "offset": 5}),
    Case("one key", n=5, m=1),
    Case("one query, one key", n=1, m=1, span=Span.full(1)),
    Case("causal, some see nothing", span=Span.causal(7), options={"causal": True, "offset": -3}),
    Case("window, some see nothing", span=Span.clipped(2), options={"window": (2, 2), "offset": 5}),
    Case("nobody sees anything", span=Span.causal(2), tables="rel_k rel_v", options={"causal": True, "offset": -9}),
    Case("grouped queries", heads=4, kv_heads=2, tables="rel_k rel_v rel_bias"),
    Case("one key head", heads=3, kv_heads=1, own_tables=False),
    Case("values of another width", dv=5, tables="rel_k rel_v"),
    Case("own relative queries", rel_q_width=3),
    Case("relative queries of another width", rel_q_width=5, span=Span.clipped(2)),
    Case("relative queries unserved", n=3, m=3, rel_q_width=2, span=Span(2, 0, "zero"), options={"offset": -4}),
    Case("scales", options={"scale": 0.3, "rel_scale": -0.7}),
    Case("scales of nothing", options={"scale": 0.0, "rel_scale": 0.0}),
    Case("softcap", tables="rel_k rel_v rel_bias", options={"softcap": 1.5}),
    Case("softcap and everything", span=Span.clipped(3), tables="rel_k rel_v rel_bias", mask="additive with holes",
         rel_q_width=2, options={"softcap": 2.0, "causal": True, "window": (5, None), "offset": 1}),
    Case("no heads axis", lead=(), heads=None, tables="rel_k rel_v rel_bias"),
    Case("no heads axis, causal, masked", lead=(), heads=None, span=Span.causal(7), mask="additive",
         options={"causal": True}),
    Case("no batch axis", lead=(), tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(2, 7, 7)),
    Case("two batch axes", lead=(2, 3), tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(3, 1, 1, 7)),
    *(Case(f"{kind} mask of shape {shape}", tables="rel_k rel_v", mask=kind, mask_shape=shape)
      for kind in ("boolean", "additive", "additive with holes") for shape in MASK_SHAPES),
    Case("additive mask and causal", span=Span.causal(7), mask="additive", options={"causal": True}),
    Case("additive mask and window", tables="rel_k rel_bias", mask="additive", mask_shape=(2, 7, 1),
         options={"window": (1, 2)}),
]  # fmt: skip

"""One attention problem: its shape, the same numbers for every contender and library, and the result in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from relskew_core import Span

CLIP = 64
"""The reach of the clipped table on both sides."""


@dataclass(frozen=True, slots=True)
class Shape:
    """As many queries as keys, and a table for every position that occurs."""

    length: int
    batch: int = 1
    heads: int = 8
    dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = True
    block_size: int | None = None  # Music Transformer's local blocks
    window: int | None = None  # keys that a query sees, itself included
    std: float = 1.0  # standard deviation of the logits
    bias: bool = False  # one number per head and relative position instead of a row
    by_head: bool = False  # a table for each head

    @property
    def span(self) -> Span:
        """The visible relative positions."""
        if self.block_size is not None:
            return Span.causal(2 * self.block_size)
        if self.window is not None:
            return Span.causal(self.window)
        return Span.causal(self.length) if self.causal else Span.full(self.length)

    def options(self) -> dict[str, Any]:
        """Return the equivalent options of ``relative_attention``."""
        if self.block_size is not None:
            return {"block_size": self.block_size}
        return {"causal": self.causal, "window": None if self.window is None else (self.window - 1, 0)}

    def flops(self, products: float) -> float:
        """Return the operations of this many products of every query with every visible key."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 2 * products * self.batch * self.heads * pairs * self.dim


class Inputs(NamedTuple):
    """The arrays of one problem, in one library."""

    shape: Shape
    q: Any  # (B, H, L, D)
    k: Any
    v: Any
    table: Any  # (R, D), (H, R, D) by head, or (H, R) with shape.bias
    clipped: Any  # the same, reaching CLIP
    d_out: Any

    def to_torch(self, *, gradients: bool = False) -> Inputs:
        """Return tensors, sharing memory if possible; leaves of a graph if ``gradients``."""
        to = {"device": self.shape.device, "dtype": getattr(torch, self.shape.dtype)}
        arrays = [torch.from_numpy(x).to(**to) for x in self[1:]]
        q, k, v, table, clipped = (x.requires_grad_(gradients) for x in arrays[:-1])
        return Inputs(self.shape, q, k, v, table, clipped, arrays[-1])


@functools.lru_cache(maxsize=1)
def make_inputs(shape: Shape) -> Inputs:
    """Draw NumPy arrays, without zeros: the logits' variance is ``std ** 2``, half of it from the table."""
    rng = np.random.default_rng(0)

    def draw(*sizes: int, std: float = 1.0) -> np.ndarray:
        return rng.standard_normal(sizes, dtype=np.float32) * np.float32(std)

    def table(rows: int) -> np.ndarray:
        lead = (shape.heads,) * (shape.by_head or shape.bias)
        return draw(*lead, rows) if shape.bias else draw(*lead, rows, shape.dim, std=0.5**0.5)

    content = (shape.batch, shape.heads, shape.length, shape.dim)
    q, k, v, d_out = (draw(*content, std=std) for std in (shape.std, 0.5**0.5, 1.0, 1.0))
    return Inputs(shape, q, k, v, table(shape.span.rows), table(2 * CLIP + 1), d_out)


class Expected(NamedTuple):
    """Results of some queries of every head of the first item, spread over the sequence: cheap at every length."""

    rows: Tensor
    out: Tensor
    d_q: Tensor

    def error(self, result: Any, *, gradient: bool) -> float:
        """Return the relative L2 error of an output, or of a gradient of the queries."""
        x = result.detach() if isinstance(result, Tensor) else torch.from_numpy(np.asarray(result))
        expected = self.d_q if gradient else self.out
        return float((x[0][:, self.rows].double() - expected).norm() / expected.norm())


@functools.lru_cache(maxsize=3)
def reference(shape: Shape, kind: str, count: int = 16) -> Expected:
    """Attend by the plain formula in float64, with the table, the ``"clipped"`` one, or ``"plain"`` without one."""
    x = make_inputs(shape).to_torch()
    rows = torch.linspace(0, shape.length - 1, min(count, shape.length), device=x.q.device).long().unique()
    k, v = x.k[0].double(), x.v[0].double()
    table, left = (x.clipped, CLIP) if kind == "clipped" else (x.table, shape.span.left)
    outs, d_qs, scale = [], [], shape.dim**-0.5
    for i in rows.tolist():  # one query at a time, because its table rows are as large as the keys
        r = torch.arange(shape.length, device=rows.device) - i
        columns = (r + left).clamp(0, table.shape[-1 if shape.bias else -2] - 1)
        q, d_out = x.q[0, :, i].double(), x.d_out[0, :, i].double()
        keys = k if kind == "plain" or shape.bias else k + table.double()[..., columns, :]
        logits = (keys @ q[..., None])[..., 0] * scale
        if shape.bias and kind != "plain":
            logits = logits + table.double()[:, columns]
        weights = logits.masked_fill(~visible(shape, i, r), -math.inf).softmax(-1)
        out = (weights[:, None] @ v)[:, 0]
        d_logits = weights * ((v @ d_out[..., None])[..., 0] - (d_out * out).sum(-1, keepdim=True))
        outs.append(out)
        d_qs.append((d_logits[:, None] @ keys)[:, 0] * scale)
    return Expected(rows, torch.stack(outs, 1), torch.stack(d_qs, 1))


def visible(shape: Shape, i: Any, r: Tensor) -> Tensor:
    """Return the relative positions ``r`` that queries at ``i`` see."""
    if shape.block_size is not None:
        return (r <= 0) & (r >= -(i % shape.block_size + shape.block_size))
    seen = r <= 0 if shape.causal else torch.ones_like(r, dtype=torch.bool)
    return seen if shape.window is None else seen & (r > -shape.window)

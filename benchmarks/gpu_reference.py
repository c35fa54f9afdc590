"""What contenders on a GPU are held to: the plain formula in float64, for a few queries of one head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_contenders import CLIP, Inputs

ROWS = 48
"""Queries that are checked, spread over the sequence."""


class Reference(NamedTuple):
    """Results of the chosen queries of the first head of the first batch entry."""

    rows: Tensor
    out: Tensor
    d_q: Tensor


def reference(x: Inputs, kind: str) -> Reference:
    """Attend for a few queries, and differentiate by them, one table row gathered for every pair."""
    shape = x.shape
    rows = torch.linspace(0, shape.length - 1, min(ROWS, shape.length), device=x.q.device).long().unique()
    q, d_out = x.q.detach()[0, 0, rows].double(), x.d_out[0, 0, rows].double()
    k, v = x.k.detach()[0, 0].double(), x.v.detach()[0, 0].double()
    r = torch.arange(shape.length, device=rows.device) - rows[:, None]
    pieces = []
    for i in range(len(rows)):  # one query at a time: its table rows are as large as the keys
        meets = k
        if kind != "plain":
            table, left = (x.table, shape.span.left) if kind == "full" else (x.clipped, CLIP)
            indices = (r[i] + left).clamp(0, table.shape[1] - 1)
            meets = k + table.detach()[0].double()[indices]
        logits = meets @ q[i] * shape.dim**-0.5
        if shape.causal:
            logits = logits.masked_fill(r[i] > 0, -math.inf)
        weights = logits.softmax(-1)
        out = weights @ v
        d_logits = weights * (v @ d_out[i] - d_out[i] @ out)
        pieces.append((out, d_logits @ meets * shape.dim**-0.5))
    outs, d_qs = zip(*pieces, strict=True)
    return Reference(rows, torch.stack(outs), torch.stack(d_qs))


def error(actual: Tensor, expected: Tensor, rows: Tensor) -> float:
    """Return the relative L2 error of the chosen queries."""
    return float((actual.detach()[0, 0, rows].double() - expected).norm() / expected.norm())

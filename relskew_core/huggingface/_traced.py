"""Relative attention in operators that export with symbolic lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from relskew_core._positions.span import Span


def traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    rel_k: Tensor | None = None,
    rel_v: Tensor | None = None,
    rel_bias: Tensor | None = None,
    span: Span | None = None,
    scale: float | None = None,
    causal: bool = False,
    offset: int = 0,
    dropout: float = 0.0,
) -> Tensor:
    """Attend in operators that export with symbolic lengths: nothing here asks how long anything is.

    ``rel_k`` and ``rel_v`` are multiplied as short as they are, and products are extended by as many columns as there
    are queries and keys, so that the window of relative positions is a slice at a fixed place; then comes the skew,
    with its spare column. What lies outside is zero for tables and the nearest number for a bias.
    """
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    n, m = q.shape[-2], k.shape[-2]
    logits = q @ k.transpose(-2, -1) * scale
    if rel_k is not None and span is not None:
        product = pad(q @ rel_k.transpose(-2, -1) * scale, (n + offset, m))
        logits = logits + _skewed(product[..., span.left : span.left + n + m], n, m)
    if rel_bias is not None and span is not None:
        edges = (rel_bias[:, :1].expand(-1, n + offset), rel_bias, rel_bias[:, -1:].expand(-1, m))
        row = torch.cat(edges, -1)[:, span.left : span.left + n + m]
        logits = logits + _skewed(row[:, None, :].expand(-1, n, -1), n, m)
    if causal:
        future = torch.arange(m, device=q.device) > torch.arange(n, device=q.device)[:, None] + offset
        logits = logits.masked_fill(future, -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    weights = torch.dropout(torch.softmax(logits, -1), dropout, train=dropout > 0)
    out = weights @ v
    if rel_v is not None and span is not None:
        flat = pad(pad(weights, (0, n - 1)).flatten(-2), (n, 0))
        relative = pad(flat.unflatten(-1, (n, n + m)), (span.left, span.right + 1))
        out = out + relative[..., n + offset : n + offset + span.rows] @ rel_v
    return out


def _skewed(x: Tensor, n: int, m: int) -> Tensor:
    """Relative layout ``(…, n, n + m)`` to absolute layout ``(…, n, m)``."""
    return x.flatten(-2)[..., n:].unflatten(-1, (n, n + m - 1))[..., :m]

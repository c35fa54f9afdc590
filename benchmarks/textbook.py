"""Relative attention as in papers, tutorials and models that copy them, once for all benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor


def skewed(product: Tensor) -> Tensor:
    """Pad, reshape, slice (Huang et al. 2018, section 3.4): ``(…, L, L)`` of queries and a causal table."""
    length = product.shape[-2]
    return F.pad(product, (1, 0)).reshape(*product.shape[:-2], length + 1, length)[..., 1:, :]


def shifted(product: Tensor) -> Tensor:
    """The same for a table of both directions, ``(…, L, 2L − 1)``: Transformer-XL's shift."""
    length = product.shape[-2]
    padded = F.pad(F.pad(product, (0, 1)).flatten(-2), (0, length - 1))
    return padded.reshape(*product.shape[:-2], length + 1, 2 * length - 1)[..., :length, length - 1 :]


def columns(n: int, m: int, left: int, rows: int, device: Any = None) -> Tensor:
    """Return the table row of each pair of the last ``n`` queries and ``m`` keys."""
    queries, keys = torch.arange(m - n, m, device=device), torch.arange(m, device=device)
    return (keys[None, :] - queries[:, None] + left).clamp(0, rows - 1)


def gathered(q: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Take a row of the table for each pair (Shaw et al. 2018, equation 5); the table is shared or by head."""
    rows = table[..., index, :]
    return torch.einsum("bhid,ijd->bhij" if table.ndim == 2 else "bhid,hijd->bhij", q, rows)


def picked(q: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Multiply by all rows, and select a product for each pair, like DeBERTa in transformers."""
    product = q @ table.transpose(-2, -1)
    return torch.gather(product, -1, index.expand(*product.shape[:-1], -1))


def future(length: int, device: Any = None) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def attended(logits: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    logits = logits if hidden is None else logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(-1) @ v


def projected(layer: Any, x: Tensor, heads: int) -> Iterator[Tensor]:
    """Return the queries, keys and values of a layer, by head; torch.onnx fixes the lengths of ``unflatten``."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    return (project(x).reshape(*x.shape[:2], heads, -1).transpose(1, 2) for project in projections)


def joined(layer: Any, out: Tensor) -> Any:
    return layer.out_proj(out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1))

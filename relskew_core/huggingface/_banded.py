"""Local attention in exports of whole models: folded into blocks, with memory that grows linearly with the length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from relskew_core._kernel.call import Operands
from relskew_core._positions.span import Span


def banded(
    operands: Operands,
    *,
    window: tuple[int, int],
    span: Span | None = None,
    scale: float | None = None,
    rel_scale: float | None = None,
) -> Tensor:
    """Attend from every position to those around it; the mask is for keys alone, ``(batch, 1, 1, length)``.

    A block of queries sees its own keys and those of the blocks around it. Only the number of blocks is a symbol.
    """
    if operands.rel_v is not None or operands.key_table is not None:
        raise NotImplementedError("local attention with `rel_v` or `key_table` cannot have symbolic lengths")
    x: Any = operands
    q, k, v, mask = x.q, x.k, x.v, x.mask
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    fold = _Fold(q.shape[-2], *window)
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    k, v = fold.keys(k), fold.keys(v)
    logits = fold.queries(q * factor) @ k.mT
    where = Span(0, 0, "zero") if span is None else span
    if x.rel_k is not None:
        rows = fold.rows(x.rel_k.mT, where).unsqueeze(-3)
        rel_q = (q if x.rel_q is None else x.rel_q) * (factor if rel_scale is None else rel_scale)
        logits = logits + fold.skewed(fold.queries(rel_q) @ rows)
    if x.rel_bias is not None:
        row = fold.rows(x.rel_bias, where)[..., None, None, :]
        logits = logits + fold.skewed(row.expand(*row.shape[:-2], fold.side, -1))
    present = q.new_ones(1, 1, q.shape[-2], 1)
    if mask is not None and mask.dtype == torch.bool:
        present = mask.mT.to(q.dtype)
    elif mask is not None:
        logits = logits + fold.keys(mask.mT).mT
    seen = (fold.keys(present).mT != 0) & fold.band(q.device)
    weights = torch.softmax(torch.where(seen, logits, torch.finfo(q.dtype).min), -1)
    return fold.unfolded(weights @ v)


class _Fold:
    """A sequence in blocks of ``side`` queries, each with ``side * (before + 1 + after)`` keys around it."""

    def __init__(self, length: int, left: int, right: int) -> None:
        self.length, self.left, self.right = length, left, right
        self.side = max(8, (max(left, right) + 1) // 2)  # a query sees most of the keys of a block
        self.before, self.after = -(-left // self.side), -(-right // self.side)
        self.around = self.side * (self.before + 1 + self.after)
        # One extra block, because torch specialises an axis of length 1, as short examples have, to broadcasting.
        self.count = (length + self.side - 1) // self.side + 1

    def queries(self, x: Tensor) -> Tensor:
        """``(…, length, D)`` to ``(…, blocks, side, D)``."""
        return pad(x, (0, 0, 0, self.count * self.side - self.length)).unflatten(-2, (self.count, self.side))

    def keys(self, x: Tensor) -> Tensor:
        """``(…, length, D)`` to ``(…, blocks, around, D)``."""
        blocks = self.before + self.count + self.after
        ends = (self.before * self.side, (self.count + self.after) * self.side - self.length)
        wide = pad(x, (0, 0, *ends)).unflatten(-2, (blocks, self.side))
        near = [wide[..., i : i + self.count, :, :] for i in range(self.before + 1 + self.after)]
        return torch.cat(near, -2)

    def unfolded(self, x: Tensor) -> Tensor:
        return x.flatten(-3, -2)[..., : self.length, :]

    def rows(self, table: Tensor, span: Span) -> Tensor:
        """Return the columns of a table ``(…, R)`` that the skew of a block reads, ``(…, side + around)``."""
        first = -self.side - self.before * self.side
        wanted = (
            torch.arange(first, first + self.side + self.around, dtype=torch.int64, device=table.device) + span.left
        )
        columns = table.index_select(-1, wanted.clamp(0, span.rows - 1))
        inside = (wanted >= 0) & (wanted < span.rows)
        return columns if span.beyond == "clip" else torch.where(inside, columns, 0.0)

    def skewed(self, x: Tensor) -> Tensor:
        """Relative layout ``(…, side, side + around)`` to absolute layout ``(…, side, around)``."""
        width = self.side + self.around - 1
        return x.flatten(-2)[..., self.side :].unflatten(-1, (self.side, width))[..., : self.around]

    def band(self, device: torch.device) -> Tensor:
        """Return the keys around its block that a query sees, ``(side, around)``."""
        keys = torch.arange(self.around, dtype=torch.int64, device=device) - self.before * self.side
        relative = keys - torch.arange(self.side, dtype=torch.int64, device=device)[:, None]
        return (relative >= -self.left) & (relative <= self.right)

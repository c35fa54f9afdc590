"""torch on CPU: the items of a short call that are worked on at once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel.call import Operands
from relskew_core._kernel.plan import Plan
from relskew_core.backends._in_place import mask_by_batch

BLOCK = 2**18
"""Logits of the items that are worked on at once: in the caches, and enough for some threads. Twice as many in
training, where gradients have to be put together again as well."""


class Hidden(NamedTuple):
    """What the pattern hides from queries. Triangles are cleared and added to in half the time of a masked fill."""

    bias: Tensor  # (n, m), -inf where a key is hidden, else 0
    diagonals: tuple[int | None, int | None]  # the first and the last one that is seen
    blocks: Tensor | None  # where what is hidden has no such form: booleans (n, m)

    def clear(self, x: Tensor) -> Tensor:
        """Put zeros into (..., n, m) where a key is hidden, whatever stands there."""
        first, last = self.diagonals
        if self.blocks is not None:
            return x.masked_fill_(self.blocks, 0.0)
        if last is not None:
            x.tril_(last)
        return x if first is None else x.triu_(first)


class Block(NamedTuple):
    """Some items of a call: sequences (items · heads, length, width), a bias as a table one wide."""

    heads: int
    group: int  # how many of them have one key head
    q: Tensor
    k: Tensor  # those that some query sees
    v: Tensor
    rel_k: Tensor | None  # (R, D) or (H, R, D)
    rel_v: Tensor | None
    rel_bias: Tensor | None
    rel_q: Tensor | None
    mask: Tensor | None  # (items or 1, heads or 1, n or 1, m or 1)

    @property
    def items(self) -> int:
        return self.q.shape[0] // self.heads

    def by_key_head(self, x: Tensor) -> Tensor:
        """Put the queries together that meet one key head."""
        return x if self.group == 1 else x.reshape(x.shape[0] // self.group, -1, x.shape[-1])

    def apart(self, x: Tensor) -> Tensor:
        """Return (items · heads, ...) as (items, heads, ...)."""
        return x.view(self.items, self.heads, *x.shape[1:])

    def for_table(self, x: Tensor, table: Tensor) -> Tensor:
        """Return (items · heads, n, a) as (items · heads · n, a), or (heads, items · n, a) for a table by head."""
        if table.ndim == 2:
            return x.reshape(-1, x.shape[-1])
        return x if self.items == 1 else self.apart(x).transpose(0, 1).reshape(self.heads, -1, x.shape[-1])

    def by_sequence(self, x: Tensor) -> Tensor:
        """Return the inverse of :meth:`for_table`, with an axis for items where that needs no copy else."""
        n = self.q.shape[1]
        if x.ndim == 2 or self.items == 1:
            return x.view(-1, n, x.shape[-1])
        return x.view(self.heads, self.items, n, -1).transpose(0, 1)


def blocks(x: Operands, plan: Plan, *, training: bool = False) -> list[Block]:
    """Cut a call into some items each."""
    q, k, v, rel_k, rel_v, bias, rel_q, mask, *_ = x
    first, end, *_ = plan.layout
    heads, group = q.shape[-3], q.shape[-3] // k.shape[-3]
    if end - first < k.shape[-2]:
        k, v = k[..., first:end, :], v[..., first:end, :]
    q, k, v = q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:])
    if bias is not None:
        bias = bias[..., None] if bias.shape[0] == heads else bias[0, :, None]
    if rel_q is not None:
        rel_q = rel_q.reshape(-1, *rel_q.shape[-2:])
    if mask is not None:
        mask = mask_by_batch(mask if mask.shape[-1] == 1 else mask[..., first:end], x.q, xp=xp)
    whole = Block(heads, group, q, k, v, rel_k, rel_v, bias, rel_q, mask)
    logits = 2 * BLOCK if training else BLOCK
    size = max(1, logits // (heads * q.shape[1] * k.shape[1]))
    if size >= whole.items:
        return [whole]
    starts = range(0, whole.items, size)

    def cut(x: Tensor | None, rows: int) -> Iterable[Tensor | None]:
        return repeat(x) if x is None or x.shape[0] == 1 else x.split(size * rows)

    parts = (cut(q, heads), cut(k, heads // group), cut(v, heads // group), cut(rel_q, heads), cut(mask, 1))
    return [
        Block(heads, group, q, k, v, rel_k, rel_v, bias, rel_q, mask)
        for _, q, k, v, rel_q, mask in zip(starts, *parts, strict=False)
    ]


def joined(parts: list[Any] | tuple[Any, ...]) -> Any:
    """Put the blocks' results together again."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)

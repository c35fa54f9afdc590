"""torch on CPU: a call cut into stacks of heads and chunks of queries.

All buffers of a chunk stay in the cache of one core. Of long inputs a head alone fills it; of short ones several go at
once, since each operation costs some microseconds however little it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.chunk import Chunk, chunks
from relskew_core._kernel.dropout import hashes
from relskew_core._kernel.forward import Tables, has_dead_rows
from relskew_core._positions.table import Table
from relskew_core.backends import _parallel
from relskew_core.backends._in_place import by_batch, chunk_size, hidden_columns
from relskew_core.backends._torch.cpu import threads

T = TypeVar("T")

STACK_BYTES = 2**20
"""Budget of one logits buffer of several heads at once."""

SHORT = 2**14
"""Logits of a head up to which the portable kernels, all heads and batch entries at once, are as fast or faster."""


@dataclass(frozen=True, slots=True)
class StackedCall:
    """Flattened operands, and what all chunks share."""

    q: Tensor  # (B, H, Lq, D), unscaled
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor
    rel_q: Tensor | None
    mask: Tensor | None  # four axes, each whole or 1
    bound: Tensor | None  # where a mask is the same for all queries, -inf for what it hides and inf for all else
    tables: Tables
    options: Options
    chunks: list[Chunk]  # those that see a key
    stack: int  # how many heads are worked on at once
    hidden: list[list[tuple[slice, Tensor]]]  # for each chunk, columns and which of their entries are hidden
    dead_rows: bool
    segments: tuple[Tensor, Tensor] | None  # of queries and of keys, (rows, L): batch entries in turn
    positions: tuple[Tensor, Tensor] | None  # likewise, where the pattern goes by value
    drawn: list[tuple[Tensor, Tensor]]  # with dropout, for each chunk hashes of queries (B, H, n, 1) and of keys (m,)

    @classmethod
    def of(cls, operands: Operands, options: Options) -> StackedCall:
        """Cut the queries of a call of flattened operands into chunks."""
        if options.chunk_size is None:
            size = chunk_size(options, operands.q.element_size())
            size *= 1 if operands.key_table is None else 2  # blocks of keys, too, are half of a chunk
            options = replace(options, chunk_size=size)
        laid = [chunk for chunk in chunks(operands, options) if chunk.first < chunk.end]
        mask, bound = _mask_and_bound(operands)
        return cls(
            q=operands.q,
            k=operands.k,
            v=operands.v,
            rel_q=operands.rel_q,
            mask=mask,
            bound=bound,
            tables=Tables.of(operands, options, laid, xp=xp),
            options=options,
            chunks=laid,
            stack=_stack_size(operands.q, operands.k, laid),
            hidden=[_hidden(options, chunk, operands.q.device) for chunk in laid],
            dead_rows=has_dead_rows(operands, options),
            segments=_labels(operands.q_segments, operands.k_segments),
            positions=_labels(operands.q_positions, operands.k_positions),
            drawn=[_drawn(operands, options, chunk) for chunk in laid] if options.dropout else [],
        )

    @property
    def has_labels(self) -> bool:
        """Whether what a query sees differs from batch entry to batch entry."""
        return self.segments is not None or self.positions is not None

    @property
    def share_kept(self) -> float:
        """Which share of the weights is kept."""
        return 1 - self.options.dropout

    @property
    def unit(self) -> float:
        """What logits are multiplied by before a softcap: it is worked out from ``2 · logits / softcap``."""
        return 1.0 if self.options.softcap is None else 2 / self.options.softcap

    @property
    def group(self) -> int:
        """How many heads have one key head."""
        return _group(self.q, self.k)

    def shares(self) -> list[list[HeadPlace]]:
        """Return every stack of heads; those that have a key head in common in one list."""
        size, heads, group = self.stack, self.q.shape[1], self.group
        share = size if group == 1 else group
        return [
            [
                HeadPlace(batch, slice(start, start + size), slice(start // group, (start + size - 1) // group + 1))
                for start in range(first, first + share, size)
            ]
            for batch in range(self.q.shape[0])
            for first in range(0, heads, share)
        ]

    def at(self, place: HeadPlace) -> Stack:
        """Return what belongs to some heads of one batch entry."""
        batch, heads, key_heads = place
        q = self.by_chunk(self.q[batch, heads])
        k, v = (x[batch, key_heads].expand(self.stack, -1, -1) for x in (self.k, self.v))
        return Stack(
            place=place,
            q=q,
            rel_q=q if self.rel_q is None else self.by_chunk(self.rel_q[batch, heads]),
            k=k,
            k_columns=k.mT,
            v=v,
            rel_k=self.of_table(self.tables.rel_k, place),
            rel_v=self.of_table(self.tables.rel_v, place),
            key_table=self.of_table(self.tables.key_table, place),
            mask=None if self.mask is None else of_mask(self.mask, place),
            bound=None if self.bound is None else of_mask(self.bound, place),
        )

    def of_table(self, table: Table | None, place: HeadPlace) -> Tensor | None:
        """Return the columns of a table for some heads, (stack, D, rows)."""
        if table is None:
            return None
        columns: Tensor = table.columns
        if columns.ndim == 3 and columns.shape[0] > 1:
            return columns[place.heads]
        return columns.expand(self.stack, -1, -1)

    def by_chunk(self, x: Tensor, *, axis: int = -2) -> Sequence[Tensor]:
        """Cut the queries' rows into chunks, those that see no key included."""
        pieces: Sequence[Tensor] = x.split(self.options.chunk_size or 1, axis)
        return pieces


class HeadPlace(NamedTuple):
    """Some heads of one batch entry."""

    batch: int
    heads: slice
    key_heads: slice  # one, or as many as heads


@dataclass(frozen=True, slots=True)
class Stack:
    """The operands of some heads of one batch entry, (stack, …); queries cut into chunks."""

    place: HeadPlace
    q: Sequence[Tensor]
    rel_q: Sequence[Tensor]  # those that meet `rel_k`
    k: Tensor
    k_columns: Tensor  # (stack, D, Lk)
    v: Tensor
    rel_k: Tensor | None  # columns of the table, (stack, D, rows)
    rel_v: Tensor | None
    key_table: Tensor | None
    mask: Tensor | None  # (stack or 1, Lq or 1, Lk or 1)
    bound: Tensor | None  # (stack or 1, 1, Lk or 1)


def is_short(operands: Operands) -> bool:
    """Whether a call has so little work in a head that the portable kernels do all of it."""
    return operands.q.shape[-2] * operands.k.shape[-2] <= SHORT


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the caller's autograd and autocast out of what an operator computes."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _hidden(options: Options, chunk: Chunk, device: torch.device) -> list[tuple[slice, Tensor]]:
    """Return what the pattern hides from the queries of every batch entry."""
    return [] if options.visibility.by_value else hidden_columns(options, chunk, xp=xp, device=device)


def _mask_and_bound(operands: Operands) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask, or what is left of it to add, and the bound of logits instead of what it hides."""
    mask = operands.mask
    if mask is None or mask.shape[-2] > 1:
        return mask, None
    boolean = mask.dtype == torch.bool
    visible = mask if boolean else mask != -torch.inf
    bound = operands.q.new_full((), torch.inf).where(visible, -torch.inf)
    return None if boolean else mask, None if bool(visible.all()) else bound


def _labels(*labels: Tensor | None) -> tuple[Tensor, Tensor] | None:
    queries, keys = labels
    return None if queries is None or keys is None else (queries, keys)


def _drawn(operands: Operands, options: Options, chunk: Chunk) -> tuple[Tensor, Tensor]:
    rows, columns = hashes(operands, options, chunk, xp=xp)
    return by_batch(rows, xp=xp), columns


def _stack_size(q: Tensor, k: Tensor, laid: list[Chunk]) -> int:
    """Return how many heads to work on at once: few enough for the caches, and a stack for every thread."""
    batches, heads = q.shape[:2]
    group = _group(q, k)
    together = heads if group == 1 else group
    sizes = [(chunk.stop - chunk.start) * max(chunk.width, chunk.end - chunk.first) for chunk in laid]
    most = max(sizes or [1]) * q.element_size()
    limit = max(1, min(STACK_BYTES // most, batches * heads // torch.get_num_threads()))
    return max(size for size in range(1, max(1, min(limit, together)) + 1) if together % size == 0)


def _group(q: Tensor, k: Tensor) -> int:
    return max(1, q.shape[1] // max(1, k.shape[1]))


def of_mask(mask: Tensor, place: HeadPlace) -> Tensor:
    """Return the mask of some heads, (stack or 1, Lq or 1, Lk or 1)."""
    of_batch = mask[place.batch if mask.shape[0] > 1 else 0]
    return of_batch[place.heads] if of_batch.shape[0] > 1 else of_batch


def run(work: Callable[[T], Any], tasks: Sequence[T], workers: int) -> None:
    """Run tasks on threads that have torch to themselves, one thread each."""
    if min(workers, len(tasks)) <= 1 or not threads.can_limit():
        for task in tasks:
            work(task)
        return
    with undisturbed(), threads.on_one_thread():
        _parallel.for_each(work, tasks, workers=workers, library="torch", initializer=threads.limit_this_thread)

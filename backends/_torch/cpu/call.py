"""torch on CPU: a call cut into stacks of heads and chunks of queries.

All buffers of a chunk stay in the cache of one core. Of long inputs a head alone fills it; of short ones several go at
once, since each operation costs some microseconds however little it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel.chunk import Chunk, chunks
from relskew_core._kernel.forward import Tables
from relskew_core._kernel.problem import Operands, Options
from relskew_core._positions.table import Table
from relskew_core.backends import _parallel
from relskew_core.backends._torch.cpu import threads

T = TypeVar("T")

CHUNK_SIZE = 128
"""Queries of a chunk: fewer are slower matrix products, more are work on hidden keys and buffers beyond the caches."""

SCRATCH_BYTES = 2**23
"""Budget of one logits buffer, which very many keys keep by smaller chunks."""

STACK_BYTES = 2**21
"""Budget of one logits buffer of several heads at once."""

SHORT = 2**14
"""Logits of a head up to which the portable kernels, all heads and batch entries at once, are as fast or faster."""


@dataclass(frozen=True, slots=True)
class Call:
    """The operands with their leading axes flattened to one batch axis, and what all chunks share."""

    q: Tensor  # (B, H, Lq, D), unscaled
    k: Tensor  # (B, Hkv, Lk, D)
    v: Tensor
    rel_q: Tensor | None
    mask: Tensor | None  # four axes, each whole or 1
    tables: Tables
    options: Options
    chunks: list[Chunk]  # those that see a key
    stack: int  # how many heads are worked on at once
    hidden: list[list[tuple[slice, Tensor]]]  # for each chunk, columns and which of their entries are hidden
    dead_rows: bool
    dropout: Dropout | None

    @classmethod
    def of(cls, operands: Operands, options: Options, *, dropout: Dropout | None = None) -> Call:
        """Flatten a call and cut its queries into chunks."""
        if options.chunk_size is None:
            options = replace(options, chunk_size=_chunk_size(options, operands.q.element_size()))
        visibility = options.visibility
        laid = [chunk for chunk in chunks(operands, options) if chunk.first < chunk.end]
        q, k = by_batch(operands.q), by_batch(operands.k)
        return cls(
            q=q,
            k=k,
            v=by_batch(operands.v),
            rel_q=None if operands.rel_q is None else by_batch(operands.rel_q),
            mask=None if operands.mask is None else mask_by_batch(operands.mask, operands.q),
            tables=Tables.of(operands, options, xp=xp),
            options=options,
            chunks=laid,
            stack=_stack_size(q, k, laid),
            hidden=[_hidden(options, chunk, operands.q.device) for chunk in laid],
            dead_rows=operands.mask is not None or visibility.some_query_sees_nothing(),
            dropout=dropout,
        )

    @property
    def group(self) -> int:
        """How many heads have one key head."""
        return _group(self.q, self.k)

    def shares(self) -> list[list[Place]]:
        """Return every stack of heads; those that have a key head in common in one list."""
        size, heads, group = self.stack, self.q.shape[1], self.group
        share = size if group == 1 else group
        return [
            [
                Place(batch, slice(start, start + size), slice(start // group, (start + size - 1) // group + 1))
                for start in range(first, first + share, size)
            ]
            for batch in range(self.q.shape[0])
            for first in range(0, heads, share)
        ]

    def at(self, place: Place) -> Stack:
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
            rel_k=None if self.tables.rel_k is None else self.of_table(self.tables.rel_k, place),
            mask=None if self.mask is None else of_mask(self.mask, place),
        )

    def of_table(self, table: Table, place: Place) -> Tensor:
        """Return the columns of a table for some heads, (stack, D, rows)."""
        columns: Tensor = table.columns
        if columns.ndim == 3 and columns.shape[0] > 1:
            return columns[place.heads]
        return columns.expand(self.stack, -1, -1)

    def by_chunk(self, x: Tensor, *, axis: int = -2) -> Sequence[Tensor]:
        """Cut the queries' rows into chunks, those that see no key included."""
        pieces: Sequence[Tensor] = x.split(self.options.chunk_size or 1, axis)
        return pieces


class Place(NamedTuple):
    """Some heads of one batch entry."""

    batch: int
    heads: slice
    key_heads: slice  # one, or as many as heads


@dataclass(frozen=True, slots=True)
class Stack:
    """The operands of some heads of one batch entry, (stack, …); queries cut into chunks."""

    place: Place
    q: Sequence[Tensor]
    rel_q: Sequence[Tensor]  # those that meet `rel_k`
    k: Tensor
    k_columns: Tensor  # (stack, D, Lk)
    v: Tensor
    rel_k: Tensor | None  # columns of the table, (stack, D, rows)
    mask: Tensor | None  # (stack or 1, Lq or 1, Lk or 1)


def is_short(operands: Operands) -> bool:
    """Whether a call has so little work in a head that the portable kernels do all of it."""
    return operands.q.shape[-2] * operands.k.shape[-2] <= SHORT


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the caller's autograd and autocast out of what an operator computes."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def by_batch(x: Tensor) -> Tensor:
    """Flatten the axes before the heads into one."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def mask_by_batch(mask: Tensor, q: Tensor) -> Tensor:
    mask = mask.reshape((1,) * (q.ndim - mask.ndim) + tuple(mask.shape))
    lead = q.ndim - 3
    if any(size > 1 for size in mask.shape[:lead]):
        mask = mask.expand(*q.shape[:lead], *mask.shape[lead:])
    return by_batch(mask)


def _chunk_size(options: Options, itemsize: int) -> int:
    low, high = options.positions()
    keys = max(1, min(options.visibility.n_keys, high - low + 1))
    size = SCRATCH_BYTES // (keys * itemsize)
    return max(32, min(CHUNK_SIZE, 1 << max(size, 1).bit_length() - 1))


def _stack_size(q: Tensor, k: Tensor, laid: list[Chunk]) -> int:
    """Return how many heads to work on at once: few enough for the caches, and a stack for every thread."""
    batches, heads = q.shape[:2]
    group = _group(q, k)
    together = heads if group == 1 else group
    most = max([(chunk.stop - chunk.start) * chunk.width for chunk in laid] or [1]) * q.element_size()
    limit = max(1, min(STACK_BYTES // most, batches * heads // torch.get_num_threads()))
    return max(size for size in range(1, max(1, min(limit, together)) + 1) if together % size == 0)


def _group(q: Tensor, k: Tensor) -> int:
    return max(1, q.shape[1] // max(1, k.shape[1]))


def _hidden(options: Options, chunk: Chunk, device: torch.device) -> list[tuple[slice, Tensor]]:
    """Return the columns of a chunk in which the pattern hides something, and what it hides there."""
    return [
        (slice(first - chunk.first, end - chunk.first), ~visible)
        for first, end in options.visibility.partly_hidden(chunk.start, chunk.stop, chunk.first, chunk.end)
        if (visible := options.visibility.mask(chunk.start, chunk.stop, first, end, xp=xp, device=device)) is not None
    ]


def of_mask(mask: Tensor, place: Place) -> Tensor:
    """Return the mask of some heads, (stack or 1, Lq or 1, Lk or 1)."""
    of_batch = mask[place.batch if mask.shape[0] > 1 else 0]
    return of_batch[place.heads] if of_batch.shape[0] > 1 else of_batch


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which weights are kept, drawn from a seed whenever they are asked for; factors for the portable kernels too."""

    seed: int
    share: float

    def __call__(self, chunk: Chunk, weights: Tensor) -> Tensor:
        generator = torch.Generator(weights.device).manual_seed(self.seed + chunk.start)
        return torch.empty_like(weights).bernoulli_(self.share, generator=generator)

    def write(self, call: Call, place: Place, index: int, kept: Tensor) -> Tensor:
        """Write 1 for the weights of a chunk that are kept and 0 for the others, shape (stack, n, m).

        Each head of a chunk has a seed of its own, so that stacks of any size drop the same.
        """
        for head, own in enumerate(kept, place.batch * call.q.shape[1] + place.heads.start):
            generator = torch.Generator().manual_seed(self.seed + head * len(call.chunks) + index)
            own.bernoulli_(self.share, generator=generator)
        return kept


def run(work: Callable[[T], Any], tasks: Sequence[T], workers: int) -> None:
    """Run tasks on threads that have torch to themselves, one thread each."""
    if min(workers, len(tasks)) <= 1 or not threads.can_limit():
        for task in tasks:
            work(task)
        return
    with undisturbed(), threads.on_one_thread():
        _parallel.for_each(work, tasks, workers=workers, library="torch", initializer=threads.limit_this_thread)

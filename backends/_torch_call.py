"""torch on CPU: a call cut into heads and chunks, with the logits of a chunk written in place.

The product with the table is written first; its skewed view then takes the product with the keys on top, a matrix
product that accumulates into a strided result. So the logits are never copied from one layout to the other, and all
buffers of a head's chunk stay in the cache of one core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._chunk import Chunk, chunks
from relskew_core._kernel import Tables
from relskew_core._problem import Operands, Options
from relskew_core._softmax import NEGLIGIBLE
from relskew_core._table import Table
from relskew_core.backends import _parallel

T = TypeVar("T")

CHUNK_SIZE = 128
"""Queries of a chunk: fewer are slower matrix products, more are work on hidden keys and buffers beyond the caches."""

SCRATCH_BYTES = 2**23
"""Budget of one logits buffer, which very many keys keep by smaller chunks."""


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
        return cls(
            q=by_batch(operands.q),
            k=by_batch(operands.k),
            v=by_batch(operands.v),
            rel_q=None if operands.rel_q is None else by_batch(operands.rel_q),
            mask=None if operands.mask is None else mask_by_batch(operands.mask, operands.q),
            tables=Tables.of(operands, options, xp=xp),
            options=options,
            chunks=laid,
            hidden=[_hidden(options, chunk, operands.q.device) for chunk in laid],
            dead_rows=operands.mask is not None or visibility.some_query_sees_nothing(),
            dropout=dropout,
        )

    def groups(self) -> list[tuple[int, int]]:
        """Every batch entry with every key head."""
        return [(batch, group) for batch in range(self.k.shape[0]) for group in range(self.k.shape[1])]

    def heads(self, group: int) -> range:
        """Query heads of a key head."""
        size = self.q.shape[1] // self.k.shape[1]
        return range(group * size, (group + 1) * size)

    def at(self, batch: int, head: int) -> Head:
        """Return what belongs to one head of one batch entry."""
        group = head * self.k.shape[1] // self.q.shape[1]
        q = self.by_chunk(self.q[batch, head])
        return Head(
            batch=batch,
            number=head,
            group=group,
            q=q,
            rel_q=q if self.rel_q is None else self.by_chunk(self.rel_q[batch, head]),
            k=self.k[batch, group],
            k_columns=self.k[batch, group].t(),
            v=self.v[batch, group],
            rel_k=None if self.tables.rel_k is None else of_table(self.tables.rel_k, head),
            mask=None if self.mask is None else of_head(self.mask, batch, head),
        )

    def by_chunk(self, x: Tensor) -> Sequence[Tensor]:
        """Cut the queries' rows into chunks, those that see no key included."""
        pieces: Sequence[Tensor] = x.split(self.options.chunk_size or 1)
        return pieces


@dataclass(frozen=True, slots=True)
class Head:
    """The operands of one head of one batch entry; queries cut into chunks."""

    batch: int
    number: int
    group: int  # its key head
    q: Sequence[Tensor]
    rel_q: Sequence[Tensor]  # those that meet `rel_k`
    k: Tensor
    k_columns: Tensor  # (D, Lk)
    v: Tensor
    rel_k: Tensor | None  # columns of the table, (D, rows)
    mask: Tensor | None


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


def _hidden(options: Options, chunk: Chunk, device: torch.device) -> list[tuple[slice, Tensor]]:
    """Return the columns of a chunk in which the pattern hides something, and what it hides there."""
    return [
        (slice(first - chunk.first, end - chunk.first), ~visible)
        for first, end in options.visibility.partly_hidden(chunk.start, chunk.stop, chunk.first, chunk.end)
        if (visible := options.visibility.mask(chunk.start, chunk.stop, first, end, xp=xp, device=device)) is not None
    ]


class Scratch:
    """The buffers of one worker, as long as the longest chunk needs them, and every chunk's views of them."""

    def __init__(self, call: Call) -> None:
        relative = max((chunk.width * (chunk.stop - chunk.start) for chunk in call.chunks), default=0)
        self._flat: dict[str, Tensor] = {}
        self._size, self._call = relative, call
        self._views: dict[int, Views] = {}

    def relative(self, name: str, chunk: Chunk) -> Tensor:
        """Return a buffer in relative layout, (n, width)."""
        n = chunk.stop - chunk.start
        return self._buffer(name)[: n * chunk.width].view(n, chunk.width)

    def absolute(self, name: str, chunk: Chunk) -> Tensor:
        """Return a buffer in absolute layout, (n, m)."""
        n, m = chunk.stop - chunk.start, chunk.end - chunk.first
        return self._buffer(name)[: n * m].view(n, m)

    def views(self, index: int) -> Views:
        """Return a chunk's views."""
        if index not in self._views:
            self._views[index] = Views.of(self._call, self, index)
        return self._views[index]

    def _buffer(self, name: str) -> Tensor:
        if name not in self._flat:
            self._flat[name] = self._call.q.new_empty(self._size)
        return self._flat[name]


@dataclass(frozen=True, slots=True)
class Views:
    """Where a chunk works, made once for all heads: every view made costs as much as a small kernel.

    Threads feel it twice, since each operation gives the interpreter's lock away and waits to get it back.
    """

    chunk: Chunk
    number: int  # of the chunk among all that the queries are cut into
    relative: Tensor  # buffer of the logits in relative layout, (n, width)
    logits: Tensor  # the same memory in absolute layout, (n, m)
    weights: Tensor  # (n, m)
    hidden: list[tuple[slice, Tensor]]  # columns in which the pattern hides something, and what it hides there
    hidden_logits: list[tuple[Tensor, Tensor]]  # the places of the logits for these
    product: Product | None  # the product with `rel_k`

    @classmethod
    def of(cls, call: Call, scratch: Scratch, index: int) -> Views:
        chunk = call.chunks[index]
        relative, weights = scratch.relative("logits", chunk), scratch.absolute("weights", chunk)
        logits = chunk.absolute(relative, xp=xp)
        table = call.tables.rel_k
        return cls(
            chunk=chunk,
            number=chunk.start // (call.options.chunk_size or 1),
            relative=relative,
            logits=logits,
            weights=weights,
            hidden=call.hidden[index],
            hidden_logits=[(logits[:, columns], hidden) for columns, hidden in call.hidden[index]],
            product=None if table is None else Product.of(table, chunk.low, chunk.high, relative),
        )

    def keys(self, x: Tensor, *, axis: int = 0) -> Tensor:
        """Cut keys or values to those that the chunk sees."""
        return x.narrow(axis, self.chunk.first, self.chunk.end - self.chunk.first)

    def hide(self, value: float) -> None:
        """Put ``value`` into the logits where the pattern hides a key from a query."""
        for place, hidden in self.hidden_logits:
            place.masked_fill_(hidden, value)

    def clear_hidden(self, x: Tensor) -> None:
        """Put zeros into ``x``, (n, m), where the pattern hides a key from a query.

        In relative layout such a place belongs to another query: zeros there keep a query's NaN to itself.
        """
        for columns, hidden in self.hidden:
            x[:, columns].masked_fill_(hidden, 0.0)


@dataclass(frozen=True, slots=True)
class Product:
    """Where ``q · e_r`` for ``r = low … high`` goes, past the ends of a short table too."""

    start: int  # the table's first column that is multiplied …
    count: int  # … and how many are
    core: Tensor  # their place
    copies: list[tuple[Tensor, Tensor]]  # places beyond a clipped table, and the product at its edge
    zeros: list[Tensor]  # places beyond a table that counts for nothing there

    @classmethod
    def of(cls, table: Table, low: int, high: int, x: Tensor) -> Product:
        plan = table.plan(low, high)
        begin = plan.zeros_before + plan.edge_before
        end = begin + plan.stop - plan.start
        core = x[:, begin:end]
        before, after = x[:, plan.zeros_before : begin], x[:, end : end + plan.edge_after]
        return cls(
            start=plan.start,
            count=plan.stop - plan.start,
            core=core,
            copies=[(place, edge) for place, edge in ((before, core[:, :1]), (after, core[:, -1:])) if place.numel()],
            zeros=[x for x in (x[:, : plan.zeros_before], x[:, end + plan.edge_after :]) if x.numel()],
        )

    def write(self, q: Tensor, columns: Tensor, scale: float) -> None:
        """Multiply queries (n, D) by the columns of a table (D, rows)."""
        torch.addmm(self.core, q, columns.narrow(1, self.start, self.count), beta=0, alpha=scale, out=self.core)
        for place, edge in self.copies:
            place.copy_(edge)
        for place in self.zeros:
            place.zero_()


def write_logits(call: Call, views: Views, head: Head) -> None:
    """Write a chunk's logits in absolute layout, into the views' memory."""
    options, logits = call.options, views.logits
    beta = 1
    if views.product is not None:
        views.product.write(head.rel_q[views.number], head.rel_k, options.rel_scale)  # type: ignore[arg-type]
    if call.tables.rel_bias is not None:
        spread = call.tables.rel_bias.spread(views.chunk.low, views.chunk.high, xp=xp)
        bias = spread[head.number if spread.shape[0] > 1 else 0]
        views.relative.copy_(bias.expand_as(views.relative)) if views.product is None else views.relative.add_(bias)
    elif views.product is None:
        beta = 0
    torch.addmm(
        logits, head.q[views.number], views.keys(head.k_columns, axis=1), beta=beta, alpha=options.scale, out=logits
    )
    views.hide(-math.inf)
    if head.mask is not None:
        mask = head.mask[views.chunk.of_mask(head.mask)]
        if mask.dtype != torch.bool:
            logits.add_(mask)
            logits.masked_fill_(mask == -math.inf, -math.inf)  # where the products are not finite
        else:
            logits.masked_fill_(~mask, -math.inf)


def of_table(table: Table, head: int) -> Tensor:
    """Return the columns of a table for one head, (D, rows)."""
    columns: Tensor = table.columns
    return columns if columns.ndim == 2 else columns[head if columns.shape[0] > 1 else 0]


def of_head(mask: Tensor, batch: int, head: int) -> Tensor:
    """Return the mask of one head, (Lq or 1, Lk or 1)."""
    return mask[batch if mask.shape[0] > 1 else 0, head if mask.shape[1] > 1 else 0]


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which weights are kept, drawn from a seed for every chunk of every head anew."""

    seed: int
    share: float

    def write(self, call: Call, scratch: Scratch, head: Head, index: int) -> Tensor:
        """Write 1 for the weights that are kept and 0 for the others, shape (n, m)."""
        part = (head.batch * call.q.shape[1] + head.number) * len(call.chunks) + index
        generator = torch.Generator().manual_seed(self.seed + part)
        return scratch.absolute("kept", call.chunks[index]).bernoulli_(self.share, generator=generator)


def write_softmax(call: Call, views: Views) -> None:
    """Write the softmax of the logits over the keys; rows that see nothing get zeros."""
    logits, weights = views.logits, views.weights
    torch._softmax(logits, -1, False, out=weights)
    torch.threshold_(weights, math.exp(NEGLIGIBLE), 0.0)  # no subnormals into the products
    if call.dead_rows:
        weights.masked_fill_(logits.amax(-1, keepdim=True) == -math.inf, 0.0)


def write_relative_weights(chunk: Chunk, weights: Tensor, relative: Tensor) -> None:
    """Write a chunk's weights, (n, m), into relative layout, (n, width): the adjoint of the skew."""
    relative.zero_()
    chunk.absolute(relative, xp=xp).copy_(weights)


def run(work: Callable[[T], Any], tasks: Sequence[T], workers: int) -> None:
    """Run tasks on workers of one torch thread each, leaving everybody else's number of threads as it is."""
    threads = torch.get_num_threads()
    _parallel.for_each(work, tasks, workers=workers, library="torch", initializer=lambda: torch.set_num_threads(1))
    torch.set_num_threads(threads)

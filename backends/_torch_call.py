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

from relskew_core._kernel import Chunk, Tables, chunks
from relskew_core._problem import Operands, Options
from relskew_core._softmax import NEGLIGIBLE
from relskew_core._table import Table
from relskew_core.backends import _parallel

T = TypeVar("T")

CACHE_BYTES = 2**20
"""Budget of one logits buffer: about the second-level cache of one core."""


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

    def own_rel_q(self) -> bool:
        """Whether the queries that meet ``rel_k`` differ from those that meet the keys."""
        return self.rel_q is not None or self.options.rel_scale != self.options.scale

    def relative_queries(self, batch: int, head: int, chunk: Chunk, scaled: Tensor) -> Tensor:
        """Return the scaled queries of a chunk that meet ``rel_k``."""
        if not self.own_rel_q():
            return scaled
        rel_q = self.q if self.rel_q is None else self.rel_q
        return rel_q[batch, head, chunk.start : chunk.stop] * self.options.rel_scale


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
    size = CACHE_BYTES // (keys * itemsize)
    return max(32, min(128, 1 << max(size, 1).bit_length() - 1))


def _hidden(options: Options, chunk: Chunk, device: torch.device) -> list[tuple[slice, Tensor]]:
    """Return the columns of a chunk in which the pattern hides something, and what it hides there."""
    return [
        (slice(first - chunk.first, end - chunk.first), ~visible)
        for first, end in options.visibility.partly_hidden(chunk.start, chunk.stop, chunk.first, chunk.end)
        if (visible := options.visibility.mask(chunk.start, chunk.stop, first, end, xp=xp, device=device)) is not None
    ]


class Scratch:
    """The buffers of one worker, as long as the longest chunk needs them."""

    def __init__(self, call: Call) -> None:
        relative = max((chunk.width * (chunk.stop - chunk.start) for chunk in call.chunks), default=0)
        self._flat: dict[str, Tensor] = {}
        self._size, self._like = relative, call.q

    def relative(self, name: str, chunk: Chunk) -> Tensor:
        """Return a buffer in relative layout, (n, width)."""
        n = chunk.stop - chunk.start
        return self._buffer(name)[: n * chunk.width].view(n, chunk.width)

    def absolute(self, name: str, chunk: Chunk) -> Tensor:
        """Return a buffer in absolute layout, (n, m)."""
        n, m = chunk.stop - chunk.start, chunk.end - chunk.first
        return self._buffer(name)[: n * m].view(n, m)

    def _buffer(self, name: str) -> Tensor:
        if name not in self._flat:
            self._flat[name] = self._like.new_empty(self._size)
        return self._flat[name]


def write_logits(call: Call, scratch: Scratch, batch: int, head: int, index: int, q: Tensor, k: Tensor) -> Tensor:
    """Write the logits of a chunk and return them in absolute layout, a view of the scratch buffer ``logits``."""
    chunk = call.chunks[index]
    x = scratch.relative("logits", chunk)
    logits: Tensor = chunk.absolute(x, xp=xp)
    if call.tables.rel_k is None and call.tables.rel_bias is None:
        torch.mm(q, k.t(), out=logits)
    else:
        _write_relative(call, batch, head, chunk, q, x)
        logits.addmm_(q, k.t())
    fill_hidden(call, index, logits, -math.inf)
    if call.mask is not None:
        mask = of_head(call.mask, batch, head)[chunk.of_mask(call.mask)]
        if mask.dtype != torch.bool:
            logits.add_(mask)
            logits.masked_fill_(mask == -math.inf, -math.inf)  # where the products are not finite
        else:
            logits.masked_fill_(~mask, -math.inf)
    return logits


def fill_hidden(call: Call, index: int, x: Tensor, value: float) -> None:
    """Put ``value`` where the pattern hides a key of a chunk from a query, (n, m).

    In relative layout such a place belongs to another query: zeros there keep a query's NaN to itself.
    """
    for columns, hidden in call.hidden[index]:
        x[:, columns].masked_fill_(hidden, value)


def _write_relative(call: Call, batch: int, head: int, chunk: Chunk, q: Tensor, x: Tensor) -> None:
    """Write everything that depends on the relative position alone into ``x``, (n, width)."""
    bias = None
    if call.tables.rel_bias is not None:
        spread = call.tables.rel_bias.spread(chunk.low, chunk.high, xp=xp)
        bias = spread[head if spread.shape[0] > 1 else 0]
    if call.tables.rel_k is None:
        x.copy_(bias.expand_as(x))  # type: ignore[union-attr]  # one of the two tables is there
        return
    q = call.relative_queries(batch, head, chunk, q)
    write_product(call.tables.rel_k, head, q, chunk.low, chunk.high, x)
    if bias is not None:
        x.add_(bias)


def write_product(table: Table, head: int, q: Tensor, low: int, high: int, x: Tensor) -> None:
    """Write ``q · e_r`` for ``r = low … high`` into ``x``, past the ends of a short table too."""
    plan = table.plan(low, high)
    begin = plan.zeros_before + plan.edge_before
    end = begin + plan.stop - plan.start
    core = x[:, begin:end]
    torch.mm(q, of_table(table, head)[:, plan.start : plan.stop], out=core)
    x[:, : plan.zeros_before].zero_()
    x[:, plan.zeros_before : begin] = core[:, :1]
    x[:, end : end + plan.edge_after] = core[:, -1:]
    x[:, end + plan.edge_after :].zero_()


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

    def write(self, call: Call, scratch: Scratch, batch: int, head: int, index: int) -> Tensor:
        """Write 1 for the weights that are kept and 0 for the others, shape (n, m)."""
        part = (batch * call.q.shape[1] + head) * len(call.chunks) + index
        generator = torch.Generator().manual_seed(self.seed + part)
        return scratch.absolute("kept", call.chunks[index]).bernoulli_(self.share, generator=generator)


def write_softmax(call: Call, logits: Tensor, weights: Tensor) -> None:
    """Write the softmax over the keys into ``weights``, contiguous; rows that see nothing get zeros."""
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

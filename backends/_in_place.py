"""What the native paths share that work head by head and chunk by chunk, in place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import KINDS, TABLES, Kind, Operands, Options
from relskew_core._kernel.chunk import Chunk
from relskew_core._positions.table import Extension

CHUNK_SIZE = 128
"""Queries of a chunk: fewer are slower matrix products, more are work on hidden keys and buffers beyond the caches."""

SCRATCH_BYTES = 2**23
"""Budget of one logits buffer, which very many keys keep by smaller chunks."""


def chunk_size(options: Options, itemsize: int) -> int:
    """Return how many queries of one head a processor's caches hold the logits of."""
    low, high = options.positions()
    keys = max(1, min(options.visibility.n_keys, high - low + 1))
    size = SCRATCH_BYTES // (keys * itemsize)
    return max(32, min(CHUNK_SIZE, 1 << max(size, 1).bit_length() - 1))


def hidden_columns(options: Options, chunk: Chunk, *, xp: Namespace, device: Any) -> list[tuple[slice, Array]]:
    """Return the columns of a chunk in which the pattern hides something, and what it hides there."""
    pattern = options.visibility
    return [
        (slice(first - chunk.first, end - chunk.first), ~visible)
        for first, end in pattern.partly_hidden(chunk.start, chunk.stop, chunk.first, chunk.end)
        if (visible := pattern.mask(chunk.start, chunk.stop, first, end, xp=xp, device=device)) is not None
    ]


def by_batch(x: Array, *, xp: Namespace) -> Array:
    """Flatten the axes before the heads into one."""
    return x if x.ndim == 4 else xp.reshape(x, (math.prod(x.shape[:-3]), *x.shape[-3:]))


def flattened(operands: Operands, *, xp: Namespace) -> Operands:
    """Return operands with one batch axis; that of labels and masks may be 1, and tables have one if ragged."""
    lead = operands.q.ndim - 3
    if lead == 1 and operands.mask is operands.q_segments is operands.q_positions is None:
        return operands

    def flat(name: str, x: Array) -> Array:
        kind = KINDS[name]
        if kind is Kind.SEQUENCE:
            return by_batch(x, xp=xp)
        if kind is Kind.MASK:
            return mask_by_batch(x, operands.q, xp=xp)
        if name in TABLES and x.ndim > (2 if kind is Kind.BIAS else 3):
            return xp.reshape(x, (math.prod(x.shape[:lead]), *x.shape[lead:]))
        return labels_by_batch(x, operands.q, xp=xp) if kind is Kind.LABEL else x

    return operands._replace(**{name: flat(name, x) for name, x in operands._asdict().items() if x is not None})


def labels_by_batch(labels: Array, q: Array, *, xp: Namespace) -> Array:
    """Return labels with one axis before that of their sequence, whole or 1."""
    *given, count = labels.shape
    if math.prod(given) != 1:
        lead = tuple(q.shape[:-3])
        labels = xp.broadcast_to(xp.reshape(labels, (*(1,) * (len(lead) - len(given)), *given, count)), (*lead, count))
    return xp.reshape(labels, (math.prod(labels.shape[:-1]), count))


def mask_by_batch(mask: Array, q: Array, *, xp: Namespace) -> Array:
    """Return a mask with axes for batch, heads, queries and keys, each whole or 1."""
    lead = q.ndim - 3
    mask = xp.reshape(mask, (1,) * (q.ndim - mask.ndim) + tuple(mask.shape))
    if any(size > 1 for size in mask.shape[:lead]):
        mask = xp.broadcast_to(mask, (*q.shape[:lead], *mask.shape[lead:]))
    return by_batch(mask, xp=xp)


def regions(extension: Extension, x: Array) -> tuple[Array, list[tuple[Array, Array]], list[Array]]:
    """Return views of an array for all planned columns.

    The place of the core; places of repeated edges with the column to repeat; places of zeros.
    """
    begin = extension.zeros_before + extension.edge_before
    end = begin + extension.stop - extension.start
    after = end + extension.edge_after
    core = x[..., begin:end]
    edges = [(x[..., extension.zeros_before : begin], core[..., :1]), (x[..., end:after], core[..., -1:])]
    zeros = [x[..., : extension.zeros_before], x[..., after:]]
    return core, [pair for pair in edges if pair[0].shape[-1]], [place for place in zeros if place.shape[-1]]


def fill(edges: Iterable[tuple[Array, Array]], zeros: Iterable[Array]) -> None:
    """Write what lies beyond a core that is written."""
    for place, edge in edges:
        place[...] = edge
    for place in zeros:
        place[...] = 0.0

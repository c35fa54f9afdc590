"""CuPy without torch: cuBLAS adds ``QKᵀ`` to the skewed product in place, and one kernel computes the softmax in place.

All arithmetic goes through a :class:`Device`, so that the same steps run on NumPy arrays in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import Operands, Options, shape_of_out, shape_of_rows
from relskew_core._kernel.chunk import Chunk, chunks, visible_columns
from relskew_core._kernel.forward import Tables
from relskew_core._positions.table import Extension, Table
from relskew_core.backends._batch import mask_by_batch
from relskew_core.backends._cupy.softmax import NO_END


class Device(Protocol):
    """The operations that the algorithm needs from a library and its device."""

    xp: Namespace

    def view(self, x: Array, start: int, shape: tuple[int, ...], pitches: tuple[int, ...]) -> Array:
        """Return a view of a flat array, pitches in elements."""

    def multiply(self, alpha: float, a: Array, b: Array, beta: float, c: Array) -> None:
        """Write ``alpha · a b + beta · c`` into ``c``: (P or 1, n, k), (P or 1, k, m), (P, n, m)."""

    def softmax(self, x: Array, lse: Array, mask: Array | None, numbers: dict[str, Any]) -> None:
        """Turn logits into weights in place, as ``_cupy_softmax.SOURCE`` does, with a block for every row."""


@dataclass(frozen=True, slots=True)
class BatchedCall:
    """The operands with one axis for batch and heads together."""

    device: Device
    operands: Operands
    options: Options
    tables: Tables
    batch: int
    heads: int
    group: int  # query heads per key head
    q: Array  # (P, Lq, D)
    k: Array  # (P / group, Lk, D)
    v: Array
    rel_q: Array
    mask: Array | None  # four axes


def attention(operands: Operands, options: Options, *, device: Device) -> tuple[Array, Array]:
    """Return the output (..., H, Lq, Dv) and the log-sum-exp (..., H, Lq)."""
    xp, q = device.xp, operands.q
    options = replace(options, visibility=options.visibility.bounded())
    laid = list(chunks(operands, options))
    heads, group = q.shape[-3], q.shape[-3] // operands.k.shape[-3]
    mask = None if operands.mask is None else xp.ascontiguousarray(mask_by_batch(operands.mask, q, xp=xp))
    call = BatchedCall(
        device=device,
        operands=operands,
        options=options,
        tables=Tables.of(operands, options, laid, xp=xp),
        batch=math.prod(q.shape[:-3]),
        heads=heads,
        group=group,
        q=_by_head(q, xp=xp),
        k=_by_head(operands.k, xp=xp),
        v=_by_head(operands.v, xp=xp),
        rel_q=_by_head(q if operands.rel_q is None else operands.rel_q, xp=xp),
        mask=mask,
    )
    out = xp.zeros((call.q.shape[0], q.shape[-2], operands.v.shape[-1]), dtype=q.dtype)
    lse = xp.full(call.q.shape[:2], -math.inf, dtype=q.dtype)
    for chunk in laid:
        if chunk.first < chunk.end and call.q.shape[0]:
            _attend(call, chunk, out, lse)
    return xp.reshape(out, shape_of_out(operands)), xp.reshape(lse, shape_of_rows(operands))


def _by_head(x: Array, *, xp: Namespace) -> Array:
    return xp.ascontiguousarray(xp.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:])))


def _attend(call: BatchedCall, chunk: Chunk, out: Array, lse: Array) -> None:
    device, xp, options = call.device, call.device.xp, call.options
    programs, n, m = call.q.shape[0], chunk.stop - chunk.start, chunk.end - chunk.first
    queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.end)
    relative = xp.empty((programs, n, chunk.width), dtype=call.q.dtype)
    pitch = chunk.width - (n > 1)
    logits = device.view(relative, chunk.spare, (programs, n, m), (n * chunk.width, pitch, 1))
    there = _write_relative(call, chunk, call.rel_q[:, queries], relative)
    for member in range(call.group):  # heads that share keys are evenly spaced
        own = slice(member, None, call.group)
        device.multiply(options.scale, call.q[own, queries], call.k[:, keys].swapaxes(1, 2), float(there), logits[own])
    device.softmax(relative, lse, call.mask, _numbers(call, chunk, pitch))
    for member in range(call.group):
        own = slice(member, None, call.group)
        device.multiply(1.0, logits[own], call.v[:, keys], 0.0, out[own, queries])
    if call.tables.rel_v is not None:
        seen, low, high = visible_columns(relative, chunk, options)
        if low <= high:
            extension = call.tables.rel_v.plan(low, high)
            weights = extension.fold(seen, xp=xp)
            rows = call.tables.rel_v.columns[..., extension.start : extension.stop].swapaxes(-1, -2)
            _by_table(call, 1.0, weights, rows, 1.0, out[:, queries])


def _by_table(call: BatchedCall, alpha: float, a: Array, rows: Array, beta: float, c: Array) -> None:
    """Multiply by a table that is shared by all heads, or separate for each head."""
    if rows.ndim == 2:
        call.device.multiply(alpha, a, rows[None], beta, c)
        return
    for batch in range(call.batch):
        here = slice(batch * call.heads, (batch + 1) * call.heads)
        call.device.multiply(alpha, a[here], rows, beta, c[here])


def _write_relative(call: BatchedCall, chunk: Chunk, rel_q: Array, x: Array) -> bool:
    """Write the contribution of relative positions, (P, n, width); return ``False`` if there is none."""
    rel_k, bias = call.tables.rel_k, call.tables.rel_bias
    if rel_k is not None:
        extension = rel_k.plan(chunk.low, chunk.high)
        core, edges, zeros = _regions(extension, x)
        if core.shape[-1]:
            columns = rel_k.columns[..., extension.start : extension.stop]
            _by_table(call, call.options.rel_scale, rel_q, columns, 0.0, core)
        _fill(edges, zeros)
    if bias is not None:
        by_head = _spread(bias, chunk, call)
        by_batch = x.reshape(call.batch, call.heads, *x.shape[1:])  # a view, because x is contiguous
        if rel_k is None:
            by_batch[...] = by_head
        else:
            by_batch += by_head
    return rel_k is not None or bias is not None


def _spread(bias: Table, chunk: Chunk, call: BatchedCall) -> Array:
    return bias.spread(chunk.low, chunk.high, xp=call.device.xp)


def _numbers(call: BatchedCall, chunk: Chunk, pitch: int) -> dict[str, Any]:
    """Return the kernel's numbers as a dictionary, in its order."""
    pattern, mask, n = call.options.visibility, call.mask, chunk.stop - chunk.start
    strides, start = [0, 0, 0, 0], 0
    if mask is not None:
        counts = [math.prod(mask.shape[axis + 1 :]) for axis in range(4)]
        strides = [count if size > 1 else 0 for count, size in zip(counts, mask.shape, strict=True)]
        start = chunk.start * strides[2] + chunk.first * strides[3]
    boolean = mask is not None and mask.dtype == bool
    return {
        "mask_start": start,
        "head_pitch": n * chunk.width, "pitch": pitch, "spare": chunk.spare, "n": n, "m": chunk.end - chunk.first,
        "heads": call.heads, "position": chunk.start + pattern.offset, "first_key": chunk.first,
        "before": -1 if pattern.left is None else pattern.left,
        "after": NO_END if pattern.right is None else pattern.right,
        "block_size": pattern.block_size or 0, "softcap": call.options.softcap or 0.0,
        "mask_kind": 0 if mask is None else 1 if boolean else 2,
        "mask_b": strides[0], "mask_h": strides[1], "mask_i": strides[2], "mask_j": strides[3],
        "lse_pitch": call.q.shape[1], "lse_start": chunk.start,
    }  # fmt: skip


def _regions(extension: Extension, x: Array) -> tuple[Array, list[tuple[Array, Array]], list[Array]]:
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


def _fill(edges: Iterable[tuple[Array, Array]], zeros: Iterable[Array]) -> None:
    """Write the columns beyond a core that is written."""
    for place, edge in edges:
        place[...] = edge
    for place in zeros:
        place[...] = 0.0

"""Triton: the backward pass on the host: chunks of queries, and their buffers for tables and masks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core._positions.table import Extension
from relskew_core.backends._ragged import by_batch
from relskew_core.backends._torch.triton.call import TiledCall, block, on_device_of, rows_of
from relskew_core.backends._torch.triton.kernels.keys import key_gradient_kernel, table_gradient_kernel
from relskew_core.backends._torch.triton.kernels.queries import delta_kernel, query_gradient_kernel

BUFFER_BYTES = 2**27
"""The budget of a chunk's buffers: long chunks fill the device, short ones save its memory."""

DELTA_ROWS = 64
"""The queries of a program that multiplies outputs by their gradients."""

SLAB_ROWS = 2048
"""The queries whose share of a table's gradient one program sums."""


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    out: Tensor,
    sums: Tensor,
    d_lse: Tensor | None = None,
    wanted: frozenset[str] = frozenset(Operands._fields),
) -> Gradients:
    """Return the gradients of every operand.

    Of those that are not ``wanted`` tables and masks are left out, which need buffers of a chunk's queries times their
    positions.
    """
    with on_device_of(operands.q):
        return _attention_vjp(d_out, operands, options, out, sums, d_lse, wanted)


def _attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    out: Tensor,
    sums: Tensor,
    d_lse: Tensor | None,
    wanted: frozenset[str],
) -> Gradients:
    call = TiledCall.of(operands, options)
    d_out = by_batch(d_out, xp=torch).contiguous()
    delta = _delta(d_out, out, d_lse)
    given = {"d_out": d_out, "row_sums": sums.contiguous(), "delta": delta, **call.arguments(call.backward)}
    x = call.operands
    d_q, d_k, d_v = (x.new_zeros(x.shape) for x in (x.q, x.k, x.v))
    d_rel_q = None if x.rel_q is None else x.rel_q.new_zeros(x.rel_q.shape)
    rel_q = x.q if x.rel_q is None else x.rel_q
    logits = _Relative(call, rel_q, "rel_k", "rel_bias") if wanted & {"rel_k", "rel_bias"} else None
    weights = _Relative(call, given["d_out"], "rel_v") if "rel_v" in wanted else None
    key_logits = _Relative(call, x.k, "key_table") if "key_table" in wanted else None
    mask = _Mask.of(call) if "mask" in wanted else None

    if not call.is_empty:
        of_keys = mask if call.of_keys else None
        for start, stop in _chunks(call, x.k.shape[2], [key_logits]):
            columns = call.columns(start, stop, mirrored=True)
            key_gradient_kernel[-(-(stop - start) // call.backward.size), call.batch * x.k.shape[1]](
                d_k=d_k, d_v=d_v, chunk_start=start, chunk_stop=stop, first_position=columns.first, width=columns.width,
                **_kept("d_logits", "far_logits", key_logits), d_mask=None if of_keys is None else of_keys.buffer,
                **{**given, "num_stages": call.key_stages},
            )  # fmt: skip
        of_pairs = None if call.of_keys else mask
        for start, stop in _chunks(call, x.q.shape[2], [logits, weights, of_pairs]):
            columns = call.columns(start, stop)
            query_gradient_kernel[-(-(stop - start) // call.backward.size), call.batch * call.heads](
                d_q=d_q, d_rel_q=d_rel_q, chunk_start=start, chunk_stop=stop, first_position=columns.first,
                width=columns.width, **_kept("d_logits", "far_logits", logits),
                **_kept("weights", "far_weights", weights), d_mask=None if of_pairs is None else of_pairs.buffer,
                **{**given, "num_stages": call.query_stages},
            )  # fmt: skip
        if of_keys is not None:
            of_keys.end(0, 1)

    found: dict[str, Tensor | None] = {"q": d_q, "k": d_k, "v": d_v, "rel_q": d_rel_q}
    shaped = {name: None if x is None else x.reshape(getattr(operands, name).shape) for name, x in found.items()}
    for table in (logits, weights, key_logits):
        shaped |= {} if table is None else table.gradients()
    if mask is not None and operands.mask is not None:
        shaped["mask"] = mask.gradient(operands.mask.shape, operands.q.shape[:-3])
    return Gradients(**shaped)


def _delta(d_out: Tensor, out: Tensor, d_lse: Tensor | None) -> Tensor:
    """Return ``d_out · out`` of every query, less its ``d_lse``."""
    width, rows = d_out.shape[-1], d_out.shape[:-1].numel()
    delta = d_out.new_empty(rows, dtype=torch.float32)
    if delta.numel():
        delta_kernel[-(-rows // DELTA_ROWS),](
            d_out, out.contiguous(), None if d_lse is None else d_lse.float().contiguous(), delta, rows,
            DV=width, BLOCK_DV=block(width), B=DELTA_ROWS, D_LSE=d_lse is not None,
        )  # fmt: skip
    return delta


def _chunks(call: TiledCall, length: int, parts: list[_Relative | _Mask | None]) -> Iterator[tuple[int, int]]:
    """Cut queries or keys into chunks of whole tiles, and let the parts begin and end each."""
    kept, size = [part for part in parts if part is not None and part.wanted], call.backward.size
    rows = call.options.chunk_size or BUFFER_BYTES // max(1, sum(part.row_bytes for part in kept))
    rows = max(size, rows // size * size) if kept else length
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        for part in kept:
            part.begin(start, stop)
        yield start, stop
        for part in kept:
            part.end(start, stop)


def _kept(buffer: str, far: str, relative: _Relative | None) -> dict[str, Any]:
    if relative is None or not relative.wanted:
        return {buffer: None, far: None}
    return {buffer: relative.buffer, far: relative.far}


class _Memory:
    """One allocation for the buffers of all chunks; the first chunk is the longest."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.flat: Tensor | None = None

    def zeros(self, shape: tuple[int, ...], *, room: int) -> Tensor:
        """Return zeros at its start; the first call allocates."""
        if self.flat is None:
            self.flat = self.like.new_empty(room)
        return self.flat[: math.prod(shape)].view(shape).zero_()


class _Relative:
    """Sums over all queries, or keys, of their numbers by relative position times their rows: a table's gradient."""

    def __init__(self, call: TiledCall, rows: Tensor, table: str, bias: str | None = None) -> None:
        self.call, self.rows, self.names, self.mirrored = call, rows, (table, bias), table == "key_table"
        self.table = getattr(call.operands, table)
        self.bias = None if bias is None else getattr(call.operands, bias)
        self.wanted = self.table is not None or self.bias is not None
        self.all = call.columns(0, rows.shape[2], mirrored=self.mirrored)
        programs = call.batch * call.heads
        self.sums: Tensor | None = None
        self.bias_sums = torch.zeros((call.heads, self.all.width), dtype=torch.float32, device=rows.device)
        self.far = torch.zeros((2, programs, rows.shape[-2]), dtype=torch.float32, device=rows.device)
        # pairs of one row of the table, which positions in any order may have, are added in the buffer
        self.memory = _Memory(self.far if call.by_value else rows)
        self.row_bytes = programs * self.all.width * self.memory.like.element_size()

    def begin(self, start: int, stop: int) -> None:
        """Clear the buffer of a chunk."""
        programs, rows = self.call.batch * self.call.heads, stop - start
        shape = (programs, rows, self.call.columns(start, stop, mirrored=self.mirrored).width)
        self.buffer = self.memory.zeros(shape, room=programs * rows * self.all.width)

    def end(self, start: int, stop: int) -> None:
        """Add the kernel's results of a chunk."""
        here = self.call.columns(start, stop, mirrored=self.mirrored)
        column = here.first - self.all.first
        if self.bias is not None:
            of_heads = self.buffer.unflatten(0, (self.call.batch, self.call.heads))
            self.bias_sums[:, column : column + here.width] += of_heads.sum((0, 2), dtype=torch.float32)
        if self.table is None:
            return
        width, tile = self.table.shape[-1], self.call.backward
        slabs = -(-(stop - start) // SLAB_ROWS)
        if self.sums is None:
            shape = (slabs, self.call.heads, self.all.width, width)
            self.sums = torch.zeros(shape, dtype=torch.float32, device=self.rows.device)
        table_gradient_kernel[-(-here.width // tile.size), self.call.heads, slabs](
            self.buffer, rows_of(self.rows), self.sums, batch=self.call.batch, group=self.group, chunk_start=start,
            chunk_stop=stop,
            width=here.width, first_column=column, all_columns=self.all.width, slab_rows=SLAB_ROWS,
            D=width, BLOCK_D=block(width), B=tile.size, PRECISION=self.call.precision, HIDDEN=self.mirrored,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the table and of the bias, if present, in float32."""
        result, self.memory = {}, _Memory(self.rows)  # without the chunks' buffer
        self.buffer = self.rows
        scale = 1.0 if self.names[0] == "rel_v" else self.call.options.rel_scale
        if self.table is not None:
            width = self.table.shape[-1]
            sums = self.bias_sums.new_zeros((1, *self.bias_sums.shape, width)) if self.sums is None else self.sums
            sums = sums[0] if len(sums) == 1 else sums.sum(0)
            shared = self.table.ndim == 2 or self.table.shape[0] == 1  # those of ragged batches have an axis for heads
            result[self.names[0]] = self._fold(sums, self.rows, shared).mul_(scale).reshape(self.table.shape)
        if self.bias is not None and self.names[1] is not None:
            bias = self._fold(self.bias_sums[..., None], None, self.bias.shape[0] == 1)
            result[self.names[1]] = bias.reshape(self.bias.shape)
        return result

    def _fold(self, sums: Tensor, rows: Tensor | None, shared: bool) -> Tensor:
        """Fold (heads, columns, width) into (…, table rows, width); ``rows`` of ones if ``None``."""
        span, (first, width) = self.call.options.span, self.all
        axes = (0, 1) if shared else (0,)  # of items and heads
        if self.mirrored and not self.call.by_value:
            sums, first = sums.flip(-2), 1 - first - width
        extension = Extension.of(span.left, span.rows, span.beyond, first, first + width - 1)
        core = extension.fold((sums.sum(0) if shared else sums).mT, xp=torch)
        table = torch.nn.functional.pad(core, (extension.start, span.rows - extension.stop)).mT.contiguous()
        if span.beyond == "clip" and not self.call.by_value:  # sums over the tiles that are entirely past the edges
            for row, far in ((0, self.far[0]), (-1, self.far[1])):
                far = far.unflatten(0, (self.call.batch, -1, self.group))[..., None]
                if rows is not None:  # not a product, which autocast may round; hidden rows may contain NaN
                    far = torch.where(far == 0, far, far * rows[:, :, None])
                table[..., row, :] += far.sum(-2).flatten(1, 2).sum(axes)
        return table

    @property
    def group(self) -> int:
        """The heads that have the same rows."""
        return self.call.heads // self.rows.shape[1]


class _Mask:
    """The gradient of an additive mask: a chunk's gradients of logits, summed along the axes on which it broadcasts."""

    wanted = True

    def __init__(self, call: TiledCall, mask: Tensor) -> None:
        self.call, self.like = call, mask
        self.row_bytes = call.batch * call.heads * call.options.visibility.n_keys * mask.element_size()
        self.sums = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        self.memory = _Memory(mask)
        if call.of_keys:
            shape = (call.batch, call.heads, 1, call.options.visibility.n_keys)
            self.buffer = torch.zeros(shape, dtype=torch.float32, device=mask.device)

    @classmethod
    def of(cls, call: TiledCall) -> _Mask | None:
        """Return ``None`` if there is no additive mask to differentiate."""
        mask = call.operands.mask
        return None if mask is None or mask.dtype == torch.uint8 else cls(call, mask)

    def begin(self, start: int, stop: int) -> None:
        """Clear the buffer of a chunk."""
        shape = (self.call.batch, self.call.heads, stop - start, self.call.options.visibility.n_keys)
        self.buffer = self.memory.zeros(shape, room=math.prod(shape))

    def end(self, start: int, stop: int) -> None:
        """Add the kernel's results of a chunk."""
        target = self.sums[:, :, start:stop] if self.like.shape[2] > 1 else self.sums
        axes = [axis for axis, size in enumerate(target.shape) if size == 1]
        target += self.buffer.sum(axes, keepdim=True, dtype=torch.float32) if axes else self.buffer

    def gradient(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Tensor:
        """Return the gradient in the shape of the caller's mask."""
        sums = self.sums
        if sums.numel() != torch.Size(shape).numel():  # it broadcasts along some of the batch axes
            sums = sums.reshape(*lead, *sums.shape[1:]).sum_to_size(shape)
        return sums.reshape(shape)

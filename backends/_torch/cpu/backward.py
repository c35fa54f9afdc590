"""torch on CPU: the backward pass, stack by stack and chunk by chunk.

Gradients of logits are written through the skewed view; what lies under it is the gradient of the product with the
table, ready for the matrix products that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel.backward import attention_vjp as portable
from relskew_core._kernel.chunk import visible_columns
from relskew_core._kernel.problem import Gradients, Operands, Options
from relskew_core._positions.table import Table
from relskew_core.backends._parallel import leave_if_dropped
from relskew_core.backends._torch.cpu.call import (
    Call,
    Dropout,
    Place,
    Stack,
    by_batch,
    is_short,
    of_mask,
    run,
    undisturbed,
)
from relskew_core.backends._torch.cpu.scratch import (
    Product,
    Scratch,
    Views,
    write_logits,
    write_relative_weights,
    write_softmax,
)


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    d_lse: Tensor | None = None,
    mask_gradient: bool = True,
    dropout: Dropout | None = None,
) -> Gradients:
    """Return the gradients of every operand; repeatable to the bit for a given number of threads."""
    if is_short(operands):
        with undisturbed():
            gradients = portable(d_out, operands, options, d_lse=d_lse, factors=dropout, xp=xp)
        return gradients if mask_gradient else gradients._replace(mask=None)
    call = Call.of(operands, options, dropout=dropout)
    shares = call.shares()
    workers = max(1, min(torch.get_num_threads(), len(shares)))
    bounds = [len(shares) * index // workers for index in range(workers + 1)]
    # Every worker owns a fixed run of heads and its own sums for what they share: no two write one place.
    whole = _Whole.of(call, d_out, d_lse)
    sums = [_Sums.of(call, mask_gradient=mask_gradient) for _ in range(workers)]

    def work(index: int) -> None:
        scratch = Scratch(call)
        with torch.inference_mode():
            for place in [place for share in shares[bounds[index] : bounds[index + 1]] for place in share]:
                stack, own = call.at(place), whole.at(call, place)
                for chunk in range(len(call.chunks)):
                    leave_if_dropped()
                    _backward(call, scratch, stack, chunk, own, sums[index])

    run(work, range(workers), workers)
    return _collect(call, whole, sums, operands)


@dataclass(frozen=True, slots=True)
class _Whole:
    """The incoming gradients, and the outgoing ones that belong to heads of one batch entry."""

    d_out: Tensor
    d_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    rel_q: Tensor | None

    @classmethod
    def of(cls, call: Call, d_out: Tensor, d_lse: Tensor | None) -> _Whole:
        return cls(
            d_out=by_batch(d_out),
            d_lse=None if d_lse is None else d_lse.reshape(call.q.shape[:-1]),
            q=torch.zeros_like(call.q, memory_format=torch.contiguous_format),
            k=torch.zeros_like(call.k, memory_format=torch.contiguous_format),
            v=torch.zeros_like(call.v, memory_format=torch.contiguous_format),
            rel_q=None if call.rel_q is None else torch.zeros_like(call.rel_q, memory_format=torch.contiguous_format),
        )

    def at(self, call: Call, place: Place) -> _Own:
        """Return what belongs to some heads of one batch entry."""
        batch, heads, key_heads = place
        q = call.by_chunk(self.q[batch, heads])
        return _Own(
            d_out=call.by_chunk(self.d_out[batch, heads]),
            d_lse=None if self.d_lse is None else call.by_chunk(self.d_lse[batch, heads].unsqueeze(-1)),
            q=q,
            k=self.k[batch, key_heads],
            v=self.v[batch, key_heads],
            rel_q=q if self.rel_q is None else call.by_chunk(self.rel_q[batch, heads]),
        )


@dataclass(frozen=True, slots=True)
class _Own:
    """The gradients of some heads of one batch entry; those of queries cut into chunks."""

    d_out: Sequence[Tensor]
    d_lse: Sequence[Tensor] | None
    q: Sequence[Tensor]
    k: Tensor  # of one key head, or of as many as there are heads
    v: Tensor
    rel_q: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class _Sums:
    """One worker's sums of what heads and batch entries share: tables by rows, and an additive mask."""

    rel_k: Tensor | None
    rel_v: Tensor | None
    rel_bias: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(cls, call: Call, *, mask_gradient: bool) -> _Sums:
        def rows(table: Table | None) -> Tensor | None:
            return None if table is None else call.q.new_zeros(table.columns.mT.shape)

        mask = call.mask if mask_gradient else None
        return cls(
            rows(call.tables.rel_k),
            rows(call.tables.rel_v),
            rows(call.tables.rel_bias),
            None if mask is None or mask.dtype == torch.bool else call.q.new_zeros(mask.shape),
        )


def _backward(call: Call, scratch: Scratch, stack: Stack, index: int, own: _Own, sums: _Sums) -> None:
    views, options = scratch.views(index), call.options
    chunk, relative, logits, weights = views.chunk, views.relative, views.logits, views.weights
    d_out = own.d_out[views.number]

    write_logits(call, views, stack)
    write_softmax(call, views)
    views.clear_hidden(weights)
    kept = (
        None if call.dropout is None else call.dropout.write(call, stack.place, index, scratch.absolute("kept", chunk))
    )
    of_values = weights if kept is None else torch.mul(weights, kept, out=scratch.absolute("of_values", chunk))
    _add_product(views.keys(own.v), of_values.mT, d_out)
    d_weights = _write_d_weights(call, scratch, stack, views, d_out, of_values, sums)
    if kept is not None:
        d_weights.mul_(kept)

    # d_logits take the place of the logits, zero wherever no key stands in relative layout
    if logits.is_contiguous():
        relative.view(-1)[: relative.numel() - logits.numel()].zero_()
        torch.ops.aten._softmax_backward_data.out(d_weights, weights, -1, weights.dtype, grad_input=logits)
    else:
        d_logits = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        write_relative_weights(chunk, d_logits, relative)
    views.hide(0.0)
    if own.d_lse is not None:
        logits.addcmul_(weights, own.d_lse[views.number])
    if sums.mask is not None:
        target = of_mask(sums.mask, stack.place)[(slice(None), *chunk.of_mask(sums.mask))]
        target.add_(logits.sum_to_size(target.shape))

    _add_product(views.keys(own.k), logits.mT, stack.q[views.number], options.scale)
    d_q = own.q[views.number]
    torch.baddbmm(d_q, logits, views.keys(stack.k), beta=0, alpha=options.scale, out=d_q)
    _add_relative_terms(call, stack, views, own, sums)


def _add_product(place: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """Add ``scale · x y``, summed over the heads where they share one place."""
    if place.shape[0] == x.shape[0]:
        place.baddbmm_(x, y, alpha=scale)
    else:
        place[0].addbmm_(x, y, alpha=scale)


def _write_d_weights(
    call: Call, scratch: Scratch, stack: Stack, views: Views, d_out: Tensor, weights: Tensor, sums: _Sums
) -> Tensor:
    """Write the gradient of the weights, and add to the gradient of ``rel_v``."""
    rel_v, chunk, v = call.tables.rel_v, views.chunk, views.keys(stack.v)
    if rel_v is None:
        return torch.bmm(d_out, v.mT, out=scratch.absolute("d_weights", chunk))
    relative = scratch.relative("relative", chunk)
    write_relative_weights(chunk, weights, relative)
    seen, low, high = visible_columns(relative, chunk, call.options)
    if low <= high:
        plan = rel_v.plan(low, high)
        rows = _of_rows(sums.rel_v, stack.place)[:, plan.start : plan.stop]
        _add_product(rows, plan.fold(seen, xp=xp).mT, d_out)
    relative = scratch.relative("d_weights", chunk)
    relative.zero_()
    if low <= high:
        place = relative[..., low - chunk.low : high - chunk.low + 1]
        Product.of(rel_v, low, high, place).write(d_out, call.of_table(rel_v, stack.place), 1.0)
    d_weights: Tensor = chunk.absolute(relative, xp=xp)
    return d_weights.baddbmm_(d_out, v.mT)


def _add_relative_terms(call: Call, stack: Stack, views: Views, own: _Own, sums: _Sums) -> None:
    """Add the gradients of ``rel_bias``, ``rel_k`` and the queries that meet it."""
    seen, low, high = visible_columns(views.relative, views.chunk, call.options)
    if low > high:
        return
    if call.tables.rel_bias is not None:
        plan = call.tables.rel_bias.plan(low, high)
        target = _of_rows(sums.rel_bias, stack.place)[:, plan.start : plan.stop, 0]
        target.add_(plan.fold(seen, xp=xp).sum(-2).sum_to_size(target.shape))
    if call.tables.rel_k is not None and stack.rel_k is not None:
        plan, scale = call.tables.rel_k.plan(low, high), call.options.rel_scale
        core = plan.fold(seen, xp=xp)
        rows = stack.rel_k.narrow(-1, plan.start, plan.stop - plan.start).mT
        target = _of_rows(sums.rel_k, stack.place).narrow(-2, plan.start, plan.stop - plan.start)
        _add_product(target, core.mT, stack.rel_q[views.number], scale)
        own.rel_q[views.number].baddbmm_(core, rows, alpha=scale)


def _of_rows(rows: Tensor | None, place: Place) -> Tensor:
    """Return the rows of some heads, (stack or 1, rows, D), of sums that are there."""
    assert rows is not None
    if rows.ndim == 2:
        return rows[None]
    return rows[place.heads] if rows.shape[0] > 1 else rows


def _collect(call: Call, whole: _Whole, sums: list[_Sums], operands: Operands) -> Gradients:
    def total(name: str) -> Tensor | None:
        parts = [part for worker in sums if (part := getattr(worker, name)) is not None]
        return sum(parts[1:], parts[0]) if parts else None

    def table(name: str) -> Tensor | None:
        rows = total(name)
        if rows is None:
            return None
        gradient: Tensor = getattr(call.tables, name).gradient(rows.mT, xp=xp)
        return gradient[..., 0] if name == "rel_bias" else gradient

    mask = total("mask")
    if mask is not None and operands.mask is not None:
        if mask.numel() != operands.mask.numel():  # it broadcasts along some of the batch axes
            mask = mask.reshape(*operands.q.shape[:-3], *mask.shape[1:]).sum_to_size(operands.mask.shape)
        mask = mask.reshape(operands.mask.shape)
    return Gradients(
        q=whole.q.reshape(operands.q.shape),
        k=whole.k.reshape(operands.k.shape),
        v=whole.v.reshape(operands.v.shape),
        rel_k=table("rel_k"),
        rel_v=table("rel_v"),
        rel_bias=table("rel_bias"),
        rel_q=None if operands.rel_q is None or whole.rel_q is None else whole.rel_q.reshape(operands.rel_q.shape),
        mask=mask,
    )

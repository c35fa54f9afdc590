"""torch on CPU: the backward pass, head by head and chunk by chunk.

Gradients of logits are written through the skewed view; what lies under it is the gradient of the product with the
table, ready for the matrix products that follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel import Chunk, visible_columns
from relskew_core._problem import Gradients, Operands, Options
from relskew_core._table import Table
from relskew_core.backends._torch_call import (
    Call,
    Dropout,
    Scratch,
    by_batch,
    fill_hidden,
    of_head,
    of_table,
    run,
    write_logits,
    write_product,
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
    call = Call.of(operands, options, dropout=dropout)
    groups = call.groups()
    workers = max(1, min(torch.get_num_threads(), len(groups)))
    bounds = [len(groups) * index // workers for index in range(workers + 1)]
    # Every worker owns a fixed run of heads and its own sums for what heads share: no two write one place.
    whole = _Whole.of(call, d_out, d_lse)
    sums = [_Sums.of(call, mask_gradient=mask_gradient) for _ in range(workers)]

    def work(index: int) -> None:
        scratch = Scratch(call)
        with torch.inference_mode():
            for batch, group in groups[bounds[index] : bounds[index + 1]]:
                for head in call.heads(group):
                    for chunk in range(len(call.chunks)):
                        _backward(call, scratch, batch, head, chunk, whole, sums[index])

    run(work, range(workers), workers)
    return _collect(call, whole, sums, operands)


@dataclass(frozen=True, slots=True)
class _Whole:
    """The incoming gradients, and the outgoing ones that belong to one head of one batch entry."""

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


def _backward(call: Call, scratch: Scratch, batch: int, head: int, index: int, whole: _Whole, sums: _Sums) -> None:
    chunk, options = call.chunks[index], call.options
    group = head * call.k.shape[1] // call.q.shape[1]
    queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.end)
    q = call.q[batch, head, queries] * options.scale
    k, v = call.k[batch, group, keys], call.v[batch, group, keys]
    d_out = whole.d_out[batch, head, queries]

    logits = write_logits(call, scratch, batch, head, index, q, k)
    weights = scratch.absolute("weights", chunk)
    write_softmax(call, logits, weights)
    fill_hidden(call, index, weights, 0.0)
    kept = None if call.dropout is None else call.dropout.write(call, scratch, batch, head, index)
    of_values = weights if kept is None else torch.mul(weights, kept, out=scratch.absolute("of_values", chunk))
    whole.v[batch, group, keys].addmm_(of_values.t(), d_out)
    d_weights = _write_d_weights(call, scratch, head, chunk, d_out, v, of_values, sums)
    if kept is not None:
        d_weights.mul_(kept)

    # d_logits take the place of the logits, zero wherever no key stands in relative layout
    relative = scratch.relative("logits", chunk)
    if logits.is_contiguous():
        relative.view(-1)[: relative.numel() - logits.numel()].zero_()
        torch.ops.aten._softmax_backward_data.out(d_weights, weights, -1, weights.dtype, grad_input=logits)
    else:
        d_logits = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        write_relative_weights(chunk, d_logits, relative)
    fill_hidden(call, index, logits, 0.0)
    if whole.d_lse is not None:
        logits.addcmul_(weights, whole.d_lse[batch, head, queries, None])
    if sums.mask is not None:
        target = of_head(sums.mask, batch, head)[chunk.of_mask(sums.mask)]
        target.add_(logits.sum_to_size(target.shape))

    whole.k[batch, group, keys].addmm_(logits.t(), q)
    d_q = whole.q[batch, head, queries]
    torch.mm(logits, k, out=d_q).mul_(options.scale)
    _add_relative_terms(call, batch, head, chunk, relative, q, whole, sums)


def _write_d_weights(
    call: Call, scratch: Scratch, head: int, chunk: Chunk, d_out: Tensor, v: Tensor, weights: Tensor, sums: _Sums
) -> Tensor:
    """Write the gradient of the weights, and add to the gradient of ``rel_v``."""
    rel_v = call.tables.rel_v
    if rel_v is None:
        return torch.mm(d_out, v.t(), out=scratch.absolute("d_weights", chunk))
    relative = scratch.relative("relative", chunk)
    write_relative_weights(chunk, weights, relative)
    seen, low, high = visible_columns(relative, chunk, call.options)
    if low <= high:
        plan = rel_v.plan(low, high)
        of_table_rows(sums.rel_v, head)[plan.start : plan.stop].addmm_(plan.fold(seen, xp=xp).t(), d_out)
    relative = scratch.relative("d_weights", chunk)
    relative.zero_()
    if low <= high:
        write_product(rel_v, head, d_out, low, high, relative[:, low - chunk.low : high - chunk.low + 1])
    d_weights: Tensor = chunk.absolute(relative, xp=xp)
    return d_weights.addmm_(d_out, v.t())


def _add_relative_terms(
    call: Call, batch: int, head: int, chunk: Chunk, relative: Tensor, q: Tensor, whole: _Whole, sums: _Sums
) -> None:
    """Add the gradients of ``rel_bias``, ``rel_k`` and the queries that meet it."""
    seen, low, high = visible_columns(relative, chunk, call.options)
    if low > high:
        return
    if call.tables.rel_bias is not None:
        plan = call.tables.rel_bias.plan(low, high)
        of_table_rows(sums.rel_bias, head)[plan.start : plan.stop, 0].add_(plan.fold(seen, xp=xp).sum(0))
    if call.tables.rel_k is not None:
        plan = call.tables.rel_k.plan(low, high)
        core = plan.fold(seen, xp=xp)
        rows = of_table(call.tables.rel_k, head)[:, plan.start : plan.stop].t()
        rel_q = call.relative_queries(batch, head, chunk, q)
        of_table_rows(sums.rel_k, head)[plan.start : plan.stop].addmm_(core.t(), rel_q)
        target = whole.q if whole.rel_q is None else whole.rel_q
        target[batch, head, chunk.start : chunk.stop].addmm_(core, rows, alpha=call.options.rel_scale)


def of_table_rows(rows: Tensor | None, head: int) -> Tensor:
    """Return the rows of one head, (rows, D), of sums that are there."""
    assert rows is not None
    return rows if rows.ndim == 2 else rows[head if rows.shape[0] > 1 else 0]


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

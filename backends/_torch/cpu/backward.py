"""torch on CPU: the backward pass, stack by stack and chunk by chunk.

Gradients of logits are written through the skewed view; what lies under it is the gradient of the product with the
table, ready for the matrix products that follow.
"""

from __future__ import annotations

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.softmax import share_of
from relskew_core._kernel.backward import attention_vjp as portable
from relskew_core._kernel.call import TABLES, Gradients, Operands, Options
from relskew_core._kernel.chunk import visible_columns
from relskew_core.backends._parallel import leave_if_dropped
from relskew_core.backends._torch.cpu import compiled
from relskew_core.backends._torch.cpu.call import Stack, StackedCall, is_short, of_mask, run, undisturbed
from relskew_core.backends._torch.cpu.gradients import Own, Whole, WorkerSums, of_rows, of_table, total
from relskew_core.backends._torch.cpu.parts import flattened, parts, with_zeros
from relskew_core.backends._torch.cpu.product import Product
from relskew_core.backends._torch.cpu.scratch import (
    Scratch,
    Views,
    log_sum_exp,
    write_kept,
    write_logits,
    write_softmax,
)


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    d_lse: Tensor | None = None,
    wanted: frozenset[str] = frozenset(Operands._fields),
) -> Gradients:
    """Return the gradients of every operand; repeatable to the bit for a given number of threads.

    Of those that are not ``wanted`` the mask's alone is left out: it is the one that costs much.
    """
    if compiled.serves_backward(operands, options, wanted):
        with undisturbed():
            return Gradients(**compiled.attention_vjp(d_out, operands, options, out, lse, d_lse, wanted))
    labelled = operands.k_segments is not None or operands.k_positions is not None
    if labelled or is_short(operands):  # what no query of an item sees has no part in gradients there
        with undisturbed():
            return portable(d_out, operands, options, out=out, lse=lse, d_lse=d_lse, xp=xp)
    whole = Whole.of(flattened(operands), options, d_out, out, lse, d_lse, mask_gradient="mask" in wanted)
    tables: dict[str, Tensor] = {}
    for part in parts(flattened(operands), options):
        for name, gradient in _pull_back(StackedCall.of(part.operands, part.options), whole.part(part)).items():
            tables[name] = tables[name] + gradient if name in tables else gradient
    return whole.gradients(operands, with_zeros(tables, operands, TABLES))


def own_attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    out: Tensor | None,
    lse: Tensor | None,
    d_lse: Tensor | None,
    wanted: frozenset[str],
) -> Gradients:
    """Return the same where the results are the call's own: who computes the weights anew needs them not."""
    if not compiled.serves_backward(operands, options, wanted):
        out = lse = None
    return attention_vjp(d_out, operands, options, out=out, lse=lse, d_lse=d_lse, wanted=wanted)


def _pull_back(call: StackedCall, whole: Whole) -> dict[str, Tensor]:
    """Add to the gradients of whole sequences and of the mask, and return those of the tables."""
    shares = call.shares()
    workers = max(1, min(torch.get_num_threads(), len(shares)))
    bounds = [len(shares) * index // workers for index in range(workers + 1)]
    # Every worker owns a fixed run of heads and its own sums for what they share: no two write one place.
    sums = [WorkerSums.of(call, mask=whole.mask) for _ in range(workers)]

    def work(index: int) -> None:
        scratch = Scratch(call)
        with torch.inference_mode():
            for place in [place for share in shares[bounds[index] : bounds[index + 1]] for place in share]:
                stack, own = call.at(place), whole.at(call, place)
                for chunk in range(len(call.chunks)):
                    leave_if_dropped()
                    _backward(call, scratch, stack, chunk, own, sums[index])

    run(work, range(workers), workers)
    if whole.mask is not None:
        whole.mask.add_(total(sums, "mask"))
    return {name: of_table(call, sums, name) for name in TABLES if getattr(sums[0], name, None) is not None}


def _backward(call: StackedCall, scratch: Scratch, stack: Stack, index: int, own: Own, sums: WorkerSums) -> None:
    views, options = scratch.views(index), call.options
    chunk, logits, weights = views.chunk, views.logits, views.weights
    d_out = own.d_out[views.number]

    slope = None if options.softcap is None else scratch.absolute("slope", chunk)
    write_logits(call, views, stack, slope)
    write_softmax(call, views)
    if own.lse is not None:
        sums_here = log_sum_exp(logits, weights).unsqueeze(-1)
        weights.mul_(share_of(sums_here, own.lse[views.number], xp=xp))
    views.clear_hidden(weights)
    kept = write_kept(call, scratch, stack.place, index) if call.drawn else None
    of_values = weights if kept is None else torch.mul(weights, kept, out=scratch.absolute("of_values", chunk))
    _add_product(views.keys(own.v), of_values.mT, d_out)
    d_weights = _write_d_weights(call, scratch, stack, views, d_out, of_values, sums)
    if kept is not None:
        d_weights.mul_(kept)

    _write_d_logits(views, d_weights, None if own.delta is None else own.delta[views.number])
    views.hide(0.0)
    if own.d_lse is not None:
        logits.addcmul_(weights, own.d_lse[views.number])
    if sums.mask is not None:
        target = of_mask(sums.mask, stack.place)[(slice(None), *chunk.of_mask(sums.mask))]
        target.add_(logits.sum_to_size(target.shape))
    if slope is not None:
        logits.mul_(slope)

    _add_product(views.keys(own.k), logits.mT, stack.q[views.number], options.scale)
    d_q = own.q[views.number]
    torch.baddbmm(d_q, logits, views.keys(stack.k), beta=0, alpha=options.scale, out=d_q)
    _add_key_side(stack, views, own, sums, options.rel_scale)
    _add_relative_terms(call, stack, views, own, sums)


def _write_d_logits(views: Views, d_weights: Tensor, delta: Tensor | None) -> None:
    """Write the gradient of the logits over them, zero wherever no key stands in relative layout."""
    relative, logits, weights = views.relative, views.logits, views.weights
    if delta is not None:
        _write_logits(views, d_weights.sub_(delta).mul_(weights))
    elif logits.is_contiguous():
        if views.look_up is None:
            relative.view(-1)[: relative.numel() - logits.numel()].zero_()
        torch.ops.aten._softmax_backward_data.out(d_weights, weights, -1, weights.dtype, grad_input=logits)
    else:
        d_logits = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        _write_logits(views, d_logits)


def _write_logits(views: Views, x: Tensor) -> None:
    """Write absolute layout, (stack, n, m), over the logits."""
    if views.look_up is None:
        views.fold(x, views.relative)
    else:
        views.logits.copy_(x)


def _add_product(place: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """Add ``scale · x y``, summed over the heads where they share one place."""
    if place.shape[0] == x.shape[0]:
        place.baddbmm_(x, y, alpha=scale)
    else:
        place[0].addbmm_(x, y, alpha=scale)


def _write_d_weights(
    call: StackedCall, scratch: Scratch, stack: Stack, views: Views, d_out: Tensor, weights: Tensor, sums: WorkerSums
) -> Tensor:
    """Write the gradient of the weights, and add to the gradient of ``rel_v``."""
    rel_v, chunk, v = call.tables.rel_v, views.chunk, views.values(stack.v)
    if rel_v is None or stack.rel_v is None:
        return torch.bmm(d_out, v.mT, out=scratch.absolute("d_weights", chunk))
    relative = views.fold(weights, scratch.relative("relative", chunk))
    seen, low, high = visible_columns(relative, chunk, call.options)
    if low <= high:
        extension = rel_v.plan(low, high)
        rows = of_rows(sums.rel_v, stack.place)[:, extension.start : extension.stop]
        _add_product(rows, extension.fold(seen, xp=xp).mT, d_out)
    relative = scratch.relative("d_weights", chunk)
    relative.zero_()
    if low <= high:
        place = relative[..., low - chunk.low : high - chunk.low + 1]
        Product.of(rel_v, low, high, place).write(d_out, stack.rel_v, 1.0)
    d_weights: Tensor
    if views.look_up is None:
        d_weights = chunk.absolute(relative, xp=xp)
    else:
        d_weights = views.look_up.gather(relative, scratch.absolute("looked_up", chunk))
    return d_weights.baddbmm_(d_out, v.mT)


def _add_relative_terms(call: StackedCall, stack: Stack, views: Views, own: Own, sums: WorkerSums) -> None:
    """Add the gradients of ``rel_bias``, ``rel_k`` and the queries that meet it."""
    relative = views.relative
    if views.look_up is not None:
        relative = views.fold(views.logits, views.whole)
    seen, low, high = visible_columns(relative, views.chunk, call.options)
    if low > high:
        return
    if call.tables.rel_bias is not None:
        extension = call.tables.rel_bias.plan(low, high)
        target = of_rows(sums.rel_bias, stack.place)[:, extension.start : extension.stop, 0]
        target.add_(extension.fold(seen, xp=xp).sum(-2).sum_to_size(target.shape))
    if call.tables.rel_k is not None and stack.rel_k is not None:
        extension, scale = call.tables.rel_k.plan(low, high), call.options.rel_scale
        core = extension.fold(seen, xp=xp)
        rows = stack.rel_k.narrow(-1, extension.start, extension.stop - extension.start).mT
        target = of_rows(sums.rel_k, stack.place).narrow(-2, extension.start, extension.stop - extension.start)
        _add_product(target, core.mT, stack.rel_q[views.number], scale)
        own.rel_q[views.number].baddbmm_(core, rows, alpha=scale)


def _add_key_side(stack: Stack, views: Views, own: Own, sums: WorkerSums, scale: float) -> None:
    """Add the gradients of ``key_table`` and of the keys that meet it."""
    for block in views.key_side:
        core = block.folded()
        if core is not None and stack.key_table is not None:
            start, count = block.extension.start, core.shape[-1]
            target = of_rows(sums.key_table, stack.place).narrow(-2, start, count)
            _add_product(target, core.mT, stack.k[:, block.keys], scale)
            _add_product(own.k[:, block.keys], core, stack.key_table.narrow(-1, start, count).mT, scale)

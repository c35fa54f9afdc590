"""torch on CPU: the forward pass, stack by stack and chunk by chunk."""

from __future__ import annotations

import math
from dataclasses import replace

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.chunk import visible_columns
from relskew_core._kernel.forward import attention as portable
from relskew_core.backends._parallel import leave_if_dropped
from relskew_core.backends._torch.cpu import compiled
from relskew_core.backends._torch.cpu.call import HeadPlace, Stack, StackedCall, is_short, run, undisturbed
from relskew_core.backends._torch.cpu.parts import flattened, parts
from relskew_core.backends._torch.cpu.scratch import (
    Scratch,
    log_sum_exp,
    write_kept,
    write_logits,
    write_softmax,
)


def attention(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq)."""
    served = compiled.serves(operands, options)
    if is_short(operands) and not served:
        with undisturbed():
            return portable(operands, options, xp=xp)
    flat = flattened(operands)
    shape = flat.q.shape[:-1]
    out = flat.q.new_zeros((*shape, flat.v.shape[-1]))
    lse = flat.q.new_full(shape, -math.inf) if options.return_lse else None
    for part in parts(flat, options):
        own = out[part.items], None if lse is None else lse[part.items]
        if served:
            compiled.attend(part.operands, part.options, *own)
        else:
            _attend(StackedCall.of(part.operands, part.options), *own)
    if options.dropout and not served:
        out.div_(1 - options.dropout)
    lead = operands.q.shape[:-3]
    return out.reshape(*lead, *out.shape[1:]), None if lse is None else lse.reshape(*lead, *lse.shape[1:])


def attention_with_lse(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """Return the output and the log-sum-exp."""
    return attention(operands, replace(options, return_lse=True))


def _attend(call: StackedCall, out: Tensor, lse: Tensor | None) -> None:
    places, workers = [place for share in call.shares() for place in share], torch.get_num_threads()
    pieces = 1 if len(places) >= workers else workers  # few heads: their chunks are dealt to the workers
    idle = [Scratch(call) for _ in range(workers)]

    def work(task: tuple[HeadPlace, int]) -> None:
        place, piece = task
        scratch = idle.pop()
        with torch.inference_mode():
            stack = call.at(place)
            outs = call.by_chunk(out[place.batch, place.heads])
            sums = None if lse is None else call.by_chunk(lse[place.batch, place.heads], axis=-1)
            for index in range(piece, len(call.chunks), pieces):
                leave_if_dropped()
                views = scratch.views(index)
                _attend_chunk(call, scratch, stack, index, outs[views.number])
                if sums is not None:
                    sums[views.number].copy_(log_sum_exp(views.logits, views.weights))
        idle.append(scratch)

    run(work, [(place, piece) for place in places for piece in range(pieces)], workers)


def _attend_chunk(call: StackedCall, scratch: Scratch, stack: Stack, index: int, out: Tensor) -> None:
    views = scratch.views(index)
    weights, chunk = views.weights, views.chunk
    write_logits(call, views, stack)
    write_softmax(call, views)
    if call.tables.rel_v is not None:
        views.clear_hidden(views.weights)
    if call.drawn:
        kept = write_kept(call, scratch, stack.place, index)
        weights = torch.mul(weights, kept, out=kept)
    torch.bmm(weights, views.values(stack.v), out=out)
    if call.tables.rel_v is not None and stack.rel_v is not None:
        relative = views.fold(weights, scratch.relative("relative", chunk))
        seen, low, high = visible_columns(relative, chunk, call.options)
        if low <= high:
            extension = call.tables.rel_v.plan(low, high)
            rows = stack.rel_v[..., extension.start : extension.stop].mT
            out.baddbmm_(extension.fold(seen, xp=xp), rows)

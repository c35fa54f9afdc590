"""torch on CPU: the forward pass, head by head and chunk by chunk."""

from __future__ import annotations

import math

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._chunk import visible_columns
from relskew_core._problem import Operands, Options
from relskew_core.backends._torch_call import (
    Call,
    Dropout,
    Head,
    Scratch,
    of_table,
    run,
    write_logits,
    write_relative_weights,
    write_softmax,
)


def attention(operands: Operands, options: Options, *, dropout: Dropout | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq)."""
    call = Call.of(operands, options, dropout=dropout)
    shape = call.q.shape[:-1]
    out = call.q.new_zeros((*shape, call.v.shape[-1]))
    lse = call.q.new_full(shape, -math.inf) if options.return_lse else None
    groups, workers = call.groups(), torch.get_num_threads()
    parts = 1 if len(groups) >= workers else workers  # few heads: their chunks are dealt to the workers
    idle = [Scratch(call) for _ in range(workers)]

    def work(task: tuple[int, int, int]) -> None:
        batch, group, part = task
        scratch = idle.pop()
        with torch.inference_mode():
            for number in call.heads(group):
                head = call.at(batch, number)
                outs = call.by_chunk(out[batch, number])
                sums = None if lse is None else call.by_chunk(lse[batch, number])
                for index in range(part, len(call.chunks), parts):
                    views = scratch.views(index)
                    _attend(call, scratch, head, index, outs[views.number])
                    if sums is not None:
                        _write_lse(views.logits, views.weights, sums[views.number])
        idle.append(scratch)

    run(work, [(*group, part) for group in groups for part in range(parts)], workers)
    lead = operands.q.shape[:-3]
    return out.reshape(*lead, *out.shape[1:]), None if lse is None else lse.reshape(*lead, *lse.shape[1:])


def _attend(call: Call, scratch: Scratch, head: Head, index: int, out: Tensor) -> None:
    views = scratch.views(index)
    weights, chunk = views.weights, views.chunk
    write_logits(call, views, head)
    write_softmax(call, views)
    if call.tables.rel_v is not None:
        views.clear_hidden(views.weights)
    if call.dropout is not None:
        kept = call.dropout.write(call, scratch, head, index)
        weights = torch.mul(weights, kept, out=kept)
    torch.mm(weights, views.keys(head.v), out=out)
    if call.tables.rel_v is not None:
        relative = scratch.relative("relative", chunk)
        write_relative_weights(chunk, weights, relative)
        seen, low, high = visible_columns(relative, chunk, call.options)
        if low <= high:
            plan = call.tables.rel_v.plan(low, high)
            rows = of_table(call.tables.rel_v, head.number)[:, plan.start : plan.stop].t()
            out.addmm_(plan.fold(seen, xp=xp), rows)


def _write_lse(logits: Tensor, weights: Tensor, lse: Tensor) -> None:
    """Write the log-sum-exp: the largest weight is 1 / sum, or 0 where all logits are -inf."""
    torch.sub(logits.amax(-1), weights.amax(-1).clamp_(min=torch.finfo(weights.dtype).tiny).log_(), out=lse)

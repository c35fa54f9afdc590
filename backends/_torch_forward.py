"""torch on CPU: the forward pass, head by head and chunk by chunk."""

from __future__ import annotations

import math

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel import visible_columns
from relskew_core._problem import Operands, Options
from relskew_core.backends._torch_call import (
    Call,
    Dropout,
    Scratch,
    fill_hidden,
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

    def work(task: tuple[int, int, int]) -> None:
        batch, group, part = task
        scratch = Scratch(call)
        with torch.inference_mode():
            for head in call.heads(group):
                for index in range(part, len(call.chunks), parts):
                    _attend(call, scratch, batch, head, index, out, lse)

    run(work, [(*group, part) for group in groups for part in range(parts)], workers)
    lead = operands.q.shape[:-3]
    return out.reshape(*lead, *out.shape[1:]), None if lse is None else lse.reshape(*lead, *lse.shape[1:])


def _attend(call: Call, scratch: Scratch, batch: int, head: int, index: int, out: Tensor, lse: Tensor | None) -> None:
    chunk, options = call.chunks[index], call.options
    group = head * call.k.shape[1] // call.q.shape[1]
    queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.end)
    q = call.q[batch, head, queries] * options.scale
    logits = write_logits(call, scratch, batch, head, index, q, call.k[batch, group, keys])
    weights = scratch.absolute("weights", chunk)
    write_softmax(call, logits, weights)
    if lse is not None:  # the largest weight is 1 / sum, or 0 where all logits are -inf
        tiny = torch.finfo(weights.dtype).tiny
        lse[batch, head, queries] = logits.amax(-1) - weights.amax(-1).clamp_(min=tiny).log_()
    if call.dropout is not None:
        weights.mul_(call.dropout.write(call, scratch, batch, head, index))
    here = out[batch, head, queries]
    torch.mm(weights, call.v[batch, group, keys], out=here)
    if call.tables.rel_v is not None:
        fill_hidden(call, index, weights, 0.0)
        relative = scratch.relative("relative", chunk)
        write_relative_weights(chunk, weights, relative)
        seen, low, high = visible_columns(relative, chunk, options)
        if low <= high:
            plan = call.tables.rel_v.plan(low, high)
            rows = of_table(call.tables.rel_v, head)[:, plan.start : plan.stop].t()
            here.addmm_(plan.fold(seen, xp=xp), rows)

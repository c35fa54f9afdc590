"""torch on CPU: the backward pass of short calls, from weights that were kept or are computed anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor

from relskew_core._kernel.call import TABLES, Operands
from relskew_core._kernel.plan import Plan
from relskew_core.backends._torch.cpu.short.block import Block, blocks, joined
from relskew_core.backends._torch.cpu.short.forward import attend, columns, meeting, mixed, multiply, skewed, unskewed


def pull_back(d_out: Tensor, x: Operands, plan: Plan, kept: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the operands by name."""
    cut = blocks(x, plan, training=True)
    d_out = d_out.reshape(-1, *d_out.shape[-2:])
    d_outs = [d_out] if len(cut) == 1 else d_out.split(cut[0].q.shape[0])
    parts = [
        _gradients(own, block, plan, kept[number] if kept else attend(block, plan)[2])
        for number, (own, block) in enumerate(zip(d_outs, cut, strict=True))
    ]
    found = {}
    for name in parts[0]:
        own, like = [part[name] for part in parts], getattr(x, name)
        is_table = name in TABLES
        whole = _by_row(sum(own[1:], own[0]), getattr(cut[0], name), plan) if is_table else joined(own)
        if name in ("k", "v") and whole.shape[1] < like.shape[-2]:
            whole = F.pad(whole, (0, 0, plan.layout.first, like.shape[-2] - plan.layout.end))
        found[name] = whole.view(like.shape)
    return found


def _gradients(d_out: Tensor, x: Block, plan: Plan, weights: Tensor) -> dict[str, Tensor]:
    """Return the gradients of some items; those of tables by column, (…, width, D)."""
    options, shape = plan.options, x.q.shape
    scaled, d_out_by_key_head = x.q * options.scale, x.by_key_head(d_out)
    found = {"v": torch.bmm(x.by_key_head(weights).mT, d_out_by_key_head)}
    d_weights = torch.bmm(d_out_by_key_head, x.v.mT).view(weights.shape)
    if x.rel_v is not None:
        rows = x.for_table(d_out, x.rel_v)
        relative = skewed(multiply(rows, columns(x.rel_v, plan)), shape[1], plan)
        (d_weights if relative.ndim == 3 else x.apart(d_weights)).add_(relative)
        found["rel_v"] = multiply(unskewed(weights, x, x.rel_v, plan).mT, rows)
    d_logits = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    if plan.hidden is not None:  # as in the forward pass
        plan.hidden.clear(d_logits)
    by_key_head = x.by_key_head(d_logits)
    found["k"] = torch.bmm(by_key_head.mT, x.by_key_head(scaled))
    d_met = None
    if x.rel_bias is not None:
        found["rel_bias"] = unskewed(d_logits, x, x.rel_bias, plan).sum(-2)[..., None]
    if x.rel_k is not None:
        relative, met = unskewed(d_logits, x, x.rel_k, plan), meeting(x, scaled, plan)
        found["rel_k"] = multiply(relative.mT, x.for_table(met, x.rel_k))
        d_met = x.by_sequence(mixed(relative, x.rel_k, plan)).reshape(shape[0], shape[1], -1)
    if x.rel_q is not None and d_met is not None:
        found["rel_q"], d_met = d_met.mul_(options.rel_scale), None
    if d_met is None:
        d_q = torch.bmm(by_key_head, x.k).mul_(options.scale)
    else:
        d_q = torch.baddbmm(x.by_key_head(d_met), by_key_head, x.k, beta=options.rel_scale, alpha=options.scale)
    found["q"] = d_q.view(shape)
    return found


def _by_row(gradient: Tensor, table: Tensor, plan: Plan) -> Tensor:
    """Return the adjoint of :func:`columns`, from (…, width, D) to (…, R, D)."""
    *lead, count, width = table.shape
    if plan.rows is not None:
        more = plan.options.span.beyond == "zero"
        total = gradient.new_zeros((*lead, count + more, width)).index_add_(-2, plan.rows, gradient)
        return total[..., :count, :].contiguous()
    if plan.layout.width == count:
        return gradient
    return F.pad(gradient, (0, 0, plan.layout.row, count - plan.layout.row - plan.layout.width))

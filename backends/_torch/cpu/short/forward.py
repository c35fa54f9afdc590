"""torch on CPU: the forward pass of short calls, block by block."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor

from relskew_core._array.softmax import NEGLIGIBLE
from relskew_core._kernel.call import Operands
from relskew_core._kernel.plan import Plan
from relskew_core.backends._torch.cpu.scratch import log_sum_exp
from relskew_core.backends._torch.cpu.short.block import Block

TINY = math.exp(NEGLIGIBLE)


def attend_one(x: Operands, plan: Plan) -> Tensor:
    """Return the output of one query for each head, where there is nothing but a table."""
    q, k, v, rel_k, *_ = x
    assert rel_k is not None
    first, end, width, row, _ = plan.layout
    if width < k.shape[-2]:
        k, v = k[..., first:end, :], v[..., first:end, :]
    k, v = k.reshape(-1, width, k.shape[-1]), v.reshape(-1, width, v.shape[-1])
    scaled = q.reshape(-1, q.shape[-1]) * plan.options.scale
    if rel_k.ndim == 2:
        relative = torch.mm(scaled, rel_k.narrow(0, row, width).t())
    else:
        by_head = scaled.view(-1, rel_k.shape[0], scaled.shape[-1]).transpose(0, 1)
        relative = torch.bmm(by_head, rel_k.narrow(1, row, width).mT).transpose(0, 1)
    logits = torch.baddbmm(relative.reshape(k.shape[0], -1, width), scaled.view(k.shape[0], -1, k.shape[-1]), k.mT)
    weights = torch.softmax(logits, -1)
    torch.threshold_(weights, TINY, 0.0)
    return torch.bmm(weights, v).view(*q.shape[:-1], -1)


def attend(x: Block, plan: Plan) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the output (B · H, n, Dv), the log-sum-exp (B · H, n) if asked for, and the weights (B · H, n, m)."""
    options, hidden = plan.options, plan.hidden
    scaled = x.q * options.scale
    logits = _logits(x, scaled, plan)
    if options.softcap is not None:
        logits.mul_(1 / options.softcap).tanh_().mul_(options.softcap)
    if hidden is not None:
        hidden.clear(logits).add_(hidden.bias)
    if x.mask is not None:
        if x.mask.dtype != torch.bool:
            x.apart(logits).add_(x.mask)
        x.apart(logits).masked_fill_(~x.mask if x.mask.dtype == torch.bool else x.mask == -math.inf, -math.inf)
    weights = torch.softmax(logits, -1)
    torch.threshold_(weights, TINY, 0.0)  # no subnormals into the products
    if plan.dead_rows or x.mask is not None:
        weights.masked_fill_(logits.amax(-1, keepdim=True) == -math.inf, 0.0)
    if hidden is not None and x.rel_v is not None:  # in relative layout a query's NaN would be its neighbour's
        hidden.clear(weights)
    out = torch.bmm(x.by_key_head(weights), x.v)
    out = out if x.group == 1 else out.view(*x.q.shape[:2], -1)
    if x.rel_v is not None:
        out += x.by_sequence(mixed(unskewed(weights, x, x.rel_v, plan), x.rel_v, plan)).reshape(out.shape)
    return out, (log_sum_exp(logits, weights) if options.return_lse else None), weights


def _logits(x: Block, scaled: Tensor, plan: Plan) -> Tensor:
    """Return the logits (B · H, n, m), before softcap and masks."""
    q, keys, relative = x.by_key_head(scaled), x.k.mT, _relative_terms(x, scaled, plan)
    if relative is None:
        logits = torch.bmm(q, keys)
    elif relative.ndim == 3 and relative.shape[0] == scaled.shape[0]:  # on top of a view of the product with the table
        logits = torch.baddbmm(x.by_key_head(relative), q, keys)
    else:
        logits = torch.bmm(q, keys)
        x.apart(logits.view(*x.q.shape[:2], -1)).add_(relative)
    return logits if x.group == 1 else logits.view(*x.q.shape[:2], -1)


def _relative_terms(x: Block, scaled: Tensor, plan: Plan) -> Tensor | None:
    """Return what depends on the relative position alone, skewed: (B · H, n, m), or with an axis for each."""
    n = x.q.shape[1]
    bias = None if x.rel_bias is None else columns(x.rel_bias, plan)  # (1, width) or (H, 1, width)
    if x.rel_k is None:
        return None if bias is None else skewed(bias.expand(*bias.shape[:-2], n, -1).contiguous(), n, plan)
    met = x.for_table(meeting(x, scaled, plan), x.rel_k)
    if plan.rows is None or 2 * x.rel_k.shape[-2] > plan.layout.width:
        product = multiply(met, columns(x.rel_k, plan))
    else:  # of a short table it costs less to multiply what is there
        product = extended(multiply(met, x.rel_k.mT), plan)
    if bias is not None:
        by_head = bias.ndim == 3 and product.ndim == 2
        (product.view(x.items, x.heads, n, -1) if by_head else product).add_(bias)
    return skewed(product, n, plan)


def meeting(x: Block, scaled: Tensor, plan: Plan) -> Tensor:
    """Return the queries that meet ``rel_k``, scaled."""
    if x.rel_q is None and plan.options.rel_scale == plan.options.scale:
        return scaled
    return (x.q if x.rel_q is None else x.rel_q) * plan.options.rel_scale


def columns(table: Tensor, plan: Plan) -> Tensor:
    """Return a table by columns of the relative layout, (…, D, width)."""
    if plan.rows is not None:
        return extended(table.mT, plan)
    _, _, width, row, _ = plan.layout
    return (table if width == table.shape[-2] else table.narrow(-2, row, width)).mT


def extended(columns: Tensor, plan: Plan) -> Tensor:
    """Return what stands for the columns of the relative layout, from what stands for the rows of a table."""
    assert plan.rows is not None
    return (F.pad(columns, (0, 1)) if plan.options.span.beyond == "zero" else columns).index_select(-1, plan.rows)


def skewed(x: Tensor, n: int, plan: Plan) -> Tensor:
    """Return a product in relative layout, as :meth:`Block.for_table`, in absolute layout, as a view.

    (B · H, n, m); (B, H, n, m) where the memory has the heads first; (1, H, n, m) or (1, n, m) if it is for all items.
    """
    first, end, width, *_ = plan.layout
    start = x.storage_offset() + n - 1
    if x.ndim == 3 and x.shape[1] > n:
        shape, steps = (x.shape[1] // n, x.shape[0], n, end - first), (n * width, x.stride(0), width - 1, 1)
        return x.as_strided(shape, steps, start)
    return x.as_strided((x.numel() // (n * width), n, end - first), (n * width, width - 1, 1), start)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return torch.mm(x, y) if x.ndim == 2 else torch.bmm(x, y)


def unskewed(s: Tensor, x: Block, table: Tensor, plan: Plan) -> Tensor:
    """Absolute layout (B · H, n, m) to relative layout (…, width), as :meth:`Block.for_table`."""
    _, n, keys = s.shape
    width = plan.layout.width
    s = s if keys == width else F.pad(s, (0, width - keys))
    s = x.apart(s).transpose(0, 1) if table.ndim == 3 and x.items > 1 else s
    lead = s.shape[:-2]
    relative = torch.cat([s.new_zeros((*lead, n)), s.flatten(-2)], -1).view(*lead, n, width + 1)[..., 1:]
    return relative.reshape(-1, width) if table.ndim == 2 else relative.reshape(x.heads, -1, width)


def mixed(relative: Tensor, table: Tensor, plan: Plan) -> Tensor:
    """Return ``Σ_r w_r e_r``; rows that no query sees are never multiplied, not even by zero."""
    seen = plan.layout.seen
    return multiply(relative[..., seen], columns(table, plan)[..., seen].mT)

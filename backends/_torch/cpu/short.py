"""torch on CPU: short calls, all queries at once and many heads.

Every operation costs some microseconds however little it does, and a short call is little else. So there are few of
them: nothing is cut into chunks of queries, no operator stands between the caller and the kernel, and autograd knows
one node, which keeps the weights where they are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor
from torch.autograd import forward_ad

from relskew_core._array.softmax import NEGLIGIBLE
from relskew_core._kernel.call import DIFFERENTIABLE, TABLES, Operands, Options
from relskew_core._kernel.plan import Layout, Plan
from relskew_core._positions.visibility import Visibility
from relskew_core.backends._compiled import Call
from relskew_core.backends._in_place import mask_by_batch
from relskew_core.backends._torch.cpu import compiled as kernels
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.cpu.scratch import log_sum_exp
from relskew_core.backends._torch.operator import flat

TYPES = frozenset((Tensor, torch.nn.Parameter, NoneType))
"""Of arguments; subclasses have ways of their own."""

LOGITS = 2**16
"""Logits of a head up to which this is the faster way: of more, chunks save what no query sees."""

BLOCK = 2**18
"""Logits of the items that are worked on at once: in the caches, and enough for some threads. Twice as many in
training, where gradients have to be put together again as well."""

KEPT = 2**20
"""Weights up to which they are kept for the backward pass; logits that an item may have: what memory is spent on."""

TINY = math.exp(NEGLIGIBLE)

COUNT = len(Operands._fields)


def ordinary() -> bool:
    """Whether nobody traces, watches or changes what is computed here."""
    return not (
        torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


about = attrgetter("dtype", "device", "layout")
"""What a call's checks look at in a tensor, its shape aside."""


def serves(x: Operands) -> bool:
    """Whether these kernels are for such arrays."""
    return x.q.device.type == "cpu" and all(each is None or each.layout == torch.strided for each in x)


compiled = kernels.call_of
"""What compiled kernels are to know of a call, ``None`` if they do not serve it."""


def rows(wanted: Sequence[int]) -> Tensor:
    """Return which rows of a table are wanted, as an array."""
    return torch.tensor(wanted)


class Hidden(NamedTuple):
    """What the pattern hides from queries. Triangles are cleared and added to in half the time of a masked fill."""

    bias: Tensor  # (n, m), -inf where a key is hidden, else 0
    diagonals: tuple[int | None, int | None]  # the first and the last one that is seen
    blocks: Tensor | None  # where what is hidden has no such form: booleans (n, m)

    def clear(self, x: Tensor) -> Tensor:
        """Put zeros into (..., n, m) where a key is hidden, whatever stands there."""
        first, last = self.diagonals
        if self.blocks is not None:
            return x.masked_fill_(self.blocks, 0.0)
        if last is not None:
            x.tril_(last)
        return x if first is None else x.triu_(first)


def hidden(seen: Tensor, visibility: Visibility, layout: Layout, dtype: torch.dtype) -> Hidden:
    """Return what is hidden, from which keys are seen, (n, m)."""
    shift = visibility.offset - layout.first
    first, last = (
        None if visibility.left is None else shift - visibility.left,
        None if visibility.right is None else shift + visibility.right,
    )
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
    return Hidden(bias, (first, last), None if visibility.block_size is None else ~seen)


def is_short(shape: Sequence[int], keys: int) -> bool:
    """Whether this is the faster way, and memory stays small, for queries of a shape. One has no chunks to cut."""
    heads, queries = shape[-3] if len(shape) > 2 else 1, shape[-2]
    return heads * queries * keys <= KEPT and (queries == 1 or queries * keys <= LOGITS)


def attention(x: Operands, plan: Plan | Call) -> tuple[Tensor, Tensor | None] | None:
    """Return the output and, if asked for, the log-sum-exp; ``None`` if gradients are asked for that it has not."""
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in x):
        learned = x.mask is not None and x.mask.requires_grad
        if learned or plan.options.return_lse or plan.options.softcap is not None:
            return None
        apply: Any = (_Compiled if isinstance(plan, Call) else _Attention).apply
        return apply(plan, *x), None
    if isinstance(plan, Call):
        return kernels.attention(x, plan)
    if x.q.shape[-2] == 1 and plan.is_plain:
        return _attend_one(x, plan), None
    parts = [_attend(block, plan)[:2] for block in _blocks(x, plan, BLOCK)]
    out, lse = (_joined(each) for each in zip(*parts, strict=True))
    shape = x.q.shape[:-1]
    return out.view(*shape, -1), None if lse is None else lse.view(shape)


def _attend_one(x: Operands, plan: Plan) -> Tensor:
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


class _Attention(torch.autograd.Function):
    """The output alone, with gradients."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *operands: Tensor | None) -> Tensor:
        """Attend, and keep the weights if they are few."""
        x = Operands(*operands)
        parts = [_attend(block, plan) for block in _blocks(x, plan, 2 * BLOCK)]
        kept = [weights for _, _, weights in parts]
        ctx.plan = plan
        ctx.save_for_backward(*operands, *(kept if sum(weights.numel() for weights in kept) <= KEPT else ()))
        return _joined([out for out, _, _ in parts]).view(*x.q.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; where these are to be differentiated again, the operator's."""
        saved = ctx.saved_tensors  # which checkpoints let nobody ask for twice
        operands, kept = Operands(*saved[:COUNT]), saved[COUNT:]
        options = ctx.plan.options_for(operands.k.shape[-2])
        return _wanted(ctx, d_out, operands, options, lambda: _pull_back(d_out, operands, ctx.plan, kept))


class _Compiled(torch.autograd.Function):
    """The same by compiled kernels, which keep the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Tensor | None) -> Tensor:
        """Attend."""
        out, lse = kernels.attention(Operands(*operands), call, return_lse=True)
        ctx.call = call
        ctx.save_for_backward(*operands, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; where these are to be differentiated again, the operator's."""
        *operands, out, lse = ctx.saved_tensors  # which checkpoints let nobody ask for twice
        x, call = Operands(*operands), ctx.call
        compute = partial(kernels.pull_back, d_out, x, call, out, lse)
        return _wanted(ctx, d_out, x, call.own_options, compute, out, lse)


def _wanted(
    ctx: Any, d_out: Tensor, x: Operands, options: Options, compute: Callable[[], dict[str, Any]], *results: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients that are asked for; where these are to be differentiated again, the operator's."""
    wanted = [name for name, needs in zip(Operands._fields, ctx.needs_input_grad[1:], strict=True) if needs]
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not ordinary():
        gradients = _by_operator(d_out, x, options, wanted, *results)
    else:
        gradients = compute()
    return (None, *(gradients[name] if name in wanted else None for name in Operands._fields))


def _by_operator(
    d_out: Tensor,
    x: Operands,
    options: Options,
    wanted: list[str],
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> dict[str, Any]:
    found = OPERATOR.vjp(d_out, None, out, lse, " ".join(wanted), *x, *flat(options))
    return dict(zip(DIFFERENTIABLE, found, strict=True))


class _Block(NamedTuple):
    """Some items of a call: sequences (items · heads, length, width), a bias as a table one wide."""

    heads: int
    group: int  # how many of them have one key head
    q: Tensor
    k: Tensor  # those that some query sees
    v: Tensor
    rel_k: Tensor | None  # (R, D) or (H, R, D)
    rel_v: Tensor | None
    rel_bias: Tensor | None
    rel_q: Tensor | None
    mask: Tensor | None  # (items or 1, heads or 1, n or 1, m or 1)

    @property
    def items(self) -> int:
        return self.q.shape[0] // self.heads

    def by_key_head(self, x: Tensor) -> Tensor:
        """Put the queries together that meet one key head."""
        return x if self.group == 1 else x.reshape(x.shape[0] // self.group, -1, x.shape[-1])

    def apart(self, x: Tensor) -> Tensor:
        """Return (items · heads, ...) as (items, heads, ...)."""
        return x.view(self.items, self.heads, *x.shape[1:])

    def for_table(self, x: Tensor, table: Tensor) -> Tensor:
        """Return (items · heads, n, a) as (items · heads · n, a), or (heads, items · n, a) for a table by head."""
        if table.ndim == 2:
            return x.reshape(-1, x.shape[-1])
        return x if self.items == 1 else self.apart(x).transpose(0, 1).reshape(self.heads, -1, x.shape[-1])

    def by_sequence(self, x: Tensor) -> Tensor:
        """Return the inverse of :meth:`for_table`, with an axis for items where that needs no copy else."""
        n = self.q.shape[1]
        if x.ndim == 2 or self.items == 1:
            return x.view(-1, n, x.shape[-1])
        return x.view(self.heads, self.items, n, -1).transpose(0, 1)


def _blocks(x: Operands, plan: Plan, logits: int) -> list[_Block]:
    """Cut a call into some items each, of so many logits."""
    q, k, v, rel_k, rel_v, bias, rel_q, mask, *_ = x
    first, end, *_ = plan.layout
    heads, group = q.shape[-3], q.shape[-3] // k.shape[-3]
    if end - first < k.shape[-2]:
        k, v = k[..., first:end, :], v[..., first:end, :]
    q, k, v = q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:])
    if bias is not None:
        bias = bias[..., None] if bias.shape[0] == heads else bias[0, :, None]
    if rel_q is not None:
        rel_q = rel_q.reshape(-1, *rel_q.shape[-2:])
    if mask is not None:
        mask = mask_by_batch(mask if mask.shape[-1] == 1 else mask[..., first:end], x.q, xp=xp)
    whole = _Block(heads, group, q, k, v, rel_k, rel_v, bias, rel_q, mask)
    size = max(1, logits // (heads * q.shape[1] * k.shape[1]))
    if size >= whole.items:
        return [whole]
    starts = range(0, whole.items, size)

    def cut(x: Tensor | None, rows: int) -> Iterable[Tensor | None]:
        return repeat(x) if x is None or x.shape[0] == 1 else x.split(size * rows)

    parts = (cut(q, heads), cut(k, heads // group), cut(v, heads // group), cut(rel_q, heads), cut(mask, 1))
    return [
        _Block(heads, group, q, k, v, rel_k, rel_v, bias, rel_q, mask)
        for _, q, k, v, rel_q, mask in zip(starts, *parts, strict=False)
    ]


def _joined(parts: list[Any] | tuple[Any, ...]) -> Any:
    """Put the blocks' results together again."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)


def _attend(x: _Block, plan: Plan) -> tuple[Tensor, Tensor | None, Tensor]:
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
        out += x.by_sequence(_mixed(_unskewed(weights, x, x.rel_v, plan), x.rel_v, plan)).reshape(out.shape)
    return out, (log_sum_exp(logits, weights) if options.return_lse else None), weights


def _logits(x: _Block, scaled: Tensor, plan: Plan) -> Tensor:
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


def _relative_terms(x: _Block, scaled: Tensor, plan: Plan) -> Tensor | None:
    """Return what depends on the relative position alone, skewed: (B · H, n, m), or with an axis for each."""
    n = x.q.shape[1]
    bias = None if x.rel_bias is None else _columns(x.rel_bias, plan)  # (1, width) or (H, 1, width)
    if x.rel_k is None:
        return None if bias is None else _skewed(bias.expand(*bias.shape[:-2], n, -1).contiguous(), n, plan)
    met = x.for_table(_meeting(x, scaled, plan), x.rel_k)
    if plan.rows is None or 2 * x.rel_k.shape[-2] > plan.layout.width:
        product = _product(met, _columns(x.rel_k, plan))
    else:  # of a short table it costs less to multiply what is there
        product = _extended(_product(met, x.rel_k.mT), plan)
    if bias is not None:
        by_head = bias.ndim == 3 and product.ndim == 2
        (product.view(x.items, x.heads, n, -1) if by_head else product).add_(bias)
    return _skewed(product, n, plan)


def _meeting(x: _Block, scaled: Tensor, plan: Plan) -> Tensor:
    """Return the queries that meet ``rel_k``, scaled."""
    if x.rel_q is None and plan.options.rel_scale == plan.options.scale:
        return scaled
    return (x.q if x.rel_q is None else x.rel_q) * plan.options.rel_scale


def _columns(table: Tensor, plan: Plan) -> Tensor:
    """Return a table by columns of the relative layout, (…, D, width)."""
    if plan.rows is not None:
        return _extended(table.mT, plan)
    _, _, width, row, _ = plan.layout
    return (table if width == table.shape[-2] else table.narrow(-2, row, width)).mT


def _extended(columns: Tensor, plan: Plan) -> Tensor:
    """Return what stands for the columns of the relative layout, from what stands for the rows of a table."""
    assert plan.rows is not None
    return (F.pad(columns, (0, 1)) if plan.options.span.beyond == "zero" else columns).index_select(-1, plan.rows)


def _skewed(x: Tensor, n: int, plan: Plan) -> Tensor:
    """Return a product in relative layout, as :meth:`_Block.for_table`, in absolute layout, as a view.

    (B · H, n, m); (B, H, n, m) where the memory has the heads first; (1, H, n, m) or (1, n, m) if it is for all items.
    """
    first, end, width, *_ = plan.layout
    start = x.storage_offset() + n - 1
    if x.ndim == 3 and x.shape[1] > n:
        shape, steps = (x.shape[1] // n, x.shape[0], n, end - first), (n * width, x.stride(0), width - 1, 1)
        return x.as_strided(shape, steps, start)
    return x.as_strided((x.numel() // (n * width), n, end - first), (n * width, width - 1, 1), start)


def _product(x: Tensor, y: Tensor) -> Tensor:
    return torch.mm(x, y) if x.ndim == 2 else torch.bmm(x, y)


def _unskewed(s: Tensor, x: _Block, table: Tensor, plan: Plan) -> Tensor:
    """Absolute layout (B · H, n, m) to relative layout (…, width), as :meth:`_Block.for_table`."""
    _, n, keys = s.shape
    width = plan.layout.width
    s = s if keys == width else F.pad(s, (0, width - keys))
    s = x.apart(s).transpose(0, 1) if table.ndim == 3 and x.items > 1 else s
    lead = s.shape[:-2]
    relative = torch.cat([s.new_zeros((*lead, n)), s.flatten(-2)], -1).view(*lead, n, width + 1)[..., 1:]
    return relative.reshape(-1, width) if table.ndim == 2 else relative.reshape(x.heads, -1, width)


def _mixed(relative: Tensor, table: Tensor, plan: Plan) -> Tensor:
    """Return ``Σ_r w_r e_r``; rows that no query sees are never multiplied, not even by zero."""
    seen = plan.layout.seen
    return _product(relative[..., seen], _columns(table, plan)[..., seen].mT)


def _pull_back(d_out: Tensor, x: Operands, plan: Plan, kept: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the operands by name."""
    blocks = _blocks(x, plan, 2 * BLOCK)
    d_out = d_out.reshape(-1, *d_out.shape[-2:])
    d_outs = [d_out] if len(blocks) == 1 else d_out.split(blocks[0].q.shape[0])
    parts = [
        _gradients(own, block, plan, kept[number] if kept else _attend(block, plan)[2])
        for number, (own, block) in enumerate(zip(d_outs, blocks, strict=True))
    ]
    found = {}
    for name in parts[0]:
        own, like = [part[name] for part in parts], getattr(x, name)
        is_table = name in TABLES
        whole = _by_row(sum(own[1:], own[0]), getattr(blocks[0], name), plan) if is_table else _joined(own)
        if name in ("k", "v") and whole.shape[1] < like.shape[-2]:
            whole = F.pad(whole, (0, 0, plan.layout.first, like.shape[-2] - plan.layout.end))
        found[name] = whole.view(like.shape)
    return found


def _gradients(d_out: Tensor, x: _Block, plan: Plan, weights: Tensor) -> dict[str, Tensor]:
    """Return the gradients of some items; those of tables by column, (…, width, D)."""
    options, shape = plan.options, x.q.shape
    scaled, d_out_by_key_head = x.q * options.scale, x.by_key_head(d_out)
    found = {"v": torch.bmm(x.by_key_head(weights).mT, d_out_by_key_head)}
    d_weights = torch.bmm(d_out_by_key_head, x.v.mT).view(weights.shape)
    if x.rel_v is not None:
        rows = x.for_table(d_out, x.rel_v)
        relative = _skewed(_product(rows, _columns(x.rel_v, plan)), shape[1], plan)
        (d_weights if relative.ndim == 3 else x.apart(d_weights)).add_(relative)
        found["rel_v"] = _product(_unskewed(weights, x, x.rel_v, plan).mT, rows)
    d_logits = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    if plan.hidden is not None:  # as in the forward pass
        plan.hidden.clear(d_logits)
    by_key_head = x.by_key_head(d_logits)
    found["k"] = torch.bmm(by_key_head.mT, x.by_key_head(scaled))
    d_met = None
    if x.rel_bias is not None:
        found["rel_bias"] = _unskewed(d_logits, x, x.rel_bias, plan).sum(-2)[..., None]
    if x.rel_k is not None:
        relative, met = _unskewed(d_logits, x, x.rel_k, plan), _meeting(x, scaled, plan)
        found["rel_k"] = _product(relative.mT, x.for_table(met, x.rel_k))
        d_met = x.by_sequence(_mixed(relative, x.rel_k, plan)).reshape(shape[0], shape[1], -1)
    if x.rel_q is not None and d_met is not None:
        found["rel_q"], d_met = d_met.mul_(options.rel_scale), None
    if d_met is None:
        d_q = torch.bmm(by_key_head, x.k).mul_(options.scale)
    else:
        d_q = torch.baddbmm(x.by_key_head(d_met), by_key_head, x.k, beta=options.rel_scale, alpha=options.scale)
    found["q"] = d_q.view(shape)
    return found


def _by_row(gradient: Tensor, table: Tensor, plan: Plan) -> Tensor:
    """Return the adjoint of :func:`_columns`, from (…, width, D) to (…, R, D)."""
    *lead, count, width = table.shape
    if plan.rows is not None:
        more = plan.options.span.beyond == "zero"
        total = gradient.new_zeros((*lead, count + more, width)).index_add_(-2, plan.rows, gradient)
        return total[..., :count, :].contiguous()
    if plan.layout.width == count:
        return gradient
    return F.pad(gradient, (0, 0, plan.layout.row, count - plan.layout.row - plan.layout.width))

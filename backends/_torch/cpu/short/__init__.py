"""torch on CPU: short calls, all queries at once and many heads.

Every operation costs some microseconds however little it does, and a short call is little else. So there are few of
them: nothing is cut into chunks of queries, no operator stands between the caller and the kernel, and autograd knows
one node, which keeps the weights where they are small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from types import NoneType

import torch
from torch import Tensor

from relskew_core._kernel.call import Operands
from relskew_core._kernel.plan import Layout, Plan
from relskew_core._positions.visibility import Visibility
from relskew_core.backends._compiled import Call
from relskew_core.backends._torch.cpu import compiled as kernels
from relskew_core.backends._torch.cpu.short import differentiable, forward
from relskew_core.backends._torch.cpu.short.block import Hidden, blocks, joined
from relskew_core.backends._torch.cpu.short.differentiable import ordinary as ordinary
from relskew_core.backends._torch.watched import asks_for_gradients

TYPES = frozenset((Tensor, torch.nn.Parameter, NoneType))
"""Of arguments; subclasses have ways of their own."""

LOGITS = 2**16
"""Logits of a head up to which this is the faster way: of more, chunks save what no query sees."""

ONLY_COMPILED = False
"""Whether compiled kernels are all that there is here for short calls."""

about = attrgetter("dtype", "device", "layout")
"""What a call's checks look at in a tensor, its shape aside."""


def serves(x: Operands) -> bool:
    """Whether these kernels are for such arrays."""
    return x.q.device.type == "cpu" and all(each is None or each.layout == torch.strided for each in x)


compiled = kernels.call_of
"""What compiled kernels are to know of a call, ``None`` if they do not serve it."""


def rows(wanted: Sequence[int]) -> Tensor:
    """Return which rows of a table are wanted, as an array."""
    return torch.tensor(wanted, dtype=torch.int64, device="cpu")


def hidden(seen: Tensor, visibility: Visibility, layout: Layout, dtype: torch.dtype) -> Hidden:
    """Return what is hidden, from which keys are seen, (n, m)."""
    shift = visibility.offset - layout.first
    first, last = (
        None if visibility.left is None else shift - visibility.left,
        None if visibility.right is None else shift + visibility.right,
    )
    bias = seen.new_zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
    return Hidden(bias, (first, last), None if visibility.block_size is None else ~seen)


def is_short(shape: Sequence[int], keys: int) -> bool:
    """Whether this is the faster way, and memory stays small, for queries of a shape. One has no chunks to cut."""
    heads, queries = shape[-3] if len(shape) > 2 else 1, shape[-2]
    return heads * queries * keys <= differentiable.KEPT and (queries == 1 or queries * keys <= LOGITS)


def takes(x: Operands, plan: Plan | Call) -> bool:
    """Whether a call of such a plan is for these kernels: they have all the gradients that are asked for."""
    if isinstance(plan, Call) or not asks_for_gradients(x):
        return True
    learned = x.mask is not None and x.mask.requires_grad
    return plan.options.softcap is None and not plan.options.return_lse and not learned


def attention(x: Operands, plan: Plan | Call) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if asked for, the log-sum-exp."""
    if asks_for_gradients(x):
        if isinstance(plan, Call):
            return differentiable.by_kernels(x, plan)
        return differentiable.attention(x, plan), None
    if isinstance(plan, Call):
        return kernels.attention(x, plan)
    if x.q.shape[-2] == 1 and plan.is_plain:
        return forward.attend_one(x, plan), None
    parts = [forward.attend(block, plan)[:2] for block in blocks(x, plan)]
    out, lse = (joined(each) for each in zip(*parts, strict=True))
    shape = x.q.shape[:-1]
    return out.view(*shape, -1), None if lse is None else lse.view(shape)

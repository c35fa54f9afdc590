"""torch on CPU: a ragged batch as calls of their own, one for all items after one another that have the same offset.

Around the operator, which takes no offsets by item. The windows of an item's tables stand at offset 0 already: what may
be seen is moved there as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from relskew_core._kernel import backward as portable_backward
from relskew_core._kernel import forward as portable
from relskew_core._kernel.call import DIFFERENTIABLE, TABLES, Gradients, Operands, Options
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core._positions.visibility import Visibility
from relskew_core.backends._torch.cpu import backward
from relskew_core.backends._torch.cpu.call import is_short
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.cpu.parts import flattened, mask_of_call


def serves(options: Options) -> bool:
    """Whether items may be called for on their own: blocks and dropout go by where queries stand."""
    pattern = options.visibility
    known = isinstance(pattern, RaggedVisibility) and bool(pattern.known)
    return known and pattern.block_size is None and not options.dropout


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if asked for, the log-sum-exp."""
    if is_short(operands):
        return portable.attention(operands, options, xp=xp)
    outs, sums = zip(*(OPERATOR(*run) for run in runs(operands, options)), strict=True)
    rows = operands.q.shape[:-1]
    out = torch.cat(outs).reshape(*rows, operands.v.shape[-1])
    return out, torch.cat(sums).reshape(rows) if options.return_lse else None


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    d_lse: Tensor | None = None,
    xp: Any,
) -> Gradients:
    """Return the gradients of every operand."""
    if is_short(operands):
        return portable_backward.attention_vjp(d_out, operands, options, out=out, lse=lse, d_lse=d_lse, xp=xp)
    sizes, like = _sizes(options), flattened(operands)
    named = {"d_out": d_out, "out": out, "lse": lse, "d_lse": d_lse}
    axes = operands.q.ndim - 3
    given = {name: _apart(name, None if x is None else x.flatten(0, axes - 1), sizes) for name, x in named.items()}
    total = {
        name: torch.zeros_like(x)
        for name in DIFFERENTIABLE
        if (x := getattr(like, name)) is not None and x.is_floating_point()
    }
    places = {name: _apart(name, x, sizes) for name, x in total.items()}
    for index, (own, pattern) in enumerate(runs(operands, options)):
        cotangents: dict[str, Any] = {name: pieces[index] for name, pieces in given.items()}
        found = backward.attention_vjp(operands=own, options=pattern, **cotangents)
        for name, pieces in places.items():
            pieces[index].add_(getattr(found, name))
    if "mask" in total:
        total["mask"] = mask_of_call(total["mask"], operands)
    return Gradients(**{name: x.reshape(getattr(operands, name).shape) for name, x in total.items()})


def runs(operands: Operands, options: Options) -> Iterator[tuple[Operands, Options]]:
    """Cut a ragged batch whose offsets are known."""
    pattern, sizes = options.visibility, _sizes(options)
    assert isinstance(pattern, RaggedVisibility)
    pieces = [_apart(name, x, sizes) for name, x in flattened(operands)._asdict().items()]
    for own, (offset, _) in zip(zip(*pieces, strict=True), groupby(pattern.known or ()), strict=True):
        left = None if pattern.left is None else pattern.left - offset
        right = None if pattern.right is None else pattern.right + offset
        moved = Visibility(pattern.n_queries, pattern.n_keys, 0, left, right).bounded()
        yield Operands(*own), replace(options, visibility=moved)


def _sizes(options: Options) -> list[int]:
    """Return how many items one after the other have the same offset."""
    return [sum(1 for _ in items) for _, items in groupby(getattr(options.visibility, "known", None) or ())]


def _apart(name: str, x: Tensor | None, sizes: list[int]) -> Sequence[Any]:
    """Return what each run has of a flattened array; of windows of tables, which are the same for all, the first's."""
    if x is None or name == "seed" or x.shape[0] < sum(sizes):
        return [x] * len(sizes)
    pieces = x.split(sizes)  # at once, which autograd puts together at once
    return [piece[0] for piece in pieces] if name in TABLES else pieces

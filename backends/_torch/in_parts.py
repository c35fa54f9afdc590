"""torch: attention in parts, some queries at a time, as one operator that autograd and ``torch.compile`` see whole.

A program that traced the parts would be made for one number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core.backends._torch.operator import TwoOperators

Arrays = Sequence[Tensor]
Layout = Sequence[Any]


class OperatorInParts(TwoOperators):
    """``relskew::name`` and ``relskew::name_vjp``, which computes the parts again.

    Parameters
    ----------
    name : str
        Of the operator.
    parts : callable
        ``parts(arrays, axes, spans, numbers, xp=xp)`` with three lists of ints yields the range of some queries, their
        output and their log-sum-exp; the arrays are ``q, k, v`` and others, which may be ``None``. The last number is 0
        if the log-sum-exp has no gradient.
    """

    def __init__(self, name: str, parts: Callable[..., Iterator[tuple[slice, Tensor, Tensor]]]) -> None:
        self._of = parts
        given = "Tensor[] arrays, bool[] given, SymInt[] axes, SymInt[] spans, SymInt[] numbers"
        self.register(name, given, "Tensor d_out, Tensor d_lse, bool[] wanted", "Tensor[]")

    def __call__(self, arrays: Sequence[Tensor | None], *layout: Layout) -> tuple[Tensor, Tensor]:
        """Attend."""
        results: tuple[Tensor, Tensor] = self.op(  # lists with None have no gradients
            [x for x in arrays if x is not None], [x is not None for x in arrays], *layout
        )
        return results

    def _parts(self, arrays: Arrays, given: Sequence[bool], *layout: Layout) -> Iterator[tuple[slice, Tensor, Tensor]]:
        those = iter(arrays)
        return self._of([next(those) if is_given else None for is_given in given], *layout, xp=xp)

    def _forward(self, arrays: Arrays, *layout: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), torch.autocast(arrays[0].device.type, enabled=False):
            _, outs, lses = zip(*self._parts(arrays, *layout), strict=True)
            return torch.cat(outs, -2), torch.cat(lses, -1)

    def _fake(self, arrays: Arrays, *layout: Any) -> tuple[Tensor, Tensor]:
        q, v = arrays[0], arrays[2]
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])

    def _vjp(self, d_out: Tensor, d_lse: Tensor, wanted: Sequence[bool], arrays: Arrays, *layout: Any) -> list[Tensor]:
        """Return the gradients of the wanted arrays, which add up over the parts."""
        leaves = [x.detach().requires_grad_(own) for x, own in zip(arrays, wanted, strict=True)]
        below = torch._C.DispatchKey.AutogradFunctionality  # which the kernels of operators exclude
        with (
            torch._C._SetExcludeDispatchKeyGuard(below, False),
            torch.enable_grad(),
            torch.autocast(d_out.device.type, enabled=False),
        ):
            for rows, out, lse in self._parts(leaves, *layout):
                pairs = [(out, d_out[..., rows, :])]
                if layout[-1][-1]:
                    pairs.append((lse, d_lse[..., rows]))
                pairs = [pair for pair in pairs if pair[0].requires_grad]
                if pairs:
                    torch.autograd.backward([x for x, _ in pairs], [d_x for _, d_x in pairs])
        chosen = [x for x, own in zip(leaves, wanted, strict=True) if own]
        return [x.new_zeros(x.shape) if x.grad is None else x.grad.contiguous() for x in chosen]

    def _fake_vjp(
        self, d_out: Tensor, d_lse: Tensor, wanted: Sequence[bool], arrays: Arrays, *layout: Any
    ) -> list[Tensor]:
        return [x.new_empty(x.shape) for x, own in zip(arrays, wanted, strict=True) if own]

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        arrays, *ctx.layout = inputs
        ctx.save_for_backward(*arrays)

    def _backward(self, ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[0]
        found = iter(self.vjp(d_out, d_lse, wanted, ctx.saved_tensors, *ctx.layout))
        return [next(found) if own else None for own in wanted], *[None] * len(ctx.layout)

    def _vmap(
        self, info: Any, in_dims: tuple[Any, ...], arrays: Arrays, *layout: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """Attend with each item separately."""
        dims = list(zip(arrays, in_dims[0], strict=True))
        items = [
            self.op([x if dim is None else x.select(dim, item) for x, dim in dims], *layout)
            for item in range(info.batch_size)
        ]
        return tuple(torch.stack(results) for results in zip(*items, strict=True)), (0, 0)

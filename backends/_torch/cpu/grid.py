"""torch on CPU: gradients of calls on grids under transformations, or of second order, from torch's operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from relskew_core._array.softmax import joint, log_sum_exp
from relskew_core._kernel.call import GridOperands, GridOptions, Operands, Options, named
from relskew_core.backends._torch.cpu.operator import OPERATOR


def gradients(
    d_out: Tensor, d_lse: Tensor | None, x: GridOperands, options: GridOptions, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """Return a dictionary of gradients, from the call whose mask includes the products with the axes' tables."""
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Options)}
    with torch.enable_grad():
        own = {name: each if each is None else each.view_as(each) for name, each in named(x).items()}
        views = GridOperands(**own)
        plain = Operands(**{name: own[name] for name in Operands._fields})._replace(mask=_mask(views, options))
        out, sums = OPERATOR(plain, Options(**{**given, "return_lse": True}))
        lse = log_sum_exp(sums)
    results: Any
    results, cotangents = ((out,), (d_out,)) if d_lse is None else ((out, lse), (d_out, d_lse))
    inputs: list[Any] = [own[name] for name in wanted]
    create = torch.is_grad_enabled()
    found = torch.autograd.grad(results, inputs, cotangents, create_graph=create, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def _mask(x: GridOperands, options: GridOptions) -> Tensor:
    """Return a call's mask with the products of its queries with the tables of the axes, (..., H, Lq, Lk)."""
    assert x.axis_tables is not None
    added, first = [], 0
    for side in options.sides:
        rows = x.axis_tables[..., first : first + side.rows, :]
        products = torch.matmul((x.q if x.rel_q is None else x.rel_q) * options.rel_scale, rows.mT)
        queries = (side.queries - 1 - _places(side.queries, x.q)) * side.query_step
        added.append((products, queries[:, None] + _places(side.keys, x.q) * side.key_step))
        first += side.rows
    total: Any = 0
    cells = math.prod(side.queries for side in options.sides)
    outside = x.q.shape[-2] - cells, x.k.shape[-2] - math.prod(side.keys for side in options.sides)
    for place, (products, rows_of) in enumerate(added):
        before = math.prod(side.queries for side in options.sides[place + 1 :])
        own = rows_of[_places(cells, x.q) // before % len(rows_of)]
        read = products[..., outside[0] :, :].gather(-1, own.expand(*products.shape[:-2], -1, -1))
        shape = [side.keys if other == place else 1 for other, side in enumerate(options.sides)]
        total = total + read.reshape(*read.shape[:-1], *shape)
    total = torch.nn.functional.pad(total.flatten(-len(options.sides)), (outside[1], 0, outside[0], 0))
    mask: Any = joint(total, x.mask, xp=torch)
    return mask


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=like.device)

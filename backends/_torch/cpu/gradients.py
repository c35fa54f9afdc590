"""torch on CPU: where the gradients of a call are written, and what comes in for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel.call import KINDS, Gradients, Kind, Operands, Options, names_of
from relskew_core._positions.table import Table
from relskew_core.backends._in_place import by_batch
from relskew_core.backends._torch.cpu.call import HeadPlace, StackedCall
from relskew_core.backends._torch.cpu.parts import Part, mask_of_call


@dataclass(frozen=True, slots=True)
class Whole:
    """The incoming gradients, and the outgoing ones that belong to heads of one batch entry."""

    d_out: Tensor
    delta: Tensor | None  # mean of the weights' gradients, known from the output
    lse: Tensor | None
    d_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    rel_q: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(
        cls,
        operands: Operands,
        options: Options,
        d_out: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        d_lse: Tensor | None,
        *,
        mask_gradient: bool,
    ) -> Whole:
        """Take what came, and zeros for what goes, of flattened operands."""
        mask = operands.mask if mask_gradient else None

        def rows(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.reshape(operands.q.shape[:-1])

        def zeros(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_zeros(x.shape)

        gradients: dict[str, Any] = {name: zeros(getattr(operands, name)) for name in names_of(Kind.SEQUENCE)}
        return cls(
            d_out=by_batch(d_out / (1 - options.dropout) if options.dropout else d_out, xp=xp),
            delta=rows(None if out is None else (d_out * out).sum(-1)),
            lse=rows(lse),
            d_lse=rows(d_lse),
            mask=None if mask is None or mask.dtype == torch.bool else zeros(mask),
            **gradients,
        )

    def part(self, part: Part) -> Whole:
        """Return views of what belongs to a part."""
        like = {name: name if name in KINDS else "q" for name in self.__slots__}
        return Whole(**{name: part.cut(operand, getattr(self, name)) for name, operand in like.items()})

    def at(self, call: StackedCall, place: HeadPlace) -> Own:
        """Return what belongs to some heads of one batch entry."""
        batch, heads, key_heads = place
        q = call.by_chunk(self.q[batch, heads])

        def rows(x: Tensor | None) -> Sequence[Tensor] | None:
            return None if x is None else call.by_chunk(x[batch, heads].unsqueeze(-1))

        return Own(
            d_out=call.by_chunk(self.d_out[batch, heads]),
            delta=rows(self.delta),
            lse=rows(self.lse),
            d_lse=rows(self.d_lse),
            q=q,
            k=self.k[batch, key_heads],
            v=self.v[batch, key_heads],
            rel_q=q if self.rel_q is None else call.by_chunk(self.rel_q[batch, heads]),
        )

    def gradients(self, operands: Operands, tables: dict[str, Tensor]) -> Gradients:
        """Return everything in the shapes of the call's operands."""
        of_heads = {name: getattr(self, name) for name in names_of(Kind.SEQUENCE)}
        return Gradients(
            **{name: None if x is None else x.reshape(getattr(operands, name).shape) for name, x in of_heads.items()},
            **tables,
            mask=None if self.mask is None else mask_of_call(self.mask, operands),
        )


@dataclass(frozen=True, slots=True)
class Own:
    """The gradients of some heads of one batch entry; those of queries cut into chunks."""

    d_out: Sequence[Tensor]
    delta: Sequence[Tensor] | None
    lse: Sequence[Tensor] | None
    d_lse: Sequence[Tensor] | None
    q: Sequence[Tensor]
    k: Tensor  # of one key head, or of as many as there are heads
    v: Tensor
    rel_q: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class WorkerSums:
    """One worker's sums of what heads and batch entries share: tables by rows, and an additive mask."""

    rel_k: Tensor | None
    rel_v: Tensor | None
    rel_bias: Tensor | None
    key_table: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(cls, call: StackedCall, *, mask: Tensor | None) -> WorkerSums:
        def rows(table: Table | None) -> Tensor | None:
            return None if table is None else call.q.new_zeros(table.columns.mT.shape)

        return cls(
            rows(call.tables.rel_k),
            rows(call.tables.rel_v),
            rows(call.tables.rel_bias),
            rows(call.tables.key_table),
            None if mask is None else torch.zeros_like(mask),
        )


def of_rows(rows: Tensor | None, place: HeadPlace) -> Tensor:
    """Return the rows of some heads, (stack or 1, rows, D), of sums that are there."""
    assert rows is not None
    if rows.ndim == 2:
        return rows[None]
    return rows[place.heads] if rows.shape[0] > 1 else rows


def total(sums: list[WorkerSums], name: str) -> Tensor:
    return functools.reduce(torch.add, [getattr(worker, name) for worker in sums])


def of_table(call: StackedCall, sums: list[WorkerSums], name: str) -> Tensor:
    gradient: Tensor = getattr(call.tables, name).gradient(total(sums, name).mT, xp=xp)
    if name == "key_table":  # its columns descend
        return gradient.flip(-2)
    return gradient[..., 0] if name == "rel_bias" else gradient

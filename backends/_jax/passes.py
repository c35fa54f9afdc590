"""JAX: the two passes, loops over chunks of one shape that carry what the chunks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from relskew_core._array.typing import Array
from relskew_core._kernel.backward import Cotangents, pull_back
from relskew_core._kernel.call import (
    BY_KEY,
    DIFFERENTIABLE,
    TABLES,
    Gradients,
    Operands,
    Options,
    shape_of_out,
    shape_of_sums,
)
from relskew_core._kernel.forward import attend
from relskew_core._kernel.sums import columns_gradient, grouped_outer, mask_gradient
from relskew_core.backends._jax.explicit import split_by_compiler
from relskew_core.backends._jax.loops import ChunkPlace, Loop, Ranges
from relskew_core.backends._jax.manual import axes_of, varying
from relskew_core.backends._jax.view import ScannedCall, TracedView


@partial(jax.jit, static_argnames="options")
def attention(operands: Operands, options: Options, ranges: Ranges | None) -> tuple[Array, Array | None]:
    like = operands.q, operands.q[..., 0] if options.return_lse else None
    return split_by_compiler(partial(_attention, options), like, operands, ranges)


def _attention(options: Options, operands: Operands, ranges: Ranges | None) -> tuple[Array, Array | None]:
    call = ScannedCall.of(operands, options, ranges)
    dtype = operands.q.dtype
    results = (
        jnp.zeros(shape_of_out(operands), dtype=dtype),
        jnp.full(shape_of_sums(operands), -math.inf, dtype=dtype) if options.return_lse else None,
    )

    def step(loop: Loop, results: Any, place: ChunkPlace) -> Any:
        """Attend from one chunk, and write its rows into the results."""
        rows = attend(TracedView(call, loop, place), sums=options.return_lse)
        return jax.tree.map(
            lambda x, own: lax.dynamic_update_slice_in_dim(x, own, place.start, axis=x.ndim - 2), results, rows
        )

    with jax.named_scope("relative_attention"):
        found: tuple[Array, Array | None] = _run(call, step, varying(results, axes_of(operands)))
    return found


@partial(jax.jit, static_argnames="options")
def attention_vjp(cotangents: Cotangents, operands: Operands, options: Options, ranges: Ranges | None) -> Gradients:
    """Return the gradients of every operand, ``None`` for a boolean mask."""
    floating = {name: x for name in DIFFERENTIABLE if (x := getattr(operands, name)) is not None and x.dtype != bool}
    function = partial(_attention_vjp, options)
    return split_by_compiler(function, Gradients(**floating), cotangents, operands, ranges)


def _attention_vjp(options: Options, cotangents: Cotangents, operands: Operands, ranges: Ranges | None) -> Gradients:
    call = ScannedCall.of(operands, options, ranges)
    given = {name: x for name in DIFFERENTIABLE if (x := getattr(operands, name)) is not None and x.dtype != bool}
    tables = {name: getattr(call.tables, name).columns for name in TABLES if name in given}
    keys = {name: jnp.matrix_transpose(given[name]) for name in BY_KEY if name in given}
    totals = jax.tree.map(jnp.zeros_like, {**given, **keys, **tables})

    def step(loop: Loop, totals: dict[str, Array], place: ChunkPlace) -> dict[str, Array]:
        sums = CarriedSums(totals)
        pull_back(TracedView(call, loop, place), cotangents, sums)
        return sums.totals

    with jax.named_scope("relative_attention_vjp"):
        found = _run(call, step, varying(totals, axes_of((cotangents, operands))))
    found |= {name: jnp.matrix_transpose(found[name]) for name in keys}
    return Gradients(**found | {name: call.tables.gradient(name, found[name], xp=jnp) for name in tables})


def _run(call: ScannedCall, step: Callable[[Loop, Any, ChunkPlace], Any], carry: Any) -> Any:
    """Run the loops of a call. A single turn is no loop: its places are constants, which compilers make use of."""
    for loop in call.plan.loops:
        if len(loop.places.start) == 1:
            carry = step(loop, carry, ChunkPlace(*(x[0] for x in loop.places)))
        else:
            carry, _ = lax.scan(partial(_turn, partial(step, loop)), carry, loop.places)
    return carry


def _turn(step: Callable[[Any, ChunkPlace], Any], carry: Any, place: ChunkPlace) -> tuple[Any, None]:
    return step(carry, place), None


class CarriedSums:
    """The gradients that a loop carries, to which every chunk adds in place; those of keys are transposed."""

    def __init__(self, totals: dict[str, Array]) -> None:
        self.totals = dict(totals)

    def add(self, name: str, piece: Array, starts: dict[int, Array | int]) -> None:
        """Add a piece to the larger array; XLA does it in place."""
        total = self.totals[name]
        at = [jnp.asarray(starts.get(axis - total.ndim, 0), dtype=jnp.int32) for axis in range(total.ndim)]
        piece = lax.dynamic_slice(total, at, piece.shape) + piece
        self.totals[name] = lax.dynamic_update_slice(total, piece, at)

    def add_queries(self, view: TracedView, **pieces: Array | None) -> None:
        for name, piece in pieces.items():
            if piece is not None and name in self.totals:
                self.add(name, piece, {-2: view.place.start})

    def add_keys(self, view: TracedView, name: str, weights: Array, rows: Array, more: Array | None = None) -> None:
        # transposing the weights instead would copy them
        piece = grouped_outer(rows, weights, self.totals[name].shape[-3], xp=jnp)
        piece = piece if more is None else piece + jnp.matrix_transpose(more)
        reached = view.reached()
        piece = piece if reached is None else jnp.where(reached, piece, 0.0)
        self.add(name, piece, {-1: view.place.first})

    def add_table(self, view: TracedView, name: str, low: int, high: int, relative: Array, rows: Array | None) -> None:
        rows = jnp.ones((*relative.shape[:-1], 1), relative.dtype) if rows is None else rows  # XLA's sums are slower
        piece = columns_gradient(relative, rows, self.totals[name].shape[:-2], xp=jnp)
        self.add(name, piece, {-1: view.column(name)})

    def add_mask(self, view: TracedView, d_logits: Array) -> None:
        if "mask" in self.totals:
            mask, place = self.totals["mask"], view.place
            starts = {axis: 0 if mask.shape[axis] == 1 else x for axis, x in ((-2, place.start), (-1, place.first))}
            self.add("mask", mask_gradient(d_logits, mask, xp=jnp), starts)

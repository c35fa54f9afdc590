"""JAX: the forward pass, loops over chunks of one shape."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from relskew_core._array.typing import Array
from relskew_core._kernel.call import Operands, Options, shape_of_out, shape_of_sums
from relskew_core._kernel.forward import grouped_matmul
from relskew_core.backends._jax.chunk import ScannedCall, TracedChunk
from relskew_core.backends._jax.explicit import split_by_compiler
from relskew_core.backends._jax.loops import ChunkPlace, Loop, Ranges
from relskew_core.backends._jax.manual import axes_of, varying


@partial(jax.jit, static_argnames="options")
def attention(operands: Operands, options: Options, ranges: Ranges | None) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the sums of weights (..., H, Lq, 2)."""
    like = operands.q, operands.q[..., 0] if options.return_lse else None
    results: tuple[Array, Array | None] = split_by_compiler(partial(_attention, options), like, operands, ranges)
    return results


def _attention(options: Options, operands: Operands, ranges: Ranges | None) -> tuple[Array, Array | None]:
    call = ScannedCall.of(operands, options, ranges)
    dtype = operands.q.dtype
    results = (
        jnp.zeros(shape_of_out(operands), dtype=dtype),
        jnp.full(shape_of_sums(operands), -math.inf, dtype=dtype) if options.return_lse else None,
    )
    results = varying(results, axes_of(operands))
    with jax.named_scope("relative_attention"):
        for loop in call.plan.loops:
            results, _ = lax.scan(partial(_step, call, loop), results, loop.places)
    return results


def _step(
    call: ScannedCall, loop: Loop, results: tuple[Array, Array | None], place: ChunkPlace
) -> tuple[tuple[Array, Array | None], None]:
    """Attend from one chunk, and write its rows into the output."""
    chunk = TracedChunk(call, loop, place)
    logits = chunk.logits(*chunk.scaled_queries(), chunk.keys(call.operands.k))
    weights, own = chunk.weights(logits, sums=results[1] is not None)
    weights = chunk.kept(weights)
    rows = grouped_matmul(weights, chunk.keys(call.operands.v), xp=jnp)
    if call.rel_v is not None:
        rows = rows + chunk.mixed(chunk.relative(weights), call.rel_v)
    out, sums = results
    out = lax.dynamic_update_slice_in_dim(out, rows, place.start, axis=out.ndim - 2)
    if sums is not None and own is not None:
        sums = lax.dynamic_update_slice_in_dim(sums, own, place.start, axis=sums.ndim - 2)
    return (out, sums), None

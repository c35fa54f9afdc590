"""JAX: loops over chunks of one shape, compiled once, under a differentiation rule that keeps the memory promise.

Left to themselves, ``jax.jit`` unrolls the portable kernel's chunks, which takes compile time by the length and memory
by its square, and ``jax.grad`` keeps every chunk's weights for the backward pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from relskew_core._array.typing import Array
from relskew_core._kernel.backward import Cotangents
from relskew_core._kernel.call import DIFFERENTIABLE, Gradients, Operands, Options
from relskew_core._kernel.chunk import chunk_size
from relskew_core._kernel.problem import Problem
from relskew_core.backends._jax import backward as jax_backward
from relskew_core.backends._jax import forward as jax_forward
from relskew_core.backends._path import COMMON, Path


def serve(function: str, call: Problem) -> Path | str:
    """Return the kernels that serve a call, or say why there are none."""
    return Path(attention, attention_vjp, knows=COMMON | {"softcap", "blocks_before"})


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq)."""
    result: tuple[Array, Array | None] = _attention(operands, _sized(operands, options))
    return result


def attention_vjp(d_out: Array, operands: Operands, options: Options, *, xp: Any, **results: Array | None) -> Gradients:
    """Return the gradients of every operand."""
    return jax_backward.attention_vjp(Cotangents(d_out, **results), operands, _sized(operands, options))


def _sized(operands: Operands, options: Options) -> Options:
    options = replace(options, visibility=options.visibility.bounded())  # XLA counts in 32 bits
    if options.chunk_size is not None:
        return options
    cpu = jax.default_backend() == "cpu"  # under jit arrays are on no device yet
    return replace(options, chunk_size=chunk_size(operands, options, cpu=cpu))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(operands: Operands, options: Options) -> tuple[Array, Array | None]:
    return jax_forward.attention(operands, options)


def _forward(operands: Operands, options: Options) -> tuple[tuple[Array, Array | None], tuple[Operands, Array]]:
    out, lse = jax_forward.attention(operands, options)
    return (out, lse), (operands, out)


def _backward(
    options: Options, kept: tuple[Operands, Array], cotangents: tuple[Array, Array | None]
) -> tuple[Operands]:
    operands, out = kept
    d_out, d_lse = cotangents
    gradients = jax_backward.attention_vjp(Cotangents(d_out, out, None, d_lse), operands, options)
    return (Operands(**{name: getattr(gradients, name) for name in DIFFERENTIABLE}),)


_attention.defvjp(_forward, _backward)

"""JAX: the portable kernels under a differentiation rule of their own, so that gradients keep the memory promise.

Left to itself, ``jax.grad`` keeps every chunk's weights for the backward pass: queries × keys numbers a head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from relskew_core._gradient import attention_vjp as portable_vjp
from relskew_core._kernel import attention as portable_attention
from relskew_core._kernel import chunk_size
from relskew_core._problem import Operands, Options, Problem
from relskew_core._typing import Array


def refusal(function: str, call: Problem) -> str | None:
    """Say why there is no native path for a call, ``None`` if there is one."""
    return None if function == "attention" else "JAX's is a differentiation rule, and this is the gradient itself"


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Array, Array | None]:
    """Return the output and, if asked for, the log-sum-exp."""
    if options.chunk_size is None:  # under jit arrays are on no device yet
        size = chunk_size(operands, options.visibility, cpu=jax.default_backend() == "cpu")
        options = replace(options, chunk_size=size)
    result: tuple[Array, Array | None] = _attention(operands, options)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(operands: Operands, options: Options) -> tuple[Array, Array | None]:
    return portable_attention(operands, options, xp=jax.numpy)


def _forward(operands: Operands, options: Options) -> tuple[tuple[Array, Array | None], tuple[Operands, Array]]:
    out, lse = _attention(operands, options)
    return (out, lse), (operands, out)


def _backward(
    options: Options, kept: tuple[Operands, Array], cotangents: tuple[Array, Array | None]
) -> tuple[Operands]:
    operands, out = kept
    d_out, d_lse = cotangents
    gradients = Operands(*portable_vjp(d_out, operands, options, out=out, d_lse=d_lse, xp=jax.numpy))
    if operands.mask is not None and operands.mask.dtype == bool:
        no_tangent = np.zeros(operands.mask.shape, dtype=jax.dtypes.float0)
        gradients = gradients._replace(mask=no_tangent)
    return (gradients,)


_attention.defvjp(_forward, _backward)

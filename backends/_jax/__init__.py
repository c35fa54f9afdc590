"""JAX: loops over chunks of one shape, compiled once, with a differentiation rule that keeps memory linear.

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
from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core._kernel.chunk import chunk_size, documents_of
from relskew_core._kernel.problem import Problem
from relskew_core.backends._jax import compiled, tangent
from relskew_core.backends._jax import prepared as prepared
from relskew_core.backends._jax.loops import Ranges
from relskew_core.backends._jax.manual import axes_of, varying
from relskew_core.backends._jax.offsets import split
from relskew_core.backends._path import EVERY, Path

COMPILED = tangent.Passes(compiled.attention, compiled.attention_vjp, keeps_sums=True)

LARGEST_ON_CPUS = 64
"""The most queries of a chunk: a turn of a loop costs little, and every additional query multiplies hidden keys."""


def serve(function: str, call: Problem) -> Path:
    serves = compiled.serves if function == "attention" else compiled.serves_backward
    passes = COMPILED if serves(call.operands(), call.options) else tangent.LOOPS
    return Path(partial(attention, passes=passes), partial(attention_vjp, passes=passes), supports=EVERY)


def attention(operands: Operands, options: Options, *, xp: Any, passes: tangent.Passes) -> tuple[Array, Array | None]:
    return tangent.attention(*_prepared(operands, options), passes)


def attention_vjp(
    d_out: Array,
    operands: Operands,
    options: Options,
    *,
    xp: Any,
    passes: tangent.Passes,
    **results: Array | None,
) -> Gradients:
    cotangents, operands = varying((Cotangents(d_out, **results), operands), axes_of((d_out, results, operands)))
    return passes.pull_back(cotangents, *_prepared(operands, options))


def _prepared(operands: Operands, options: Options) -> tuple[Operands, Options, Ranges | None]:
    """Return a call with constant options and a chosen chunk size, and the keys of its documents if known."""
    operands, options = split(operands, options)
    options, documents = replace(options, visibility=options.visibility.bounded()), documents_of(operands)
    size = options.chunk_size
    if size is None:
        cpu = jax.default_backend() == "cpu"  # under jit, arrays are not on a device yet
        size = chunk_size(operands, options, documents, cpu=cpu)
        size = min(size, LARGEST_ON_CPUS) if cpu else size
    ranges = Ranges.of(options, size, documents)
    return varying(operands, axes_of(operands)), replace(options, chunk_size=size), ranges

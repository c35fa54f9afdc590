"""dask: gradients by block of the batch and of the heads; only lengths and widths are rechunked to one block."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._kernel.call import DIFFERENTIABLE, Gradients, Operands, Options
from relskew_core._kernel.problem import Problem
from relskew_core.backends._dask.blocks import LENGTH, WIDTH, Blocks, arrays_of, delayed, kernels

Arrays = dict[str, Any]


def attention_vjp(d_out: Any, operands: Operands, options: Options, *, xp: Any, **results: Any) -> Gradients:
    """Return the gradients of every operand: arrays that several blocks share get the sum over the blocks."""
    one = {axis % operands.q.ndim: -1 for axis in (LENGTH, WIDTH)}
    x = Blocks.of(operands._replace(q=operands.q.rechunk(one), k=operands.k.rechunk(one)))
    q = x.arrays["q"]
    given = {name: y for name, y in {"d_out": d_out, **results}.items() if y is not None}
    cut = {name: y.rechunk((*q.chunks[:WIDTH], -1)[: y.ndim]) for name, y in given.items()}
    pieces = {name: y.to_delayed(optimize_graph=False) for name, y in cut.items()}
    wanted = [name for name in DIFFERENTIABLE if name in x.arrays and x.arrays[name].dtype != bool]
    shares: dict[str, Any] = {name: np.empty(x.arrays[name].numblocks, dtype=object) for name in wanted}
    pull = delayed(partial(_pull_back, options), pure=True)
    for place in np.ndindex(q.numblocks[:WIDTH]):
        own = pull(x.here(place, 0), {name: y[(*place, 0)[: y.ndim]] for name, y in pieces.items()})
        for name in wanted:
            at = x.at(name, place, 0)
            shares[name][at] = [*(shares[name][at] or ()), own[name]]
    return Gradients(**{name: _array(shares[name], x.arrays[name]) for name in wanted})


def _pull_back(options: Options, arrays: Arrays, results: Arrays) -> Arrays:
    """Return the gradients of a block, in the library of the blocks."""
    operands = Operands(**arrays)
    xp = namespace_of_arrays({"q": operands.q})
    call = Problem(operands, options, xp, operands.q.dtype, heads=True, ragged=None, sinks=None, scales=None)
    cotangents = {name: results.get(name) for name in ("d_out", "out", "sums", "d_lse")}
    path = kernels("attention_vjp", call)
    return path.attention_vjp(operands=operands, options=options, **cotangents, xp=xp)._asdict()


def _array(shares: Any, like: Any) -> Any:
    """Return an array of the sums of the parts that belong to each of its blocks."""
    blocks = np.empty(like.numblocks, dtype=object)
    for at in np.ndindex(like.numblocks):
        shape = tuple(sizes[index] for sizes, index in zip(like.chunks, at, strict=True))
        blocks[at] = arrays_of.from_delayed(delayed(sum, pure=True)(shares[at]), shape, meta=like._meta)
    return arrays_of.block(blocks.tolist())

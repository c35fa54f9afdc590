"""JAX: the directional derivative of the results, as a linear map with a custom transpose.

``jax.custom_vjp`` cannot be pushed forward under ``jax.jit``, and what ``jax.custom_jvp`` alone gives is transposed by
JAX itself, which keeps every chunk's weights. So the rule's linear part is a primitive: pushed forward it is JAX's
derivative of the loops, transposed it is the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from relskew_core._array.typing import Array
from relskew_core._kernel.backward import Cotangents
from relskew_core._kernel.call import DIFFERENTIABLE, Gradients, Operands, Options
from relskew_core.backends._jax import passes as loops
from relskew_core.backends._jax.loops import Ranges

Arrays = tuple[Array, ...]
Results = tuple[Array, Array | None]

if TYPE_CHECKING:
    from jax.extend.core import Primitive as Primitive
else:  # the same class without `jax.extend`, which imports Pallas in a fifth of a second
    Primitive = type(jax.lax.add_p)


class Passes(NamedTuple):
    attention: Callable[[Operands, Options, Ranges | None], Results]
    pull_back: Callable[[Cotangents, Operands, Options, Ranges | None], Gradients]
    keeps_sums: bool = False  # whether the backward pass uses the sums of weights


LOOPS = Passes(loops.attention, loops.attention_vjp)


@partial(jax.custom_jvp, nondiff_argnums=(1, 3))
def attention(operands: Operands, options: Options, ranges: Ranges | None, passes: Passes) -> Results:
    """Return the results of the forward pass, whose gradient is the backward pass."""
    return passes.attention(operands, options, ranges)


@partial(attention.defjvp, symbolic_zeros=True)
def _pushed(
    options: Options, passes: Passes, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Results, Results]:
    moved = tangents[0]._asdict()
    names = [name for name in DIFFERENTIABLE if not isinstance(moved[name], jax.custom_derivatives.SymbolicZero | None)]
    kept = replace(options, return_lse=options.return_lse or passes.keeps_sums)
    out, sums = attention(primals[0], kept, primals[1], passes)
    results = out, (sums if options.return_lse else None)
    known, tree = jax.tree.flatten((*primals, sums if passes.keeps_sums else None, results))
    back = LOOPS if "mask" in names else passes  # the kernels compute no gradient of a mask
    change = Change(options, back, tuple(names), tree)
    pushed = tangent_p.bind(
        *known, *(moved[name] for name in names), change=change, results=len(jax.tree.leaves(results))
    )
    return results, jax.tree.unflatten(jax.tree.structure(results), pushed)


@dataclass(frozen=True)
class Change:
    """The map from changes of some operands to changes of the results, and its transpose."""

    options: Options
    passes: Passes
    names: tuple[str, ...]
    known: Any  # the tree of operands, ranges, the saved sums and results

    def push(self, known: Arrays, tangents: Arrays) -> Arrays:
        operands, ranges, *_ = jax.tree.unflatten(self.known, known)

        def results(*moved: Array) -> Any:
            now = operands._replace(**dict(zip(self.names, moved, strict=True)))
            return tuple(jax.tree.leaves(loops.attention(now, self.options, ranges)))

        return jax.jvp(results, tuple(getattr(operands, name) for name in self.names), tangents)[1]

    def pull(self, known: Arrays, cotangents: tuple[Array | None, ...]) -> Arrays:
        operands, ranges, sums, (out, _) = jax.tree.unflatten(self.known, known)
        d_out, d_sums = (*cotangents, None)[:2]
        d_lse = None if d_sums is None else d_sums[..., 1]
        gradients = self.passes.pull_back(Cotangents(d_out, out, sums, d_lse), operands, self.options, ranges)
        return tuple(getattr(gradients, name) for name in self.names)


@dataclass(frozen=True)
class Mapped:
    """A map under ``jax.vmap``: the new axis of tangents, cotangents and known arrays comes first."""

    change: Any
    axes: tuple[int | None, ...]

    def push(self, known: Arrays, tangents: Arrays) -> Arrays:
        return jax.vmap(self.change.push, in_axes=(self.axes, 0))(known, tangents)

    def pull(self, known: Arrays, cotangents: tuple[Array | None, ...]) -> Arrays:
        return jax.vmap(self.change.pull, in_axes=(self.axes, 0))(known, cotangents)


tangent_p = Primitive("relative_attention_tangent")
"""``known, tangents -> changes of the results``; the last ``results`` entries of ``known`` are results."""
tangent_p.multiple_results = True


def _known(args: Any, change: Any) -> int:
    while isinstance(change, Mapped):
        change = change.change
    return len(args) - len(change.names)


def _push(*args: Array, change: Any, results: int) -> Arrays:
    count = _known(args, change)
    return change.push(args[:count], args[count:])


def _types(*args: Any, change: Any, results: int) -> list[Any]:
    count = _known(args, change)
    return list(args[count - results : count])


def _pushed_once_more(primals: Any, tangents: Any, **parameters: Any) -> tuple[Any, Any]:
    moved = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def pushed(*now: Array) -> Arrays:
        given = dict(zip(moved, now, strict=True))
        return _push(*(given.get(place, x) for place, x in enumerate(primals)), **parameters)

    return jax.jvp(pushed, [primals[place] for place in moved], [tangents[place] for place in moved])


def _transposed(cotangents: Any, *args: Any, change: Any, results: int) -> list[Array | None]:
    count = _known(args, change)
    d_out, *d_sums = cotangents
    given = [ad.instantiate_zeros(d_out), *(None if isinstance(x, ad.Zero) else x for x in d_sums)]
    pulled = change.pull(args[:count], tuple(given))
    needed = [x if ad.is_undefined_primal(y) else None for x, y in zip(pulled, args[count:], strict=True)]
    return [*[None] * count, *needed]


def _mapped(args: Any, axes: Any, change: Any, results: int) -> tuple[Any, list[int]]:
    count = _known(args, change)
    (size,) = {x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None}

    def with_axis(x: Array, axis: int | None, place: int) -> Array:
        if axis is not None:
            return jnp.moveaxis(x, axis, 0)
        return jnp.broadcast_to(x, (size, *x.shape)) if place >= count - results else x

    given = [with_axis(x, axis, place) for place, (x, axis) in enumerate(zip(args, axes, strict=True))]
    places = [0 if axis is not None or place >= count - results else None for place, axis in enumerate(axes)]
    found = tangent_p.bind(*given, change=Mapped(change, tuple(places[:count])), results=results)
    return found, [0] * results


tangent_p.def_impl(_push)
tangent_p.def_abstract_eval(_types)
mlir.register_lowering(tangent_p, mlir.lower_fun(_push, multiple_results=True))
ad.primitive_jvps[tangent_p] = _pushed_once_more
ad.primitive_transposes[tangent_p] = _transposed
batching.primitive_batchers[tangent_p] = _mapped

"""JAX on CPUs: calls of float32 and float64 by the kernels that were compiled at installation.

Two primitives, one for each pass. Lowered for a CPU that has the whole of its arrays, they are calls of the kernels;
lowered for anything else, or to be exported, they are the loops. So a traced call may run anywhere.
Arrays that exist already are passed to the kernels like those of NumPy: nothing is compiled for them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from relskew_core._array.checks import is_symbol
from relskew_core._array.typing import Array
from relskew_core._kernel.backward import Cotangents
from relskew_core._kernel.call import Gradients, Operands, Options, has_tables
from relskew_core.backends import _compiled
from relskew_core.backends._jax import eager, passes
from relskew_core.backends._jax.explicit import explicitly_split, split_by_compiler
from relskew_core.backends._jax.foreign import SHARED, by_kernels, is_registered, pulled
from relskew_core.backends._jax.loops import Ranges
from relskew_core.backends._jax.tangent import Primitive
from relskew_core.backends._numpy import compiled as of_numpy

Arrays = tuple[Array, ...]

RESULTS = Cotangents._fields
"""The inputs of the backward pass in addition to the operands."""


def serves(x: Operands, options: Options) -> bool:
    """Whether the kernels support a call that is lowered for CPUs."""
    if any(map(is_symbol, (*x.q.shape, *x.k.shape))):
        return False
    if jax.default_backend() != "cpu" or not _compiled.serves_kind(x, options) or not is_registered():
        return False
    if x.k_positions is None:
        return True
    # the values may be traced
    return _compiled.fit(x, options) and (options.span.beyond != "error" or not has_tables(x))


def serves_backward(x: Operands, options: Options) -> bool:
    """Whether the kernels support a call's backward pass, which has no gradient of a mask."""
    return serves(x, options) and (x.mask is None or x.mask.dtype == bool)


def attention(operands: Operands, options: Options, ranges: Ranges | None) -> tuple[Array, Array | None]:
    if not explicitly_split(operands):
        return _attend(options, operands)
    like = operands.q, operands.q[..., 0] if options.return_lse else None
    return split_by_compiler(partial(_attend, options), like, operands)


def _attend(options: Options, operands: Operands) -> tuple[Array, Array | None]:
    names, arrays = _named(operands._asdict())
    out, *sums = attend_p.bind(*arrays, names=names, options=options, maps=0)
    return out, (sums[0] if sums else None)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def attention_vjp(cotangents: Cotangents, operands: Operands, options: Options, ranges: Ranges | None) -> Gradients:
    """Return the results of ``passes.attention_vjp``, except for the gradient of a mask."""
    like = {name: x for name in pulled(operands._asdict()) if (x := getattr(operands, name)) is not None}
    return split_by_compiler(partial(_pull_back, options), Gradients(**like), cotangents, operands)


@attention_vjp.defjvp
def _pushed(options: Options, primals: Any, tangents: Any) -> Any:
    def pulled(cotangents: Cotangents, operands: Operands, ranges: Ranges | None) -> Gradients:
        return passes.attention_vjp(cotangents, operands, options, ranges)

    return jax.jvp(pulled, primals, tangents)


def _pull_back(options: Options, cotangents: Cotangents, operands: Operands) -> Gradients:
    own = partial(_attend, replace(options, return_lse=True), operands)
    out, sums = _compiled.results(cotangents.out, cotangents.sums, own, xp=jnp)
    given = cotangents._replace(out=out, sums=sums)
    names, arrays = _named({**operands._asdict(), **given._asdict()})
    found = pull_back_p.bind(*arrays, names=names, options=options, maps=0)
    return Gradients(**dict(zip(pulled(dict(zip(names, arrays, strict=True))), found, strict=True)))


def _named(arrays: dict[str, Array | None]) -> tuple[tuple[str, ...], list[Array]]:
    there = {name: x for name, x in arrays.items() if x is not None}
    return tuple(there), list(there.values())


def _given(names: tuple[str, ...], arrays: Arrays) -> tuple[Operands, Cotangents | None]:
    there = dict(zip(names, arrays, strict=True))
    given = {name: there.pop(name) for name in RESULTS if name in there}
    return Operands(**there), Cotangents(**given) if given else None


def _types(*arrays: Any, names: tuple[str, ...], options: Options, maps: int) -> list[Any]:
    there = dict(zip(names, arrays, strict=True))
    q, lead = there["q"], there["q"].shape[:maps]
    if "d_out" in there:  # under vmap, each item has separate gradients of tables
        return [x.update(shape=(*lead, *x.shape[maps:])) for x in map(there.get, pulled(there)) if x is not None]
    rows, spread = q.shape[:-1], q.sharding
    out = q.update(shape=(*rows, there["v"].shape[-1]))
    split = NamedSharding(spread.mesh, PartitionSpec(*spread.spec[:-1], None))
    return [out, q.update(shape=(*rows, 2), sharding=split)] if options.return_lse else [out]


def _run(primitive: Primitive, *arrays: Array, names: tuple[str, ...], options: Options, maps: int) -> list[Array]:
    """Run the kernels on concrete arrays."""
    if watched():
        return _by_loops(*arrays, names=names, options=options, maps=maps)
    if not maps and eager.are_concrete(arrays):
        return _eagerly(*arrays, names=names, options=options)
    return _jitted(primitive, *arrays, names=names, options=options, maps=maps)


def watched() -> bool:
    """Whether a debugging mode has to see every step."""
    config: Any = jax.config
    return bool(config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)


@partial(jax.jit, static_argnums=0, static_argnames=("names", "options", "maps"))
def _jitted(primitive: Primitive, *arrays: Array, **parameters: Any) -> list[Array]:
    return primitive.bind(*arrays, **parameters)


def _eagerly(*arrays: Array, names: tuple[str, ...], options: Options) -> list[Array]:
    x, cotangents = _given(names, tuple(map(np.asarray, arrays)))
    if cotangents is None:
        found = [each for each in of_numpy.attention(x, options, library=eager.LIBRARY) if each is not None]
    else:
        given = {"operands": x, "options": options, **cotangents._asdict()}
        gradients = of_numpy.attention_vjp(**given, library=eager.LIBRARY)
        found = [getattr(gradients, name) for name in pulled(x._asdict())]
    return eager.to_jax(found, arrays)


def _by_kernels(*arrays: Array, names: tuple[str, ...], options: Options, maps: int) -> list[Array]:
    return by_kernels(*_given(names, arrays), options, maps)


def _by_loops(*arrays: Array, names: tuple[str, ...], options: Options, maps: int) -> list[Array]:
    if maps:
        size = arrays[0].shape[0]
        axes = tuple(0 if len(x) == size else None for x in arrays)
        given = (x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True))
        return jax.vmap(partial(_by_loops, names=names, options=options, maps=maps - 1), in_axes=axes)(*given)
    x, cotangents = _given(names, arrays)
    if cotangents is not None:
        found = passes.attention_vjp(cotangents, x, options, None)
        return [getattr(found, name) for name in pulled(x._asdict())]
    return [each for each in passes.attention(x, options, None) if each is not None]


def _lowered(ctx: mlir.LoweringRuleContext, *arrays: Any, **parameters: Any) -> Any:
    function = _by_kernels if _has_the_whole(ctx.module_context) else _by_loops
    return mlir.lower_fun(partial(function, **parameters), multiple_results=True)(ctx, *arrays)


def _has_the_whole(context: Any) -> bool:
    """Whether every device has all of its arrays, and the process that lowers also runs them."""
    if context.lowering_parameters.for_export:  # the machine that loads the export may have no kernels
        return False
    axes = context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return bool(getattr(axes, "num_devices", 1) == 1)
    return bool(mesh.size == 1 or axes.manual_axes == frozenset(mesh.axis_names))


def _mapped(
    primitive: Primitive, arrays: Any, axes: Any, *, names: tuple[str, ...], options: Options, maps: int
) -> Any:
    """Move the new axis of all arrays to the front: of full length, or 1 if the items may share the array."""
    (size,) = {x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None}

    def with_axis(name: str, x: Array, axis: int | None) -> Array:
        if axis is not None:
            return jnp.moveaxis(x, axis, 0)
        return x[None] if name in (*SHARED, "mask") else jnp.broadcast_to(x, (size, *x.shape))

    given = map(with_axis, names, arrays, axes)
    found = primitive.bind(*given, names=names, options=options, maps=maps + 1)
    return found, [0] * len(found)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(partial(_run, primitive))
    primitive.def_abstract_eval(_types)
    mlir.register_lowering(primitive, mlir.lower_fun(_by_loops, multiple_results=True))
    mlir.register_lowering(primitive, _lowered, platform="cpu")
    batching.primitive_batchers[primitive] = partial(_mapped, primitive)
    return primitive


attend_p = _primitive("relative_attention")
pull_back_p = _primitive("relative_attention_vjp")

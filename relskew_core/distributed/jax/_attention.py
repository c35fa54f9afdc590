"""``ring_attention``: relative attention of a split sequence, inside ``shard_map``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace

import jax.numpy as jnp
from jax import lax

from relskew_core._array.checks import check_bool, check_choice, describe, is_array
from relskew_core._array.softmax import log_sum_exp
from relskew_core._array.typing import Array
from relskew_core._kernel.by_head import HeadScales, with_sinks
from relskew_core._kernel.call import Arguments, takes
from relskew_core._kernel.problem import problem
from relskew_core.distributed._layout import LAYOUTS, Layout, check_whole
from relskew_core.distributed.jax._ring import TracedRing


@dataclass(eq=False)
class _Ring(Arguments):
    _: KW_ONLY
    axis_name: str
    layout: Layout = "contiguous"
    return_lse: bool = False


@takes(_Ring)
def ring_attention(given: _Ring) -> Array | tuple[Array, Array]:
    """Attend as :func:`relskew_core.relative_attention` does, to a sequence that is split over a mesh axis.

    Call it inside ``jax.shard_map``: each device passes its shard of the positions of ``q``, ``k`` and ``v``, and gets
    its shard of the output, while keys and values travel around a ring. The loop is one ``lax.scan``, so the compile
    time does not grow with the number of devices. The gradient is a second round, and keeps only the inputs and outputs
    of the forward pass.

    Parameters
    ----------
    q, k, v, rel_q : array, shapes (..., H, Lq, D), (..., Hkv, Lk, D), (..., Hkv, Lk, Dv), (..., H, Lq, Dr)
        This device's shard.
    rel_k, span, rel_v, rel_bias, key_table, sinks, scale, rel_scale, softcap, chunk_size, impl
        As in :func:`relskew_core.relative_attention`; tables are whole on every device.
    causal, window, offset
        As there, of the whole sequence; ``offset`` is an int.
    mask : array, optional
        For this device's queries and all keys of the whole sequence, in their order there; broadcasts to
        ``(..., H, Lq, P · Lk)``.
    segments : integer array, shape (..., L) or (L,), or a pair of them, optional
        Of this device's shard.
    block_size, blocks_before, positions, dropout, seed
        Raise an error.
    axis_name : str
        Name of the mesh axis along which the sequence is split.
    layout : {"contiguous", "zigzag", "striped"}, default "contiguous"
        The positions of a device: contiguous; two parts, the second mirrored, so that causal attention costs the same
        on every device; or every ``n``-th position for ``n`` devices.
    return_lse : bool, default False
        Also return the log-sum-exp of the logits.

    Returns
    -------
    out : array, shape (..., H, Lq, Dv)
        This device's shard. For arrays in half precision, parts are merged in float32.
    lse : array, shape (..., H, Lq)
        Only with ``return_lse``.

    See Also
    --------
    relskew_core.relative_attention : the same on one device.
    relskew_core.distributed.torch.context_parallel_attention : the same in torch.

    Notes
    -----
    Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; Brandon et al. 2023,
    "Striped Attention".

    Examples
    --------
    One device here; the call is the same for many:

    >>> import jax
    >>> from functools import partial
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from relskew_core import relative_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 4))
    >>> table = jax.random.normal(jax.random.key(1), (8, 4))
    >>> mesh = jax.make_mesh((1,), ("ring",))
    >>> attend = partial(ring_attention, causal=True, axis_name="ring")
    >>> split, whole = PartitionSpec(None, "ring"), PartitionSpec()
    >>> specs = split, split, split, whole
    >>> ring = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=split))
    >>> given = [
    ...     jax.device_put(x, NamedSharding(mesh, spec))
    ...     for x, spec in zip((q, k, v, table), specs)
    ... ]
    >>> bool(
    ...     abs(ring(*given) - relative_attention(q, k, v, table, causal=True)).max() < 1e-5
    ... )
    True

    The zigzag layout, which gives all devices of a causal model equal work; on two devices, device 0 then has the first
    and the last quarter of the positions:

    >>> attend = partial(attend, layout="zigzag")
    >>> zigzag = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=split)
    >>> jax.jit(zigzag)(*given).shape
    (2, 8, 4)

    With a gradient, here only its shape:

    >>> gradient = jax.grad(lambda *x: ring(*x).sum(), argnums=3)
    >>> jax.eval_shape(gradient, *given).shape
    (8, 4)
    """
    check_choice("layout", given.layout, LAYOUTS)
    check_bool("return_lse", given.return_lse)
    if not isinstance(given.axis_name, str):
        raise TypeError(f"`axis_name` must be the name of one axis of the mesh, got {describe(given.axis_name)}")
    for name in ("positions", "block_size", "seed"):
        if getattr(given, name) is not None:
            raise ValueError(f"`{name}` must be None in a ring, got {describe(getattr(given, name))}")
    if is_array(given.offset) or not isinstance(given.offset, int | None):
        raise TypeError(f"`offset` must be an int, the same for all items, got {describe(given.offset)}")
    arguments = Arguments(**{field.name: getattr(given, field.name) for field in fields(Arguments)})
    call = problem(replace(arguments, mask=None))
    size = lax.psum(1, given.axis_name)  # a constant, because 1 is a constant
    check_whole(arguments, call, size, given.layout, xp=jnp)
    sinks = arguments.sinks
    scales = HeadScales.of(arguments, xp=jnp)
    arguments = replace(arguments if scales is None else scales.applied(arguments), sinks=None)
    ring = TracedRing.of(arguments, call.options, size, given.axis_name, given.layout)
    out, sums = ring.attend(arguments)
    if sinks is not None:
        out, sums = with_sinks(out, sums, sinks, xp=jnp)
    out = out.astype(given.q.dtype)
    return (out, log_sum_exp(sums)) if given.return_lse else out

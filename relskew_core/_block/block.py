"""The attention block: projections around relative attention, from one mapping of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, TypeVar

from relskew_core._array.checks import describe, explains, shape_of
from relskew_core._array.namespace import check_plain, namespace_of_arrays
from relskew_core._array.precision import autocast, cast, casts
from relskew_core._array.softmax import joint, of_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._block.cache import PAST, Cache, Growing
from relskew_core._block.spec import ATTENDED, BlockSpec, check_spec
from relskew_core._block.weights import with_bias
from relskew_core._functions.attention import relative_attention
from relskew_core._functions.weights import attention_weights
from relskew_core._kernel.kinds import MASK


@explains
@casts
def attention_block(
    x: Array,
    weights: Mapping[str, Array],
    spec: BlockSpec,
    *,
    memory: Array | None = None,
    past: tuple[Array, Array] | None = None,
    mask: Array | None = None,
) -> Array | tuple[Array, tuple[Array, Array]]:
    """Project, attend with relative positions, project back.

    Parameters
    ----------
    x : array, shape (..., Lq, E)
        Input of the queries, and of the keys and values unless ``spec.cross``.
    weights : mapping of str to array
        Exactly the keys and shapes of ``spec.weight_shapes()``, of ``x``'s library, device and dtype. Not modified.
    spec : BlockSpec
        The block.
    memory : array, shape (..., Lk, E), optional
        Input of the keys and values; required if ``spec.cross``, and an error otherwise. Its position 0 is that of
        ``x``.
    past : (array, array), optional
        Cached keys and values ``(..., Hkv, P, D)``; the queries then have the positions ``P … P + Lq - 1``.
    mask : array, optional
        Boolean (``True`` = may attend) or additive, broadcasting to ``(..., H, Lq, Lk)``.

    Returns
    -------
    y : array, shape (..., Lq, E)
    present : (array, array)
        Only with ``past``: all keys and values so far, ``(..., Hkv, P + Lq, D)``, to pass as ``past`` to the next call.

    Examples
    --------
    >>> import numpy as np
    >>> from relskew_core import BlockSpec, Span, init_weights
    >>> spec = BlockSpec(4, 2, Span.causal(8), causal=True)
    >>> weights = init_weights(spec, seed=0)
    >>> x = np.ones((1, 3, 4), dtype=np.float32)
    >>> attention_block(x, weights, spec).shape
    (1, 3, 4)
    >>> empty = np.zeros((1, 2, 0, 2), dtype=np.float32)
    >>> y, (k, v) = attention_block(x, weights, spec, past=(empty, empty))
    >>> k.shape
    (1, 2, 3, 2)
    """
    check_spec(spec)
    spec.check_weights(weights)
    check_inputs(x, memory, spec)
    cache = None if past is None else Growing.of(past, spec)
    named = {f"weights[{key!r}]": weight for key, weight in weights.items()}
    cached = dict(zip(PAST, cache or (None, None), strict=True))
    xp = namespace_of_arrays({"x": x}, {"memory": memory, **named, **cached})
    tables = {name: weights.get(name) for name in ATTENDED}

    def attend(q: Array, k: Array, v: Array, **seen: Any) -> Array:
        return relative_attention(q, k, v, mask=mask, **seen, **with_bias(tables, spec, q, k, seen, xp=xp))

    y, present = apply_block(
        x, spec, partial(_linear, weights, xp=xp), memory=memory, cache=cache, attend=attend, xp=xp
    )
    return y if present is None else (y, present)


def apply_block(
    x: Array,
    spec: BlockSpec,
    project: Callable[[str, Array], Array],
    *,
    memory: Array | None,
    cache: Cache | None,
    attend: Callable[..., Array],
    xp: Namespace,
) -> tuple[Array, Cache | None]:
    """Return the output of a block, and the cache after it.

    ``project(name, x)`` applies a projection. How many heads there are is read off what it returns: a process that
    holds a part of the heads has fewer than the spec.
    """
    q, k, v, seen, cache = project_heads(x, spec, project, memory=memory, cache=cache, xp=xp)
    out = _swap(attend(q, k, v, **seen), xp=xp)
    return project("out_proj", xp.reshape(out, (*out.shape[:-2], out.shape[-2] * out.shape[-1]))), cache


def project_heads(
    x: Array,
    spec: BlockSpec,
    project: Callable[[str, Array], Array],
    *,
    memory: Array | None,
    cache: Cache | None,
    xp: Namespace,
) -> tuple[Array, Array, Array, dict[str, Any], Cache | None]:
    """Return the heads of a block's queries, keys and values, the visibility, and the cache after the call."""
    source = x if memory is None else memory
    q, k, v = (
        _split_heads(name, project(name, of), spec.head_dim, xp=xp)
        for name, of in (("q_proj", x), ("k_proj", source), ("v_proj", source))
    )
    seen: dict[str, Any] = {"window": spec.window}
    if memory is not None:
        seen["offset"] = 0  # by default a memory begins where the input begins
    if cache is not None:
        k, v, cache, more = cache.extend(k, v, xp=xp)
        seen.update(more)
    for name in ("causal", "block_size", "blocks_before"):
        seen[name] = getattr(spec, name)
    return q, k, v, seen, cache


def check_inputs(x: Array, memory: Array | None, spec: BlockSpec) -> None:
    if spec.cross and memory is None:
        raise ValueError("`memory` must be given because `spec.cross` is True, got None")
    if not spec.cross and memory is not None:
        raise ValueError(f"`memory` must be None because `spec.cross` is False, got {describe(memory)}")
    for name, value in (("x", x), ("memory", memory))[: 2 if spec.cross else 1]:
        shape = shape_of(check_plain(name, value))
        if len(shape) < 2 or shape[-1] != spec.embed_dim:
            raise ValueError(f"`{name}` must have shape (..., length, {spec.embed_dim}), got {describe(value)}")
    if memory is not None and tuple(memory.shape[:-2]) != tuple(x.shape[:-2]):
        raise ValueError(f"`memory` must have the leading axes of `x`, {tuple(x.shape[:-2])}, got {describe(memory)}")


def _split_heads(name: str, x: Array, head_dim: int, *, xp: Namespace) -> Array:
    """Split the result of a projection into heads: (..., L, H · D) -> (..., H, L, D)."""
    heads = x.shape[-1] // head_dim  # no `divmod`: under torch.jit.trace, sizes are tensors
    if x.shape[-1] % head_dim:
        raise ValueError(f"`{name}` must return heads of width {head_dim}, got {describe(x)}")
    return _swap(xp.reshape(x, (*x.shape[:-1], heads, head_dim)), xp=xp)


def _swap(x: Array, *, xp: Namespace) -> Array:
    lead = x.ndim - 3
    return xp.permute_dims(x, (*range(lead), lead + 1, lead, lead + 2))  # torch.vmap has no rule for moveaxis


def _linear(weights: Mapping[str, Array], name: str, x: Array, *, xp: Namespace) -> Array:
    y = xp.matmul(x, xp.matrix_transpose(weights[f"{name}.weight"]))
    bias = weights.get(f"{name}.bias")
    # NumPy's results have the byte order of the machine
    return cast(y if bias is None else y + of_rank(bias, y.ndim), x.dtype, xp=xp)


def weights_alone(q: Array, k: Array, v: Array, *, rel_v: Any = None, impl: Any = None, **others: Any) -> Array:
    """Return the arguments of a call of attention that its weights depend on; the values are not among them."""
    return attention_weights(q, k, **others)


X = TypeVar("X")
"""The input and output arrays of a module."""

Past = TypeVar("Past", bound=tuple[Any, ...])
"""The input and output cache of a module."""


class Seen(TypedDict, total=False):
    """The options that the calls of modules have in all frameworks."""

    mask: Array | None
    key_padding_mask: Array | None
    offset: int | Sequence[int] | Array | None
    segments: Array | tuple[Array, Array] | None
    positions: tuple[Array, Array] | None


def check_padding(padding: Any, k: Array, *, xp: Namespace) -> Array:
    shape, dtype = (*k.shape[:-3], k.shape[-2]), getattr(padding, "dtype", None)
    check_plain("key_padding_mask", padding)
    if dtype is None or dtype != xp.bool or tuple(padding.shape) != shape:
        raise ValueError(
            f"`key_padding_mask` must be a boolean array of shape {shape}, True where a key is padding, "
            f"got {describe(padding)}"
        )
    return padding


def without_keys(hidden: Array | None, mask: Array | None, q: Array, k: Array, *, xp: Namespace) -> Array | None:
    """Return a mask that hides these keys (..., Lk) from all heads and queries, in addition to ``mask``."""
    if hidden is None:
        return mask
    mask = None if mask is None else MASK.check("mask", autocast({"mask": mask})["mask"], q, k, xp=xp)
    return joint(mask, ~hidden[..., None, None, :], xp=xp)

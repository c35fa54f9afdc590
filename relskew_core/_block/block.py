"""The attention block: projections around relative attention, from one mapping of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relskew_core._array.autocast import autocast
from relskew_core._array.checks import describe
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array
from relskew_core._block.cache import PAST, check_past
from relskew_core._block.spec import BlockSpec
from relskew_core._functions.attention import relative_attention


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
        Input of the keys and values; required if ``spec.cross``, refused otherwise.
    past : (array, array), optional
        Cached keys and values ``(..., Hkv, P, D)``; the queries then stand at positions ``P … P + Lq - 1``.
    mask : array, optional
        Boolean (``True`` = may attend) or additive, broadcasting to ``(..., H, Lq, Lk)``.

    Returns
    -------
    y : array, shape (..., Lq, E)
    present : (array, array)
        Only with ``past``: all keys and values so far, ``(..., Hkv, P + Lq, D)``, the next call's ``past``.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it.

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
    return apply_block(x, weights, spec, memory=memory, past=past, mask=mask, attend=relative_attention)


def apply_block(
    x: Array,
    weights: Mapping[str, Array],
    spec: BlockSpec,
    *,
    memory: Array | None,
    past: tuple[Array, Array] | None,
    mask: Array | None,
    attend: Callable[..., Any],
) -> Array | tuple[Array, tuple[Array, Array]]:
    """Return :func:`attention_block` with ``attend`` in the place of :func:`relative_attention`."""
    if not isinstance(spec, BlockSpec):
        raise TypeError(f"`spec` must be a BlockSpec, got {describe(spec)}")
    spec.check_weights(weights)
    _check_inputs(x, spec, memory)
    if past is not None:
        check_past(past, x, spec)
    named = {f"weights[{key!r}]": weight for key, weight in weights.items()}
    cached = dict(zip(PAST, past or (None, None), strict=True))
    given = autocast({"x": x, "memory": memory, **named, **cached})
    xp = namespace_of_arrays({"x": given["x"]}, given)
    x, memory = given["x"], given["memory"]
    weights = {key: given[name] for key, name in zip(weights, named, strict=True)}

    source = x if memory is None else memory
    q = _project(x, "q_proj", weights, spec.num_heads, xp=xp)
    k = _project(source, "k_proj", weights, spec.num_kv_heads, xp=xp)
    v = _project(source, "v_proj", weights, spec.num_kv_heads, xp=xp)
    if past is not None:
        k, v = (xp.concat([given[name], new], axis=-2) for name, new in zip(PAST, (k, v), strict=True))
    heads = attend(
        q,
        k,
        v,
        weights.get("rel_k"),
        spec.span,
        rel_v=weights.get("rel_v"),
        rel_bias=weights.get("rel_bias"),
        causal=spec.causal,
        window=spec.window,
        block_size=spec.block_size,
        blocks_before=spec.blocks_before,
        mask=mask,
        sinks=weights.get("sinks"),
        offset=0 if past is None else past[0].shape[-2],
    )
    y = _merge_heads(heads, weights, xp=xp)
    return y if past is None else (y, (k, v))


def _check_inputs(x: Array, spec: BlockSpec, memory: Array | None) -> None:
    if spec.cross and memory is None:
        raise ValueError("`memory` must be given because `spec.cross` is True, got None")
    if not spec.cross and memory is not None:
        raise ValueError(f"`memory` must be None because `spec.cross` is False, got {describe(memory)}")
    for name, value in (("x", x), ("memory", memory))[: 2 if spec.cross else 1]:
        shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))
        if len(shape) < 2 or shape[-1] != spec.embed_dim:
            raise ValueError(f"`{name}` must have shape (..., length, {spec.embed_dim}), got {describe(value)}")
    if memory is not None and tuple(memory.shape[:-2]) != tuple(x.shape[:-2]):
        raise ValueError(f"`memory` must have the leading axes of `x`, {tuple(x.shape[:-2])}, got {describe(memory)}")


def _project(x: Array, name: str, weights: Mapping[str, Array], heads: int, *, xp: Any) -> Array:
    """Linear map into heads: (..., L, E) -> (..., heads, L, D)."""
    projected = _linear(x, name, weights, xp=xp)
    split = xp.reshape(projected, (*x.shape[:-1], heads, projected.shape[-1] // heads))
    return _swap(split, xp=xp)


def _merge_heads(heads: Array, weights: Mapping[str, Array], *, xp: Any) -> Array:
    """Inverse of the split into heads, then the output projection: (..., H, L, D) -> (..., L, E)."""
    merged = _swap(heads, xp=xp)
    width = merged.shape[-2] * merged.shape[-1]
    return _linear(xp.reshape(merged, (*merged.shape[:-2], width)), "out_proj", weights, xp=xp)


def _swap(x: Array, *, xp: Any) -> Array:
    """Exchange the axes of the heads and of the length."""
    lead = x.ndim - 3
    return xp.permute_dims(x, (*range(lead), lead + 1, lead, lead + 2))  # torch.vmap has no rule for moveaxis


def _linear(x: Array, name: str, weights: Mapping[str, Array], *, xp: Any) -> Array:
    y = xp.matmul(x, xp.matrix_transpose(weights[f"{name}.weight"]))
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias

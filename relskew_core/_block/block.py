"""The attention block: projections around relative attention, from one mapping of weights."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from relskew_core import backends
from relskew_core._array.autocast import autocast
from relskew_core._array.checks import check_int, describe
from relskew_core._array.namespace import namespace_of, namespace_of_arrays
from relskew_core._array.typing import Array
from relskew_core._block.spec import BlockSpec
from relskew_core._functions.attention import relative_attention


def init_weights(spec: BlockSpec, *, seed: int, xp: Any = None, dtype: Any = None) -> dict[str, Array]:
    """Draw the weights of a block: the same float32 numbers in every array library.

    Projections are uniform in ``±sqrt(6 / (fan_in + fan_out))`` (Glorot and Bengio 2010, equation 16, as both papers'
    implementations use), tables uniform in ``±sqrt(3 / D)`` so that a row has unit expected length, biases zero.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    seed : int
        Chooses the numbers. No library's global generator is read or moved.
    xp : module, optional
        Array library to make the arrays in: ``numpy`` (the default), ``torch``, ``cupy``, ``jax.numpy`` …
    dtype : dtype of ``xp``, optional
        What the float32 numbers are rounded to at the end; ``xp.float32`` by default.

    Returns
    -------
    dict of str to array
        Exactly the keys of ``spec.weight_shapes()``.

    Examples
    --------
    >>> import numpy as np
    >>> from relskew_core import BlockSpec, Span
    >>> weights = init_weights(BlockSpec(4, 2, Span.causal(3), causal=True), seed=0)
    >>> weights["rel_k"].shape, weights["rel_k"].dtype
    ((2, 3, 2), dtype('float32'))
    >>> bool(np.all(weights["q_proj.bias"] == 0))
    True
    """
    if not isinstance(spec, BlockSpec):
        raise TypeError(f"`spec` must be a BlockSpec, got {describe(spec)}")
    seed = check_int("seed", seed)
    xp = namespace_of(backends.default_library() if xp is None else xp)
    weights = {}
    for key, shape in spec.weight_shapes().items():
        if key.endswith(".bias"):
            weight = xp.zeros(shape, dtype=xp.float32)
        else:
            bound = uniform_bound(spec, key)
            uniform = xp.asarray(_floats_in_1_2(prod(shape), f"relskew/{seed}/{key}"), dtype=xp.float32)
            weight = xp.reshape((uniform - 1.5) * (2 * bound), shape)
        weights[key] = weight if dtype is None else xp.astype(weight, dtype)
    return weights


def uniform_bound(spec: BlockSpec, key: str) -> float:
    """Return how far from zero the weights of a projection or table are drawn."""
    return (3 / spec.head_dim) ** 0.5 if key.startswith("rel_") else (6 / sum(spec.weight_shapes()[key])) ** 0.5


def _floats_in_1_2(n: int, seed: str) -> array[float]:
    """Draw ``n`` float32 numbers in [1, 2): random mantissas under one exponent, exact on every machine."""
    bits = int.from_bytes(random.Random(seed).randbytes(4 * n), "little")
    mantissas = int.from_bytes(b"\xff\xff\x7f\x00" * n, "little")
    exponents = int.from_bytes(b"\x00\x00\x80\x3f" * n, "little")
    floats = array("f", (bits & mantissas | exponents).to_bytes(4 * n, "little"))
    if sys.byteorder == "big":
        floats.byteswap()
    return floats


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
    >>> from relskew_core import BlockSpec, Span
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
    _check_inputs(x, spec, memory, past)
    given = autocast({"x": x, **{f"weights[{key!r}]": weight for key, weight in weights.items()}})
    more = autocast({"memory": memory, **{f"past[{index}]": cached for index, cached in enumerate(past or ())}})
    xp = namespace_of_arrays(given, more)
    x, memory = given["x"], more["memory"]
    weights = {key: given[f"weights[{key!r}]"] for key in weights}

    source = x if memory is None else memory
    q = _project(x, "q_proj", weights, spec.num_heads, xp=xp)
    k = _project(source, "k_proj", weights, spec.num_kv_heads, xp=xp)
    v = _project(source, "v_proj", weights, spec.num_kv_heads, xp=xp)
    offset = 0
    if past is not None:
        offset = past[0].shape[-2]
        k, v = (xp.concat([more[f"past[{index}]"], new], axis=-2) for index, new in enumerate((k, v)))
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
        mask=mask,
        offset=offset,
    )
    y = _merge_heads(heads, weights, xp=xp)
    return y if past is None else (y, (k, v))


def _check_inputs(x: Array, spec: BlockSpec, memory: Array | None, past: tuple[Array, Array] | None) -> None:
    if spec.cross and memory is None:
        raise ValueError("`memory` must be given because `spec.cross` is True, got None")
    if not spec.cross and memory is not None:
        raise ValueError(f"`memory` must be None because `spec.cross` is False, got {describe(memory)}")
    for name, value in (("x", x), ("memory", memory)):
        if value is None and name == "memory":
            continue
        shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))
        if len(shape) < 2 or shape[-1] != spec.embed_dim:
            raise ValueError(f"`{name}` must have shape (..., length, {spec.embed_dim}), got {describe(value)}")
    if memory is not None and tuple(memory.shape[:-2]) != tuple(x.shape[:-2]):
        raise ValueError(f"`memory` must have the leading axes of `x`, {tuple(x.shape[:-2])}, got {describe(memory)}")
    if past is None:
        return
    if spec.cross:
        raise ValueError("`past` must be None because `spec.cross` is True: a memory's keys are not appended to")
    if not isinstance(past, (tuple, list)) or len(past) != 2:
        raise TypeError(f"`past` must be a pair (keys, values) of arrays, got {describe(past)}")
    for index, value in enumerate(past):
        shape = tuple(getattr(value, "shape", ()))
        expected = (*x.shape[:-2], spec.num_kv_heads, shape[-2] if len(shape) > 1 else -1, spec.head_dim)
        if shape != expected or shape[-2] != past[0].shape[-2]:
            raise ValueError(
                f"`past[{index}]` must have shape (..., {spec.num_kv_heads}, past length, {spec.head_dim}) with the "
                f"leading axes of `x`, {tuple(x.shape[:-2])}, and one past length, got {describe(value)}"
            )


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

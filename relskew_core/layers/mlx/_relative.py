"""``RelativeMultiheadAttention``: the attention block as a module of mlx.nn that calls its projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self, Unpack, overload

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from relskew_core._array import mlx
from relskew_core._array.checks import explains
from relskew_core._array.namespace import is_torch
from relskew_core._array.typing import Array, Impl, Namespace
from relskew_core._block.block import Past, Seen, X
from relskew_core._block.cache import SlidingCache, check_fixed
from relskew_core._block.module import ModuleBlock, Settings, called
from relskew_core._block.spec import ATTENDED, PROJECTIONS, BlockSpec
from relskew_core._block.weights import uniform_bound


class FixedCache(NamedTuple):
    """Room for the keys and values of a whole sequence, with the same shape at every step.

    Parameters
    ----------
    keys, values : array, shape (..., Hkv, N, D)
        The keys and values so far, and room for more.
    length : array of integers, shape () or (...)
        Number of filled positions, for all items or for each. After prompts that were padded on the right, set it with
        ``cache = cache._replace(length=lengths)``: generated tokens then overwrite the padding.

    Notes
    -----
    Too many positions, or a negative ``length``, raise an error if it is known, and give NaN if it is compiled.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.mlx import RelativeMultiheadAttention
    >>> spec = BlockSpec(8, 2, Span.causal(16), causal=True)
    >>> attention = RelativeMultiheadAttention(spec)
    >>> x = mx.random.normal((2, 6, 8))
    >>> _, cache = attention(x[:, :4], past=attention.empty_cache(2, length=16))
    >>> cache = cache._replace(length=mx.array([4, 3]))  # the second prompt is shorter
    >>> y, cache = attention(x[:, 4:5], past=cache)
    >>> cache.length
    array([5, 4], dtype=int32)
    """

    keys: Array
    values: Array
    length: Array

    def extend(self, k: Array, v: Array, *, xp: Any) -> tuple[Array, Array, FixedCache, Mapping[str, Any]]:
        length, room, n = self.length, self.keys.shape[-2], k.shape[-2]
        if check_fixed(self, k, v, xp=xp) is None:
            fits = mx.logical_and(length >= 0, length <= room - n)[..., None, None, None]
            k, v = (mx.where(fits, x, mx.nan) for x in (k, v))
            length = mx.clip(length, 0, room - n)
        places = (length[..., None] + mx.arange(n))[..., None, :, None]
        keys, values = (
            mx.put_along_axis(old, mx.broadcast_to(places, new.shape), new, axis=-2)
            for old, new in ((self.keys, k), (self.values, v))
        )
        return keys, values, FixedCache(keys, values, length + n), {"offset": length}


class RelativeMultiheadAttention(ModuleBlock[FixedCache, SlidingCache], Module):
    """Multi-head attention with relative positions: :func:`relskew_core.attention_block` as a module of mlx.nn.

    The projections are called as modules, so that what replaces them takes part: quantized ones, say. Dropout goes by
    ``train()`` and ``eval()``, and by the state of ``mx.random``, as in ``nn.Dropout``.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    dropout : float, default 0.0
        Fraction of the attention weights that is set to zero in training, below 1; the others are scaled up.
    impl, chunk_size : optional
        As in :func:`relskew_core.relative_attention`.
    dtype : dtype, default float32
        Of the parameters, which are drawn in the bounds of :func:`relskew_core.init_weights`.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from relskew_core import BlockSpec, Span
    >>> spec = BlockSpec(16, 4, Span.causal(32), causal=True)
    >>> attention = RelativeMultiheadAttention(spec, dropout=0.1)
    >>> attention(mx.random.normal((2, 7, 16))).shape
    (2, 7, 16)
    """

    xp: ClassVar[Namespace] = mlx
    caches: ClassVar[tuple[type[Any], type[Any]]] = (FixedCache, SlidingCache)

    @explains(hint="a module is made of a spec, as in RelativeMultiheadAttention(BlockSpec(64, 4, Span.clipped(8)))")
    def __init__(
        self,
        spec: BlockSpec,
        *,
        dropout: float = 0.0,
        impl: Impl = "auto",
        chunk_size: int | None = None,
        dtype: Any = mx.float32,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx.nn declares no types there
        self.settings = Settings.of(spec, dropout, impl, chunk_size)
        self.spec = spec
        shapes = spec.weight_shapes()
        for name in PROJECTIONS:
            width, source = shapes[f"{name}.weight"]
            setattr(self, name, Linear(source, width, bias=spec.bias))
        for name in ATTENDED:
            setattr(self, name, None)
        self._put({name: _drawn(spec, name, shape, dtype) for name, shape in shapes.items()})

    @classmethod
    def _filled(cls, weights: dict[str, Array], spec: BlockSpec, options: dict[str, Any]) -> Self:
        module = cls(spec, **options)
        module._put(weights)
        return module

    @staticmethod
    def _copied(x: Any) -> Array:
        if is_torch(x):
            x = x.detach().cpu()
        elif hasattr(x, "strides"):  # MLX does not accept NumPy arrays with negative strides
            x = x.copy()
        return mx.asarray(x, dtype=getattr(mx, str(x.dtype).rpartition(".")[2]), copy=True)

    def _extra_repr(self) -> str:
        return ", ".join(self.spec.chosen() + self.settings.chosen())

    @overload
    def __call__(self, x: X, memory: Array | None = None, **options: Unpack[Seen]) -> X: ...
    @overload
    def __call__(self, x: X, memory: Array | None = None, *, past: Past, **options: Unpack[Seen]) -> tuple[X, Past]: ...
    @called()
    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        past: tuple[Array, Array] | FixedCache | SlidingCache | None = None,
        **seen: Any,
    ) -> Any:
        seed = mx.random.randint(0, 2**31 - 1) if self.training and self.settings.dropout else None
        return self._call(x, memory, past, seed, seen)

    def _put(self, weights: Mapping[str, Array]) -> None:
        for name, weight in weights.items():
            owner, _, part = name.rpartition(".")
            setattr(getattr(self, owner) if owner else self, part, weight)


def _drawn(spec: BlockSpec, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    bound = uniform_bound(spec, name)
    return mx.random.uniform(-bound, bound, shape, dtype) if bound else mx.zeros(shape, dtype)

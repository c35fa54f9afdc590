"""``RelativeMultiheadAttention``: the attention block as a Keras layer that calls its projections."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar, Self

import keras

from relskew_core._array.checks import describe, explains
from relskew_core._array.namespace import is_torch
from relskew_core._array.typing import Array, Impl, Namespace
from relskew_core._block.cache import SlidingCache
from relskew_core._block.module import ModuleBlock, Settings, called
from relskew_core._block.spec import ATTENDED, PROJECTIONS, BlockSpec
from relskew_core._block.weights import uniform_bound

BACKEND = keras.backend.backend()
PARTS = {
    "torch": ("array_api_compat.torch", "relskew_core.layers.torch"),
    "jax": ("jax.numpy", "relskew_core.layers._jax.caches"),
}
"""The namespace and the caches of each backend."""

if BACKEND not in PARTS:
    raise ImportError(
        f"relskew_core.layers.keras needs Keras on torch or JAX, and its backend is {BACKEND!r}; for TensorFlow, copy "
        "examples/keras_attention.py into your project"
    )
xp, own = map(import_module, PARTS[BACKEND])
FixedCache = own.FixedCache


@keras.saving.register_keras_serializable(package="relskew_core")
class RelativeMultiheadAttention(keras.layers.Layer, ModuleBlock[Any, Any]):  # type: ignore[misc]  # Keras declares no types
    """Multi-head attention with relative positions: :func:`relskew_core.attention_block` as a Keras layer.

    The projections are ``Dense`` layers that are called, so LoRA and quantisation of Keras take part. Dropout goes by
    ``training``, and masks of Keras, as from ``Embedding(mask_zero=True)``, hide keys.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    dropout : float, default 0.0
        Fraction of the attention weights that is set to zero in training, below 1; the others are scaled up.
    impl, chunk_size : optional
        As in :func:`relskew_core.relative_attention`.
    seed : int, optional
        Of dropout.
    **options
        Of ``keras.layers.Layer``: ``name``, ``dtype``, ``trainable``. Weights are drawn in the bounds of
        :func:`relskew_core.init_weights`.

    Examples
    --------
    >>> import keras
    >>> from relskew_core import BlockSpec, Span
    >>> spec = BlockSpec(16, 4, Span.causal(32), causal=True)
    >>> attention = RelativeMultiheadAttention(spec, dropout=0.1)
    >>> tuple(attention(keras.random.normal((2, 7, 16))).shape)
    (2, 7, 16)
    """

    xp: ClassVar[Namespace] = xp
    caches: ClassVar[tuple[type[Any], type[Any]]] = (FixedCache, SlidingCache)
    built: bool

    def __init__(
        self,
        spec: BlockSpec,
        *,
        dropout: float = 0.0,
        impl: Impl = "auto",
        chunk_size: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        settings = Settings.of(spec, dropout, impl, chunk_size)
        super().__init__(**options)
        self.settings, self.spec, self.seed = settings, spec, seed
        self.supports_masking = True
        self.seeds = keras.random.SeedGenerator(seed) if settings.dropout else None
        for name in PROJECTIONS:
            width = spec.weight_shapes()[f"{name}.weight"][0]
            glorot = keras.initializers.GlorotUniform()
            dense = keras.layers.Dense(
                width, use_bias=spec.bias, kernel_initializer=glorot, dtype=self.dtype_policy, name=name
            )
            setattr(self, name, dense)

    def build(self, x_shape: Any = None, memory_shape: Any = None) -> None:
        """Make the weights, whose shapes the spec says."""
        for name, shape in self.spec.weight_shapes().items():
            owner, _, part = name.rpartition(".")
            if part == "weight":
                getattr(self, owner).build((None, None, shape[1]))
            elif not owner:
                bound = uniform_bound(self.spec, name)
                drawn = keras.initializers.RandomUniform(-bound, bound) if bound else "zeros"
                setattr(self, name, self.add_weight(name=name, shape=shape, initializer=drawn))

    @classmethod
    def _filled(cls, weights: dict[str, Array], spec: BlockSpec, options: dict[str, Any]) -> Self:
        dtypes = {keras.backend.standardize_dtype(weight.dtype) for weight in weights.values()}
        layer = cls(spec, **({"dtype": dtypes.pop()} if len(dtypes) == 1 else {}), **options)
        layer.build()
        for name, variable in layer._variables_by_name().items():
            weight = weights[name]
            variable.assign(weight.T if name.endswith(".weight") else weight)  # Keras stores projections transposed
        return layer

    @staticmethod
    def _copied(x: Any) -> Array:
        if BACKEND == "jax":
            return own.JaxBlock._copied(x)
        return x.detach().clone() if is_torch(x) else keras.ops.copy(keras.ops.convert_to_tensor(x))

    def block_weights(self) -> dict[str, Array]:
        """Return the weights as a mapping, with exactly the keys and shapes of ``spec.weight_shapes()``.

        ``weights`` is the list of a Keras layer.
        """
        found = {name: keras.ops.convert_to_tensor(x) for name, x in self._variables_by_name().items()}
        return {name: x.T if name.endswith(".weight") else x for name, x in found.items()}

    def _variables_by_name(self) -> dict[str, Any]:
        found = {}
        for name in self.spec.weight_shapes():
            owner, _, part = name.rpartition(".")
            found[name] = (
                getattr(getattr(self, owner), {"weight": "kernel"}.get(part, part)) if owner else getattr(self, part)
            )
        return found

    @called(
        """
        mask, x_mask, memory_mask : array, shape (..., L), optional
            Keras's own masks, ``True`` for tokens that count, which Keras passes on from layer to layer: those of the
            keys hide them. With ``past`` they say nothing of the cached keys, so that ``key_padding_mask`` takes their
            place.
        training : bool, optional
            Whether there is dropout.
    """,
        mask="attention_mask",
    )
    def call(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        past: Any = None,
        attention_mask: Array | None = None,
        key_padding_mask: Array | None = None,
        offset: int | Sequence[int] | Array | None = None,
        segments: Array | tuple[Array, Array] | None = None,
        positions: tuple[Array, Array] | None = None,
        mask: Array | None = None,
        x_mask: Array | None = None,
        memory_mask: Array | None = None,
        training: bool | None = None,
    ) -> Any:
        if memory is not None and mask is not None:
            x_mask = mask if x_mask is None else x_mask
        counts = memory_mask if self.spec.cross else x_mask if mask is None else mask
        seed = keras.random.randint((), 0, 2**31 - 1, seed=self.seeds) if training and self.seeds is not None else None
        options = {"mask": attention_mask, "offset": offset, "segments": segments, "positions": positions}
        options["key_padding_mask"] = _padding(counts, key_padding_mask, past)
        return self._call(x, memory, past, seed, options)

    @explains
    def attention_weights(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        attention_mask: Array | None = None,
        **options: Any,
    ) -> Array:
        """Return the weights of the layer's attention, ``(..., H, Lq, Lk)``, without dropout.

        The options are ``past``, ``key_padding_mask``, ``offset``, ``segments`` and ``positions``, as in :meth:`call`.
        """
        if not self.built:
            self.build()
        given = [None if value is None else keras.ops.convert_to_tensor(value) for value in (x, memory, attention_mask)]
        return super().attention_weights(*given[:2], mask=given[2], **options)

    def compute_output_spec(self, x: Any, memory: Any = None, *, past: Any = None, **options: Any) -> Any:
        """Return the shape and dtype of the output, and of the cache with ``past``."""
        if past is not None:
            return keras.Operation.compute_output_spec(self, x, memory, past=past, **options)
        return keras.KerasTensor(x.shape, dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` makes the layer of."""
        own = {"spec": self.spec.to_dict(), **self.settings._asdict(), "seed": self.seed}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make a layer from :meth:`get_config`'s result."""
        return cls(**{**config, "spec": BlockSpec.from_dict(config["spec"])})

    def _room(self, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array, Array]:
        dtype = self.compute_dtype if dtype is None else dtype
        keys, values = (keras.ops.zeros(shape, dtype=dtype) for _ in range(2))
        return keys, values, keras.ops.zeros((), dtype="int64" if BACKEND == "torch" else "int32")

    def _tables(self) -> dict[str, Array]:
        here = self.spec.weight_shapes(projections=False)
        return {name: keras.ops.convert_to_tensor(getattr(self, name)) for name in ATTENDED if name in here}


def _padding(counts: Any, padding: Any, past: Any) -> Any:
    """Return which keys are padding, by a mask of Keras or by the argument of the call."""
    if counts is None or (past is not None and padding is not None):
        return padding
    if past is not None:
        raise ValueError(
            "`key_padding_mask` must be given for all keys, because with `past` a mask of Keras says nothing of the "
            f"cached ones, got `mask` {describe(counts)}"
        )
    if counts.ndim != 2:
        raise ValueError(
            "`mask` must have shape (..., L), Keras's mask of tokens that count; a mask by query and key is "
            f"`attention_mask`, got {describe(counts)}"
        )
    hidden = ~keras.ops.cast(counts, "bool")
    return hidden if padding is None else hidden | padding

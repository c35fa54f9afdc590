"""Relative attention as a Keras 3 layer for every backend: TensorFlow, torch or JAX. Copy it and change it.

With torch and JAX, relskew's native paths run. TensorFlow's arrays follow no standard: there the NumPy path computes
attention on the CPU, forward and backward, as one step of the graph that XLA cannot compile.
"""

from typing import Any

import keras
from keras import ops

from relskew_core import Span, relative_attention, relative_attention_vjp

TENSORFLOW = keras.backend.backend() == "tensorflow"


@keras.saving.register_keras_serializable(package="relskew")
class RelativeAttention(keras.layers.Layer):
    """Multi-head self-attention with a learned vector for every relative position and head.

    ``left`` and ``right`` are the reach of the table into the past and the future; positions further away use its last
    row. Inputs are ``(batch, length, features)``; Keras' masks, ``(batch, length)``, hide keys.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        left: int,
        right: int = 0,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_heads, self.key_dim, self.left, self.right = num_heads, key_dim, left, right
        self.causal, self.dropout, self.seed = causal, dropout, seed
        self.span = Span(left, right, beyond="clip")
        self.seeds = keras.random.SeedGenerator(seed)
        self.supports_masking = True
        self.supports_jit = not TENSORFLOW

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        batch, length, features = input_shape
        heads = (self.num_heads, None, self.key_dim)
        for name in ("query", "key", "value"):
            self._project(name, "btd,dhk->bhtk", heads, "hk", input_shape)
        self._project("out", "bhtk,hkd->btd", (None, features), "d", (batch, self.num_heads, length, self.key_dim))
        rows = (self.num_heads, self.span.rows, self.key_dim)
        self.rel_k = self.add_weight(name="rel_k", shape=rows, initializer=keras.initializers.RandomNormal(stddev=0.2))

    def _project(self, name: str, equation: str, shape: Any, bias: str, input_shape: Any) -> None:
        dense = keras.layers.EinsumDense(equation, shape, bias_axes=bias, dtype=self.dtype_policy, name=name)
        dense.supports_masking = True
        dense.build(input_shape)
        setattr(self, name, dense)

    def call(self, x: Any, mask: Any = None, training: bool = False) -> Any:
        options: dict[str, Any] = {"span": self.span, "causal": self.causal}
        if mask is not None:
            options["mask"] = ops.cast(mask, "bool")[:, None, None, :]
        if training and self.dropout:
            seed = keras.random.randint((), 0, 2**31 - 1, seed=self.seeds)
            options.update(dropout=self.dropout, seed=seed)
        attend = numpy_attention if TENSORFLOW else relative_attention
        rel_k = ops.convert_to_tensor(self.rel_k)
        return self.out(attend(self.query(x), self.key(x), self.value(x), rel_k, **options))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        names = ("num_heads", "key_dim", "left", "right", "causal", "dropout", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def numpy_attention(q: Any, k: Any, v: Any, rel_k: Any, *, mask: Any = None, seed: Any = None, **options: Any) -> Any:
    """Return ``relative_attention`` of TensorFlow tensors, computed and differentiated by NumPy."""
    import tensorflow as tf

    if q.dtype == tf.bfloat16:  # which NumPy does not support
        q, k, v, rel_k = (tf.cast(x, tf.float32) for x in (q, k, v, rel_k))
        return tf.cast(numpy_attention(q, k, v, rel_k, mask=mask, seed=seed, **options), tf.bfloat16)
    given = {name: x for name, x in (("mask", mask), ("seed", seed)) if x is not None}

    def step(function: Any, arrays: tuple[Any, ...], shapes: list[Any]) -> list[Any]:
        def run(*arrays: Any) -> Any:
            more = dict(zip(given, arrays[len(arrays) - len(given) :], strict=True))
            return function(*arrays[: len(arrays) - len(given)], **more, **options)

        results = tf.numpy_function(run, [*arrays, *given.values()], [q.dtype] * len(shapes), stateful=False)
        return [tf.ensure_shape(x, shape) for x, shape in zip(tf.nest.flatten(results), shapes, strict=True)]

    @tf.custom_gradient
    def attend(*arrays: Any) -> Any:
        shape = (*arrays[0].shape[:-1], arrays[2].shape[-1])
        (out,) = step(lambda *x, **more: [relative_attention(*x, **more)], arrays, [shape])

        def gradient(d_out: Any) -> list[Any]:
            return step(_gradients, (d_out, *arrays), [x.shape for x in arrays])

        return out, gradient

    return attend(q, k, v, rel_k)


def _gradients(*arrays: Any, **options: Any) -> list[Any]:
    found = relative_attention_vjp(*arrays, **options)
    return [found.q, found.k, found.v, found.rel_k]

"""Relative attention as a Keras 3 layer for every backend: TensorFlow, torch or JAX. Copy it and change it.

With torch and JAX, relskew's native paths run. TensorFlow's arrays follow no standard: there the NumPy path computes
attention on the CPU, forward and backward, as one step of the graph that XLA cannot compile.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from relskew_core import Span, alibi_bias, relative_attention, relative_attention_vjp, t5_buckets

TENSORFLOW = keras.backend.backend() == "tensorflow"
POSITIONS = ("keys", "bias", "t5", "alibi")


@keras.saving.register_keras_serializable(package="relskew")
class RelativeAttention(keras.layers.Layer):
    """Multi-head self-attention with relative positions.

    ``positions`` selects what a relative position has for a head: ``"keys"``, a learned vector; ``"bias"``, a learned
    number; ``"t5"``, the learned number of one of T5's 32 buckets; ``"alibi"``, ALiBi's fixed number. ``left`` and
    ``right`` are the reach into the past and the future; positions further away use the last row, and ALiBi raises an
    error. Inputs are ``(batch, length, features)``; Keras' masks, ``(batch, length)``, hide keys.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        left: int,
        right: int = 0,
        *,
        positions: str = "keys",
        causal: bool = False,
        dropout: float = 0.0,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if positions not in POSITIONS:
            raise ValueError(f"`positions` must be one of {list(POSITIONS)}, got {positions!r}")
        if positions == "t5" and max(left, right) <= (exact := 8 if right else 16):
            raise ValueError(f"`left` or `right` must be more than {exact} with T5's buckets, got {left} and {right}")
        self.num_heads, self.key_dim, self.left, self.right = num_heads, key_dim, left, right
        self.positions, self.causal, self.dropout, self.seed = positions, causal, dropout, seed
        self.span = Span(left, right, beyond="error" if positions == "alibi" else "clip")
        self.seeds = keras.random.SeedGenerator(seed)
        self.supports_masking = True
        self.supports_jit = not TENSORFLOW

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        batch, length, features = input_shape
        heads = (self.num_heads, None, self.key_dim)
        for name in ("query", "key", "value"):
            self._project(name, "btd,dhk->bhtk", heads, "hk", input_shape)
        self._project("out", "bhtk,hkd->btd", (None, features), "d", (batch, self.num_heads, length, self.key_dim))
        numbers = (self.num_heads, self.span.rows)
        shapes = {"keys": (*numbers, self.key_dim), "bias": numbers, "t5": (32, self.num_heads), "alibi": None}
        shape, random = shapes[self.positions], keras.initializers.RandomNormal(stddev=0.2)
        self.table = None if shape is None else self.add_weight(name="table", shape=shape, initializer=random)

    def _project(self, name: str, equation: str, shape: Any, bias: str, input_shape: Any) -> None:
        dense = keras.layers.EinsumDense(equation, shape, bias_axes=bias, dtype=self.dtype_policy, name=name)
        dense.supports_masking = True
        dense.build(input_shape)
        setattr(self, name, dense)

    def _table(self) -> Any:
        if self.positions == "alibi":
            return ops.convert_to_tensor(alibi_bias(self.num_heads, self.span, xp=np), dtype=self.compute_dtype)
        table = ops.convert_to_tensor(self.table)
        if self.positions == "t5":
            reach = max(self.left, self.right)
            buckets = t5_buckets(self.span, num_buckets=32, max_distance=reach, bidirectional=self.right > 0)
            table = ops.transpose(ops.take(table, buckets, axis=0))
        return table

    def call(self, x: Any, mask: Any = None, training: bool = False) -> Any:
        options: dict[str, Any] = {"span": self.span, "causal": self.causal}
        if mask is not None:
            options["mask"] = ops.cast(mask, "bool")[:, None, None, :]
        if training and self.dropout:
            seed = keras.random.randint((), 0, 2**31 - 1, seed=self.seeds)
            options.update(dropout=self.dropout, seed=seed)
        if self.positions == "t5":
            options["scale"] = 1.0
        attend = numpy_attention if TENSORFLOW else relative_attention
        options["rel_k" if self.positions == "keys" else "rel_bias"] = self._table()
        return self.out(attend(self.query(x), self.key(x), self.value(x), **options))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        names = ("num_heads", "key_dim", "left", "right", "positions", "causal", "dropout", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def numpy_attention(q: Any, k: Any, v: Any, *, mask: Any = None, seed: Any = None, **options: Any) -> Any:
    """Return ``relative_attention`` of TensorFlow tensors, computed and differentiated by NumPy."""
    import tensorflow as tf

    tables = [name for name in ("rel_k", "rel_bias") if name in options]
    given = dict(zip("qkv", (q, k, v), strict=True)) | {name: options.pop(name) for name in tables}
    fixed = {name: x for name, x in (("mask", mask), ("seed", seed)) if x is not None}
    dtype = tf.float32 if q.dtype == tf.bfloat16 else q.dtype  # NumPy does not support bfloat16

    def step(function: Any, more: tuple[Any, ...], arrays: tuple[Any, ...], shapes: list[Any]) -> list[Any]:
        def run(*x: Any) -> Any:
            named = dict(zip((*given, *fixed), x[len(more) :], strict=True))
            return function(*x[: len(more)], **named, **options)

        inputs = [*more, *arrays, *fixed.values()]
        results = tf.numpy_function(run, inputs, [dtype] * len(shapes), stateful=False)
        return [tf.ensure_shape(x, shape) for x, shape in zip(tf.nest.flatten(results), shapes, strict=True)]

    @tf.custom_gradient
    def attend(*arrays: Any) -> Any:
        (out,) = step(lambda **x: [relative_attention(**x)], (), arrays, [(*q.shape[:-1], v.shape[-1])])

        def gradients(d_out: Any, **x: Any) -> list[Any]:
            found = relative_attention_vjp(d_out, **x)
            return [getattr(found, name) for name in given]

        return out, lambda d_out: step(gradients, (d_out,), arrays, [x.shape for x in arrays])

    return tf.cast(attend(*(tf.cast(x, dtype) for x in given.values())), q.dtype)

"""equinox's module among equinox's own: its leaves, its flag, its keys."""

import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from layers.frameworks import close, differ
from layers.modules import SPECS, inputs

from relskew_core.layers.equinox import RelativeMultiheadAttention

CAUSAL = SPECS["causal"]
X = inputs(CAUSAL)[0].numpy()
KEY = jax.random.key(7)


def made(**options: Any) -> RelativeMultiheadAttention:
    return RelativeMultiheadAttention(CAUSAL, **{"key": jax.random.key(0), "dtype": jnp.float64, **options})


def test_its_leaves_are_the_weights() -> None:
    module = made(dropout=0.5)
    assert len(jax.tree.leaves(eqx.filter(module, eqx.is_array))) == len(CAUSAL.weight_shapes())
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, module)
    file.seek(0)
    other = eqx.tree_deserialise_leaves(file, made(dropout=0.5, key=jax.random.key(1)))
    close(other(X, key=KEY), module(X, key=KEY))


def test_inference_leaves_dropout_out() -> None:
    module = made(dropout=0.5)
    quiet = made()(X)
    assert differ(module(X, key=KEY), quiet)
    close(module(X, inference=True), quiet)
    model = eqx.nn.inference_mode(eqx.nn.Sequential([eqx.nn.Lambda(lambda x: x), module]))
    close(model[1](X), quiet)
    close(made(dropout=0.5, inference=True)(X), quiet)
    assert differ(made(dropout=0.5, inference=True)(X, inference=False, key=KEY), quiet)
    with pytest.raises(ValueError, match=r"`key` must be given because `dropout` is 0.5 and `inference` False"):
        module(X)


def test_every_item_under_vmap_has_its_key() -> None:
    module = made(dropout=0.5)
    same = jnp.stack([X[0], X[0]])
    keys = jax.random.split(KEY, 2)
    y = eqx.filter_jit(lambda x, key: jax.vmap(module)(x, key=key))(same, keys)
    assert differ(y[0], y[1])
    for item in (0, 1):
        close(y[item], module(same[item], key=keys[item]))


def test_what_replaces_a_projection_takes_part() -> None:
    module = made()

    class Doubled(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * self.inner(x)

    bias = module.out_proj.bias
    doubled = eqx.tree_at(lambda module: module.out_proj, module, Doubled(module.out_proj))
    close(doubled(X), 2 * module(X))
    assert bias is not None

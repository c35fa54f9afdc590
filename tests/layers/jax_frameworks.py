"""The modules of flax and equinox, each by what the tests ask of both."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from flax import nnx

from relskew_core import BlockSpec
from relskew_core.layers import equinox, flax


class Framework(NamedTuple):
    """How a module is made, called in training, and differentiated."""

    name: str
    module: Any
    drawn: Callable[..., Any]
    """``(spec, seed, **options)``."""

    train: Callable[[Any, Any, Any], Any]
    """``(module, x, key)``: with dropout."""

    dropout_key: Callable[[Any], Any]
    """The key that attention gets then."""

    grad: Callable[[Callable[[Any], Any], Any], Any]
    """``(loss, module)``: a mapping like ``module.weights()``."""

    jit: Callable[..., Any]


def _flax_grad(loss: Callable[[Any], Any], module: Any) -> Any:
    return nnx.merge(nnx.graphdef(module), nnx.grad(loss)(module)).weights()


def _equinox_grad(loss: Callable[[Any], Any], module: Any) -> Any:
    grad: Any = eqx.filter_grad(loss)
    return grad(module).weights()


FLAX = Framework(
    name="flax", module=flax.RelativeMultiheadAttention,
    drawn=lambda spec, seed, **options: flax.RelativeMultiheadAttention(spec, rngs=nnx.Rngs(seed), **options),
    train=lambda module, x, key: module(x, deterministic=False, rngs=nnx.Rngs(dropout=key)),
    dropout_key=lambda key: nnx.Rngs(dropout=key).dropout(), grad=_flax_grad, jit=nnx.jit,
)  # fmt: skip
EQUINOX = Framework(
    name="equinox", module=equinox.RelativeMultiheadAttention,
    drawn=lambda spec, seed, **options: equinox.RelativeMultiheadAttention(spec, key=jax.random.key(seed), **options),
    train=lambda module, x, key: module(x, key=key), dropout_key=lambda key: key, grad=_equinox_grad,
    jit=eqx.filter_jit,
)  # fmt: skip
FRAMEWORKS = [FLAX, EQUINOX]


def mapping(spec: BlockSpec, dtype: Any = np.float64) -> dict[str, Any]:
    """Draw weights, biases and sinks too."""
    rng = np.random.default_rng(4)
    return {key: rng.standard_normal(shape).astype(dtype) / 2 for key, shape in spec.weight_shapes().items()}


def inputs(spec: BlockSpec, n: int = 9, m: int = 7) -> tuple[Any, ...]:
    """Draw the module's positional inputs: arrays of NumPy, for JAX compiles every way in which its own are cut."""
    rng = np.random.default_rng(3)
    return tuple(rng.standard_normal((2, length, spec.embed_dim)) for length in (n, m)[: 2 if spec.cross else 1])


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare arrays of any library."""
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=tolerance)


def differ(one: jax.Array, other: jax.Array) -> bool:
    return bool(jax.numpy.abs(one - other).max() > 1e-3)

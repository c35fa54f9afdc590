"""The modules of torch, flax, equinox and MLX, each by what the tests ask of all."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from layers.modules import made

from relskew_core import BlockSpec
from relskew_core.layers import equinox, flax
from relskew_core.layers.torch import RelativeMultiheadAttention


class Framework(NamedTuple):
    """How a module is made, called in training, and differentiated."""

    name: str
    library: Any
    array: Callable[..., Any]
    module: Any

    compile: Callable[..., Any]
    """Of arrays and caches."""

    drawn: Callable[..., Any]
    """``(spec, seed, **options)``."""

    grad: Any = None
    """``(loss, module)``: a mapping like ``module.weights()``."""

    train: Any = None
    """``(module, x, key)``: with dropout."""

    dropout_key: Any = None
    """The key that attention gets then."""

    jit: Any = None
    """Of modules and arrays."""

    def wide(self, x: Any) -> Any:
        return self.array(np.asarray(x), dtype=self.library.float64)

    def weights(self, module: Any) -> Any:
        return module.state_dict() if self.library is torch else module.weights()

    def pair(self, spec: BlockSpec, **options: Any) -> tuple[Any, Any]:
        """Return torch's module and this one's, of the same weights."""
        theirs = made(spec)
        if self.library is torch:
            return theirs, made(spec, **options)
        return theirs, self.module.from_weights(theirs.state_dict(), spec, **options)


def _flax_grad(loss: Callable[[Any], Any], module: Any) -> Any:
    return nnx.merge(nnx.graphdef(module), nnx.grad(nnx.jit(loss))(module)).weights()


def _equinox_grad(loss: Callable[[Any], Any], module: Any) -> Any:
    grad: Any = eqx.filter_grad(eqx.filter_jit(loss))
    return grad(module).weights()


def _torch_drawn(spec: Any, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    return RelativeMultiheadAttention(spec, **options)


TORCH = Framework(
    "torch", torch, torch.tensor, RelativeMultiheadAttention, partial(torch.compile, backend="eager"), _torch_drawn
)
FLAX = Framework(
    "flax", jnp, jnp.asarray, flax.RelativeMultiheadAttention, jax.jit,
    lambda spec, seed, **options: flax.RelativeMultiheadAttention(spec, rngs=nnx.Rngs(seed), **options), _flax_grad,
    train=lambda module, x, key: module(x, deterministic=False, rngs=nnx.Rngs(dropout=key)),
    dropout_key=lambda key: nnx.Rngs(dropout=key).dropout(), jit=nnx.jit,
)  # fmt: skip
EQUINOX = Framework(
    "equinox", jnp, jnp.asarray, equinox.RelativeMultiheadAttention, jax.jit,
    lambda spec, seed, **options: equinox.RelativeMultiheadAttention(spec, key=jax.random.key(seed), **options),
    _equinox_grad, train=lambda module, x, key: module(x, key=key), dropout_key=lambda key: key, jit=eqx.filter_jit,
)  # fmt: skip
OF_JAX = [FLAX, EQUINOX]
OF_MLX: list[Framework] = []  # MLX is not on every machine

if importlib.util.find_spec("mlx") is not None:
    mx, nn, utils, _mlx = map(importlib.import_module, ("mlx.core", "mlx.nn", "mlx.utils", "relskew_core.layers.mlx"))

    def _mlx_drawn(spec: Any, seed: int, **options: Any) -> Any:
        mx.random.seed(seed)
        return _mlx.RelativeMultiheadAttention(spec, **options)

    def _mlx_grad(loss: Callable[[Any], Any], module: Any) -> Any:
        return dict(utils.tree_flatten(nn.value_and_grad(module, lambda: loss(module))()[1]))

    OF_MLX = [Framework("mlx", mx, mx.array, _mlx.RelativeMultiheadAttention, mx.compile, _mlx_drawn, _mlx_grad)]

OTHERS = [*OF_JAX, *OF_MLX]


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare arrays of any library."""
    one, other = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x) for x in (actual, expected))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def differ(one: Any, other: Any) -> bool:
    return bool(abs(one - other).max() > 1e-3)

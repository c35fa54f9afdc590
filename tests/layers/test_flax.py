"""flax's module among flax's own: its state, its flags, its random numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import modules
from layers.frameworks import close, differ
from layers.modules import SPECS, inputs

from relskew_core.layers.flax import RelativeMultiheadAttention

CAUSAL = SPECS["causal"]
X, WEIGHTS = inputs(CAUSAL)[0].numpy(), modules.made(CAUSAL).state_dict()


def made(**options: Any) -> Any:
    return RelativeMultiheadAttention(CAUSAL, **{"rngs": nnx.Rngs(0), **options})


def test_parameters_are_params_and_nothing_else_is_state() -> None:
    module = made()
    assert jax.tree.leaves(nnx.state(module)) == jax.tree.leaves(nnx.state(module, nnx.Param))
    assert set(nnx.state(module)) == {"q_proj", "k_proj", "v_proj", "out_proj", "rel_k"}
    assert module.q_proj.kernel.shape == (8, 8)
    graph, parameters, *(rest,) = nnx.split(made(dropout=0.5, deterministic=False), nnx.Param, ...)
    assert set(rest) == {"rngs"}
    assert differ(nnx.merge(graph, parameters, rest)(X), module(X))


def test_train_and_eval_and_calls_switch_dropout() -> None:
    module = made(dropout=0.5)
    with pytest.raises(ValueError, match=r"`deterministic` must be given .* because `dropout` is 0.5, got None"):
        module(X)
    module.eval()
    quiet = module(X)
    close(quiet, made()(X))
    assert differ(module(X, deterministic=False), quiet)
    module.train()
    assert differ(module(X), quiet)
    close(module(X, deterministic=True), quiet)
    module.set_view(deterministic=True)  # nnx.view in newer releases
    close(module(X), quiet)


def test_the_modules_own_random_numbers_move_on() -> None:
    one, other = (made(dropout=0.5, deterministic=False) for _ in range(2))
    call = nnx.jit(lambda module, x: module(x))
    first, second = call(one, X), call(one, X)
    assert differ(first, second)
    close(other(X), first)
    close(other(X), second)


def test_random_numbers_of_the_call() -> None:
    module = made(dropout=0.5, deterministic=False, keep_rngs=False)
    with pytest.raises(ValueError, match="`rngs` must be given to the call because the module keeps none, got None"):
        module(X)
    first = module(X, rngs=nnx.Rngs(dropout=3))
    close(module(X, rngs=nnx.Rngs(dropout=3).dropout), first)
    assert differ(module(X, rngs=nnx.Rngs(dropout=4)), first)


def test_random_numbers_of_a_module_with_given_weights() -> None:
    def taken(**options: Any) -> Any:
        return RelativeMultiheadAttention.from_weights(WEIGHTS, CAUSAL, dropout=0.5, deterministic=False, **options)

    with pytest.raises(ValueError, match="`rngs` must be given to the call"):
        taken()(X)
    close(taken(rngs=nnx.Rngs(1))(X), taken(rngs=nnx.Rngs(1))(X))
    assert differ(taken(rngs=nnx.Rngs(1))(X), taken(rngs=nnx.Rngs(2))(X))


def test_what_replaces_a_projection_takes_part() -> None:
    module = made()
    before = module(X)
    module.v_proj = nnx.LoRA(8, 2, 8, base_module=module.v_proj, rngs=nnx.Rngs(1))
    close(module(X), before)  # adapters start at zero
    module.v_proj.lora_b[...] = jnp.ones((2, 8), np.float32)
    assert differ(module(X), before)
    gradients = nnx.grad(lambda module: module(X).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(module)
    assert len(jax.tree.leaves(gradients)) == 2


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=str)
def test_the_dtype_that_is_computed_in(dtype: object) -> None:
    module = made(dtype=dtype)
    x = X.astype(np.float32)
    assert module(x).dtype == (dtype or np.float32)
    assert module.rel_k.dtype == np.float32
    y, cache = module(x, past=module.empty_cache(2, length=9))
    close(y, module(x), 1e-5)
    assert cache.keys.dtype == y.dtype

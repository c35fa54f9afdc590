"""What flax's and equinox's modules share: transformations, dropout by the call's key, caches in scans and exports."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers.frameworks import EQUINOX, FLAX, OF_JAX, Framework, close
from layers.modules import SPECS, inputs

from relskew_core import BlockSpec, Span, relative_attention

CAUSAL = SPECS["causal"]
GROUPED = BlockSpec(8, 4, Span.causal(21), causal=True, num_kv_heads=2, rel_values=True, rel_bias=True)
CLIPPED = BlockSpec(8, 2, Span(2, 0, "clip"), causal=True, rel_values=True)
X = inputs(CAUSAL)[0].numpy()  # JAX compiles every way in which its own arrays are cut

each = pytest.mark.parametrize("framework", OF_JAX, ids=lambda framework: framework.name)


def made(framework: Framework, spec: BlockSpec = CAUSAL, **options: Any) -> Any:
    return framework.pair(spec, **options)[1]


@each
def test_batches_vmap_and_jit_agree(framework: Framework) -> None:
    module, x = made(framework), X
    whole = np.asarray(module(x))
    for item in (0, 1):
        close(module(x[item]), whole[item])
    close(jax.vmap(module)(x), whole)
    close(module(x[None])[0], whole)
    close(framework.jit(lambda module, x: module(x))(module, x), whole)


@each
def test_the_options_of_the_module(framework: Framework) -> None:
    expected = made(framework)(X)
    for options in ({"impl": "portable"}, {"impl": "native", "chunk_size": 2}):
        close(made(framework, **options)(X), expected)
    jaxpr = str(jax.make_jaxpr(made(framework, impl="portable"))(X))
    assert "custom_jvp" not in jaxpr
    assert "custom_jvp" in str(jax.make_jaxpr(made(framework, impl="native"))(X))


@each
def test_it_prints_what_differs_from_the_defaults(framework: Framework) -> None:
    spec = BlockSpec(8, 2, Span(2, 0, "clip"), causal=True)
    for printed in (repr, str):
        text = printed(made(framework, spec, dropout=0.5))
        first, *others = text.replace("{", "(").splitlines()
        assert first.startswith("RelativeMultiheadAttention(")
        shown = [line.strip().partition("=")[0] for line in others if line.startswith("  ") and line[2].isalpha()]
        arguments = ["embed_dim", "num_heads", "span", "causal", "dropout"]
        parameters = ["q_proj", "k_proj", "v_proj", "out_proj", "rel_k"]
        assert [name for name in shown if name != "rngs"] in (arguments + parameters, parameters + arguments)
        assert "dropout=0.5" in text
        assert "span=Span(left=2, right=0, beyond='clip')" in text


# Dropout


@each
def test_dropout_is_that_of_the_call(framework: Framework) -> None:
    """Heads by hand, and the call with the same key."""
    train = framework.jit(framework.train)
    theirs, module = framework.pair(CAUSAL, dropout=0.4)
    x, weights = X, {name: weight.numpy() for name, weight in theirs.state_dict().items()}
    key = jax.random.key(7)

    def linear(name: str, x: Any) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    q, k, v = (jnp.asarray(linear(f"{name}_proj", x).reshape(2, 9, 2, 4).swapaxes(1, 2)) for name in "qkv")
    options: dict[str, Any] = {"dropout": 0.4, "seed": framework.dropout_key(key), "causal": True}
    heads: Any = relative_attention(q, k, v, jnp.asarray(weights["rel_k"]), CAUSAL.span, **options)
    close(train(module, x, key), linear("out_proj", np.asarray(heads).swapaxes(1, 2).reshape(2, 9, 8)))
    assert jnp.abs(train(module, x, key) - train(module, x, jax.random.key(8))).max() > 0.1
    assert jnp.abs(train(module, x, key) - made(framework)(x)).max() > 0.1
    close(train(module, x, key), framework.train(module, x, key))


# Caches


def scanned(module: Any, x: Any, prompt: int, **room: Any) -> tuple[Any, Any]:
    """Give a module a prompt, and then one position at a time."""

    @jax.jit
    def decoded(x: Any) -> Any:
        def step(cache: Any, token: Any) -> Any:
            y, cache = module(token[:, None], past=cache)
            return cache, y[:, 0]

        first, cache = module(x[:, :prompt], past=module.empty_cache(2, **room))
        cache, steps = jax.lax.scan(step, cache, jnp.moveaxis(x[:, prompt:], 1, 0))
        return jnp.concatenate([first, jnp.moveaxis(steps, 0, 1)], axis=1), cache

    return decoded(x)


@pytest.mark.parametrize(("framework", "spec", "room", "prompt"), [
    (FLAX, GROUPED, {"length": 12}, 4), (EQUINOX, SPECS["local"], {"length": 12}, 4),
    (EQUINOX, CLIPPED, {"length": 12}, 4), (FLAX, GROUPED, {"keep": 3}, 2), (EQUINOX, GROUPED, {"keep": 0}, 1),
], ids=["flax", "equinox, local", "equinox, clipped", "flax, sliding", "equinox, none"])  # fmt: skip
def test_a_cache_in_a_scan_is_the_whole(
    framework: Framework, spec: BlockSpec, room: dict[str, int], prompt: int
) -> None:
    """Or a window of the ``keep`` positions before a query and itself."""
    module, keep = made(framework, spec), room.get("keep")
    y, cache = scanned(module, X, prompt, **room)
    close(y, module(X) if keep is None else made(framework, replace(spec, window=(keep, 0)))(X))
    assert type(cache) is type(module.empty_cache(1, **room))
    assert cache.length == min(9, *room.values())
    assert cache.keys.shape == (2, spec.num_kv_heads, *room.values(), spec.head_dim)


def test_a_sliding_cache_hides_its_room_and_padding() -> None:
    module, x = made(EQUINOX), X
    cache = jax.tree.map(lambda x: x + 100, module.empty_cache(2, keep=3))._replace(length=jnp.int32(0))
    padding = jnp.arange(-3, 9) == jnp.asarray([[-1], [4]])
    y, cache = module(x, past=cache, key_padding_mask=padding)
    expected = module(x, mask=(jnp.arange(9) - jnp.arange(9)[:, None] >= -3), key_padding_mask=padding[:, 3:])
    close(y, expected)
    assert cache.length == 3


@each
def test_a_step_is_exported_for_any_batch(framework: Framework) -> None:
    module, x = made(framework), X
    (batch,) = jax.export.symbolic_shape("batch")

    def step(x: Any, cache: Any) -> Any:
        return module(x, past=cache)

    def given(items: int) -> Any:
        room = jnp.zeros((items, 2, 12, 4)), jnp.zeros((items, 2, 12, 4))
        return x[:items, :4], type(module.empty_cache(1, length=3))(*room, jnp.int32(0))

    def typed(x: Any) -> Any:
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]) if x.ndim else (), x.dtype)

    exported = jax.export.export(jax.jit(step))(*jax.tree.map(typed, given(2)))
    loaded = jax.export.deserialize(exported.serialize())
    whole = module(x)
    for items in (1, 2):
        y, cache = loaded.call(*given(items))
        close(y, whole[:items, :4])
        assert cache.length == 4
        assert cache.keys.shape == (items, 2, 12, 4)

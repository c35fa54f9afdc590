"""What flax's and equinox's modules have in common: the numbers, gradients, caches and weights of the block."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from layers.jax_frameworks import EQUINOX, FLAX, FRAMEWORKS, Framework, close, inputs, mapping
from layers.modules import DRAWN, SPECS, check_drawn

from relskew_core import BlockSpec, Span, attention_block, relative_attention
from relskew_core.layers.torch import RelativeMultiheadAttention as TorchAttention

CAUSAL = SPECS["causal"]
DECODERS = {
    "grouped": BlockSpec(8, 4, Span.causal(16), causal=True, num_kv_heads=2, rel_values=True, rel_bias=True),
    "local": SPECS["local"],
    "clipped": BlockSpec(8, 2, Span(2, 0, "clip"), causal=True, rel_values=True),
    "alibi": SPECS["alibi, causal, grouped"],
    "t5": SPECS["t5, causal"],
}

each = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


def made(framework: Framework, spec: BlockSpec = CAUSAL, **options: Any) -> Any:
    return framework.module.from_weights(mapping(spec), spec, **options)


# Numbers

block = partial(jax.jit, static_argnames="spec")(attention_block)


@each
@every_spec
def test_the_module_equals_the_block(framework: Framework, spec: BlockSpec) -> None:
    x, *memory = inputs(spec)
    weights = {key: jnp.asarray(x) for key, x in mapping(spec).items()}
    expected = block(jnp.asarray(x), weights, spec, memory=jnp.asarray(memory[0]) if memory else None)
    close(made(framework, spec)(x, *memory), expected, 1e-13)


@each
@pytest.mark.parametrize("name", ["bidirectional", "alibi, causal, grouped", "t5", "no positions"])
def test_attention_weights_equal_those_of_torch(framework: Framework, name: str) -> None:
    spec = SPECS[name]
    (x,) = inputs(spec)
    theirs = TorchAttention(spec, dtype=torch.float64)
    theirs.load_state_dict({key: torch.from_numpy(weight) for key, weight in mapping(spec).items()})
    module = made(framework, spec)
    want = theirs.attention_weights(torch.from_numpy(np.array(x))).detach()
    close(module.attention_weights(x), want.numpy(), 1e-13)
    if spec.causal:
        _, past = module(x[:, :4], past=module.empty_cache(2))
        close(module.attention_weights(x[:, 4:], past=past), want[:, :, 4:].numpy(), 1e-13)


@pytest.mark.parametrize(("framework", "name"), [(FLAX, "stream"), (EQUINOX, "cross")], ids=["flax", "equinox"])
def test_gradients_equal_those_of_the_block(framework: Framework, name: str) -> None:
    spec = SPECS[name]
    x, *memory = inputs(spec)

    def loss_of_block(weights: Any) -> Any:
        y: Any = block(jnp.asarray(x), weights, spec, memory=jnp.asarray(memory[0]) if memory else None)
        return jnp.sin(y).sum()

    def loss(module: Any) -> Any:
        return jnp.sin(module(x, *memory)).sum()

    expected = jax.jit(jax.grad(loss_of_block))({key: jnp.asarray(x) for key, x in mapping(spec).items()})
    actual = framework.grad(framework.jit(loss), made(framework, spec))
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        close(actual[key], gradient, 1e-11)


@each
def test_more_arguments_than_there_are_places_are_answered_with_how_it_is_called(framework: Framework) -> None:
    x = jnp.zeros((1, 3, 8))
    with pytest.raises(TypeError, match=r"called as module\(x\), and module\(x, memory\) where `spec\.cross`$"):
        made(framework)(x, x, x)


@each
def test_batches_vmap_and_jit_agree(framework: Framework) -> None:
    module, (x,) = made(framework), inputs(CAUSAL)
    whole = np.asarray(module(x))
    for item in (0, 1):
        close(module(x[item]), whole[item])
    close(jax.vmap(module)(x), whole)
    close(module(x[None])[0], whole)
    close(framework.jit(lambda module, x: module(x))(module, x), whole)


@each
def test_the_options_of_the_call(framework: Framework) -> None:
    module, (x,) = made(framework), inputs(CAUSAL)
    documents = jnp.asarray([0] * 4 + [1] * 5)
    alone = np.concatenate([np.asarray(module(y))[:, :n] for y, n in ((x, 4), (np.roll(x, -4, axis=1), 5))], axis=1)
    close(module(x, segments=documents), alone)
    order = np.random.default_rng(0).permutation(9)
    close(module(x[:, order], positions=(jnp.asarray(order), jnp.asarray(order))), np.asarray(module(x))[:, order])
    y = np.asarray(module(x, offset=jnp.asarray([3, -3])))
    close(y[1, :3], np.broadcast_to(mapping(CAUSAL)["out_proj.bias"], (3, 8)))


@each
@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
def test_padding_and_masks(framework: Framework, kind: str) -> None:
    spec = SPECS["bidirectional"]
    module, (x,) = made(framework, spec), inputs(spec)
    padding = jnp.arange(9) >= jnp.asarray([[9], [6]])
    mask: Any = np.random.default_rng(0).standard_normal((2, 1, 9, 9))
    mask = {"none": None, "boolean": jnp.asarray(mask > -0.5), "additive": jnp.asarray(mask)}[kind]
    actual = module(x, mask=mask, key_padding_mask=padding)
    close(actual[0], module(x, mask=mask)[0])
    close(actual[1, :6], module(x[1:, :6], mask=None if mask is None else mask[1:, :, :6, :6])[0])


@each
def test_the_options_of_the_module(framework: Framework) -> None:
    (x,) = inputs(CAUSAL)
    expected = made(framework)(x)
    for options in ({"impl": "portable"}, {"impl": "native", "chunk_size": 2}):
        close(made(framework, **options)(x), expected)
    jaxpr = str(jax.make_jaxpr(made(framework, impl="portable"))(x))
    assert "custom_jvp" not in jaxpr
    assert "custom_jvp" in str(jax.make_jaxpr(made(framework, impl="native"))(x))


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


@each
def test_half_precision(framework: Framework) -> None:
    weights = mapping(CAUSAL, jnp.bfloat16)
    module, x = framework.module.from_weights(weights, CAUSAL), inputs(CAUSAL)[0].astype(jnp.bfloat16)
    y = module(x)
    assert y.dtype == jnp.bfloat16
    close(y.astype(np.float32), made(framework)(x.astype(np.float64)), 0.1)
    assert module.empty_cache(2, length=4).keys.dtype == jnp.bfloat16
    assert module.empty_cache(2, dtype=jnp.float32).keys.dtype == jnp.float32


# Dropout


@each
def test_dropout_is_that_of_the_call(framework: Framework) -> None:
    """Heads by hand, and the call with the same key."""
    train = framework.jit(framework.train)
    module, (x,), weights = made(framework, dropout=0.4), inputs(CAUSAL), mapping(CAUSAL)
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


# Weights


@each
@every_spec
def test_weights_go_in_and_out(framework: Framework, spec: BlockSpec) -> None:
    given = mapping(spec)
    found = made(framework, spec).weights()
    assert list(found) == list(spec.weight_shapes())
    for key, weight in found.items():
        assert isinstance(weight, jax.Array)
        np.testing.assert_array_equal(weight, given[key])


@pytest.mark.parametrize(("spec", "dtype"),
                         [(SPECS["grouped, wide heads"], torch.float64), (SPECS["stream"], torch.bfloat16)],
                         ids=["float64", "bfloat16"])  # fmt: skip
def test_a_checkpoint_goes_round(spec: BlockSpec, dtype: torch.dtype) -> None:
    """From torch to flax to equinox to torch."""
    module = TorchAttention(spec, dtype=dtype)
    state = {key: x.clone() for key, x in module.state_dict().items()}
    in_flax = FLAX.module.from_weights(module.state_dict(), spec)
    in_equinox = EQUINOX.module.from_weights(in_flax.weights(), spec)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for key, weight in in_flax.weights().items():  # these are copies
        close(weight.astype(np.float32), state[key].float(), 0)
    back = {key: torch.utils.dlpack.from_dlpack(x) for key, x in in_equinox.weights().items()}
    module.load_state_dict(back)
    for key, weight in module.state_dict().items():
        assert weight.dtype == dtype
        assert torch.equal(weight, state[key])
    if dtype == torch.float64:
        x = torch.randn(2, 9, 8, dtype=dtype)
        for other in (in_flax, in_equinox):
            close(other(jnp.from_dlpack(x)), module(x).detach())


@each
def test_it_is_initialised_as_init_weights_does(framework: Framework) -> None:
    found = framework.drawn(DRAWN, 0).weights()
    check_drawn(found)
    drawn = [found["rel_k"], found["rel_v"], framework.drawn(DRAWN, 1).weights()["rel_k"]]
    drawn += [found["k_proj.weight"], found["v_proj.weight"]]
    assert len({x.tobytes() for x in map(np.asarray, drawn)}) == len(drawn)
    np.testing.assert_array_equal(framework.drawn(DRAWN, 0).weights()["rel_k"], found["rel_k"])


@each
def test_weights_that_do_not_fit_are_refused(framework: Framework) -> None:
    weights = mapping(CAUSAL)
    weights["rel_q"] = weights.pop("rel_k")
    with pytest.raises(ValueError, match="missing rel_k; extra rel_q"):
        framework.module.from_weights(weights, CAUSAL)
    with pytest.raises(TypeError, match="`spec` must be a BlockSpec, got str 'causal'"):
        framework.drawn("causal", 0)


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


@pytest.mark.parametrize(("framework", "name"), [(FLAX, "grouped"), (EQUINOX, "local"), (EQUINOX, "clipped")],
                         ids=["flax", "equinox, local", "equinox, clipped"])  # fmt: skip
def test_a_cache_in_a_scan_is_the_whole(framework: Framework, name: str) -> None:
    module, (x,) = made(framework, DECODERS[name]), inputs(DECODERS[name])
    y, cache = scanned(module, x, 4, length=12)
    close(y, module(x))
    assert cache.length == 9
    assert cache.keys.shape == (2, module.spec.num_kv_heads, 12, module.spec.head_dim)


@pytest.mark.parametrize(("framework", "keep", "prompt"), [(FLAX, 3, 2), (EQUINOX, 0, 1)],
                         ids=["flax", "equinox, none"])  # fmt: skip
def test_a_sliding_cache_in_a_scan_is_a_window(framework: Framework, keep: int, prompt: int) -> None:
    """Of the ``keep`` positions before a query and itself."""
    spec = replace(DECODERS["grouped"], span=Span.causal(21))
    (x,) = inputs(spec)
    y, cache = scanned(made(framework, spec), x, prompt, keep=keep)
    close(y, made(framework, replace(spec, window=(keep, 0)))(x))
    assert type(cache) is type(made(framework, spec).empty_cache(1, keep=keep))
    assert cache.keys.shape == (2, 2, keep, 2)
    assert cache.length == min(keep, 9)


def test_a_sliding_cache_hides_its_room_and_padding() -> None:
    module, (x,) = made(EQUINOX), inputs(CAUSAL)
    cache = jax.tree.map(lambda x: x + 100, module.empty_cache(2, keep=3))._replace(length=jnp.int32(0))
    padding = jnp.arange(-3, 9) == jnp.asarray([[-1], [4]])
    y, cache = module(x, past=cache, key_padding_mask=padding)
    expected = module(x, mask=(jnp.arange(9) - jnp.arange(9)[:, None] >= -3), key_padding_mask=padding[:, 3:])
    close(y, expected)
    assert cache.length == 3


@each
def test_a_step_is_exported_for_any_batch(framework: Framework) -> None:
    module, (x,) = made(framework), inputs(CAUSAL)
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

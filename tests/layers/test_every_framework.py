"""Every framework's modules: the numbers of the formula, and caches, of lengths that are known or traced.

``test_torch.py`` and ``test_caches.py`` try more of torch.
"""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from layers.frameworks import EQUINOX, FLAX, OF_JAX, OF_MLX, OTHERS, TORCH, Framework, close
from layers.modules import DRAWN, SPECS, check_drawn, dense_module, inputs, made

from relskew_core import init_weights

CAUSAL = SPECS["causal"]
X = np.random.default_rng(0).standard_normal((2, 6, 8))

each = pytest.mark.parametrize("framework", [TORCH, *OTHERS], ids=lambda framework: framework.name)
others = pytest.mark.parametrize("framework", OTHERS, ids=lambda framework: framework.name)


# Numbers


@each
@pytest.mark.parametrize("name", SPECS)
def test_outputs_and_weights_equal_those_of_the_formula(framework: Framework, name: str) -> None:
    spec = SPECS[name]
    theirs, module = framework.pair(spec)
    given = inputs(spec)
    arrays = [framework.wide(x) for x in given]
    close(module(*arrays), dense_module(theirs, *given))
    want = dense_module(theirs, *given, of_weights=True)
    close(module.attention_weights(*arrays), want)
    if name == "alibi, causal, grouped":
        _, past = module(arrays[0][:, :4], past=module.empty_cache(2))
        close(module.attention_weights(arrays[0][:, 4:], past=past), want[:, :, 4:])
    shapes = {key: tuple(x.shape) for key, x in framework.weights(module).items()}
    assert shapes == spec.weight_shapes()
    assert framework is TORCH or list(shapes) == list(spec.weight_shapes())
    for key, weight in theirs.state_dict().items():
        before = weight.clone()
        weight.zero_()  # the module has copies
        found = framework.weights(module)[key]
        assert (type(found), found.dtype) == (type(arrays[0]), framework.library.float64)
        close(found, before, 0)


GRADIENTS = [(FLAX, "stream"), (EQUINOX, "cross"), *((framework, name) for framework in OF_MLX for name in SPECS)]


@pytest.mark.parametrize(("framework", "name"), GRADIENTS, ids=lambda x: getattr(x, "name", x))
def test_gradients_equal_those_of_the_formula(framework: Framework, name: str) -> None:
    theirs, module = framework.pair(SPECS[name])
    given = inputs(SPECS[name])
    dense_module(theirs, *given).square().sum().backward()
    arrays = [framework.wide(x) for x in given]
    found = framework.grad(lambda module: (module(*arrays) ** 2).sum(), module)
    assert found.keys() == theirs.state_dict().keys()
    for key, parameter in theirs.named_parameters():
        close(found[key], parameter.grad, 1e-11)


@each
@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
def test_padding_and_masks(framework: Framework, kind: str) -> None:
    theirs, module = framework.pair(SPECS["bidirectional"])
    (x,) = inputs(SPECS["bidirectional"])
    hidden = (torch.arange(9) >= torch.tensor([[9], [6]]))[:, None, None]
    padding = framework.array(hidden[:, 0, 0].numpy())
    for shape in ((2, 1, 9, 9), (9, 9), (2, 2, 1, 9), (9,))[: 4 if framework is TORCH else 1]:
        mask = np.random.default_rng(0).standard_normal(shape)
        alone, both = {
            "none": (None, ~hidden),
            "boolean": (mask > -0.5, torch.tensor(mask > -0.5) & ~hidden),
            "additive": (mask, torch.tensor(mask) + torch.zeros(2, 1, 1, 9).masked_fill(hidden, -torch.inf)),
        }[kind]
        options = {} if alone is None else {"mask": (framework.array if kind == "boolean" else framework.wide)(alone)}
        close(module(framework.wide(x), key_padding_mask=padding, **options), dense_module(theirs, x, mask=both))
        if alone is not None:
            close(module(framework.wide(x), **options), dense_module(theirs, x, mask=torch.tensor(alone)))


@each
def test_the_options_of_the_call(framework: Framework) -> None:
    theirs, module = framework.pair(CAUSAL)
    (x,) = inputs(CAUSAL)
    y = module(framework.wide(x), segments=framework.array([0] * 4 + [1] * 5))
    for part in (slice(0, 4), slice(4, 9)):
        close(y[:, part], dense_module(theirs, x[:, part]))
    order = np.random.default_rng(0).permutation(9)
    y = module(framework.wide(x[:, order]), positions=(framework.array(order),) * 2)
    close(y, dense_module(theirs, x)[:, order])
    y = module(framework.wide(x), offset=framework.array([3, -3]))
    close(y[1, :3], theirs.out_proj.bias.expand(3, 8))
    close(framework.pair(CAUSAL, impl="portable", chunk_size=2)[1](framework.wide(x)), dense_module(theirs, x))


@others
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_goes_round(framework: Framework, dtype: str) -> None:
    half, single = getattr(framework.library, dtype), framework.library.float32
    module = framework.module.from_weights(made(CAUSAL).to(getattr(torch, dtype)).state_dict(), CAUSAL)
    x = framework.wide(inputs(CAUSAL)[0]).astype(half)
    y = module(x)
    assert y.dtype == half
    assert module.empty_cache(2, length=4).keys.dtype == half
    assert module.empty_cache(2, dtype=single).keys.dtype == single
    close(y.astype(single), dense_module(made(CAUSAL), *inputs(CAUSAL)), 0.1)
    close(framework.module.from_weights(module.weights(), CAUSAL)(x).astype(single), y.astype(single), 0)


@others
def test_numbers_of_numpy_in_any_order_in_memory(framework: Framework) -> None:
    weights = {name: np.flip(x.numpy()) for name, x in made(CAUSAL).state_dict().items()}
    for name, weight in framework.module.from_weights(weights, CAUSAL).weights().items():
        np.testing.assert_array_equal(weight, weights[name])


@each
def test_it_is_initialised_as_init_weights_does(framework: Framework) -> None:
    found, again, other = (framework.weights(framework.drawn(DRAWN, seed)) for seed in (0, 0, 1))
    check_drawn(found)
    check_drawn(init_weights(DRAWN, seed=0))
    drawn = [found["rel_k"], found["rel_v"], other["rel_k"]]
    drawn += [found["k_proj.weight"], found["v_proj.weight"]]
    assert len({x.tobytes() for x in map(np.asarray, drawn)}) == len(drawn)
    np.testing.assert_array_equal(again["rel_k"], found["rel_k"])
    if framework is not FLAX:  # whose `dtype` is that of the computation
        half = framework.library.bfloat16
        assert framework.drawn(CAUSAL, 0, dtype=half).rel_k.dtype == half


@others
def test_weights_that_do_not_fit_are_refused(framework: Framework) -> None:
    weights: dict[str, Any] = made(CAUSAL).state_dict()
    weights["rel_q"] = weights.pop("rel_k")
    with pytest.raises(ValueError, match=r"`weights` must have exactly the keys .*missing rel_k; extra rel_q"):
        framework.module.from_weights(weights, CAUSAL)


# Caches


def fed(framework: Framework, module: Any, x: Any, cache: Any) -> Any:
    return module(framework.array(x, dtype=cache.keys.dtype), past=cache)


@each
@pytest.mark.parametrize(("length", "error", "message"), [
    (-1, ValueError, r"`past\.length` must be at least 0, got -1"),
    ([3, -2], ValueError, r"`past\.length` must be at least 0, got -2"),
    (3.5, TypeError, r"`past\.length` must be an array of integers, of the library of `x`, got"),
    ([3.0, 3.0], TypeError, r"`past\.length` must be an array of integers"),
    (True, TypeError, r"`past\.length` must be an array of integers"),
    (None, TypeError, r"`past\.length` must be an array of integers.*, got NoneType"),
    ([3, 3, 3], ValueError, r"`past\.length` must be one for all items, or one for each .* `x`, \(2,\), got"),
    ([[3], [3]], ValueError, r"`past\.length` must be one for all items, or one for each"),
    ([3, 7], ValueError, "`past` must have room for 6 more positions, got 7 of 12 filled"),
], ids=str)  # fmt: skip
def test_lengths_that_cannot_be_are_refused(
    framework: Framework, length: Any, error: type[Exception], message: str
) -> None:
    _, module = framework.pair(CAUSAL)
    given = length if length is None else framework.array(length)
    rooms: list[dict[str, int]] = [{"length": 12}, {"keep": 12}]
    for room in rooms[: 1 if length in ([3, 7], [3, -2]) else 2]:  # a sliding cache has one length for all items
        with pytest.raises(error, match=message):
            fed(framework, module, X, module.empty_cache(2, **room)._replace(length=given))


@each
def test_no_items_have_lengths_too(framework: Framework) -> None:
    _, module = framework.pair(CAUSAL)
    cache = module.empty_cache(0, length=12)
    y, growing = fed(framework, module, X[:0], module.empty_cache(0))
    assert tuple(y.shape) == tuple(fed(framework, module, X[:0], growing)[0].shape) == (0, 6, 8)
    for length in (cache.length, framework.array(np.zeros(0, np.int32))):
        y, after = fed(framework, module, X[:0], cache._replace(length=length))
        assert (tuple(y.shape), tuple(after.length.shape)) == ((0, 6, 8), tuple(length.shape))


@each
def test_a_prompt_that_is_longer_than_the_room_is_refused(framework: Framework) -> None:
    _, module = framework.pair(CAUSAL)

    def step(x: Any, cache: Any) -> Any:
        return module(x, past=cache)[0]

    for function in (step, framework.compile(step)):
        with pytest.raises((ValueError, RuntimeError), match=r"`past` must have room for 6 more positions, got .* 4"):
            function(framework.wide(X), module.empty_cache(2, length=4))


@pytest.mark.parametrize("framework", OF_JAX, ids=lambda framework: framework.name)
def test_a_jitted_function_closes_over_a_cache(framework: Framework) -> None:
    (_, module), array = framework.pair(CAUSAL), framework.array
    whole = module(array(X))
    _, cache = module(array(X[:, :4]), past=module.empty_cache(2, length=12))
    for length in (cache.length, array([4, 4]), 4, np.array([4, 4])):
        known = cache._replace(length=length)
        y = jax.jit(lambda x, known=known: module(x, past=known)[0])(array(X[:, 4:]))
        close(y, whole[:, 4:], 1e-5)
        with pytest.raises(ValueError, match="`past` must have room for 9 more positions, got 4 of 12 filled"):
            jax.jit(lambda x, known=known: module(x, past=known)[0])(array(np.zeros((2, 9, 8))))
    traced = jax.jit(lambda x, length: module(x, past=cache._replace(length=length))[0])
    assert np.isnan(traced(array(X), array(-1))).all()
    assert np.isnan(traced(array(X), array([3, 7]))[1]).all()


@others
@pytest.mark.parametrize("room", [{}, {"length": 12}, {"keep": 9}], ids=str)
@pytest.mark.parametrize("cut", [(6,), (3, 1, 2)], ids=str)
def test_pieces_with_a_cache_equal_the_whole(framework: Framework, room: dict[str, Any], cut: tuple[int, ...]) -> None:
    _, module = framework.pair(CAUSAL)
    empty = cache = module.empty_cache(2, **room)
    steps = []

    def call(x: Any, cache: Any) -> Any:
        return module(x, past=cache)

    step = framework.compile(call) if framework in OF_MLX and len(cut) > 1 else call
    for piece in np.split(X, np.cumsum(cut)[:-1], axis=1):
        y, cache = step(framework.wide(piece), cache)
        steps.append(np.asarray(y))
    whole = module(framework.wide(X))
    close(np.concatenate(steps, axis=1), whole)
    assert type(cache) is type(empty)
    assert not room or int(cache.length) == 6
    close(module(framework.wide(X[0]), past=module.empty_cache((), **room))[0], whole[0])


@each
def test_prompts_of_different_lengths_in_one_cache_equal_each_alone(framework: Framework) -> None:
    _, module = framework.pair(CAUSAL)
    _, cache = fed(framework, module, X[:, :4], module.empty_cache(2, length=12))
    y, cache = fed(framework, module, X[:, 4:], cache._replace(length=framework.array([4, 2])))
    assert cache.length.tolist() == [6, 4]
    for item, length in enumerate((4, 2)):
        alone = module(framework.wide(np.concatenate([X[item, :length], X[item, 4:]])[None]))
        close(y[item], alone[0, length:])


# Refusals


@each
@pytest.mark.parametrize("room", [{}, {"length": 12}, {"keep": 3}], ids=str)
def test_caches_that_do_not_fit_are_refused(framework: Framework, room: dict[str, Any]) -> None:
    _, module = framework.pair(CAUSAL)
    x, positions = framework.wide(X), (framework.array(np.arange(6)),) * 2
    with pytest.raises(ValueError, match=r"`past.* must have shape \(\.\.\., 2, .*, 4\) with the leading axes of `x`"):
        module(x, past=module.empty_cache(3, **room))
    with pytest.raises(TypeError, match=r"`past.* must have the dtype of the new keys and values, .*float64"):
        module(x, past=module.empty_cache(2, dtype=framework.library.float32, **room))
    for options in ({"offset": 3}, {"positions": positions}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be None with `past`, which sets it, got"):
            module(x, past=module.empty_cache(2, **room), **options)


@each
@pytest.mark.parametrize(("spec", "arguments", "error", "message"), [
    ("bidirectional", {}, ValueError, "a cache needs `spec.causal`"), ("cross", {}, ValueError, "no `spec.cross`"),
    ("causal", {"length": 3, "keep": 3}, ValueError, "`keep` must be None with `length`, got 3 and 3"),
    ("local", {"keep": 3}, ValueError, "`keep` must be None because `spec.block_size` is 4"),
    ("causal", {"length": 0}, ValueError, "`length` must be an int >= 1, got 0"),
    ("causal", {"keep": -1}, ValueError, "`keep` must be an int >= 0, got -1"),
    ("causal", {"keep": 1.5}, TypeError, "`keep` must be an int, got float 1.5"),
    ("causal", {"batch": -1}, ValueError, "`batch` must be an int >= 0, got -1"),
    ("causal", {"batch": "2"}, TypeError, "`batch` must be an int, got str"),
], ids=str)  # fmt: skip
def test_empty_cache_refuses_arguments_that_do_not_fit(
    framework: Framework, spec: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        framework.pair(SPECS[spec])[1].empty_cache(**{"batch": 2, **arguments})


@each
def test_modules_refuse_arguments_that_do_not_fit(framework: Framework) -> None:
    (_, module), array = framework.pair(CAUSAL), framework.array
    x = framework.wide(X)
    for padding in (array(np.zeros((2, 5), bool)), array(np.zeros((2, 6))), [[False] * 6] * 2):
        with pytest.raises(ValueError, match=r"`key_padding_mask` must be a boolean array of shape \(2, 6\)"):
            module(x, key_padding_mask=padding)
    for mask, error in ((np.ones((6, 5), bool), ValueError), (np.zeros((6, 6), np.int32), TypeError)):
        with pytest.raises(error, match="`mask` must"):
            module(x, mask=array(mask), key_padding_mask=array(np.zeros((2, 6), bool)))
    with pytest.raises(ValueError, match="`memory` must be None"):
        module(x, x)
    more = "; MultiheadAttention takes queries, keys and values" if framework is TORCH else ""
    with pytest.raises(TypeError, match=rf"called as module\(x\), and module\(x, memory\) where `spec\.cross`{more}$"):
        module(x, x, x)
    with pytest.raises(TypeError, match=r"RelativeMultiheadAttention\(BlockSpec\(64, 4, Span\.clipped\(8\)\)\)$"):
        type(module)(64, 4)
    with pytest.raises(TypeError, match="`spec` must be a BlockSpec, got str 'causal'"):
        framework.drawn("causal", 0)
    for dropout in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"`dropout` must be a(t least 0 and less than 1| finite number), got "):
            framework.pair(CAUSAL, dropout=dropout)
    with pytest.raises(TypeError, match="`dropout` must be a Python int or float"):
        framework.pair(CAUSAL, dropout="0.1")

"""Every framework's modules: the arguments they refuse, and their caches, of lengths that are known or traced."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from layers.jax_frameworks import EQUINOX, FLAX, mapping
from layers.modules import SPECS, made

mx: Any = pytest.importorskip("mlx.core")

CAUSAL = SPECS["causal"]
MODULES = ("torch", "flax", "equinox", "mlx")
X = np.random.default_rng(0).standard_normal((2, 6, 8))

each = pytest.mark.parametrize("name", MODULES)


def of(name: str, spec: Any = CAUSAL, **options: Any) -> tuple[Any, Any]:
    """Return a module, and a function that makes arrays of its library from numbers."""
    if name == "torch":
        return made(spec, **options), torch.tensor
    if name == "mlx":
        layers: Any = pytest.importorskip("relskew_core.layers.mlx")
        module, array = layers.RelativeMultiheadAttention, mx.array
    else:
        module, array = (FLAX if name == "flax" else EQUINOX).module, jnp.asarray
    return module.from_weights(mapping(spec), spec, **options), array


def fed(module: Any, array: Any, x: Any, cache: Any) -> Any:
    return module(array(x, dtype=cache.keys.dtype), past=cache)


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
def test_lengths_that_cannot_be_are_refused(name: str, length: Any, error: type[Exception], message: str) -> None:
    module, array = of(name)
    cache = module.empty_cache(2, length=12)._replace(length=length if length is None else array(length))
    with pytest.raises(error, match=message):
        fed(module, array, X, cache)
    if length not in ([3, 7], [3, -2]):  # one length for all items
        sliding = module.empty_cache(2, keep=12)._replace(length=cache.length)
        with pytest.raises(error, match=message):
            fed(module, array, X, sliding)


@each
def test_no_items_have_lengths_too(name: str) -> None:
    module, array = of(name)
    cache = module.empty_cache(0, length=12)
    y, growing = fed(module, array, X[:0], module.empty_cache(0))
    assert tuple(y.shape) == tuple(fed(module, array, X[:0], growing)[0].shape) == (0, 6, 8)
    for length in (cache.length, array(np.zeros(0, np.int32))):
        y, after = fed(module, array, X[:0], cache._replace(length=length))
        assert (tuple(y.shape), tuple(after.length.shape)) == ((0, 6, 8), tuple(length.shape))


@each
def test_a_prompt_that_is_longer_than_the_room_is_refused(name: str) -> None:
    module, array = of(name)

    def step(x: Any, cache: Any) -> Any:
        return module(x, past=cache)[0]

    cache = module.empty_cache(2, length=4)
    x = array(X, dtype=cache.keys.dtype)
    wraps: dict[str, Any] = {"torch": partial(torch.compile, backend="eager"), "mlx": mx.compile}
    for function in (step, wraps.get(name, jax.jit)(step)):
        with pytest.raises((ValueError, RuntimeError), match=r"`past` must have room for 6 more positions, got .* 4"):
            function(x, cache)


@pytest.mark.parametrize("name", ["flax", "equinox"])
def test_a_jitted_function_closes_over_a_cache(name: str) -> None:
    module, array = of(name)
    whole = module(array(X))
    _, cache = module(array(X[:, :4]), past=module.empty_cache(2, length=12))
    for length in (cache.length, array([4, 4]), 4, np.array([4, 4])):
        known = cache._replace(length=length)
        y = jax.jit(lambda x, known=known: module(x, past=known)[0])(array(X[:, 4:]))
        np.testing.assert_allclose(np.asarray(y), np.asarray(whole[:, 4:]), atol=1e-5)
        with pytest.raises(ValueError, match="`past` must have room for 9 more positions, got 4 of 12 filled"):
            jax.jit(lambda x, known=known: module(x, past=known)[0])(array(np.zeros((2, 9, 8))))
    traced = jax.jit(lambda x, length: module(x, past=cache._replace(length=length))[0])
    assert np.isnan(traced(array(X), array(-1))).all()
    assert np.isnan(traced(array(X), array([3, 7]))[1]).all()


@pytest.mark.parametrize("name", MODULES[1:])  # `test_caches.py` tries more of torch
@pytest.mark.parametrize("room", [{}, {"length": 12}, {"keep": 9}], ids=str)
@pytest.mark.parametrize("cut", [(6,), (3, 1, 2)], ids=str)
def test_pieces_with_a_cache_equal_the_whole(name: str, room: dict[str, Any], cut: tuple[int, ...]) -> None:
    module, array = of(name)
    empty = cache = module.empty_cache(2, **room)
    steps, compiled = [], mx.compile if name == "mlx" and len(cut) > 1 else lambda step: step
    step = compiled(lambda x, cache: module(x, past=cache))
    for piece in np.split(X, np.cumsum(cut)[:-1], axis=1):
        y, cache = step(array(piece, dtype=empty.keys.dtype), cache)
        steps.append(np.asarray(y))
    whole = np.asarray(module(array(X, dtype=empty.keys.dtype)))
    np.testing.assert_allclose(np.concatenate(steps, axis=1), whole, rtol=0, atol=1e-12)
    assert type(cache) is type(empty)
    assert not room or int(cache.length) == 6
    y, _ = module(array(X[0], dtype=empty.keys.dtype), past=module.empty_cache((), **room))
    np.testing.assert_allclose(np.asarray(y), whole[0], rtol=0, atol=1e-12)


@each
def test_prompts_of_different_lengths_in_one_cache_equal_each_alone(name: str) -> None:
    module, array = of(name)
    _, cache = fed(module, array, X[:, :4], module.empty_cache(2, length=12))
    y, cache = fed(module, array, X[:, 4:], cache._replace(length=array([4, 2])))
    assert cache.length.tolist() == [6, 4]
    for item, length in enumerate((4, 2)):
        alone = module(array(np.concatenate([X[item, :length], X[item, 4:]])[None], dtype=cache.keys.dtype))
        np.testing.assert_allclose(host(y[item]), host(alone[0, length:]), rtol=0, atol=1e-12)


def host(x: Any) -> Any:
    return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x)


@each
@pytest.mark.parametrize("room", [{}, {"length": 12}, {"keep": 3}], ids=str)
def test_caches_that_do_not_fit_are_refused(name: str, room: dict[str, Any]) -> None:
    module, array = of(name)
    single, cache = {"torch": torch.float32, "mlx": mx.float32}.get(name, jnp.float32), module.empty_cache(2, **room)
    x = array(X, dtype=cache.keys.dtype)
    with pytest.raises(ValueError, match=r"`past.* must have shape \(\.\.\., 2, .*, 4\) with the leading axes of `x`"):
        module(x, past=module.empty_cache(3, **room))
    with pytest.raises(TypeError, match=r"`past.* must have the dtype of the new keys and values, .*float64"):
        module(x, past=module.empty_cache(2, dtype=single, **room))
    for argument, value in (("offset", 3), ("positions", (array(np.arange(6)),) * 2)):
        with pytest.raises(ValueError, match=f"`{argument}` must be None with `past`, which sets it"):
            module(x, past=cache, **{argument: value})


@each
@pytest.mark.parametrize(("spec", "arguments", "error", "message"), [
    ("bidirectional", {}, ValueError, "a cache needs `spec.causal`"),
    ("cross", {}, ValueError, "no `spec.cross`"),
    ("causal", {"length": 3, "keep": 3}, ValueError, "`keep` must be None with `length`, got 3 and 3"),
    ("local", {"keep": 3}, ValueError, "`keep` must be None because `spec.block_size` is 4"),
    ("causal", {"length": 0}, ValueError, "`length` must be an int >= 1, got 0"),
    ("causal", {"keep": -1}, ValueError, "`keep` must be an int >= 0, got -1"),
    ("causal", {"keep": 1.5}, TypeError, "`keep` must be an int, got float 1.5"),
    ("causal", {"batch": -1}, ValueError, "`batch` must be an int >= 0, got -1"),
    ("causal", {"batch": "2"}, TypeError, "`batch` must be an int, got str"),
], ids=str)  # fmt: skip
def test_empty_cache_refuses_arguments_that_do_not_fit(
    name: str, spec: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    module, _ = of(name, SPECS[spec])
    with pytest.raises(error, match=message):
        module.empty_cache(**{"batch": 2, **arguments})


@each
def test_modules_refuse_arguments_that_do_not_fit(name: str) -> None:
    module, array = of(name)
    x = array(X, dtype=module.empty_cache(2).keys.dtype)
    for padding in (array(np.zeros((2, 5), bool)), array(np.zeros((2, 6))), [[False] * 6] * 2):
        with pytest.raises(ValueError, match=r"`key_padding_mask` must be a boolean array of shape \(2, 6\)"):
            module(x, key_padding_mask=padding)
    for mask, error in ((np.ones((6, 5), bool), ValueError), (np.zeros((6, 6), np.int32), TypeError)):
        with pytest.raises(error, match="`mask` must"):
            module(x, mask=array(mask), key_padding_mask=array(np.zeros((2, 6), bool)))
    with pytest.raises(ValueError, match="`memory` must be None"):
        module(x, x)
    with pytest.raises(TypeError, match=r"RelativeMultiheadAttention\(BlockSpec\(64, 4, Span\.clipped\(8\)\)\)$"):
        type(module)(64, 4)
    for dropout in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"`dropout` must be a(t least 0 and less than 1| finite number), got "):
            of(name, dropout=dropout)

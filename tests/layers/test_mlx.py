"""The module of mlx.nn: the numbers, gradients, caches and weights of the block, among MLX's own modules."""

from typing import Any

import numpy as np
import pytest
import torch
from layers.modules import DRAWN, SPECS, check_drawn, dense_module, inputs, made

from relskew_core import BlockSpec, Span

mx: Any = pytest.importorskip("mlx.core")
nn: Any = pytest.importorskip("mlx.nn")
layers: Any = pytest.importorskip("relskew_core.layers.mlx")

CAUSAL = SPECS["causal"]

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


def pair(spec: BlockSpec, **options: Any) -> tuple[Any, Any]:
    """Return torch's module and MLX's, of the same weights."""
    theirs = made(spec)
    return theirs, layers.RelativeMultiheadAttention.from_weights(theirs.state_dict(), spec, **options)


def moved(x: torch.Tensor) -> Any:
    return mx.array(x.detach().numpy(), dtype=mx.float64)


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    expected = expected.detach() if isinstance(expected, torch.Tensor) else expected
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=tolerance)


@every_spec
def test_the_module_and_its_gradients_equal_the_formula(spec: BlockSpec) -> None:
    theirs, module = pair(spec)
    given = inputs(spec)
    expected = dense_module(theirs, *given)
    close(module(*map(moved, given)), expected)
    expected.tanh().sum().backward()
    step = nn.value_and_grad(module, lambda *given: mx.sum(mx.tanh(module(*given))))
    value, gradients = step(*map(moved, given))
    close(value, expected.tanh().sum(), 1e-10)
    for name, weight in theirs.named_parameters():
        found = gradients
        for part in name.split("."):
            found = found[part]
        close(found, weight.grad, 1e-10)


@every_spec
def test_the_weights_of_attention_are_the_formulas(spec: BlockSpec) -> None:
    theirs, module = pair(spec)
    given = inputs(spec)
    close(module.attention_weights(*map(moved, given)), dense_module(theirs, *given, of_weights=True))


@every_spec
def test_weights_go_in_and_out(spec: BlockSpec) -> None:
    theirs, module = pair(spec)
    found = module.weights()
    assert list(found) == list(spec.weight_shapes())
    for name, weight in theirs.state_dict().items():
        close(found[name], weight, 0)
        assert found[name].dtype == mx.float64
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert any(mx.any(weight).item() for weight in module.weights().values())  # these are copies


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_goes_round(dtype: str) -> None:
    theirs = made(CAUSAL).to(getattr(torch, dtype))
    module = layers.RelativeMultiheadAttention.from_weights(theirs.state_dict(), CAUSAL)
    x = mx.astype(moved(inputs(CAUSAL)[0]), getattr(mx, dtype))
    y = module(x)
    assert y.dtype == x.dtype
    assert module.empty_cache(2, length=4).keys.dtype == x.dtype
    close(mx.astype(y, mx.float32), dense_module(made(CAUSAL), *inputs(CAUSAL)), 0.1)
    again = layers.RelativeMultiheadAttention.from_weights(module.weights(), CAUSAL)
    assert mx.array_equal(again(x), y).item()


def test_numbers_of_numpy_in_any_order_in_memory() -> None:
    weights = {name: np.flip(x.numpy()) for name, x in made(CAUSAL).state_dict().items()}
    for name, weight in layers.RelativeMultiheadAttention.from_weights(weights, CAUSAL).weights().items():
        np.testing.assert_array_equal(weight, weights[name])


def test_it_is_initialised_as_init_weights_does() -> None:
    mx.random.seed(0)
    check_drawn(layers.RelativeMultiheadAttention(DRAWN).weights())
    assert layers.RelativeMultiheadAttention(CAUSAL, dtype=mx.bfloat16).rel_k.dtype == mx.bfloat16


def test_a_compiled_call_past_a_full_cache_is_nan() -> None:
    _, module = pair(CAUSAL)
    (x,) = inputs(CAUSAL)
    _, cache = module(moved(x[:, :5]), past=module.empty_cache(2, length=9))
    _, cache = module(moved(x[:, 5:]), past=cache._replace(length=mx.array([5, 2])))
    late = mx.compile(lambda x, cache: module(x, past=cache))(moved(x[:, :2]), cache)[0]
    assert mx.all(mx.isnan(late[0])).item()
    assert not mx.any(mx.isnan(late[1])).item()


def test_dropout_goes_by_the_modules_mode_and_by_the_state_of_random_numbers() -> None:
    _, module = pair(CAUSAL, dropout=0.5)
    x = moved(inputs(CAUSAL)[0])
    mx.random.seed(3)
    first, second = module(x), module(x)
    mx.random.seed(3)
    close(module(x), first)
    assert mx.max(mx.abs(first - second)).item() > 0.1
    close(module.eval()(x), pair(CAUSAL)[1](x))


def test_projections_are_modules() -> None:
    spec = BlockSpec(64, 2, Span.clipped(4))
    module, x = layers.RelativeMultiheadAttention(spec), mx.random.normal((1, 5, 64))
    assert set(module.parameters()) == {"q_proj", "k_proj", "v_proj", "out_proj", "rel_k"}
    y = module(x)
    nn.quantize(module, bits=8)
    assert isinstance(module.q_proj, nn.QuantizedLinear)
    assert 0 < mx.max(mx.abs(module(x) - y)).item() < 0.1


def test_padding_masks_and_options() -> None:
    theirs, module = pair(SPECS["bidirectional"])
    (x,) = inputs(SPECS["bidirectional"])
    padding = mx.arange(9) >= mx.array([[9], [6]])
    y = module(moved(x), key_padding_mask=padding)
    close(y[1, :6], dense_module(theirs, x[1:, :6])[0])
    close(module(moved(x), segments=mx.array([0] * 4 + [1] * 5))[:, :4], dense_module(theirs, x[:, :4]))
    close(pair(SPECS["bidirectional"], impl="portable", chunk_size=2)[1](moved(x)), dense_module(theirs, x))


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="`weights` must have exactly the keys"):
        layers.RelativeMultiheadAttention.from_weights({}, CAUSAL)

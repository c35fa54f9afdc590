"""The module of mlx.nn among MLX's own modules; ``test_every_framework.py`` has what it shares with others."""

from typing import Any

import pytest
from layers.frameworks import OF_MLX, close
from layers.modules import SPECS, inputs

from relskew_core import BlockSpec, Span

mx: Any = pytest.importorskip("mlx.core")
nn: Any = pytest.importorskip("mlx.nn")

CAUSAL = SPECS["causal"]


def made(**options: Any) -> tuple[Any, Any]:
    """Return a module and its input."""
    (framework,) = OF_MLX
    return framework.pair(CAUSAL, **options)[1], framework.wide(inputs(CAUSAL)[0])


def test_a_compiled_call_past_a_full_cache_is_nan() -> None:
    module, x = made()
    _, cache = module(x[:, :5], past=module.empty_cache(2, length=9))
    _, cache = module(x[:, 5:], past=cache._replace(length=mx.array([5, 2])))
    late = mx.compile(lambda x, cache: module(x, past=cache))(x[:, :2], cache)[0]
    assert mx.all(mx.isnan(late[0])).item()
    assert not mx.any(mx.isnan(late[1])).item()


def test_dropout_goes_by_the_modules_mode_and_by_the_state_of_random_numbers() -> None:
    module, x = made(dropout=0.5)
    mx.random.seed(3)
    first, second = module(x), module(x)
    mx.random.seed(3)
    close(module(x), first)
    assert mx.max(mx.abs(first - second)).item() > 0.1
    close(module.eval()(x), made()[0](x))


def test_projections_are_modules() -> None:
    module, x = type(made()[0])(BlockSpec(64, 2, Span.clipped(4))), mx.random.normal((1, 5, 64))
    assert set(module.parameters()) == {"q_proj", "k_proj", "v_proj", "out_proj", "rel_k"}
    y = module(x)
    nn.quantize(module, bits=8)
    assert isinstance(module.q_proj, nn.QuantizedLinear)
    assert 0 < mx.max(mx.abs(module(x) - y)).item() < 0.1

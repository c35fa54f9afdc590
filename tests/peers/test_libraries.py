"""Other people's arrays: implementations of the array API standard against plain loops, and quantities, refused."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from peers.common import installed, peer

import oracles
from relskew_core import BlockSpec, Span, export, init_weights, relative_attention

X, TABLE, BIAS = (np.random.default_rng(0).standard_normal(shape) for shape in [(2, 9, 8), (17, 8), (2, 17)])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"rel_k": TABLE, "rel_bias": BIAS, "causal": True, "span": Span.full(9)},
    {"rel_k": TABLE[:5], "rel_v": TABLE[:5], "span": Span.clipped(2), "window": (4, 1), "chunk_size": 4},
    {"rel_k": TABLE, "mask": np.arange(9) < 7, "sinks": np.ones(2), "span": Span.full(9)},
]


def marray(call: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    """Masked arrays of NumPy's, none of whose numbers are masked."""
    installed("marray")
    xp = peer("marray.masked_namespace")(np)
    out = call({name: xp.asarray(x) for name, x in arrays.items()})
    assert not out.mask.any()
    return out.data


def quax(call: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    """A function whose calls of JAX's primitives quax dispatches by the types of their arrays."""
    installed("quax")
    with jax.enable_x64(True):
        return np.asarray(peer("quax.quaxify")(call)({name: jax.numpy.asarray(x) for name, x in arrays.items()}))


def cubed(call: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    """Arrays in chunks, whose spec is not the default one and says where they are computed."""
    installed("cubed")
    spec = peer("cubed.Spec")(allowed_mem="500MB")
    return call({name: peer("cubed.asarray")(x, spec=spec) for name, x in arrays.items()}).compute()


@pytest.mark.parametrize("options", OPTIONS, ids=[" ".join(options) or "none" for options in OPTIONS])
@pytest.mark.parametrize("library", [marray, quax, cubed])
def test_other_implementations_of_the_standard(library: Callable[..., Any], options: dict[str, Any]) -> None:
    arrays = {"q": X, "k": X, "v": X, **{name: x for name, x in options.items() if isinstance(x, np.ndarray)}}
    fixed = {name: x for name, x in options.items() if name not in arrays}
    got = library(lambda given: relative_attention(**given, **fixed), arrays)
    without = {name: x for name, x in {**arrays, **fixed}.items() if name != "chunk_size"}
    q, k, v = (without.pop(name) for name in "qkv")
    assert oracles.relative_error(got, oracles.relative_attention(q, k, v, **without).out) < 1e-12


Q = np.ones((2, 5, 4))


def quantities(x: Any) -> list[Any]:
    return [peer("unyt.unyt_array")(x, "m"), peer("pint.UnitRegistry")().Quantity(x, "m")]


@pytest.mark.parametrize("name", ["q", "k", "v", "rel_k", "mask"])
def test_arguments_with_units_are_refused(name: str) -> None:
    arrays: dict[str, Any] = {"q": Q, "k": Q, "v": Q, "rel_k": np.ones((9, 4)), "mask": np.zeros((5, 5))}
    for quantity in quantities(arrays[name]):
        with pytest.raises(TypeError, match=f"`{name}` must be an array of numbers alone.*, got (unyt_array|Quantity)"):
            relative_attention(**{**arrays, name: quantity})


def test_weights_with_units_are_refused() -> None:
    spec = BlockSpec(8, 2, Span.causal(8), causal=True)
    weights = init_weights(spec, seed=0)
    for quantity in quantities(weights["rel_k"]):
        with pytest.raises(TypeError, match=r"`weights\['rel_k'\]` must be an array of numbers alone"):
            export.to_onnx(spec, {**weights, "rel_k": quantity})

"""Quantities of the packages that people use for units: refused, never stripped."""

from typing import Any

import numpy as np
import pytest
from peers.common import peer

from relskew_core import BlockSpec, Span, export, init_weights, relative_attention

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

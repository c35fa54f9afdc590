"""The shared part of all loaders: projections under a block's names, and the spec that fits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relskew_core._array.typing import Array
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._positions.span import Span
from relskew_core.conventions._state import State

Weights = dict[str, Array]
FORMS = {"q_proj": "W E", "k_proj": "W E", "v_proj": "W E", "out_proj": "E W"}


def note_head_width(state: State, name: str) -> None:
    """Record the width ``D`` of a head, after ``name`` has given the width ``W`` of all of them."""
    width, heads = state.sizes["W"], state.sizes["H"]
    if width % heads:
        raise ValueError(
            f"`num_heads` must divide the width of the queries, {width} in `{state.label(name)}`, got {heads}"
        )
    state.sizes["D"] = width // heads


def read_weights(state: State, names: Mapping[str, str], axes: str = "") -> Weights:
    """Read the weights of four linear layers, named as in relskew. Convolutions have more ``axes`` of 1."""
    weights = {f"{name}.weight": state.read(f"{names[name]}.weight", FORMS[name] + axes) for name in PROJECTIONS}
    note_head_width(state, f"{names['q_proj']}.weight")
    return {name: weight[..., 0] if axes else weight for name, weight in weights.items()}


def read_biases(state: State, names: Mapping[str, str]) -> Weights:
    """Read the biases of linear layers: all of them, or none if there are none."""
    if not any(state.has(f"{other}.bias") for other in names.values()):
        return {}
    return {f"{name}.bias": state.read(f"{other}.bias", FORMS[name].split()[0]) for name, other in names.items()}


def as_block(state: State, weights: Weights, span: Span, **options: Any) -> tuple[BlockSpec, Weights]:
    """Return the spec of the weights, and the weights in its order."""
    state.finish()
    spec = BlockSpec(
        state.sizes["E"], state.sizes["H"], span, head_dim=state.sizes["D"],
        shared_table="rel_k" in weights and weights["rel_k"].ndim == 2, rel_values="rel_v" in weights,
        rel_keys="rel_k" in weights, rel_bias="rel_bias" in weights, bias="q_proj.bias" in weights, **options,
    )  # fmt: skip
    spec.check_weights(weights)
    return spec, {key: weights[key] for key in spec.weight_shapes()}

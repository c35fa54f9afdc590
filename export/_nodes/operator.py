"""The node ``relskew::RelativeAttention``: one call with all its options, which the operator library runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from relskew_core._kernel.call import Options
from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes.emitter import Value
from relskew_core.export._nodes.parts import Present, Projected

DOMAIN = "relskew"
NAME = "RelativeAttention"
VERSION = 1

INPUTS = (
    "q", "k", "v", "rel_k", "rel_v", "rel_bias", "rel_q", "key_table", "mask", "added", "sinks",
    "q_segments", "k_segments", "q_positions", "k_positions", "offset", "span_left", "span_right",
    "past_key", "past_value", "past_key_int8", "past_value_int8", "past_key_scale", "past_value_scale",
    "rel_k_int8", "rel_v_int8", "rel_k_scale", "rel_v_scale",
)  # fmt: skip
"""The inputs of a node in order, as in `onnx_operator.cpp`: all except the first three are optional.

``span_left`` and ``span_right`` are for tables whose length depends on the input; they replace the attributes.
"""

OUTPUTS = (
    "out", "present_key", "present_value", "lse",
    "present_key_int8", "present_value_int8", "present_key_scale", "present_value_scale",
)  # fmt: skip
"""The outputs, likewise: all except the first are optional."""


def attributes_of(options: Options) -> dict[str, Any]:
    span, pattern = options.span, options.visibility
    block = pattern.block_size or 0
    return {
        "left": span.left, "right": span.right, "beyond": span.beyond, "causal": int(pattern.right == 0),
        "window_left": _side(pattern.left), "window_right": _side(pattern.right), "block_size": block,
        "blocks_before": pattern.whole_blocks_before if block else -1,
        "offset": pattern.offset if isinstance(pattern.offset, int) else 0, **_number("scale", options.scale),
        **_number("rel_scale", options.rel_scale), **_number("softcap", options.softcap or 0.0),
    }  # fmt: skip


Places: TypeAlias = "tuple[list[str], list[str]]"  # the names of inputs and outputs, by their index in a node


def places_of(
    projected: Projected, stored: Mapping[str, Value], given: Mapping[str, Value], heads: Value, present: Present | None
) -> Places:
    named = {**stored, **given, "q": projected.q, "k": projected.k, "v": projected.v}
    called = {"k_segments": "segments", "offset": "past_lengths"}
    found = [named[key].name if (key := called.get(name, name)) in named else "" for name in INPUTS]
    while not found[-1]:
        found.pop()
    return found, [heads.name, *(value.name for value in present or ())]


def attributes_of_block(plan: GraphPlan) -> dict[str, Any]:
    spec = plan.spec
    ends = {plan.left.past_edge, plan.right.past_edge} - {"hidden", "endless"}
    if len(ends) > 1:
        raise ValueError(
            "`operator=True` requires a `max_length` that cuts both ends of the tables or neither, got "
            f"{plan.max_length} for {spec.span}"
        )
    slopes = plan.endless and bool(spec.rel_bias)
    if slopes and plan.dtype.itemsize == 2:
        raise ValueError(
            "`operator=True` excludes a bias by distance in half precision, whose slopes are stored in float32, got "
            f"dtype {plan.dtype.name}"
        )
    # The projection already scales the queries.
    return {
        "num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads, "left": 0 if plan.endless else plan.left.rows,
        "right": 0 if plan.endless else plan.right.rows, "lead": -1 if plan.endless else plan.lead,
        "by_distance": int(slopes), "beyond": next(iter(ends - {"limited"}), "error"), "causal": int(spec.causal),
        "window_left": _side(spec.window[0] if spec.window else None),
        "window_right": _side(spec.window[1] if spec.window else None), "block_size": spec.block_size or 0,
        "blocks_before": plan.blocks_before if spec.block_size else -1, "scale": 1.0, "rel_scale": 1.0,
    }  # fmt: skip


def _side(bound: int | None) -> int:
    return -1 if bound is None else bound


def _number(name: str, value: float) -> dict[str, float]:
    """Return a number as an attribute with the nearest float, and one with the rest."""
    nearest = float(np.float32(value))
    rest = float(np.float32(value - nearest))
    return {name: nearest, **({f"{name}_rest": rest} if rest else {})}

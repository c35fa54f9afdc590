"""The node ``relskew::RelativeAttention``: one call with all its options, which the operator library serves."""

from __future__ import annotations

from typing import Any

import numpy as np

from relskew_core._kernel.call import Options

DOMAIN = "relskew"
NAME = "RelativeAttention"
VERSION = 1

INPUTS = (
    "q", "k", "v", "rel_k", "rel_v", "rel_bias", "rel_q", "key_table", "mask", "added", "sinks",
    "q_segments", "k_segments", "q_positions", "k_positions", "offset", "past_key", "past_value",
)  # fmt: skip
"""The inputs of a node in their order, as `onnx_operator.cpp` has them: all but the first three may be left out."""

OUTPUTS = ("out", "lse", "present_key", "present_value")


def attributes_of(options: Options) -> dict[str, Any]:
    """Return the attributes of a node that say what the options of a call say."""
    span, pattern = options.span, options.visibility
    block = pattern.block_size or 0
    return {
        "left": span.left,
        "right": span.right,
        "beyond": span.beyond,
        "causal": int(pattern.right == 0),
        "window_left": _side(pattern.left),
        "window_right": _side(pattern.right),
        "block_size": block,
        "blocks_before": pattern.whole_blocks_before if block else -1,
        "offset": pattern.offset if isinstance(pattern.offset, int) else 0,
        **_number("scale", options.scale),
        **_number("rel_scale", options.rel_scale),
        **_number("softcap", options.softcap or 0.0),
    }


def _side(bound: int | None) -> int:
    return -1 if bound is None else bound


def _number(name: str, value: float) -> dict[str, float]:
    """Return a number, of which an attribute holds the nearest float, and what is left of it."""
    nearest = float(np.float32(value))
    rest = float(np.float32(value - nearest))
    return {name: nearest, **({f"{name}_rest": rest} if rest else {})}

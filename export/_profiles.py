"""How attention is written for which runtimes, and in which opsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProfileName = Literal["ort", "ort-contrib", "portable", "trt"]


@dataclass(frozen=True, slots=True)
class Profile:
    """What a family of runtimes takes: its opset, and how attention, table windows and causality are written."""

    name: str
    opset: int
    fused: bool = False  # one Attention node, or its parts
    slice_window: bool = False  # the window of the table by Slice, or by Gather
    pads: bool = False  # the edges of a window by Pad, or by Expand and Concat
    causal_attribute: bool = False  # Attention's is_causal, or causality in the mask
    cache_inputs: bool = False  # Attention's past_key and past_value, or Concat
    branches: bool = False  # an If between inputs of one chunk and longer ones, or a loop over one chunk
    by_head: bool = False  # chunks of one key head after the other, or of all heads at once
    contrib: bool = False  # onnxruntime's own GroupQueryAttention


PROFILES = {
    "ort": Profile(
        "ort",
        23,
        fused=True,
        slice_window=True,
        pads=True,
        causal_attribute=True,
        cache_inputs=True,
        branches=True,
        by_head=True,
    ),
    "ort-contrib": Profile(
        "ort-contrib",
        21,
        fused=True,
        slice_window=True,
        pads=True,
        causal_attribute=True,
        cache_inputs=True,
        contrib=True,
    ),
    "portable": Profile("portable", 18),
    "trt": Profile("trt", 23, fused=True),
}

NEWEST_OPSET = 24
IN_PLACE_OPSET = 24  # of TensorScatter
IR_VERSIONS = {18: 8, 19: 9, 20: 9}  # of the releases that brought these opsets; later ones need no more than 10

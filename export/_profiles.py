"""The forms of attention for groups of runtimes, and their opsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relskew_core._array.checks import check_int

ProfileName = Literal["ort", "portable", "trt"]


@dataclass(frozen=True, slots=True)
class Profile:
    """The form for a group of runtimes: its opset, and how attention, table windows and causality are written."""

    name: str
    opset: int
    fused: bool = False  # one Attention node; else separate nodes
    slice_window: bool = False  # the window of the table by Slice, its edges by Pad; else by Gather, Expand, Concat
    causal_attribute: bool = False  # Attention's is_causal; else causality in the mask
    cache_inputs: bool = False  # Attention's past_key and past_value; else Concat
    branches: bool = False  # an If between inputs of one chunk and longer ones; else a loop even for one chunk
    by_head: bool = False  # chunks of one key head at a time; else of all heads at once


PROFILES = {
    "ort": Profile(
        "ort",
        23,
        fused=True,
        slice_window=True,
        causal_attribute=True,
        cache_inputs=True,
        branches=True,
        by_head=True,
    ),
    "portable": Profile("portable", 18),
    "trt": Profile("trt", 23, fused=True),
}

NEWEST_OPSET = 28
EXPORTER_OPSET = 24  # the newest opset that torch's exporter writes; its nodes are the same up to NEWEST_OPSET
IN_PLACE_OPSET = 24  # the first opset with TensorScatter
IR_VERSIONS = {18: 8, 19: 9, 20: 9}  # of the releases that introduced these opsets; later opsets need at most 10


def checked_opset(opset: object, newest: int = NEWEST_OPSET) -> int:
    """Return a checked version of the standard operators for graphs of torch models."""
    oldest, chosen = PROFILES["portable"].opset, check_int("opset", opset)
    if not oldest <= chosen <= newest:
        raise ValueError(f"`opset` must be {oldest} … {newest}, got {chosen}")
    return chosen

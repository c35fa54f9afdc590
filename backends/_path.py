"""The kernels for a call: the portable ones, or a library's native ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relskew_core._kernel import backward, forward

ARRAYS = ("q", "k", "v", "rel_k", "rel_v", "rel_bias", "rel_q", "mask")
OPTIONS = ("beyond", "offset", "left", "right", "block_size", "chunk_size", "return_lse", "part")
COMMON = frozenset((*ARRAYS, *OPTIONS))
"""The arrays and options that every native path supports. A path must name all others that it supports."""

EVERY = COMMON | {
    "key_table", "q_segments", "k_segments", "q_positions", "k_positions", "seed",
    "softcap", "blocks_before", "by_value", "offset_by_item", "dropout",
}  # fmt: skip
"""The names of all arrays and options, so that a path that supports them refuses those that are added later."""

FUSED = EVERY - {"offset_by_item"}
"""The arrays and options that the fused kernels support."""


@dataclass(frozen=True)
class Path:
    """Two kernels, and the calls that they support."""

    attention: Callable[..., Any]  # like _kernel.forward.attention
    attention_vjp: Callable[..., Any]  # like _kernel.backward.attention_vjp
    supports: frozenset[str] = COMMON
    half: bool = False  # whether it accepts arrays of half precision
    faster: bool = True  # than the portable kernels, for this call; `impl="auto"` depends on it


PORTABLE = Path(forward.attention, backward.attention_vjp)

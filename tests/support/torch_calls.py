"""Calls of attention that models of torch make, by name: between them they come to every line of the translation."""

from typing import Any

from relskew_core import Span
from torch_exports import random

FULL, CLIP, ZERO = Span.full(12), Span(2, 1, "clip"), Span(1, 2, "zero")
TABLE, VALUES, LONG = random(4, 4, 6), random(4, 5), random(4, 23, 6)
CROSS: dict[str, dict[str, Any]] = {
    "full": {"rel_k": random(4, 23, 6), "span": FULL},
    "shared, scales": {"rel_k": random(23, 6), "span": FULL, "scale": 0.3, "rel_scale": 0.7},
    "clip, values": {"rel_k": random(4, 4, 6), "span": CLIP, "rel_v": random(4, 4, 5)},
    "zero": {"rel_k": random(4, 6), "span": ZERO},
    "values alone": {"rel_v": random(4, 5), "span": ZERO},
    "bias": {"rel_bias": random(4, 23), "span": FULL},
    "bias for all heads, table": {"rel_bias": random(4), "rel_k": random(4, 4, 6), "span": CLIP},
    "window": {"rel_k": random(5, 6), "span": Span(2, 2), "window": (2, 1)},
    "wider windows": {"rel_k": random(4, 6), "span": CLIP, "window": (3, 4), "rel_bias": random(4)},
    "window alone": {"window": (2, None)},
    "nothing": {},
    "causal": {"rel_k": random(12, 6), "span": Span.causal(12), "causal": True},
    "causal, offset": {"rel_k": random(14, 6), "span": Span.causal(14), "causal": True, "offset": 2},
    "offset, clip": {"rel_k": random(4, 6), "span": CLIP, "offset": 3, "rel_v": random(4, 5)},
    "before all keys": {"rel_k": random(4, 6), "span": CLIP, "offset": -2, "rel_v": random(4, 5)},
    "blocks across": {"rel_k": random(4, 6), "span": CLIP, "block_size": 3, "blocks_before": 1, "rel_v": random(4, 5)},
    "blocks across, before all keys": {"rel_k": random(4, 6), "span": CLIP, "block_size": 3, "offset": -1},
    "chunk_size": {"rel_k": random(4, 6), "span": CLIP, "chunk_size": 2},
    "softcap": {"rel_k": random(4, 6), "span": CLIP, "softcap": 1.3},
    "softcap, window, values": {"rel_k": random(5, 6), "span": Span(2, 2), "window": (2, 1), "softcap": 2.0,
                                "rel_v": random(5, 5)},
    "lse": {"rel_k": random(4, 6), "span": CLIP, "return_lse": True},
    "lse, causal, nothing to see": {"causal": True, "return_lse": True, "window": (2, None)},
    "sinks": {"rel_k": random(4, 6), "span": CLIP, "sinks": random(4, seed=5)},
    "key table": {"rel_k": random(4, 6), "span": CLIP, "key_table": random(4, 4, 6, seed=9)},
    "key table alone": {"key_table": random(4, 6), "span": ZERO, "rel_scale": 0.7, "offset": 2},
    "key table, causal": {"key_table": random(12, 6), "span": Span.causal(12), "causal": True},
    "key table, window, softcap": {"key_table": random(5, 6), "span": Span(2, 2), "window": (2, 1), "softcap": 2.0},
    "key table, full": {"rel_k": random(23, 6), "key_table": random(4, 23, 6), "span": FULL},
    "scales by head": {"rel_k": random(4, 6), "span": CLIP, "scale": random(4, seed=6), "rel_scale": random(4, seed=7)},
    "scales of all": {"rel_k": random(4, 6), "span": CLIP, "scale": random(1, seed=6)[0],
                      "rel_scale": random(1, seed=7)[0]},
}  # fmt: skip

ALONG: dict[str, dict[str, Any]] = {
    "causal": {"rel_k": random(12, 6), "causal": True},
    "causal, values": {"rel_k": random(4, 12, 6), "rel_v": random(12, 6), "causal": True},
    "causal, window": {"rel_k": random(3, 6), "span": Span(2, 0), "window": (2, None), "causal": True},
    "full": {"rel_k": random(23, 6)},
    "bias": {"rel_bias": random(4, 4), "span": CLIP, "causal": True},
    "blocks": {"rel_k": random(6, 6), "span": Span.causal(6), "block_size": 3},
    "blocks, clip": {"rel_k": random(2, 6), "span": Span(1, 0, "clip"), "block_size": 3, "rel_v": random(2, 6)},
    "blocks, zero": {"rel_k": random(4, 6), "span": ZERO, "block_size": 4, "blocks_before": 0},
    "blocks, bias": {"rel_bias": random(4), "span": CLIP, "block_size": 3},
    "stream": {"rel_k": random(4, 11, 6), "span": Span(8, 2), "block_size": 3, "blocks_before": 2},
    "stream, causal, values": {
        "rel_k": random(3, 6), "span": Span(2, 0, "clip"), "block_size": 3, "blocks_before": 2, "causal": True,
        "rel_v": random(3, 6),
    },
    "stream, key table, softcap": {
        "key_table": random(7, 6), "span": Span(4, 2), "block_size": 3, "blocks_before": 0, "softcap": 2.0
    },
    "causal, key table": {"rel_k": random(12, 6), "key_table": random(4, 12, 6), "causal": True},
}  # fmt: skip

PLACED: dict[str, dict[str, Any]] = {
    "clip, both": {"rel_k": random(4, 6), "span": CLIP, "rel_v": random(4, 4, 5)},
    "zero, causal": {"rel_k": random(4, 4, 6), "span": ZERO, "rel_v": random(4, 5), "causal": True},
    "bias alone, window": {"rel_bias": random(4, 4), "span": CLIP, "window": (3, 2)},
    "bias for all, key table": {"rel_bias": random(4), "rel_k": random(4, 6), "key_table": random(4, 6), "span": ZERO},
    "key table alone, softcap": {"key_table": random(4, 4, 6), "span": CLIP, "softcap": 1.5},
    "blocks, lse": {"rel_k": random(4, 6), "span": CLIP, "block_size": 3, "blocks_before": 1, "return_lse": True},
    "blocks, causal": {"rel_k": random(4, 6), "span": CLIP, "block_size": 3},
    "no tables": {"causal": True},
    "a longer table than the window": {"rel_k": random(23, 6), "span": FULL, "window": (2, 3), "rel_v": random(23, 5)},
}

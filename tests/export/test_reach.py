"""Past a table, the error of the runtime says which table ends and how far it reaches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_sessions import opened
from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core.export import to_onnx

CAUSAL = BlockSpec(8, 2, Span.causal(6), causal=True)
CASES: dict[str, tuple[BlockSpec, dict[str, Any], str]] = {
    "ort": (CAUSAL, {}, "skew/rows/rel_k_reaches_5_back"),
    "portable": (CAUSAL, {"profile": "portable"}, "skew/rows/rel_k_reaches_5_back"),
    "max_length": (CAUSAL, {"max_length": 4}, "skew/rows/rel_k_reaches_3_back"),
    "chunks": (CAUSAL, {"chunk_size": 2}, "guard/keys_both/rel_k_reaches_5_back"),
    "full": (BlockSpec(8, 2, Span.full(6)), {}, "skew/rows/rel_k_reaches_5_back_and_5_ahead"),
    "ahead alone": (BlockSpec(8, 2, Span(2, 5), window=(2, None)), {}, "skew/rows/rel_k_reaches_5_ahead"),
    "a bias": (BlockSpec(8, 2, Span.full(6), rel_keys=False, rel_bias=True), {}, "rel_bias_reaches_5_back_and_5_ahead"),
    "values": (BlockSpec(8, 2, Span.full(6), rel_keys=False, rel_values=True), {}, "rel_v_reaches_5_back_and_5_ahead"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_node_that_fails_names_the_table(name: str) -> None:
    spec, options, told = CASES[name]
    model = to_onnx(spec, init_weights(spec, seed=0), **options)
    session = opened(model)
    x = np.ones((1, 7, 8), np.float32)
    assert session.run(None, {"x": x[:, : options.get("max_length", 6)]})[0].size
    with pytest.raises(Exception, match=f"{told}'"):
        session.run(None, {"x": x})


def test_behind_a_past_a_table_shorter_than_blocks_ends_the_graph() -> None:
    """At the beginning of a block, too, where attention sees itself alone: loudly, and not before."""
    spec = BlockSpec(8, 2, Span(0, 1), block_size=2, blocks_before=0)
    weights = init_weights(spec, seed=0)
    model = to_onnx(spec, weights, past=True)
    session = opened(model)
    x, none, two = np.ones((1, 1, 8), np.float32), np.zeros((1, 2, 0, 4), np.float32), np.ones((1, 2, 2, 4), np.float32)
    y, _ = attention_block(x, weights, spec, past=(none, none))
    found = session.run(None, {"x": x, "past_key": none, "past_value": none})[0]
    np.testing.assert_allclose(found, y, rtol=0, atol=1e-6)
    y, _ = attention_block(x, weights, spec, past=(two, two))
    assert np.all(np.isfinite(y))
    with pytest.raises(Exception, match="rel_k_reaches_0_back"):
        session.run(None, {"x": x, "past_key": two, "past_value": two})


def test_what_has_no_end_says_nothing_of_it() -> None:
    for spec in (BlockSpec(8, 2, Span.clipped(3)), BlockSpec(8, 2, Span.causal(4), causal=True, window=(3, None))):
        model = to_onnx(spec, init_weights(spec, seed=0))
        assert not any("reaches" in node.name for node in model.graph.node)

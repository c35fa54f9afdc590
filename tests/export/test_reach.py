"""Where tables, windows, blocks and `max_length` end a graph: it is right, or fails and says which table ends."""

import itertools
from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import exported
from onnx_sessions import NOTHING_OPTIMISED, opened
from relskew_core import BlockSpec, Span, attention_block, init_weights, relative_attention
from relskew_core.export import to_onnx

LENGTHS = range(1, 6)
REACHES = (0, 2)
WINDOWS = (None, 1, 3)
LONGEST = (None, 1, 3, 4)
"""``max_length``: none, less than and one more than the reaches, and what a window would read."""

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {}),
    "causal, portable": ({"causal": True}, {"profile": "portable"}),
    "full": ({}, {}),
    "cross, in chunks": ({"cross": True}, {"chunk_size": 2}),
    "blocks": ({"causal": True, "block_size": 2}, {}),
}


@pytest.mark.parametrize("beyond", ["clip", "zero", "error"])
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_right_or_fails_past_its_table(form: Any, beyond: Any) -> None:
    block, export = FORMS[form]
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 1, max(LENGTHS), 2)).astype(np.float32) for _ in "qkv")
    cross = block.get("cross", False)
    ran = 0
    for reach, window, longest in itertools.product(REACHES, WINDOWS, LONGEST):
        left, right = reach, 0 if block.get("causal") else reach
        spec = BlockSpec(2, 1, Span(left, right, beyond), window=(window, None), **block)
        table = random.standard_normal((1, spec.span.rows, 2)).astype(np.float32)
        try:
            model = to_onnx(spec, {"rel_k": table}, projections=False, max_length=longest, **export)
        except ValueError:  # more rows than the table has
            assert beyond == "error"
            assert longest is not None
            assert longest > reach + 1
            continue
        run = opened(model, **NOTHING_OPTIMISED).run
        for n in LENGTHS:
            m = 3 if cross else n
            given: dict[str, Any] = {"q": q[:, :, :n], "k": k[:, :, :m], "v": v[:, :, :m]}
            try:
                (out,) = list[Any](run(None, given))
            except Exception:
                # A covered or extended table must run up to max_length.
                assert max(n, m) > (longest or n) or beyond == "error", (reach, window, longest, n)
                continue
            if not np.isfinite(out).all():
                continue
            how: dict[str, Any] = {name: getattr(spec, name) for name in ("causal", "window", "block_size")}
            right_out = relative_attention(given["q"], given["k"], given["v"], table, spec.span, offset=0, **how)
            np.testing.assert_allclose(out, right_out, atol=1e-5, err_msg=str((reach, window, longest, n)))
            ran += 1
    assert ran > 20


@pytest.mark.parametrize("profile", ["ort", "portable"])
@pytest.mark.parametrize("window", [(2**70, 2**31), (2**70, 1), (2, 2**70)], ids=str)
def test_a_window_longer_than_any_length_is_none(window: tuple[int, int], profile: Any) -> None:
    spec = BlockSpec(8, 2, Span.clipped(2), window=window)
    weights, x = init_weights(spec, seed=0), np.random.default_rng(0).standard_normal((2, 7, 8)).astype(np.float32)
    found = opened(to_onnx(spec, weights, profile=profile), **NOTHING_OPTIMISED).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, np.asarray(attention_block(x, weights, spec)), atol=1e-5)


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
    session = opened(exported(spec, **options)[0])
    x = np.ones((1, 7, 8), np.float32)
    assert session.run(None, {"x": x[:, : options.get("max_length", 6)]})[0].size
    with pytest.raises(Exception, match=f"{told}'"):
        session.run(None, {"x": x})


def test_behind_a_past_a_table_shorter_than_blocks_ends_the_graph() -> None:
    """At the beginning of a block, too, where attention sees itself alone: loudly, and not before."""
    spec = BlockSpec(8, 2, Span(0, 1), block_size=2, blocks_before=0)
    model, _, weights = exported(spec, past=True)
    session = opened(model)
    x, none, two = np.ones((1, 1, 8), np.float32), np.zeros((1, 2, 0, 4), np.float32), np.ones((1, 2, 2, 4), np.float32)
    y, _ = attention_block(x, weights, spec, past=(none, none))
    found = session.run(None, {"x": x, "past_key": none, "past_value": none})[0]
    np.testing.assert_allclose(found, y, rtol=0, atol=1e-6)
    y, _ = attention_block(x, weights, spec, past=(two, two))
    assert np.all(np.isfinite(y))
    with pytest.raises(Exception, match="rel_k_reaches_0_back"):
        session.run(None, {"x": x, "past_key": two, "past_value": two})


def test_a_table_without_an_end_names_none() -> None:
    for spec in (BlockSpec(8, 2, Span.clipped(3)), BlockSpec(8, 2, Span.causal(4), causal=True, window=(3, None))):
        model, *_ = exported(spec)
        assert not any("reaches" in node.name for node in model.graph.node)


BLOCKS = {1: BlockSpec(8, 2, Span.causal(16), causal=True, block_size=8),
          2: BlockSpec(8, 2, Span(23, 7), block_size=8, blocks_before=2)}  # fmt: skip


@pytest.mark.parametrize("before", BLOCKS)
@pytest.mark.parametrize(("length", "blocks", "size"), [(1, 1, 1), (5, 1, 5), (8, 1, 8), (9, 2, 8), (24, 3, 8)])
def test_an_input_shorter_than_a_block_costs_what_it_is_long(before: int, length: int, blocks: int, size: int) -> None:
    model, *_ = exported(BLOCKS[before])
    names = [f"relskew/compute/blocks/{name}" for name in ("queries", "keys_values_folded")]
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    queries, keys = list[Any](opened(model).run(names, {"x": np.ones((2, length, 8), np.float32)}))
    assert queries.shape == (2 * blocks, size, 8)
    assert keys.shape == (2 * blocks, (1 + before) * size, 16)

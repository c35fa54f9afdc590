"""The loop over chunks of queries: the same numbers, and memory that does not grow with the square of the length."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import exported, made, random_weights
from onnx_sessions import grown, opened
from relskew_core import BlockSpec, Span, attention_block
from relskew_core.export import to_onnx


def run(model: onnx.ModelProto, **inputs: Any) -> np.ndarray[Any, Any]:
    return np.asarray(opened(model).run(None, inputs)[0])


BY_HEAD = [
    BlockSpec(16, 4, Span.full(9), rel_bias=True, sinks=True),
    BlockSpec(16, 4, Span.clipped(2), num_kv_heads=2, rel_values=True, rel_bias=True, sinks=True),
    BlockSpec(16, 4, Span.full(9), num_kv_heads=2, rel_values=True, shared_table=True),
    BlockSpec(16, 4, Span.causal(9), causal=True, num_kv_heads=2, rel_values=True),
    BlockSpec(16, 4, Span.causal(9), causal=True, num_kv_heads=1),
    BlockSpec(16, 4, Span.clipped(2), rel_keys=False, rel_values=True),  # no table adds logits
]


@pytest.mark.parametrize("spec", BY_HEAD)
@pytest.mark.parametrize("shape", [None, (2, 4, 9, 9), (2, 1, 9, 9), (1, 4, 1, 9), (1, 1, 9, 1)])
def test_each_head_in_chunks_reads_its_own_rows_and_masks(spec: BlockSpec, shape: tuple[int, ...] | None) -> None:
    weights, draw = random_weights(spec), np.random.default_rng(3)
    x = draw.standard_normal((2, 9, 16)).astype(np.float32)
    mask = None if shape is None else draw.random(shape) < 0.7
    model = to_onnx(spec, weights, chunk_size=4, mask=mask is not None)
    y = run(model, x=x) if mask is None else run(model, x=x, mask=mask)
    np.testing.assert_allclose(y, attention_block(x, weights, spec, mask=mask), atol=2e-5)


@pytest.mark.parametrize(("length", "looped"), [(1, False), (3, False), (4, True)])
def test_a_loop_only_where_there_are_more_queries(length: int, looped: bool, tmp_path: Path) -> None:
    spec, options, weights = made("cache, grouped, no bias")
    model = to_onnx(spec, weights, chunk_size=3, **options)
    session = opened(model, enable_profiling=True, profile_file_prefix=str(tmp_path / "profile"))
    past = np.ones((1, 2, 2, 2), np.float32)
    session.run(None, {"x": np.ones((1, length, 8), np.float32), "past_key": past, "past_value": past})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event["args"]["op_name"] for event in events if event["cat"] == "Node"]
    assert "If" in ran
    # One loop over the two key heads, and one over the chunks in each of its turns.
    assert (ran.count("Loop"), "Attention" in ran) == (3 if looped else 0, not looped)


def test_memory() -> None:
    """All at once, one tensor of logits has 2 * 4096 * 4096 * 4 = 128 MiB."""
    spec, x = BlockSpec(16, 2, Span.causal(4096), causal=True), np.ones((1, 4096, 16), np.float32)
    found: list[Any] = []
    for chunk_size in ("auto", None):
        session = opened(to_onnx(spec, random_weights(spec), chunk_size=chunk_size))
        found.append(grown(partial(session.run, None, {"x": x})))
    if None in found:
        pytest.skip("only Linux counts the peak of one call")
    assert found[0] < 64 * 2**20 < 128 * 2**20 < found[1]


def test_chunks_are_chosen_for_long_inputs() -> None:
    """Where an input may have more than 256 queries, in the profile whose short inputs go without a loop."""

    def chunks(spec: BlockSpec, **options: Any) -> bool:
        graph = to_onnx(spec, random_weights(spec), **options).graph
        assert {node.op_type for node in graph.node}.isdisjoint({"Loop"})
        return any(node.op_type == "If" for node in graph.node)

    long, clip = BlockSpec(4, 2, Span.causal(257), causal=True), BlockSpec(4, 2, Span.clipped(3))
    crossing = BlockSpec(4, 2, Span.causal(256), causal=True, cross=True)
    assert all(map(chunks, (long, clip, crossing)))
    assert chunks(long, device="cpu")
    assert chunks(clip, device="cuda", chunk_size=4)
    short = BlockSpec(4, 2, Span.causal(256), causal=True), BlockSpec(4, 2, Span.full(256))
    assert not any(map(chunks, (*short, BlockSpec(4, 2, Span.causal(600), causal=True, block_size=300))))
    few: list[dict[str, Any]] = [{"max_length": 256}, {"chunk_size": None}, {"profile": "portable"}]
    assert not any(chunks(clip, **options) for options in few)
    assert not any(chunks(long, **options) for options in ({"device": "cuda"}, {"past": True}))


def test_chunks_give_what_all_queries_at_once_do() -> None:
    """257 queries are two chunks of 129, or of at most 200, and give what all at once do."""
    spec = BlockSpec(4, 2, Span.clipped(3))
    x = np.random.default_rng(0).standard_normal((1, 257, 4)).astype(np.float32)
    whole, *chunked = (run(to_onnx(spec, random_weights(spec), chunk_size=size), x=x) for size in (None, "auto", 200))
    for y in chunked:
        np.testing.assert_allclose(y, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("form", "options", "error", "message"), [
    ("blocks", {"chunk_size": 4}, ValueError, r"`chunk_size` excludes `spec.block_size`"),
    ("causal", {"chunk_size": 0}, ValueError, "`chunk_size` must be an int >= 1"),
    ("causal", {"chunk_size": "all"}, ValueError, "`chunk_size` must be an int, 'auto' or None, got 'all'"),
    ("causal", {"chunk_size": 2.0}, TypeError, "`chunk_size` must be an int"),
    ("causal", {"device": "npu"}, ValueError, "`device` must be one of 'cpu', 'cuda', got 'npu'"),
])  # fmt: skip
def test_chunks_and_devices_that_do_not_fit_are_refused(form: str, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        exported(form, **options)

"""Caches of fixed length, written in place: every form, rows with separate pasts, pieces, rejections."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from export_forms import IN_PLACE, exported, random_weights, valid
from onnx_sessions import opened
from relskew_core import BlockSpec, Span, attention_block
from relskew_core.export import to_onnx, validate


@pytest.mark.parametrize("form", ["in place: cache", "in place: cache, zero, values, mask"])
def test_too_many_positions_fail_before_the_cache_is_written(form: str) -> None:
    """On a GPU nothing checks where TensorScatter writes."""
    model, _, _ = exported(form)
    inputs, presents = ["x", "past_key", "past_value", "past_lengths"], ["present_key", "present_value"]
    for node in (node for node in model.graph.node if node.output[0] in presents):
        node.op_type = "Identity"  # which gives its argument, the new keys or values, for any lengths
        node.input[:] = node.input[1:2]
        del node.attribute[:]
    session = opened(onnx.utils.Extractor(model).extract_model(inputs, presents))
    draw = np.random.default_rng(0)
    for past, fits in (([0, 3], True), ([4, 1], True), ([0, 5], False), ([7, 7], False)):
        feeds = {name: draw.standard_normal((2, 2, 6, 4), np.float32) for name in ("past_key", "past_value")}
        feeds |= {"x": draw.standard_normal((2, 2, 8), np.float32), "past_lengths": np.array(past)}
        feeds = {each.name: feeds[each.name] for each in session.get_inputs()}
        if fits:
            session.run(None, feeds)
        else:
            with pytest.raises(Exception, match=r"cache/new_present_(key|value)"):
                session.run(None, feeds)


@pytest.mark.parametrize("options", [{}, {"past": True, "in_place": True}], ids=["clipped", "in place"])
def test_no_pad_in_bfloat16(options: dict[str, Any]) -> None:
    spec = BlockSpec(8, 2, Span.clipped(3) if not options else Span(3, 0, "clip"), causal=bool(options))
    kinds = {}
    for dtype in ("float16", "bfloat16"):
        model = to_onnx(spec, random_weights(spec), dtype=dtype, **options)
        graphs = [model.graph, *model.functions]
        graphs += [part.g for node in model.graph.node for part in node.attribute if part.HasField("g")]
        kinds[dtype] = {node.op_type for graph in graphs for node in graph.node}
    assert "Pad" in kinds["float16"]
    assert "Pad" not in kinds["bfloat16"]


def test_notices_a_past_that_is_the_same_for_all_rows() -> None:
    model, spec, weights = exported("in place: cache")
    (scatter,) = (node for node in model.graph.node if node.output[0] == "present_key")
    same = onnx.helper.make_node("ReduceMax", ["past_lengths"], ["longest"], keepdims=1, name="relskew/shape/longest")
    spread = onnx.helper.make_node("Expand", ["longest", "rows"], ["longest_rows"], name="relskew/shape/longest_rows")
    rows = onnx.helper.make_node("Shape", ["past_lengths"], ["rows"], name="relskew/shape/rows")
    scatter.input[2] = "longest_rows"
    for node in (spread, rows, same):
        model.graph.node.insert(0, node)
    wrong = {check.name for check in validate(model, spec, weights, batches=(2,), lengths=[2]).failures}
    assert {"y", "present_key"} <= wrong


def test_a_mask_by_head_where_no_table_makes_logits() -> None:
    """Positions hide from all heads alike there, a mask does not."""
    spec = BlockSpec(4, 2, Span.causal(6), causal=True, rel_keys=False, rel_values=True)
    model, _, weights = exported(spec, past=True, in_place=True, mask=True)
    valid(model, spec, weights, runtimes=["onnxruntime"], lengths=[1, 3], batches=(2,))
    session = opened(model)
    draw = np.random.default_rng(0)
    x, mask = draw.standard_normal((1, 3, 4)).astype(np.float32), draw.random((1, 2, 3, 6)) < 0.7
    past = np.zeros((1, 2, 6, 2), np.float32)
    feeds = {"x": x, "past_key": past, "past_value": past, "past_lengths": np.zeros(1, np.int64), "mask": mask}
    expected = attention_block(x, weights, spec, mask=mask[..., :3])
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=2e-5)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({}, ValueError, "`in_place=True` requires `past=True`"),
    ({"past": True, "profile": "portable"}, ValueError, "`in_place=True` requires `profile='ort'`"),
    ({"past": True, "chunk_size": 4}, ValueError, "`in_place=True` excludes `chunk_size`"),
    ({"past": True, "opset": 23}, ValueError, "`opset` must be 24 … 28 for profile='ort', in_place=True, got 23"),
    ({"in_place": 1}, TypeError, "`in_place` must be a bool"),
], ids=str)  # fmt: skip
def test_caches_in_place_without_what_they_require_are_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        exported(IN_PLACE["in place: cache"][0], **{"in_place": True, **options})


def test_rows_of_different_lengths_in_one_buffer() -> None:
    """Each row continues where its prompt ended, as if alone; onnxruntime writes into the given buffers.

    The padding of shorter prompts is written after their ends, and overwritten later.
    """
    spec, options = IN_PLACE["in place: cache"]
    spec = replace(spec, embed_dim=8 * spec.num_heads, head_dim=8)
    weights = random_weights(spec)
    session = opened(to_onnx(spec, weights, **options))
    x = np.random.default_rng(0).standard_normal((3, 9, spec.embed_dim)).astype(np.float32)
    lengths, shape = np.array([4, 1, 6]), (3, spec.num_kv_heads, 9, 8)
    caches = [onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for _ in range(2)]

    def step(piece: np.ndarray[Any, Any], past: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        binding = session.io_binding()
        binding.bind_cpu_input("x", np.ascontiguousarray(piece))
        binding.bind_cpu_input("past_lengths", past)
        for cache, name in zip(caches, ("key", "value"), strict=True):
            binding.bind_ortvalue_input(f"past_{name}", cache)
            binding.bind_ortvalue_output(f"present_{name}", cache)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        return binding.get_outputs()[2].numpy()

    whole: Any = attention_block(x, weights, spec)
    y = step(x[:, :6], np.zeros(3, np.int64))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(y[row, :length], whole[row, :length], atol=1e-5)
    for _ in range(3):
        y = step(np.stack([x[row, length][None] for row, length in enumerate(lengths)]), lengths)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(y[row, 0], whole[row, length], atol=1e-5)
        lengths = lengths + 1
    # Row 1 was padded to 6 positions, and the others have their own.
    filled = caches[0].numpy()[:, 0].any(-1).sum(-1)
    assert filled.tolist() == [max(6, length) for length in lengths]

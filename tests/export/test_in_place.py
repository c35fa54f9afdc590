"""Caches of fixed length, written in place: every form, rows with separate pasts, pieces, rejections."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from export_forms import FORMS, IN_PLACE, made, random_weights
from relskew_core import BlockSpec, Span, attention_block
from relskew_core.export import to_onnx, validate

form = pytest.mark.parametrize("form", IN_PLACE)


@form
def test_onnxruntime_and_the_reference_evaluator(form: str) -> None:
    spec, options, weights = made(form)
    model = to_onnx(spec, weights, **options)
    onnx.checker.check_model(model, full_check=True)
    report = validate(model, spec, weights, batches=(1, 3))
    assert report.ok, report.table()
    assert {"decoding", "too long fails"} <= {check.name for check in report.checks}
    report = validate(model, spec, weights, batches=(2,), lengths=[1, 4], runtimes=["reference"])
    assert report.ok, report.table()


@pytest.mark.parametrize("form", ["in place: cache, mask", "in place: cache, zero, values, mask"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_types(form: str, dtype: str) -> None:
    spec, options, weights = made(form)
    report = validate(to_onnx(spec, weights, dtype=dtype, **options), spec, weights, batches=(3,), lengths=[1, 5])
    assert report.ok, report.table()


def test_rows_go_on_where_each_of_them_ends() -> None:
    """Three rows of different lengths, decoded together in one buffer, as the library does one by one."""
    spec, options, weights = made("in place: cache")
    model = to_onnx(spec, weights, **options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((3, 9, 8)).astype(np.float32)
    lengths = np.array([4, 1, 6])
    shape = (3, spec.num_kv_heads, 9, spec.head_dim)
    caches = {name: np.zeros(shape, np.float32) for name in ("past_key", "past_value")}
    # The padding of the shorter rows of the prefill is written after their ends, and overwritten later.
    y, keys, values = list[Any](session.run(None, {"x": x[:, :6], **caches, "past_lengths": np.zeros(3, np.int64)}))
    whole: Any = attention_block(x, weights, spec)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(y[row, :length], whole[row, :length], atol=1e-5)
    for _ in range(3):
        step = np.stack([x[row, length][None] for row, length in enumerate(lengths)])
        feeds = {"x": step, "past_key": keys, "past_value": values, "past_lengths": lengths}
        y, keys, values = list[Any](session.run(None, feeds))
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(y[row, 0], whole[row, length], atol=1e-5)
        lengths = lengths + 1


def test_one_buffer_serves_as_past_and_present() -> None:
    """With IO binding onnxruntime writes into the cache that it was given."""
    spec, options, weights = made("in place: cache")
    session = onnxruntime.InferenceSession(
        to_onnx(spec, weights, **options).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)
    shape = (1, spec.num_kv_heads, 9, spec.head_dim)
    caches = [onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for _ in range(2)]
    steps = []
    for position in range(5):
        binding = session.io_binding()
        binding.bind_cpu_input("x", x[:, position : position + 1])
        binding.bind_cpu_input("past_lengths", np.array([position]))
        for cache, name in zip(caches, ("key", "value"), strict=True):
            binding.bind_ortvalue_input(f"past_{name}", cache)
            binding.bind_ortvalue_output(f"present_{name}", cache)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        steps.append(binding.get_outputs()[2].numpy())
    whole: Any = attention_block(x, weights, spec)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), whole, atol=1e-5)
    assert np.count_nonzero(caches[0].numpy()[0, 0].any(-1)) == 5


def test_notices_a_past_that_is_the_same_for_all_rows() -> None:
    spec, options, weights = made("in place: cache")
    model = to_onnx(spec, weights, **options)
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
    weights = random_weights(spec)
    model = to_onnx(spec, weights, past=True, in_place=True, mask=True)
    assert validate(model, spec, weights, runtimes=["onnxruntime"], lengths=[1, 3], batches=(2,)).ok
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(0)
    x, mask = draw.standard_normal((1, 3, 4)).astype(np.float32), draw.random((1, 2, 3, 6)) < 0.7
    past = np.zeros((1, 2, 6, 2), np.float32)
    feeds = {"x": x, "past_key": past, "past_value": past, "past_lengths": np.zeros(1, np.int64), "mask": mask}
    expected = attention_block(x, weights, spec, mask=mask[..., :3])
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=2e-5)


def test_refused() -> None:
    spec, _ = FORMS["cache"]
    weights = random_weights(spec)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({}, "`in_place=True` requires `past=True`"),
        ({"past": True, "profile": "portable"}, "`in_place=True` requires `profile='ort'`"),
        ({"past": True, "chunk_size": 4}, "`in_place=True` excludes `chunk_size`"),
        ({"past": True, "opset": 23}, "`opset` must be 24 … 28 for profile='ort', in_place=True, got 23"),
    ]
    for options, message in refusals:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            to_onnx(spec, weights, in_place=True, **options)
    with pytest.raises(TypeError, match="`in_place` must be a bool"):
        to_onnx(spec, weights, in_place=1)  # type: ignore[arg-type]

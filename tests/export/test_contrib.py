"""Profile `ort-contrib`: every form that GroupQueryAttention supports, caches in shared buffers, rejections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from export_forms import FORMS, IN_PLACE, random_weights
from onnx_sessions import opened
from relskew_core import BlockSpec, Span, attention_block
from relskew_core.export import to_onnx, validate

NAMES = (
    "causal", "causal, two-sided table", "causal, short", "causal, window", "cache", "cache, grouped, no bias",
    "cache, window", "cache, clip", "bias alone, clip, causal", "bias alone, cache", "segments, cache",
    "segments, causal, grouped, core", "core: cache, grouped, no bias", "in place: cache", "in place: cache, clip",
    "in place: cache, grouped, no bias", "in place: cache, window, wider clip", "in place: bias alone, cache",
    "in place: core: cache, grouped, no bias", "in place: segments, cache",
)  # fmt: skip


def made(form: str) -> tuple[BlockSpec, dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return a form whose heads have a width that the operator supports."""
    spec, options = (FORMS | IN_PLACE)[form]
    spec = replace(spec, embed_dim=8 * spec.num_heads, head_dim=8)
    return spec, options, random_weights(spec, projections=options.get("projections", True))


@pytest.mark.parametrize("form", NAMES)
def test_validates(form: str) -> None:
    spec, options, weights = made(form)
    model = to_onnx(spec, weights, profile="ort-contrib", **options)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count("GroupQueryAttention") == 1
    domains = {entry.domain: entry.version for entry in model.opset_import}
    assert domains == {"": 24 if "in_place" in options else 21, "com.microsoft": 1}
    report = validate(model, spec, weights, batches=(1, 3), lengths=[1, 3, 8])
    assert report.ok, report.table()


@pytest.mark.parametrize("form", ["causal", "in place: cache"])
def test_the_whole_sweep(form: str) -> None:
    spec, options, weights = made(form)
    for dtype in ("float32", "float16"):
        report = validate(to_onnx(spec, weights, profile="ort-contrib", dtype=dtype, **options), spec, weights)
        assert report.ok, report.table()
        assert "too long fails" in {check.name for check in report.checks}


def test_as_functions() -> None:
    spec, options, weights = made("in place: cache")
    model = to_onnx(spec, weights, profile="ort-contrib", operator=True, **options)
    report = validate(model, spec, weights, batches=(2,), lengths=[1, 4])
    assert report.ok, report.table()


def test_the_operator_only_in_its_profile() -> None:
    spec, options, weights = made("cache")
    model = to_onnx(spec, weights, profile="ort-contrib", **options)
    for entry in model.metadata_props:
        if entry.key == "relskew.profile":
            entry.value = "ort"
    failures = {check.name: check.detail for check in validate(model, spec, weights, batches=(1,)).failures}
    assert "GroupQueryAttention of domain com.microsoft" in failures["standard"]


@pytest.mark.parametrize("profile", ["ort", "ort-contrib"])
def test_rows_of_different_lengths_in_one_buffer(profile: Any) -> None:
    """Each row continues where its prompt ended, as if alone; onnxruntime writes into the given buffers.

    The padding of shorter prompts is written after their ends, and overwritten later.
    """
    spec, options, weights = made("in place: cache")
    session = opened(to_onnx(spec, weights, profile=profile, **options))
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


def test_a_full_cache_fails() -> None:
    """Where a clipped table has no end, the cache has one."""
    spec, options, weights = made("in place: cache, clip")
    session = opened(to_onnx(spec, weights, profile="ort-contrib", **options))
    cache = np.zeros((1, spec.num_kv_heads, 5, 8), np.float32)
    x = np.ones((1, 2, spec.embed_dim), np.float32)
    feeds = {"x": x, "past_key": cache, "past_value": cache}
    session.run(None, {**feeds, "past_lengths": np.array([3])})
    with pytest.raises(Exception, match="relative/named"):
        session.run(None, {**feeds, "past_lengths": np.array([4])})


def test_several_queries_behind_pasts_of_several_rows_fail() -> None:
    spec, options, weights = made("in place: cache")
    session = opened(to_onnx(spec, weights, profile="ort-contrib", **options))
    cache = np.zeros((2, spec.num_kv_heads, 9, 8), np.float32)
    feeds = {"x": np.ones((2, 2, spec.embed_dim), np.float32), "past_key": cache, "past_value": cache}
    with pytest.raises(Exception, match="batch_size must be 1"):
        session.run(None, {**feeds, "past_lengths": np.array([3, 1])})


WIDE = BlockSpec(16, 2, Span.causal(9), causal=True)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (replace(WIDE, span=Span.full(9), causal=False), {}, "requires causal self-attention, got causal=False"),
        (replace(WIDE, cross=True), {}, "requires causal self-attention, got causal=True and cross=True"),
        (replace(WIDE, rel_values=True), {}, r"excludes `spec\.rel_values`, got True"),
        (replace(WIDE, sinks=True), {}, r"excludes `spec\.sinks`, got True"),
        (replace(WIDE, block_size=4), {}, r"excludes `spec\.block_size`, got 4"),
        (WIDE, {"mask": True}, "excludes `mask`, got True"),
        (WIDE, {"chunk_size": 4}, "excludes `chunk_size`, got 4"),
        (WIDE, {"dtype": "float64"}, "excludes `dtype` float64"),
        (replace(WIDE, head_dim=12), {}, r"requires a `spec\.head_dim` that is a multiple of 8, got 12"),
    ],
)
def test_refused(spec: BlockSpec, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="`profile='ort-contrib'`, which is made of GroupQueryAttention, " + message):
        to_onnx(spec, random_weights(spec), profile="ort-contrib", **options)

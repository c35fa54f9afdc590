"""Graphs whose attention is a node for the operator library: the same numbers with it, without it, and in plain."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from export_forms import FORMS, made
from onnx_sessions import opened
from operator_runs import needs_library
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import custom_ops_library, save, to_onnx, validate, without_operator
from relskew_core.export._check import runtimes
from relskew_core.export._check.trials import make_inputs, make_trials
from relskew_core.export._form.plan import make_plan
from relskew_core.export._nodes.operator import DOMAIN, NAME

pytestmark = needs_library

MIXED = ("cross, clip, short", "cross, zero, short")
"""Forms that cut a table at one end, and continue it at the other."""


def results(model: onnx.ModelProto, feeds: dict[str, Any], **settings: Any) -> list[Any] | None:
    """Return what a session gives, nothing where it fails."""
    session = opened(model, **settings)
    try:
        return list(session.run(None, feeds))
    except Exception as error:
        if "relskew" not in str(error):  # the error names a node or the operator
            raise
        return None


@pytest.mark.parametrize("form", [form for form in FORMS if form not in MIXED])
def test_every_form_gives_the_same_with_the_library_and_without(form: str) -> None:
    spec, own, weights = made(form)
    model = to_onnx(spec, weights, operator=True, **own)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count(NAME) == 1
    plan = make_plan(spec, np.dtype(np.float32), **own)
    for trial, seed in make_trials(plan, [4, 10], [3], 0)[:4]:
        feeds = make_inputs(plan, trial, seed)
        expected = results(to_onnx(spec, weights, **own), feeds)
        for library in (True, False):
            found = results(model, feeds, library=library)
            assert (found is None) == (expected is None)
            for one, other in zip(found or (), expected or (), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", ["cache, grouped, no bias", "in place: cache", "sinks, mask, values", "blocks"])
def test_both_ways_and_the_plain_graph_validate(form: str) -> None:
    spec, own, weights = made(form)
    model = to_onnx(spec, weights, operator=True, **own)
    report = validate(model, spec, weights, batches=(2,), lengths=[1, 5], runtimes=["onnxruntime", "reference"])
    assert report.ok, report.table()
    assert any(check.runtime.endswith("operator") for check in report.checks)
    plain = without_operator(model)
    assert not plain.functions
    assert {entry.domain for entry in plain.opset_import} == {""}
    report = validate(plain, spec, weights, batches=(2,), lengths=[1, 5])
    assert report.ok, report.table()
    assert not any(check.runtime.endswith("operator") for check in report.checks)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("profile", ["ort", "portable"])
def test_types_and_profiles_validate(profile: Any, dtype: str) -> None:
    spec = BlockSpec(16, 4, Span.clipped(3), num_kv_heads=2, rel_values=True)
    weights = init_weights(spec, seed=0)
    model = to_onnx(spec, weights, operator=True, profile=profile, dtype=dtype)
    report = validate(model, spec, weights, batches=(2,), lengths=[1, 9])
    assert report.ok, report.table()


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_the_operator_wins_over_the_function(level: str) -> None:
    """No text of onnx says so: runtimes decide."""
    spec = BlockSpec(8, 2, Span.causal(8), causal=True)
    weights = init_weights(spec, seed=0)
    model = to_onnx(spec, weights, operator=True)
    right = to_onnx(spec, weights)
    (function,) = model.functions
    seven = helper.make_node("Constant", [], ["seven"], value_floats=[7.0])
    zero = helper.make_node("Sub", [function.input[0], function.input[0]], ["zero"])
    del function.node[:]
    function.node.extend([seven, zero, helper.make_node("Add", ["seven", "zero"], [function.output[0]])])
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)}
    optimised = getattr(onnxruntime.GraphOptimizationLevel, level)
    found = [results(model, feeds, library=each, graph_optimization_level=optimised) for each in (True, False)]
    expected = results(right, feeds)
    assert found[0] is not None
    assert found[1] is not None
    assert expected is not None
    np.testing.assert_allclose(found[0][0], expected[0], rtol=0, atol=1e-5)
    assert np.abs(found[1][0] - expected[0]).max() > 1


@pytest.mark.parametrize("form", MIXED)
def test_a_length_that_cuts_one_end_is_refused(form: str) -> None:
    spec, own, weights = made(form)
    with pytest.raises(ValueError, match=r"`operator=True` requires a `max_length` that cuts both ends .* got 5"):
        to_onnx(spec, weights, operator=True, **own)


def test_wrong_arguments_are_named() -> None:
    spec = BlockSpec(8, 2, Span.causal(8), causal=True)
    weights = init_weights(spec, seed=0)
    slopes = BlockSpec.alibi(8, 2)
    with pytest.raises(ValueError, match=r"excludes a bias by distance in half precision.* got dtype float16"):
        to_onnx(slopes, init_weights(slopes, seed=0), operator=True, dtype="float16")
    with pytest.raises(TypeError, match=r"`operator` must be"):
        to_onnx(spec, weights, operator=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`model_or_path` must have nodes relskew::RelativeAttention"):
        without_operator(to_onnx(spec, weights))
    with pytest.raises(TypeError, match=r"`model_or_path` must be an onnx.ModelProto or a path, got int 3"):
        without_operator(3)  # type: ignore[arg-type]


def test_a_file_is_read(tmp_path: Any) -> None:
    spec = BlockSpec(8, 2, Span.causal(8), causal=True)
    model = to_onnx(spec, init_weights(spec, seed=0), operator=True)
    path = save(model, tmp_path / "block.onnx")
    assert without_operator(path) == without_operator(str(path)) == without_operator(model)
    assert any(entry.domain == DOMAIN for entry in model.opset_import)


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeError("there is no operator library here")

    monkeypatch.setattr(runtimes, "custom_ops_library", missing)
    spec = BlockSpec(8, 2, Span.causal(8), causal=True)
    weights = init_weights(spec, seed=0)
    report = validate(to_onnx(spec, weights, operator=True), spec, weights, batches=(1,), lengths=[3])
    (failed,) = report.failures
    assert (failed.name, failed.runtime) == ("loads", runtimes.WITH_OPERATOR)
    assert "there is no operator library here" in failed.detail
    assert custom_ops_library().is_file()

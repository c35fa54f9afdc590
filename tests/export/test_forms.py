"""Every form of the block in every profile, against float64, in every runtime here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops import op_attention

from export_forms import FORMS, PROFILES, made
from onnx_sessions import opened
from relskew_core.export import to_onnx, validate
from relskew_core.export._check.trials import make_inputs, make_trials
from relskew_core.export._form.plan import make_plan

form = pytest.mark.parametrize("form", FORMS)
TYPED = [
    "full", "causal", "cache, mask", "cross, window", "clip, values", "blocks", "bias, full, grouped",
    "bias alone, shared, mask", "core: clip, values", "core: causal", "sinks, mask, values", "segments, stream",
]  # fmt: skip


def turn(form: str, shift: int = 0) -> Any:
    """Return a profile: of a third of the forms, each."""
    return PROFILES[([*FORMS].index(form) + shift) % len(PROFILES)]


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("form", "profile"),
    [*((form, "ort") for form in FORMS), *((form, "trt") for form in FORMS if turn(form) == "trt")],
)
def test_onnxruntime(form: Any, profile: Any) -> None:
    spec, options, weights = made(form)
    batches = (1, 3) if turn(form) == "ort" else (2,)
    report = validate(to_onnx(spec, weights, profile=profile, **options), spec, weights, batches=batches)
    assert report.ok, report.table()
    assert any(check.name == "optimiser off" for check in report.checks)


@form
def test_portable_runtimes(form: Any) -> None:
    """Each form in onnxruntime, and a third of them in runtimes that are slower to start."""
    spec, options, weights = made(form)
    runtimes: list[Any] = ["onnxruntime", *(["reference", "openvino"] if turn(form) == "portable" else [])]
    model = to_onnx(spec, weights, profile="portable", **options)
    report = validate(model, spec, weights, runtimes=runtimes, batches=(2,))
    assert report.ok, report.table()


@pytest.mark.parametrize("form", ["full", "full, mask", "cache, mask", "cross, window", "clip, values", "blocks"])
@pytest.mark.parametrize("profile", ["ort", "trt"])
def test_reference_evaluator_agrees_with_attention(form: Any, profile: Any) -> None:
    spec, options, weights = made(form)
    model = to_onnx(spec, weights, profile=profile, **options)
    report = validate(model, spec, weights, runtimes=["reference"], batches=(2,))
    assert report.ok, report.table()


@pytest.mark.no_cover
@pytest.mark.parametrize("form", TYPED)
@pytest.mark.parametrize(("dtype", "shift"), [("float64", 0), ("float16", 1)])
def test_types_in_onnxruntime(form: Any, dtype: str, shift: int) -> None:
    spec, options, weights = made(form)
    model = to_onnx(spec, weights, profile=turn(form, shift), dtype=dtype, **options)
    report = validate(model, spec, weights, batches=(2,))
    assert report.ok, report.table()


@pytest.mark.parametrize("form", ["full", "cache, mask", "clip, values", "blocks"])
@pytest.mark.parametrize("profile", PROFILES)
def test_bfloat16_in_the_reference_evaluator(form: Any, profile: Any) -> None:
    spec, options, weights = made(form)
    model = to_onnx(spec, weights, profile=profile, dtype="bfloat16", **options)
    report = validate(model, spec, weights, runtimes=["reference"], batches=(2,))
    assert report.ok, report.table()


class Attention(op_attention.Attention):  # named like the operator that it replaces
    """Makes NaN of queries that see no key, as onnxruntime did before 1.28 and others may."""

    made = 0

    def _run(self, *args: Any, **attributes: Any) -> Any:
        out, *others = super()._run(*args, **attributes)
        dead = np.all(out == 0, axis=-1, keepdims=True)
        Attention.made += int(dead.sum())
        return np.where(dead, np.nan, out).astype(out.dtype), *others


@pytest.mark.parametrize(
    "form",
    ["full, mask", "cache, mask", "cache, window, mask", "cross, window", "stream, mask", "core: full, mask",
     "core: cross, window, mask"],
)  # fmt: skip
@pytest.mark.parametrize("profile", ["ort", "trt"])
def test_queries_that_see_no_key_are_zeros_whatever_attention_makes_of_them(form: Any, profile: Any) -> None:
    spec, options, weights = made(form)
    model = to_onnx(spec, weights, profile=profile, **options)
    plan, before = make_plan(spec, np.dtype(np.float32), profile=profile, **options), Attention.made
    assert plan.fused
    old, new = ReferenceEvaluator(model, new_ops=[Attention]), opened(model)
    for trial, seed in make_trials(plan, None, (2,), 0):
        if trial.fits:
            feeds = make_inputs(plan, trial, seed)
            for result, wanted in zip(old.run(None, feeds), new.run(None, feeds), strict=True):
                np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-5)
    assert Attention.made > before


@pytest.mark.no_cover
@form
def test_symbols_tell_the_truth(form: Any) -> None:
    """Runtimes share buffers between tensors of equal symbolic shapes: equal symbols must be equal lengths."""
    (spec, options, weights), profile = made(form), turn(form)
    model = to_onnx(spec, weights, profile=profile, dtype="float32", **options)
    del model.graph.output[1:]
    model.graph.output.extend(info for info in model.graph.value_info)
    written = {info.name: info.type.tensor_type for info in model.graph.output}
    run = opened(model)
    plan = make_plan(spec, np.dtype(np.float32), profile=profile, **options)
    for trial, seed in [(trial, seed) for trial, seed in make_trials(plan, None, (2,), 0) if trial.fits][:6]:
        feeds = make_inputs(plan, trial, seed)
        lengths: dict[str, int] = {}
        for value, result in zip(run.get_outputs(), list[Any](run.run(None, feeds)), strict=True):
            dims = written[value.name].shape.dim
            assert len(dims) == result.ndim, value.name
            for dim, length in zip(dims, result.shape, strict=True):
                wanted = lengths.setdefault(dim.dim_param, length) if dim.dim_param else dim.dim_value
                assert length == wanted, (value.name, dim.dim_param, result.shape)

"""Every form of the block in every profile, against float64, in every runtime here; in chunks, in place, as a node."""

from typing import Any

import ndonnx
import numpy as np
import onnx
import pytest

from export_forms import FORMS, IN_PLACE, PROFILES, exported, random_weights, valid
from onnx_sessions import opened
from operator_runs import needs_library
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.export import to_onnx, without_operator

TYPED = [
    "full", "causal", "cache, mask", "cross, window", "clip, values", "blocks", "bias, full, grouped",
    "bias alone, shared, mask", "core: clip, values", "core: causal", "sinks, mask, values", "segments, stream",
]  # fmt: skip
LOOPED = [form for form, (spec, _) in FORMS.items() if spec.block_size is None]
REFERENCE = {"runtimes": ["reference"]}


def turn(form: str, shift: int = 0) -> Any:
    """Return a profile: of a third of the forms, each."""
    return PROFILES[([*FORMS].index(form) + shift) % len(PROFILES)]


def case(kind: str, form: str, asked: dict[str, Any] | None = None, /, *, watched: bool = True, **options: Any) -> Any:
    marks = [*([] if watched else [pytest.mark.no_cover]), *([needs_library] if "operator" in options else [])]
    name = "-".join([kind, form, *map(str, options.values()), *map(str, (asked or {}).get("runtimes", ())[:1])])
    return pytest.param(form, options, {"batches": (2,), **(asked or {})}, id=name, marks=marks)


BATCHES: dict[bool, dict[str, Any]] = {True: {"batches": (1, 3)}, False: {}}
SLOWER: dict[bool, dict[str, Any]] = {True: {"runtimes": ["onnxruntime", "reference", "openvino"]}, False: {}}
"""Of each form onnxruntime, of a third of them runtimes that are slower to start."""

CASES = [
    *(case("ort", form, BATCHES[turn(form) == "ort"], watched=False, profile="ort") for form in FORMS),
    *(case("trt", form, watched=False, profile="trt") for form in FORMS if turn(form) == "trt"),
    *(case("portable", form, SLOWER[turn(form) == "portable"], profile="portable") for form in FORMS),
    *(
        case("by Attention", form, REFERENCE, profile=profile) for profile in ("ort", "trt")
        for form in ("full", "full, mask", "cache, mask", "cross, window", "clip, values", "blocks")
    ),
    *(
        case("type", form, watched=False, profile=turn(form, shift), dtype=dtype)
        for form in TYPED for dtype, shift in (("float64", 0), ("float16", 1))
    ),
    *(
        case("type", form, {"runtimes": ["reference", "openvino"]}, profile=profile, dtype="bfloat16")
        for form in ("full", "cache, mask", "clip, values", "blocks") for profile in PROFILES
    ),
    *(
        case("chunks", form, profile=("ort", "portable")[place % 2], chunk_size=3 + place % 2)
        for place, form in enumerate(LOOPED)
    ),
    *(
        case("a query or all", form, {"lengths": [1, 2, 5, 9]}, chunk_size=size) for size in (1, 64)
        for form in ("full", "causal", "cache, mask", "cross, window, mask", "clip, values")
    ),
    *(
        case("elsewhere", form, {"lengths": [1, 3, 8], "runtimes": ["reference", "openvino"]}, profile="portable",
             chunk_size=3)
        for form in ("full", "cache, mask", "cross, window, mask")
    ),
    *(case("in place", form, {"batches": (1, 3)}) for form in IN_PLACE),
    *(case("in place", form, {"lengths": [1, 4], **REFERENCE}) for form in IN_PLACE),
    *(
        case("type", form, {"batches": (3,), "lengths": [1, 5]}, dtype=dtype) for dtype in ("float16", "float64")
        for form in ("in place: cache, mask", "in place: cache, zero, values, mask")
    ),
    *(
        case("node", form, {"lengths": [1, 5], "runtimes": ["onnxruntime", "reference"]}, operator=True)
        for form in ("cache, grouped, no bias", "in place: cache", "sinks, mask, values", "blocks")
    ),
    *(
        case("node", "clip, values", {"lengths": [1, 9]}, operator=True, profile=profile, dtype=dtype)
        for profile in ("ort", "portable") for dtype in ("float16", "float64")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "options", "asked"), CASES)
def test_validate_passes_every_form(form: str, options: dict[str, Any], asked: dict[str, Any]) -> None:
    model, spec, weights = exported(form, **options)
    onnx.checker.check_model(model, full_check=True)
    report = valid(model, spec, weights, **asked)
    names = {check.name for check in report.checks}
    assert "onnxruntime" not in asked.get("runtimes", ["onnxruntime"]) or "optimiser off" in names
    assert form not in IN_PLACE or "lengths" in asked or {"decoding", "too long fails"} <= names
    with_operator = [check for check in report.checks if check.runtime.endswith("operator")]
    assert bool(with_operator) == options.get("operator", False)
    if with_operator:
        plain = without_operator(model)
        assert not plain.functions
        assert {entry.domain for entry in plain.opset_import} == {""}
        report = valid(plain, spec, weights, **{**asked, "runtimes": ["onnxruntime"]})
        assert not any(check.runtime.endswith("operator") for check in report.checks)


# The portable function traced by ndonnx: graphs for fixed shapes, by another hand, that must agree with ours

TRACED = {
    "full": BlockSpec(8, 2, Span.full(9)),
    "full, grouped, shared": BlockSpec(8, 4, Span.full(9), num_kv_heads=2, shared_table=True),
    "clip, values": BlockSpec(8, 2, Span.clipped(2), rel_values=True),
    "zero, bias": BlockSpec(8, 2, Span(2, 1, "zero"), rel_bias=True),
    "causal": BlockSpec(8, 2, Span.causal(9), causal=True),
    "causal, window": BlockSpec(8, 2, Span(3, 0), causal=True, window=(3, None)),
    "blocks": BlockSpec(8, 2, Span.causal(6), causal=True, block_size=3),
    "cross": BlockSpec(8, 2, Span(8, 6), cross=True),
}


@pytest.mark.no_cover
@pytest.mark.parametrize(("form", "queries"), [*((form, 7) for form in TRACED), ("clip, values", 1), ("cross", 1)])
def test_a_graph_traced_by_ndonnx_gives_the_same_numbers(form: str, queries: int) -> None:
    spec, draw = TRACED[form], np.random.default_rng(0)
    shapes = dict.fromkeys("kv", (2, spec.num_kv_heads, 5 if spec.cross else queries, spec.head_dim))
    shapes["q"] = (2, spec.num_heads, queries, spec.head_dim)
    feeds = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    tables = random_weights(spec, projections=False)
    traced: dict[str, Any] = {name: ndonnx.argument(shape=x.shape, dtype=ndonnx.float32) for name, x in feeds.items()}
    call: dict[str, Any] = {name: getattr(spec, name) for name in ("span", "causal", "window", "block_size")}
    call |= {name: ndonnx.asarray(table) for name, table in tables.items()}
    out: Any = relative_attention(**traced, **call, offset=0)
    (theirs,) = list[Any](opened(ndonnx.build(traced, {"out": out})).run(None, feeds))
    for profile in ("ort", "portable"):
        (ours,) = opened(to_onnx(spec, tables, projections=False, profile=profile)).run(None, feeds)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)

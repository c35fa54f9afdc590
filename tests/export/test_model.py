"""What a graph looks like: its interface, names, sizes, metadata, and what `to_onnx` refuses."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import compose, numpy_helper

import relskew_core
from export_forms import FORMS, PROFILES, exported, made, random_weights, valid
from onnx_sessions import opened
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx

CAUSAL = FORMS["causal"][0]
CROSS = FORMS["cross"][0]


def graph_of(form: str, **options: Any) -> onnx.ModelProto:
    return exported(form, **options)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_form_is_a_valid_file_with_named_nodes(form: Any, profile: Any) -> None:
    model = graph_of(form, profile=profile, chunk_size=None)
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == (8 if profile == "portable" else 10)
    (opset,) = model.opset_import
    assert (opset.domain, opset.version) == ("", 18 if profile == "portable" else 23)
    assert not model.functions
    assert not any(attribute.HasField("g") for node in model.graph.node for attribute in node.attribute)
    named = {value.name for value in model.graph.value_info} | {value.name for value in model.graph.output}
    assert {output for node in model.graph.node for output in node.output if output} == named
    assert all(node.name.startswith(("relskew/compute/", "relskew/shape/")) for node in model.graph.node)
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)
    keys = list(made(form)[2])
    if FORMS[form][0].rel_bias == "alibi":  # it has no weights
        keys.insert(0, "rel_bias")
    stored = [tensor.name for tensor in model.graph.initializer]
    assert stored[: len(keys)] == keys
    assert all(name.startswith("relskew/constant/") for name in stored[len(keys) :])
    contents = {(t.data_type, tuple(t.dims), t.raw_data) for t in model.graph.initializer[len(keys) :]}
    assert len(contents) == len(stored) - len(keys)
    causal = [a.i for node in model.graph.node for a in node.attribute if a.name == "is_causal"]
    if profile == "trt":
        assert not any(causal)
        assert all(sum(map(bool, node.output)) == 1 for node in model.graph.node)
    square = FORMS[form][0].causal and not FORMS[form][0].cross and "blocks" not in form
    if any(causal):
        assert square or form in ("blocks, short table", "blocks, short", "blocks, mask", "blocks, cache")


def test_same_export_same_bytes() -> None:
    spec, options = FORMS["cache, zero, values, mask"]
    weights = random_weights(spec)
    backwards = dict(reversed(weights.items()))
    first, second = (
        to_onnx(spec, given, **options).SerializeToString(deterministic=True) for given in (weights, backwards)
    )
    assert first == second


def test_a_graph_has_the_version_and_the_name_that_is_given() -> None:
    model = to_onnx(CAUSAL, random_weights(CAUSAL), name="layer_3")
    assert {entry.key: entry.value for entry in model.metadata_props}["relskew.version"] == relskew_core.__version__
    assert model.graph.name == "layer_3"


@pytest.mark.parametrize("profile", PROFILES)
def test_blocks_are_stacked_by_onnx(profile: Any) -> None:
    first, second = (to_onnx(CAUSAL, random_weights(CAUSAL, seed), profile=profile) for seed in (0, 1))
    stack = compose.merge_models(first, second, io_map=[("y", "x")], prefix1="0/", prefix2="1/")
    onnx.checker.check_model(stack, full_check=True)
    y: Any = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    whole = opened(stack).run(None, {"0/x": y})[0]
    for model in (first, second):
        y = opened(model).run(None, {"x": y})[0]
    np.testing.assert_allclose(whole, y, atol=1e-6)


def test_versions_as_old_as_the_opset_allows() -> None:
    versions = [graph_of("causal", profile="portable", opset=opset).ir_version for opset in range(18, 25)]
    assert versions == [8, 9, 9, 10, 10, 10, 10]
    assert graph_of("causal", profile="portable", operator=True).ir_version == 10


def stored(model: onnx.ModelProto, key: str) -> np.ndarray[Any, Any]:
    (array,) = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name == key]
    return array


def test_max_length_trims_the_stored_rows() -> None:
    weights = random_weights(CAUSAL)
    assert stored(to_onnx(CAUSAL, weights), "rel_k").shape == (2, 10, 4)
    trimmed = stored(to_onnx(CAUSAL, weights, max_length=4), "rel_k")
    assert trimmed.shape == (2, 5, 4)
    np.testing.assert_array_equal(trimmed[:, 1:], weights["rel_k"][:, -4:])
    assert stored(graph_of("window", max_length=100), "rel_k").shape == (2, 6, 4)
    assert stored(graph_of("clip", max_length=100), "rel_k").shape == (2, 4, 4)
    # Trimmed rows that a longer input would read raise an error, even if the table's end is soft.
    for beyond in ("clip", "zero"):
        soft = BlockSpec(8, 2, Span(8, 0, beyond), causal=True)
        model = to_onnx(soft, weights, max_length=4)
        np.testing.assert_array_equal(stored(model, "rel_k"), trimmed)
        report = valid(model, soft, weights, batches=(1,))
        assert "batch 1, queries 5, keys 5, past 0" in {c.case for c in report.checks if c.name == "too long fails"}


VALUES: list[tuple[Any, dict[str, Any], str]] = [
    (CAUSAL, {"max_length": 10}, "`max_length` must be at most 9, as far as the span reaches into the past"),
    (BlockSpec(8, 2, Span(9, 3)), {"max_length": 5}, "`max_length` must be at most 4.* the future"),
    (CAUSAL, {"max_length": 0}, "`max_length` must be an int >= 1"),
    (CROSS, {"past": True}, "`past=True` excludes `spec.cross`"),
    (FORMS["full"][0], {"past": True}, "`past=True` requires `spec.causal` or `spec.blocks_before`"),
    (FORMS["stream"][0], {"past": True, "max_length": 2}, "requires a table that reaches 2 into the future"),
    (FORMS["stream"][0], {"past": True, "in_place": True, "opset": 24}, "`in_place=True` requires `spec.causal`"),
    (CROSS, {"segments": True}, "`segments=True` excludes `spec.cross`"),
    (CAUSAL, {"profile": "tensorrt"}, "`profile` must be one of 'ort', 'portable', 'trt'"),
    (CAUSAL, {"opset": 22}, "`opset` must be 23 … 28 for profile='ort', got 22"),
    (CAUSAL, {"opset": 17, "profile": "portable"}, "`opset` must be 18"),
    (CAUSAL, {"dtype": "int8"}, "`dtype` must be one of 'float16', 'bfloat16', 'float32', 'float64'"),
    (CAUSAL, {"dtype": object()}, "`dtype` must be one of"),
    (CAUSAL, {"projections": False}, r"`weights` must have exactly the keys rel_k; extra q_proj\.weight"),
    # of options that these exclude or require
    (CAUSAL, {"in_place": True}, "`in_place=True` requires `past=True`"),
    (CAUSAL, {"in_place": True, "past": True, "profile": "portable"}, "`in_place=True` requires `profile='ort'`"),
    (CAUSAL, {"in_place": True, "past": True, "chunk_size": 4}, "`in_place=True` excludes `chunk_size`"),
    (CAUSAL, {"in_place": True, "past": True, "opset": 23}, "`opset` must be 24 … 28 for .* in_place=True, got 23"),
    (FORMS["blocks"][0], {"chunk_size": 4}, r"`chunk_size` excludes `spec.block_size`"),
    (CAUSAL, {"chunk_size": 0}, "`chunk_size` must be an int >= 1"),
    (CAUSAL, {"chunk_size": "all"}, "`chunk_size` must be an int, 'auto' or None, got 'all'"),
    (CAUSAL, {"device": "npu"}, "`device` must be one of 'cpu', 'cuda', got 'npu'"),
    (BlockSpec(8, 2, Span.clipped(2), window=(2**30, 1)), {}, "`spec.window` must be at most 16777216 .* None, got "),
]  # fmt: skip
TYPES: list[tuple[Any, dict[str, Any], str]] = [
    (CAUSAL, {"past": 1}, "`past` must be a bool"),
    (CAUSAL, {"mask": None}, "`mask` must be a bool"),
    (CAUSAL, {"in_place": 1}, "`in_place` must be a bool"),
    (CAUSAL, {"chunk_size": 2.0}, "`chunk_size` must be an int"),
    (CAUSAL, {"operator": 1}, "`operator` must be"),
    (CAUSAL, {"segments": 1}, "`segments` must be a bool"),
    (CAUSAL, {"max_length": 4.0}, "`max_length` must be an int"),
    (CAUSAL, {"opset": "23"}, "`opset` must be an int"),
    (CAUSAL, {"name": ""}, "`name` must be a str"),
    (CAUSAL, {"name": 3}, "`name` must be a str"),
    ("causal", {}, "`spec` must be a BlockSpec"),
]


@pytest.mark.parametrize(
    ("error", "case"), [*((ValueError, case) for case in VALUES), *((TypeError, case) for case in TYPES)]
)
def test_arguments_that_do_not_fit_are_refused(error: Any, case: tuple[Any, dict[str, Any], str]) -> None:
    spec, options, message = case
    with pytest.raises(error, match=message):
        to_onnx(spec, random_weights(spec if isinstance(spec, BlockSpec) else CAUSAL), **options)


@pytest.mark.parametrize(("key", "value", "dtype", "error", "message"), [
    ("k_proj.bias", None, None, ValueError, "missing k_proj.bias"),
    ("rel_v", np.zeros((2, 9, 4), "f"), None, ValueError, "extra rel_v"),
    ("rel_k", np.zeros((2, 8, 4), "f"), None, ValueError, "rel_k.*shape \\(2, 9, 4\\), got \\(2, 8, 4\\)"),
    ("rel_k", np.zeros((2, 9, 4), np.int64), None, TypeError, "`weights\\['rel_k'\\]`.*int64"),
    ("rel_k", np.zeros((2, 9, 4), np.complex64), "float32", TypeError, "rel_k"),
    ("q_proj.bias", np.full(8, np.nan, "f"), None, ValueError, "q_proj.bias.*finite"),
    ("q_proj.bias", np.full(8, -np.inf, "f"), "float64", ValueError, "q_proj.bias.*finite"),
    ("v_proj.bias", np.full(8, 7e4, "f"), "float16", ValueError, "v_proj.bias.*fit into float16.*70000"),
    ("v_proj.bias", np.full(8, 1e39), "bfloat16", ValueError, "v_proj.bias.*fit into bfloat16"),
    ("v_proj.bias", np.full(8, 1e39), "float32", ValueError, "v_proj.bias.*fit into float32"),
    ("v_proj.bias", np.zeros(8), None, ValueError, "v_proj.bias.*must have the dtype of.*float32.*got float64"),
    ("out_proj.bias", [0.0] * 8, None, TypeError, "out_proj.bias.*must be an array"),
])  # fmt: skip
def test_wrong_weights_are_refused(key: str, value: Any, dtype: Any, error: type[Exception], message: str) -> None:
    weights = {name: x for name, x in {**random_weights(CAUSAL), key: value}.items() if x is not None}
    with pytest.raises(error, match=message):
        to_onnx(CAUSAL, weights, dtype=dtype)


def test_weights_are_left_alone() -> None:
    weights = random_weights(CAUSAL)
    before = {key: array.copy() for key, array in weights.items()}
    for array in weights.values():
        array.flags.writeable = False
    to_onnx(CAUSAL, weights, dtype="float16", max_length=3)
    assert list(weights) == list(before)
    for key, array in weights.items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.parametrize(("library", "dtype"), [
    *(("torch", dtype) for dtype in ("float16", "bfloat16", "float32", "float64")), ("jax.numpy", "float32"),
    ("jax.numpy", "bfloat16"), ("array_api_strict", "float32"),
])  # fmt: skip
def test_weights_and_dtypes_of_other_libraries_are_taken(library: str, dtype: str) -> None:
    xp, weights = pytest.importorskip(library), random_weights(CAUSAL)
    wanted = dtype if library == "array_api_strict" else getattr(xp, dtype)
    given = {key: xp.asarray(array) for key, array in weights.items()}
    if library == "torch":
        given = {key: xp.nn.Parameter(x) for key, x in given.items()}
    expected = to_onnx(CAUSAL, weights, dtype=dtype)
    assert to_onnx(CAUSAL, given, dtype=wanted) == expected
    if dtype != "float64" and library != "array_api_strict":
        cast = {key: x.to(wanted) if library == "torch" else x.astype(wanted) for key, x in given.items()}
        assert to_onnx(CAUSAL, cast) == expected


def test_a_tensor_too_large_for_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relskew_core.export._form.weights.TENSOR_LIMIT", 300)
    with pytest.raises(ValueError, match=r"`weights.'rel_k'.` must be at most 2 GiB"):
        to_onnx(CAUSAL, random_weights(CAUSAL))


HELD = """
import numpy as np
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

def export(width, rows):
    spec = BlockSpec(width, 16, Span.causal(rows), causal=True, rel_values=True)
    before = status("VmRSS")
    weights = {key: np.ones(shape, np.float32) for key, shape in spec.weight_shapes().items()}
    model = to_onnx(spec, weights)
    return (status("VmHWM") - before) / sum(array.nbytes for array in weights.values())

export(32, 32)
print(export(2048, 2048))
"""


@pytest.mark.no_cover
@pytest.mark.skipif(sys.platform != "linux", reason="reads what the process has held from /proc")
def test_to_onnx_holds_the_weights_twice() -> None:
    """Those that are given and those in the model, and the bytes of one of the six tensors, which protobuf copies."""
    free = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory is returned at once
    told = subprocess.run([sys.executable, "-c", HELD], check=True, capture_output=True, text=True, env=free).stdout
    assert 1.9 < float(told) < 2.2

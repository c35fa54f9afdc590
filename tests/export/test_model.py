"""What a graph looks like: its interface, names, sizes, metadata, and what `to_onnx` refuses."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import compose, numpy_helper

import relskew_core
from export_forms import FORMS, PROFILES, made, random_weights
from onnx_sessions import opened
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx, validate

CAUSAL = FORMS["causal"][0]
FULL = FORMS["full"][0]
CROSS = FORMS["cross"][0]
OPSETS = range(18, 25)


def shapes(values: Any) -> dict[str, tuple[int | str, ...]]:
    return {
        value.name: tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in values
    }


def export(form: Any, **options: Any) -> onnx.ModelProto:
    spec, own, weights = made(form)
    return to_onnx(spec, weights, **{**own, **options})


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    session = opened(model)
    return list[Any](session.run(None, feeds))


@pytest.mark.parametrize("profile", PROFILES)
def test_inputs_and_outputs_have_names_and_symbols(profile: Any) -> None:
    model = export("cache, mask", profile=profile)
    assert shapes(model.graph.input) == {
        "x": ("batch", "query_length", 8),
        "mask": ("mask_batch", "mask_heads", "mask_queries", "mask_keys"),
        "past_key": ("batch", 2, "past_length", 4),
        "past_value": ("batch", 2, "past_length", 4),
    }
    assert list(shapes(model.graph.input)) == ["x", "mask", "past_key", "past_value"]
    assert list(shapes(model.graph.output)) == ["y", "present_key", "present_value"]
    assert shapes(model.graph.output)["present_value"] == ("batch", 2, "total_length", 4)
    cross = export("cross, window, mask", profile=profile)
    assert list(shapes(cross.graph.input)) == ["x", "memory", "mask"]
    assert shapes(cross.graph.input)["memory"] == ("batch", "memory_length", 8)
    assert shapes(cross.graph.output) == {"y": ("batch", "query_length", 8)}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_core_without_projections_takes_heads(profile: Any) -> None:
    model = export("core: cache, grouped, no bias", profile=profile)
    assert shapes(model.graph.input) == {
        "q": ("batch", 4, "query_length", 2), "k": ("batch", 2, "query_length", 2),
        "v": ("batch", 2, "query_length", 2), "past_key": ("batch", 2, "past_length", 2),
        "past_value": ("batch", 2, "past_length", 2),
    }  # fmt: skip
    assert shapes(model.graph.output)["out"] == ("batch", 4, "query_length", 2)
    assert list(shapes(model.graph.output)) == ["out", "present_key", "present_value"]
    assert shapes(export("core: cross", profile=profile).graph.input) == {
        "q": ("batch", 2, "query_length", 4), "k": ("batch", 2, "key_length", 4), "v": ("batch", 2, "key_length", 4),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"`weights` must have exactly the keys rel_k; extra q_proj\.weight"):
        to_onnx(CAUSAL, random_weights(CAUSAL), profile=profile, projections=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_form_is_a_valid_file_with_named_nodes(form: Any, profile: Any) -> None:
    model = export(form, profile=profile, chunk_size=None)
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == (8 if profile == "portable" else 10)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [
        ("", 18 if profile == "portable" else 23)
    ]
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
    square = FORMS[form][0].causal and not FORMS[form][0].cross and "blocks" not in form
    if profile == "trt":
        assert not any(causal)
        assert all(sum(map(bool, node.output)) == 1 for node in model.graph.node)
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
    code = (
        "import hashlib, export_forms as f; from relskew_core.export import to_onnx\n"
        "s, o = f.FORMS['cache, zero, values, mask']\n"
        "b = to_onnx(s, f.random_weights(s), **o).SerializeToString(deterministic=True)\n"
        "print(hashlib.sha256(b).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert other.stdout.strip() == hashlib.sha256(first).hexdigest()


def test_metadata_hold_the_spec_and_the_options() -> None:
    model = export("causal, short", dtype="float16")
    described = {entry.key: entry.value for entry in model.metadata_props}
    assert BlockSpec.from_dict(json.loads(described.pop("relskew.spec"))) == FORMS["causal, short"][0]
    assert re.search(r"SHA-256 [0-9a-f]{64}\.$", model.graph.doc_string)
    assert described == {
        "relskew.version": relskew_core.__version__, "relskew.profile": "ort", "relskew.dtype": "float16",
        "relskew.max_length": "9",
    }  # fmt: skip
    assert model.graph.name == "relative_attention_block"
    assert to_onnx(CAUSAL, random_weights(CAUSAL), name="layer_3").graph.name == "layer_3"


@pytest.mark.parametrize("profile", PROFILES)
def test_blocks_are_stacked_by_onnx(profile: Any) -> None:
    first, second = (to_onnx(CAUSAL, random_weights(CAUSAL, seed), profile=profile) for seed in (0, 1))
    stack = compose.merge_models(first, second, io_map=[("y", "x")], prefix1="0/", prefix2="1/")
    onnx.checker.check_model(stack, full_check=True)
    y: Any = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    (whole,) = run(stack, {"0/x": y})
    for model in (first, second):
        (y,) = run(model, {"x": y})
    np.testing.assert_allclose(whole, y, atol=1e-6)


def test_versions_as_old_as_the_opset_allows() -> None:
    versions = [export("causal", profile="portable", opset=opset).ir_version for opset in OPSETS]
    assert versions == [8, 9, 9, 10, 10, 10, 10]
    assert export("causal", profile="portable", operator=True).ir_version == 10


def stored(model: onnx.ModelProto, key: str) -> np.ndarray[Any, Any]:
    (array,) = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name == key]
    return array


def test_max_length_trims_the_stored_rows() -> None:
    weights = random_weights(CAUSAL)
    assert stored(to_onnx(CAUSAL, weights), "rel_k").shape == (2, 10, 4)
    trimmed = stored(to_onnx(CAUSAL, weights, max_length=4), "rel_k")
    assert trimmed.shape == (2, 5, 4)
    np.testing.assert_array_equal(trimmed[:, 1:], weights["rel_k"][:, -4:])
    assert stored(export("window", max_length=100), "rel_k").shape == (2, 6, 4)
    assert stored(export("clip", max_length=100), "rel_k").shape == (2, 4, 4)
    # Trimmed rows that a longer input would read raise an error, even if the table's end is soft.
    for beyond in ("clip", "zero"):
        soft = BlockSpec(8, 2, Span(8, 0, beyond), causal=True)
        model = to_onnx(soft, weights, max_length=4)
        np.testing.assert_array_equal(stored(model, "rel_k"), trimmed)
        report = validate(model, soft, weights, batches=(1,))
        assert report.ok, report.table()
        assert "batch 1, queries 5, keys 5, past 0" in {c.case for c in report.checks if c.name == "too long fails"}


@pytest.mark.parametrize(("spec", "options", "message"), [
    (CAUSAL, {"max_length": 10}, "`max_length` must be at most 9, as far as the span reaches into the past"),
    (BlockSpec(8, 2, Span(9, 3)), {"max_length": 5}, "`max_length` must be at most 4.* the future"),
    (CAUSAL, {"max_length": 0}, "`max_length` must be an int >= 1"),
    (CROSS, {"past": True}, "`past=True` excludes `spec.cross`"),
    (FULL, {"past": True}, "`past=True` requires `spec.causal` or `spec.blocks_before`"),
    (FORMS["stream"][0], {"past": True, "max_length": 2}, "requires a table that reaches 2 into the future"),
    (FORMS["stream"][0], {"past": True, "in_place": True, "opset": 24}, "`in_place=True` requires `spec.causal`"),
    (CROSS, {"segments": True}, "`segments=True` excludes `spec.cross`"),
    (CAUSAL, {"profile": "tensorrt"}, "`profile` must be one of 'ort', 'portable', 'trt'"),
    (CAUSAL, {"opset": 22}, "`opset` must be 23 … 28 for profile='ort', got 22"),
    (CAUSAL, {"opset": 17, "profile": "portable"}, "`opset` must be 18"),
    (CAUSAL, {"opset": 99}, "`opset` must be"),
    (CAUSAL, {"dtype": "int8"}, "`dtype` must be one of 'float16', 'bfloat16', 'float32', 'float64'"),
    (CAUSAL, {"dtype": object()}, "`dtype` must be one of"),
])  # fmt: skip
def test_wrong_values_are_refused(spec: BlockSpec, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_onnx(spec, random_weights(spec), **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"past": 1}, "`past` must be a bool"),
    ({"mask": None}, "`mask` must be a bool"),
    ({"segments": 1}, "`segments` must be a bool"),
    ({"max_length": 4.0}, "`max_length` must be an int"),
    ({"opset": "23"}, "`opset` must be an int"),
    ({"name": ""}, "`name` must be a str"),
    ({"name": 3}, "`name` must be a str"),
])  # fmt: skip
def test_wrong_types_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        to_onnx(CAUSAL, random_weights(CAUSAL), **options)
    with pytest.raises(TypeError, match="`spec` must be a BlockSpec"):
        to_onnx("causal", random_weights(CAUSAL))  # type: ignore[arg-type]


def changed(key: str, value: Any) -> dict[str, Any]:
    weights: dict[str, Any] = random_weights(CAUSAL)
    if value is None:
        del weights[key]
    else:
        weights[key] = value
    return weights


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
def test_wrong_weights_are_refused(
    key: str, value: Any, dtype: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        to_onnx(CAUSAL, changed(key, value), dtype=dtype)


def test_weights_are_left_alone() -> None:
    weights = random_weights(CAUSAL)
    before = {key: array.copy() for key, array in weights.items()}
    for array in weights.values():
        array.flags.writeable = False
    to_onnx(CAUSAL, weights, dtype="float16", max_length=3)
    assert list(weights) == list(before)
    for key, array in weights.items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_weights_and_dtypes_of_torch_are_taken(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    weights = random_weights(CAUSAL)
    expected = to_onnx(CAUSAL, weights, dtype=dtype)
    wanted = getattr(torch, dtype)
    parameters = {key: torch.nn.Parameter(torch.tensor(array)) for key, array in weights.items()}
    assert to_onnx(CAUSAL, parameters, dtype=wanted) == expected
    if dtype != "float64":
        assert to_onnx(CAUSAL, {key: value.to(wanted) for key, value in parameters.items()}) == expected


def test_weights_of_other_libraries_are_taken() -> None:
    weights = random_weights(CAUSAL)
    expected = to_onnx(CAUSAL, weights)
    strict = pytest.importorskip("array_api_strict")
    assert to_onnx(CAUSAL, {key: strict.asarray(array) for key, array in weights.items()}) == expected
    jnp = pytest.importorskip("jax.numpy")
    given = {key: jnp.asarray(array) for key, array in weights.items()}
    assert to_onnx(CAUSAL, given, dtype=jnp.float32) == expected
    half = {key: array.astype(jnp.bfloat16) for key, array in given.items()}
    assert to_onnx(CAUSAL, half) == to_onnx(CAUSAL, weights, dtype="bfloat16")


def test_a_tensor_too_large_for_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relskew_core.export._form.weights.TENSOR_LIMIT", 300)
    with pytest.raises(ValueError, match=r"`weights.'rel_k'.` must be at most 2 GiB"):
        to_onnx(CAUSAL, random_weights(CAUSAL))


@pytest.mark.parametrize("opset", [24, 28])
def test_a_newer_opset_is_written_on_request(opset: int) -> None:
    """onnx's evaluator runs them; runtimes follow later."""
    weights = random_weights(CAUSAL)
    model = to_onnx(CAUSAL, weights, opset=opset)
    assert model.opset_import[0].version == opset
    onnx.checker.check_model(model, full_check=True)
    assert validate(model, CAUSAL, weights, runtimes=["reference"], lengths=[4], batches=(2,)).ok


def test_to_onnx_needs_neither_torch_nor_onnxruntime() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'onnxruntime', 'openvino', 'jax', 'cupy'): sys.modules[name] = None\n"
        "import numpy as np, relskew_core as r\n"
        "from relskew_core.export import to_onnx, validate\n"
        "spec = r.BlockSpec(4, 2, r.Span.causal(4), causal=True)\n"
        "weights = {k: np.ones(s, np.float32) for k, s in spec.weight_shapes().items()}\n"
        "model = to_onnx(spec, weights)\n"
        "report = validate(model, spec, weights)\n"
        "assert not report.ok and 'onnxruntime is not installed' in report.failures[-1].detail, report.table()\n"
        "assert validate(model, spec, weights, runtimes=['reference']).ok"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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

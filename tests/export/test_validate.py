"""`validate` must notice errors, report them, and never raise."""

import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from export_forms import FORMS, IN_PLACE, change, exported, made, random_weights, valid
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import Check, Report, save, to_onnx, validate

CACHE, CACHE_OPTIONS = FORMS["cache"]
CAUSAL = FORMS["causal"][0]
FULL = FORMS["full"][0]


def wrong(report: Report) -> set[str]:
    return {check.name for check in report.failures}


@pytest.mark.parametrize("key", CACHE.weight_shapes())
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_notices_a_weight_off_by_one_percent(key: str, dtype: str) -> None:
    model, _, weights = exported(CACHE, dtype=dtype, **CACHE_OPTIONS)
    change(model, key, lambda array: array * np.asarray(1.01, array.dtype))
    found = wrong(validate(model, CACHE, weights, batches=(1,)))
    assert "weights" in found
    # The outputs must show the difference where they can: softmax cancels a change of the keys' bias.
    if dtype == "float32":
        assert "present_key" in found if key == "k_proj.bias" else found & {"y", "present_key", "present_value"}


def test_notices_lengths_that_run_silently() -> None:
    """Left to the runtime, the new rows' length would let an input past the table give wrong numbers."""
    model, _, weights = exported(CAUSAL)
    change(model, "rel_k", lambda table: np.concatenate([table[:, :1].repeat(20, 1), table], axis=1))
    change(model, "relskew/constant/int64/1/9", lambda start: start + 20)
    report = validate(model, CAUSAL, weights, batches=(1,))
    assert "y" not in wrong(report)
    assert "too long fails" in wrong(report)


def test_notices_a_forgotten_past() -> None:
    model, _, weights = exported(CACHE, profile="portable", **CACHE_OPTIONS)
    (concat,) = (node for node in model.graph.node if node.name == "relskew/compute/cache/present_key")
    concat.input[0] = "past_value"
    assert {"y", "present_key", "decoding"} <= wrong(validate(model, CACHE, weights, batches=(1,)))


def test_a_report_in_full() -> None:
    weights = random_weights(CAUSAL)
    steps: list[str] = []
    asked: dict[str, Any] = {"lengths": [2], "batches": [3], "runtimes": ["onnxruntime", "reference"], "atol": 1e-3}
    report = validate(to_onnx(CAUSAL, weights), CAUSAL, weights, progress=steps.append, **asked)
    onnx_version, version = map(importlib.metadata.version, ("onnx", "onnxruntime"))
    onnxs, ort = f"onnx {onnx_version}, , , True", f"onnxruntime {version}, CPUExecutionProvider"
    reference, case = f"onnx reference {onnx_version}, NumPy", "batch 3, queries 2, keys 2, past 0"
    largest = f"True, {report.checks[10].gate}, largest difference …"
    assert [
        re.sub(r"\d\.\d\de[-+]\d\d|\d+ nodes", "…", ", ".join(str(value) for value in shown if value is not None))
        for *shown, error, gate, detail in map(astuple, report.checks)
        for shown in [[*shown, gate, detail]]
    ] == [
        *(f"{name}, {onnxs}, " for name in ("file", "standard", "metadata", "spec", "interface", "unread")),
        f"weights, {onnxs}, 9 of 9 stored under their names and equal",
        f"placement, {ort}, , True, … on CPUExecutionProvider",
        f"y, {ort}, {case}, True, 2e-06, largest difference …",
        f"optimiser off, {ort}, {case}, True, 2e-06, largest difference …",
        f"y, {ort}, {case}, large logits, {largest}",
        f"optimiser off, {ort}, {case}, large logits, {largest}",
        f"too long fails, {ort}, batch 3, queries 10, keys 10, past 0, True, raised",
        f"y, {reference}, {case}, True, 2e-06, largest difference …",
        f"y, {reference}, {case}, large logits, {largest}",
        f"too long fails, {reference}, batch 3, queries 10, keys 10, past 0, True, raised",
    ]
    tried = [case, f"{case}, large logits", "batch 3, queries 10, keys 10, past 0"]
    assert steps == [f"{runtime}: {step}" for runtime in ("onnxruntime", "reference") for step in ("load", *tried)]


def test_the_longest_of_short_inputs_is_decoded() -> None:
    """The longest of up to 64, or the shortest of longer ones."""
    clipped = BlockSpec(8, 2, Span(9, 0, "clip"), causal=True)
    for spec, lengths, decoded in (
        (clipped, [1, 9, 7], 9),
        (clipped, [8, 64, 65], 64),
        (clipped, [70, 66], 66),
        (CACHE, [9], 9),  # the whole table, which does not fit with a past
    ):
        weights = random_weights(spec)
        model = to_onnx(spec, weights, past=True)
        steps: list[str] = []
        report = valid(model, spec, weights, lengths=lengths, batches=[1], progress=steps.append)
        assert steps[-1] == "onnxruntime: decoding in pieces"
        assert report.checks[-1].case == f"batch 2, queries {decoded}, keys {decoded}, past 0, in pieces"


def test_nothing_is_decoded_where_no_length_fits() -> None:
    report = valid(*exported(CACHE, **CACHE_OPTIONS), lengths=[10, 12])
    assert "decoding" not in {check.name for check in report.checks}


SHARED = BlockSpec(8, 2, Span.causal(9), causal=True, shared_table=True)


def test_an_empty_batch_is_tried() -> None:
    """Last, unless batches are asked for: by all that run a graph on CPUs."""
    (model, _, weights), steps = exported(SHARED, profile="portable", past=True), list[str]()
    asked: dict[str, Any] = {"lengths": [3], "runtimes": ["onnxruntime", "reference", "openvino"]}
    report = valid(model, SHARED, weights, **asked, progress=steps.append)
    (empty,) = {step.split(": ")[1] for step in steps if "batch 0" in step}
    assert empty == "batch 0, queries 3, keys 4, past 1"
    assert steps[-1] == f"openvino: {empty}"
    found = [check for check in report.checks if check.case == empty]
    assert [check.name for check in found if check.name != "optimiser off"] == [
        value.name for value in model.graph.output
    ] * 3
    assert all(check.error == 0 for check in found)
    assert "batch 0" not in validate(model, SHARED, weights, lengths=[3], batches=(1,)).to_json()


def test_an_empty_batch_that_a_graph_refuses() -> None:
    model, _, weights = exported(SHARED, profile="portable")
    model.graph.node[-1].output[0] = "elsewhere"
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, -1, 8]), "guessed"))
    model.graph.node.append(helper.make_node("Reshape", ["elsewhere", "guessed"], ["y"], "relskew/compute/guessed"))
    report = validate(model, SHARED, weights, lengths=[3], runtimes=["onnxruntime", "reference"])
    assert [check.case[:7] for check in report.failures] == ["batch 0"] * len(report.failures)
    assert {check.runtime.split()[0] for check in report.failures} == {"onnxruntime", "onnx"}


@pytest.mark.parametrize("form", ["causal", "window, mask", "cross, window, mask", "cache, mask", "blocks"])
def test_notices_a_mask_that_large_logits_overcome(form: Any) -> None:
    spec, options = FORMS[form]
    model, _, weights = exported(spec, profile="portable", **options)
    valid(model, spec, weights, batches=(1,))
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name in [name for name, x in stored.items() if np.any(x == np.float32(-1e30))]:
        change(model, name, lambda x: np.where(x == np.float32(-1e30), np.float32(-60), x))  # weaker
    failures = validate(model, spec, weights, batches=(1,)).failures
    assert failures
    assert all("large logits" in check.case for check in failures if check.name == "y")


def test_files_pass_with_their_weights_inside_or_outside(tmp_path: Path) -> None:
    spec = BlockSpec(32, 2, Span.causal(9), causal=True)
    model, _, weights = exported(spec)
    inside = save(model, tmp_path / "inside.onnx")
    outside = save(model, tmp_path / "outside.onnx", external_threshold=0)
    for path in (inside, str(outside)):
        valid(path, spec, weights, runtimes=["onnxruntime", "reference", "openvino"], batches=(1,))
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(inside.read_bytes()[:-1000])
    next(tmp_path.glob("outside.onnx.*.data")).unlink()
    for path in (broken, outside, tmp_path / "none.onnx", tmp_path):
        report = validate(path, spec, weights)
        assert wrong(report) == {"file"}, report.table()
    assert wrong(validate(None, CAUSAL, weights)) == {"file"}  # type: ignore[arg-type]
    assert wrong(validate(onnx.ModelProto(), CAUSAL, weights)) == {"file"}


SLOW = (
    "turns = Constant<value_int = 1099511627776>() on = Constant<value = bool {1}>()"
    " start = Constant<value_float = 0.0>() turned = Loop<body = g (int64 i, bool c, float v) =>"
    " (bool c2, float v2) {c2 = Identity(c) v2 = Sin(v)}>(turns, on, start) late = Add(x, turned)",
    "many = Constant<value_ints = [1073741824]>() huge = ConstantOfShape<value = float[1] {1.0}>(many)"
    " small = ReduceMin<keepdims = 0>(huge) late = Mul(x, small)",
)
"""A loop of 2**40 turns, and 4 GiB that are written in full."""


def test_a_file_has_limits_of_time_and_memory(tmp_path: Path) -> None:
    paths, (_, _, weights) = [], exported(CAUSAL)
    for number, text in enumerate(SLOW):
        model, _, _ = exported(CAUSAL)
        assert model.graph.node[0].input[0] == "x"
        model.graph.node[0].input[0] = "late"
        for node in reversed(onnx.parser.parse_graph(f"g () => () {{{text}}}").node):
            model.graph.node.insert(0, node)
        paths.append(save(model, tmp_path / f"{number}.onnx"))
    start, steps, path = time.perf_counter(), list[str](), paths[0]
    report = validate(path, CAUSAL, weights, time_limit=5, batches=(1,), lengths=[3], progress=steps.append)
    assert time.perf_counter() - start < 20
    assert report.failures[-1].name == "validation"
    assert "stopped after 5 s, `time_limit`, at: onnxruntime: " in report.failures[-1].detail
    assert {check.name for check in report.checks} >= {"file", "interface", "weights"}  # the checks up to this point
    assert steps
    report = validate(paths[1], CAUSAL, weights, memory_limit=2**30, batches=(1,), lengths=[3])
    assert not report.ok
    assert "alloc" in " ".join(check.detail for check in report.failures).lower()


def test_a_model_runs_elsewhere_on_request() -> None:
    """With a limit a model that was made here gets a process too; weights of any library and all options go along."""
    torch = pytest.importorskip("torch")
    weights = {key: torch.from_numpy(array) for key, array in random_weights(CAUSAL).items()}
    model, steps = to_onnx(CAUSAL, weights), (list[str](), list[str]())
    asked: dict[str, Any] = {"runtimes": ["reference", "onnxruntime"], "batches": [2], "atol": 1, "tolerance": 0.3}
    for more in ({}, {"lengths": [3], "seed": 7, **asked}):
        limits = zip((None, 60), steps, strict=True)
        here, there = (validate(model, CAUSAL, weights, time_limit=x, progress=y.append, **more) for x, y in limits)
        assert there == here
        assert there.ok
    assert steps[0] == steps[1] != []


@pytest.mark.parametrize(("key", "value", "why"), [
    ("spec", "{", "JSONDecodeError: "),
    ("spec", "[]", ""),
    ("spec", "{}", ""),
    ("profile", "web", "ValueError: must be one of ort, portable, trt)"),
    ("chunk_size", "many", "ValueError: invalid literal for int() with base 10: 'many')"),
])  # fmt: skip
def test_metadata_that_cannot_be_read_are_named(key: str, value: str, why: str) -> None:
    model, _, weights = exported(CAUSAL)
    helper.set_model_props(model, {f"relskew.{key}": value})
    (check,) = validate(model, CAUSAL, weights, batches=(1,), lengths=[2]).failures
    assert check.name == "metadata"
    assert check.detail.startswith(f"relskew.{key} is {value!r} ({why}")


def test_metadata_that_cannot_be_read_is_cut_in_the_report() -> None:
    model, _, weights = exported(CAUSAL)
    spec = json.dumps({"x" * 200: 1} | CAUSAL.to_dict())
    props = {"relskew.profile": "", "relskew.spec": spec, "relskew.max_length": "0", "relskew.chunk_size": "9" * 5000}
    helper.set_model_props(model, props)
    (check,) = validate(model, CAUSAL, weights, batches=(1,), lengths=[2]).failures
    too_long, refused, too_large = check.detail.split("; relskew.")
    assert too_long.startswith(f"relskew.spec is {spec[:60]!r} (TypeError: ")
    assert len(too_long.partition("Error: ")[2]) == 101  # the message is cut, and a bracket follows
    assert refused == "max_length is '0' (ValueError: must be at least 1)"
    assert too_large.startswith(f"chunk_size is {'9' * 60!r} (ValueError: Exceeds the limit")


def test_wrong_specs_and_weights() -> None:
    model, _, weights = exported(CAUSAL)
    assert wrong(validate(model, FULL, random_weights(FULL))) >= {"spec", "y"}
    wider = BlockSpec(12, 2, Span.causal(9), causal=True)
    assert wrong(validate(model, wider, random_weights(wider))) == {"spec", "interface"}
    assert wrong(validate(model, FORMS["cross"][0], weights)) == {"spec", "interface"}
    assert wrong(validate(model, "causal", weights)) == {"validation"}  # type: ignore[arg-type]
    assert wrong(validate(model, CAUSAL, {})) == {"validation"}
    assert wrong(validate(model, CAUSAL, random_weights(CAUSAL, seed=1))) >= {"weights", "y"}
    del model.metadata_props[:]
    assert "spec" not in wrong(validate(model, FULL, random_weights(FULL)))
    assert "y" in wrong(validate(model, FULL, random_weights(FULL)))
    assert validate(model, CAUSAL, weights).ok


def test_runtimes_and_providers_that_are_not_there() -> None:
    model, _, weights = exported(CAUSAL)
    report = validate(model, CAUSAL, weights, runtimes=["tensorrt"])  # type: ignore[list-item]
    told = "`runtimes` must be among 'onnxruntime', 'reference', 'openvino', got 'tensorrt'"
    assert report.failures == (Check("loads", "tensorrt", "", "", False, detail=told),)
    report = validate(model, CAUSAL, weights, providers=["NoSuchExecutionProvider"])
    assert wrong(report) == {"loads"}
    assert "NoSuchExecutionProvider is not available here, only " in report.failures[0].detail
    names = [("tensorrt", {}), "cuda", (), (3, {}), 3]
    report = validate(model, CAUSAL, weights, providers=names, lengths=[2])  # type: ignore[arg-type]
    known = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "()", "3", "3"]
    assert [(check.name, check.provider, check.case) for check in report.failures] == [("loads", x, "") for x in known]
    for name in ("providers", "runtimes"):
        (check,) = validate(model, CAUSAL, weights, **{name: ()}).failures  # type: ignore[arg-type]
        told = f"ValueError: `{name}` must name at least one, got (): nothing would be run"
        assert check == Check("validation", "", "", "", False, detail=told)


def test_a_provider_that_did_not_run_the_nodes() -> None:
    """The Azure provider is listed wherever onnxruntime is built with it, yet every node runs on the CPU."""
    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime is built without AzureExecutionProvider")
    (check,) = validate(*exported(CAUSAL), providers=["AzureExecutionProvider"], batches=(1,)).failures
    assert check.name == "placement"
    assert "relskew/compute/attention on CPUExecutionProvider" in check.detail
    assert "no node on AzureExecutionProvider" in check.detail


def test_a_report_as_text_and_as_json() -> None:
    """The table has a line for each check and runtime, with the worst error next to the narrowest tolerance."""
    checks = [
        Check("y", "a", "b", "1", True, 1e-7, 2e-6),
        Check("z", "a", "b", "1", True, 3e-7, 2e-6),
        Check("y", "a", "b", "2", False, 4e-2, 3e-3),
        Check("y", "a", "c", "2", False, 4e-2),
        Check("y", "a", "b", "3", False, 2e-2, 1e-3, "far"),
        Check("z", "d", "b", "1", False, float("nan"), 2e-6, "largest difference nan"),
        Check("loads", "e", "", "", False, detail="not here"),
    ]
    report = Report(tuple(checks), 7)
    assert report.failures == report.checks[2:]
    assert report.table().splitlines() == [
        "check  runtime  provider  cases  worst error  gate   result",
        "y      a        b             3      4.0e-02  2e-06  2 wrong",
        "z      a        b             1      3.0e-07  2e-06  ok",
        "y      a        c             1      4.0e-02         1 wrong",
        "z      d        b             1          nan  2e-06  1 wrong",
        "loads  e                      1                      1 wrong",
        "FAILED y (a, b, 2): error 4.00e-02, gate 3e-03",
        "FAILED y (a, c, 2): error 4.00e-02, gate 0e+00",
        "FAILED y (a, b, 3): error 2.00e-02, gate 1e-03: far",
        "FAILED z (d, b, 1): error nan, gate 2e-06: largest difference nan",
        "FAILED loads (e): not here",
        "drawn from seed 7",
    ]
    assert "seed" not in Report(tuple(checks)).table()
    assert "seed" not in Report((checks[0],), 7).table()  # it is of no use if all checks pass
    assert [Report(some, 7).ok for some in ((checks[0],), (), report.checks)] == [True, False, False]
    written = json.loads(report.to_json())
    assert list(written) == ["ok", "seed", "checks", "failures"]
    assert (written["ok"], written["seed"], written["failures"]) == (False, 7, written["checks"][2:])
    assert [check["error"] for check in written["checks"]] == [1e-7, 3e-7, 4e-2, 4e-2, 2e-2, None, None]
    assert written["checks"][0] == asdict(checks[0])
    assert report.to_json().startswith('{\n  "ok": false,')


# Every form with one change: the core, biases, caches in place, chunks, functions

MUTATED: dict[str, dict[str, Any]] = {
    "cache": {}, "cache, mask": {"dtype": "float16"}, "core: causal": {}, "core: cross": {}, "bias, full, grouped": {},
    "bias alone, cache": {}, "in place: cache": {}, "in place: cache, zero, values, mask": {},
    "causal, values": {"chunk_size": 3}, "causal": {"operator": True},
    "full, grouped": {"profile": "portable", "operator": True}, "causal, window": {"chunk_size": 5},
}  # fmt: skip
SCOPES = {"causal, values": "long/", "causal, window": "short/"}
"""Which branch of a graph with chunks is changed."""


def graphs(model: onnx.ModelProto) -> Iterator[Any]:
    """The graph and the functions of a model, and all that is nested in them."""
    found: list[Any] = [model.graph, *model.functions]
    for graph in found:
        yield graph
        found.extend(x.g for node in graph.node for x in node.attribute if x.HasField("g"))


def recomputed(model: onnx.ModelProto, name: str, text: str) -> None:
    """Let nodes in onnx's syntax make a tensor ``new`` of what it was, which they call ``old``."""
    (graph,) = (graph for graph in graphs(model) if any(name in node.output for node in graph.node))
    (place,) = (place for place, node in enumerate(graph.node) if name in node.output)
    graph.node[place].output[:] = ["old" if output == name else output for output in graph.node[place].output]
    for node in reversed(onnx.parser.parse_graph(f"g () => () {{{text}}}").node):
        node.output[:] = [name if output == "new" else output for output in node.output]
        graph.node.insert(place + 1, node)


@cache
def right(form: str) -> bytes:
    """Return the graph of a form, which must pass."""
    spec, own, weights = made(form)
    model = to_onnx(spec, weights, **own, **({} if form in IN_PLACE else {"chunk_size": None}) | MUTATED.get(form, {}))
    assert not noticed(form, model)
    return model.SerializeToString()


def noticed(form: str, model: onnx.ModelProto) -> set[str]:
    spec, _, weights = made(form)
    return {check.name for check in validate(model, spec, weights, batches=(2,), lengths=[2, 6]).failures}


@pytest.mark.parametrize("form", MUTATED)
@pytest.mark.parametrize("how", ["one percent", "flipped", "shifted"])
def test_a_changed_table_is_noticed(form: str, how: str) -> None:
    for key in [key for key in made(form)[2] if key.startswith("rel_")]:

        def changed(table: Any, key: str = key) -> Any:
            # Positions are on the longest axis, unless a table has fewer rows than columns.
            axis = -1 if key == "rel_bias" or table.shape[-1] > table.shape[-2] else -2
            return {"one percent": table * 1.01, "flipped": np.flip(table, axis), "shifted": np.roll(table, 1, axis)}[
                how
            ]

        model = onnx.ModelProto.FromString(right(form))
        change(model, key, changed)
        found = noticed(form, model)
        assert "weights" in found
        assert found & {"y", "out"}, key


@pytest.mark.parametrize("form", MUTATED)
def test_a_skew_off_by_one_is_noticed(form: str) -> None:
    """Drop one entry too few in front and one more behind, so that every shape stays right."""
    model, start = onnx.ModelProto.FromString(right(form)), f"relskew/compute/{SCOPES.get(form, '')}skew/rows"
    (shifted,) = (node for graph in graphs(model) for node in graph.node if node.name.startswith(start))
    recomputed(model, shifted.output[0], """
        flat = Constant<value_ints = [0, 0, -1]>() first = Constant<value_ints = [0]>()
        second = Constant<value_ints = [1]>() end = Constant<value_ints = [4611686018427387904]>()
        axis = Constant<value_ints = [2]>() shape = Shape(old) entries = Reshape(old, flat)
        rest = Slice(entries, second, end, axis) one = Slice(entries, first, second, axis)
        all = Concat<axis = 2>(rest, one) new = Reshape(all, shape)
    """)  # fmt: skip
    assert noticed(form, model) & {"y", "out"}


def attribute(name: str, kind: str, value: float) -> Callable[..., None]:
    """Return a change of a node's attribute."""
    return lambda model, node: setattr(next(one for one in node.attribute if one.name == name), kind, value)


def no_buffer(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.float32), "nothing"))
    node.input[0] = "nothing"


def always(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.op_type, node.input[1] = "Equal", node.input[0]


def operator(op_type: str) -> Callable[..., None]:
    return lambda model, node: setattr(node, "op_type", op_type)


SEGMENTS = ["segments", "segments, cache", "segments, stream", "in place: segments, cache"]
CHANGES: dict[str, tuple[list[str], str, int, Callable[[onnx.ModelProto, onnx.NodeProto], None]]] = {
    "a lost causal attribute": (["core: causal", "bias alone, cache", "causal", "causal, window"], "Attention", 1,
                                attribute("is_causal", "i", 0)),
    "a visible future": (["in place: cache", "in place: cache, zero, values, mask"], "relative/buffer", 1, no_buffer),
    "a lost causal condition": (["causal, values"], "long/visible/causal", 1, always),
    "a wrong scale of the core": (["core: causal", "core: cross"], "q/scaled", 1,
                                  lambda model, node: change(model, node.input[1], lambda scale: scale * 1.1)),
    "lost segments": (SEGMENTS, "visible/segment", 1, operator("GreaterOrEqual")),
    "a block too few": (["stream"], "visible/exists", 1, operator("Greater")),
    "a wrong scale": (["bias, full, grouped", "causal"], "Attention", 1, attribute("scale", "f", 1.1)),
    # of the whole cache and of its filled part
    "a wrong scale of a branch": (["in place: cache"], "Attention", 2, attribute("scale", "f", 1.1)),
}  # fmt: skip
"""Forms, the name or operator of nodes, how many there are, and how each in turn is changed."""


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, (forms, *_) in CHANGES.items() for form in forms])
def test_a_changed_node_is_noticed(kind: str, form: str) -> None:
    _, name, count, how = CHANGES[kind]
    for place in range(count):
        model = onnx.ModelProto.FromString(right(form))
        every = [node for graph in graphs(model) for node in graph.node]
        found = [node for node in every if name in (node.op_type, node.name.removeprefix("relskew/compute/"))]
        assert len(found) == count
        how(model, found[place])
        assert noticed(form, model) & {"y", "out"}


@pytest.mark.parametrize("form", ["sinks", "sinks, stream", "in place: sinks, cache, mask"])
def test_sinks_of_other_heads_are_noticed(form: str) -> None:
    model = onnx.ModelProto.FromString(right(form))
    change(model, "sinks", lambda sinks: np.roll(sinks, 1, axis=0))
    assert {"weights", "y"} <= noticed(form, model)


def test_a_past_that_is_the_same_for_all_rows_is_noticed() -> None:
    model = onnx.ModelProto.FromString(right("in place: cache"))
    (scatter,) = (node for node in model.graph.node if node.output[0] == "present_key")
    for node in onnx.parser.parse_graph("g () => () {longest = ReduceMax(past_lengths) rows = Shape(past_lengths) "
                                        "same = Expand(longest, rows)}").node[::-1]:  # fmt: skip
        model.graph.node.insert(0, node)
    scatter.input[2] = "same"
    assert noticed("in place: cache", model) >= {"y", "present_key"}


@pytest.mark.parametrize("profile", ["ort", "portable"])
def test_a_wrong_band_past_a_clip_is_noticed(profile: Any) -> None:
    """Some positions far past the table do not have the logits of its edge: only an input that is long has them."""
    spec = BlockSpec(8, 2, Span.clipped(3))
    weights = init_weights(spec, seed=0)
    model = to_onnx(spec, weights, profile=profile, chunk_size=None)
    assert validate(model, spec, weights, batches=(2,)).ok
    recomputed(model, "relskew/compute/relative/extended", """
        zero = Constant<value_int = 0>() one = Constant<value_int = 1>() two = Constant<value_int = 2>()
        last = Constant<value_int = -1>() far = Constant<value_int = -120>() near = Constant<value_int = -110>()
        shape = Shape(old) columns = Gather(shape, last) queries = Div(columns, two)
        places = Range(zero, columns, one) r = Sub(places, queries) after = GreaterOrEqual(r, far)
        before = LessOrEqual(r, near) within = And(after, before) added = CastLike(within, old) new = Add(old, added)
    """)  # fmt: skip
    assert "y" in {check.name for check in validate(model, spec, weights, batches=(2,)).failures}

"""What `validate` says of a model before it runs it, each thing wrong in turn."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from export_forms import FORMS, PROFILES, change, exported, random_weights
from relskew_core import BlockSpec, Span
from relskew_core.export import Check, save, to_onnx
from relskew_core.export._check.inspect import Subject, inspect_model

ONNX = f"onnx {onnx.__version__}"
CAUSAL = FORMS["causal"][0]
GROUPED = BlockSpec(8, 4, Span.causal(9), causal=True, num_kv_heads=2)
CROSS = BlockSpec(8, 2, Span(8, 6), cross=True)
IN_PLACE = {"past": True, "in_place": True, "mask": True, "segments": True, "projections": False}


def made_of(spec: BlockSpec, **options: Any) -> onnx.ModelProto:
    return exported(spec, **options)[0]


def stored(made: onnx.ModelProto, name: str) -> Any:
    return next(numpy_helper.to_array(tensor) for tensor in made.graph.initializer if tensor.name == name)


def inspected(made: Any, spec: BlockSpec) -> tuple[list[Check], Subject | None]:
    checks, core = list[Check](), isinstance(made, onnx.ModelProto) and made.graph.input[0].name == "q"
    return checks, inspect_model(made, spec, random_weights(spec, projections=not core), checks.append)


def failures(made: Any, spec: BlockSpec) -> dict[str, str]:
    return {check.name: check.detail for check in inspected(made, spec)[0] if not check.ok}


def test_a_file_passes_with_its_weights_inside_or_outside(tmp_path: Path) -> None:
    for threshold in (0, 2**30):
        made = made_of(CAUSAL)
        made.graph.initializer.append(numpy_helper.from_array(np.zeros(300, np.float32), "ballast"))
        path = save(made, tmp_path / f"{threshold}.onnx", external_threshold=threshold)
        for given in (path, os.fspath(path)):
            checks, subject = inspected(given, CAUSAL)
            (wrong,) = (check for check in checks if not check.ok)
            assert (wrong.name, wrong.detail) == ("unread", "nothing reads ballast")
            assert subject is not None
            assert subject.source.path == subject.source.content() == os.fspath(path)
            assert len(subject.source.model.graph.initializer[-1].raw_data) == 1200
    outside = onnx.load(tmp_path / "0.onnx", load_external_data=False)
    entry = next(entry for entry in outside.graph.initializer[-1].external_data if entry.key == "location")
    entry.value += "\0.txt"  # onnx reads the file whose name ends there
    (tmp_path / "0.onnx").write_bytes(outside.SerializeToString())
    assert "the location of ballast's data has a NUL character" in failures(tmp_path / "0.onnx", CAUSAL)["file"]
    path.write_bytes(b"no model")
    assert failures(path, CAUSAL).keys() == {"file"}
    broken = made_of(CAUSAL)
    broken.graph.node[0].input[0] = "nobody"
    path.write_bytes(broken.SerializeToString())
    assert all("nobody" in failures(given, CAUSAL)["file"] for given in (path, broken))


def test_the_error_of_the_checker_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> None:
        raise LookupError("not\n  a model " + "x" * 1000)

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    checks, subject = inspected(made_of(CAUSAL), CAUSAL)
    assert checks == [Check("file", ONNX, "", "", False, detail="LookupError: not a model " + "x" * 388)]
    assert subject is None


Change = Callable[[onnx.ModelProto], object]


def of_another_domain(made: onnx.ModelProto, *domains: str, node: bool = False) -> None:
    made.opset_import.extend(helper.make_opsetid(domain, 1) for domain in domains)
    made.graph.node.extend([helper.make_node("Gelu", ["x"], ["gelu"], domain=domains[0])] if node else [])


def with_a_function(made: onnx.ModelProto) -> None:
    quick, imports = helper.make_node("Quick", ["x"], ["y"], domain="com.b"), [helper.make_opsetid("com.b", 1)]
    made.functions.append(helper.make_function("com.a", "Twice", ["x"], ["y"], [quick], imports))


FOREIGN: dict[str, Change] = {
    "domain com.a": lambda made: of_another_domain(made, "com.a", "ai.onnx"),
    "domain com.a; Gelu of domain com.a": lambda made: of_another_domain(made, "com.a", node=True),
    "domain relskew; Gelu of domain relskew": lambda made: of_another_domain(made, "relskew", node=True),
    "local function Twice; Quick of domain com.b": with_a_function,
}


@pytest.mark.parametrize("told", FOREIGN)
def test_operators_of_other_domains_are_named(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx.checker, "check_model", lambda model: None)  # which knows no foreign operators
    made = made_of(CAUSAL)
    FOREIGN[told](made)
    assert failures(made, CAUSAL) == {"standard": told}


def test_a_tolerance_takes_operators_and_weights_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """For quantised models: foreign operators are reported, and weights may differ by a share of the largest."""
    monkeypatch.setattr(onnx.checker, "check_model", lambda model: None)
    made = made_of(CAUSAL)
    of_another_domain(made, "com.a", node=True)
    weights, table = random_weights(CAUSAL), stored(made, "rel_k").copy()
    largest = float(np.max(np.abs(table)))
    table[0, 3, 2] += 0.01 * largest
    change(made, "rel_k", lambda _: table)
    for tolerance, ok in ((0.011, True), (0.009, False)):
        checks: list[Check] = []
        inspect_model(made, CAUSAL, weights, checks.append, tolerance)
        told = {check.name: (check.ok, check.detail) for check in checks}
        assert told["standard"] == (True, "domain com.a; Gelu of domain com.a")
        within = f"9 of 9 stored under their names within {tolerance}"
        assert told["weights"] == (ok, within if ok else f"rel_k differs by up to {0.01 * largest:.3g}")
    change(made, "rel_k", lambda _: np.full_like(table, np.nan))
    inspect_model(made, CAUSAL, weights, checks.append, 1e9)
    assert checks[-1].detail == "rel_k differs by up to nan"


@pytest.mark.parametrize("form", ["full, mask", "cache, window, mask", "cross, clip, values", "blocks, cache"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_are_recognised_without_metadata(form: str, dtype: str) -> None:
    """Whatever the profile: what its arguments were shows in the inputs."""
    spec, options = FORMS[form]
    for profile in PROFILES:
        made = made_of(spec, dtype=dtype, profile=profile, **options)
        del made.metadata_props[:]
        checks, subject = inspected(made, spec)
        assert all(check.ok for check in checks)
        assert subject is not None
        assert subject.plan.profile.name == "portable"  # the profile with the fewest requirements
        assert (subject.plan.mask, subject.plan.past) == (options.get("mask", False), options.get("past", False))


def test_the_arguments_of_the_export_are_read_back() -> None:
    spec = FORMS["causal, short"][0]
    for profile in PROFILES:
        for chunk_size in (None, 1, 3):
            options = {"profile": profile, "max_length": 9, "chunk_size": chunk_size}
            checks, subject = inspected(made_of(spec, **options), spec)
            assert all(check.ok for check in checks)
            assert subject is not None
            plan = subject.plan
            assert (plan.profile.name, plan.max_length, plan.chunk_size) == (profile, 9, chunk_size)
    made = made_of(GROUPED, **IN_PLACE)
    for known in (True, False):
        checks, subject = inspected(made, GROUPED)
        assert all(check.ok for check in checks)
        assert subject is not None
        plan = subject.plan
        assert (plan.past, plan.in_place, plan.mask, plan.segments, plan.projections) == (*[True] * 4, False)
        assert plan.profile.name == "ort", known
        del made.metadata_props[:]


def test_a_model_without_a_sequence_is_refused() -> None:
    for name, kind in (("z", onnx.TensorProto.FLOAT), ("x", onnx.TensorProto.INT64)):
        made = made_of(CAUSAL)
        made.graph.input[0].name, made.graph.input[0].type.tensor_type.elem_type = name, kind
        for node in made.graph.node:
            node.input[:] = [name if given == "x" else given for given in node.input]
        with pytest.raises(ValueError, match=f"must have an input x or q of a floating type, got the inputs {name}$"):
            inspected(made, CAUSAL)


SHAPES = {  # each kind of input and output
    "x": (CROSS, {"mask": True}, "('batch', 'query_length', 8)"),
    "memory": (CROSS, {"mask": True}, "('batch', 'memory_length', 8)"),
    "mask": (CROSS, {"mask": True}, "('mask_batch', 'mask_heads', 'mask_queries', 'mask_keys')"),
    "q": (GROUPED, IN_PLACE, "('batch', 4, 'query_length', 2)"),
    "k": (GROUPED, IN_PLACE, "('batch', 2, 'query_length', 2)"),
    "segments": (GROUPED, IN_PLACE, "('batch', 'cache_length')"),
    "past_key": (GROUPED, IN_PLACE, "('batch', 2, 'cache_length', 2)"),
    "past_lengths": (GROUPED, IN_PLACE, "('batch',)"),
    "out": (GROUPED, IN_PLACE, "('batch', 4, 'query_length', 2)"),
    "present_key": (GROUPED, IN_PLACE, "('batch', 2, 'cache_length', 2)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_inputs_and_outputs(name: str) -> None:
    """One dimension too few, a size that is no size; symbols may have any name, or be sizes."""
    spec, options, told = SHAPES[name]
    made = made_of(spec, **options)
    assert not failures(made, spec)
    (value,) = [value for value in (*made.graph.input, *made.graph.output) if value.name == name]
    dims, numbers = value.type.tensor_type.shape.dim, itertools.count(70)
    assert all(dim.dim_param or dim.dim_value for dim in dims)
    for dim in dims:
        if dim.dim_param:
            dim.dim_param = "anything"
    assert not failures(made, spec)
    for dim in dims:
        if dim.dim_param:
            dim.dim_value = next(numbers)
    assert not failures(made, spec)
    sizes = [dim for dim, wanted in zip(dims, told.split(","), strict=False) if "'" not in wanted]
    for dim in sizes:
        size, dim.dim_value = dim.dim_value, 99
        assert f", expected {told}" in failures(made, spec)["interface"]
        dim.dim_param = "any"
        assert "any" in failures(made, spec)["interface"]
        dim.dim_value = size
    del dims[:]
    for size in (77, 78, 79):
        dims.add(dim_value=size)
    assert failures(made, spec) == {"interface": f"{name} of shape (77, 78, 79), expected {told}"}


def test_more_inputs_and_outputs_are_named() -> None:
    made = made_of(CROSS, mask=True)
    made.graph.input.add(name="more").CopyFrom(made.graph.input[1])
    made.graph.input[-1].name = "more"
    made.graph.output.add(name="twice").CopyFrom(made.graph.output[0])
    made.graph.output[-1].name = "memory2"
    made.graph.node.append(helper.make_node("Identity", ["memory"], ["memory2"]))
    told = "inputs x, memory, mask, more, expected x, memory, mask; outputs y, memory2, expected y"
    checks, subject = inspected(made, CROSS)
    assert [(check.name, check.detail) for check in checks if not check.ok] == [("interface", told)]
    assert subject is None  # there were no valid inputs
    made = made_of(CROSS)
    made.graph.input.reverse()  # the order is part of the promise
    assert failures(made, CROSS) == {"interface": "inputs memory, x, expected x, memory"}


def test_stored_weights_that_differ_are_named() -> None:
    made = made_of(CAUSAL)
    changes: dict[str, Callable[[Any], Any]] = {
        "rel_k": lambda array: array + np.float32(0.25) * (np.arange(array.shape[-1]) == 3),
        "k_proj.bias": lambda array: array[:-1],
        "v_proj.bias": lambda array: array.astype(np.float64),
        "q_proj.weight": lambda array: -array,
    }
    for key, how in changes.items():
        change(made, key, how)
    largest = 2 * float(np.max(np.abs(stored(made, "q_proj.weight"))))
    # another name, as tools give to names that they do not know: it is not compared
    next(tensor for tensor in made.graph.initializer if tensor.name == "out_proj.bias").name = "renamed"
    for node in made.graph.node:
        node.input[:] = ["renamed" if given == "out_proj.bias" else given for given in node.input]
    assert failures(made, CAUSAL)["weights"].split("; ") == [
        f"q_proj.weight differs by up to {largest:.3g}",
        "k_proj.bias is float32 (7,), expected float32 (8,)",
        "v_proj.bias is float64 (8,), expected float32 (8,)",
        "rel_k differs by up to 0.25",
    ]


def test_zeros_of_either_sign_differ() -> None:
    """The bytes are compared: a sum that starts from the other zero differs in its sign too."""
    weights = {key: np.zeros_like(array) for key, array in random_weights(CAUSAL).items()}
    made = to_onnx(CAUSAL, {key: -array for key, array in weights.items()})
    checks: list[Check] = []
    inspect_model(made, CAUSAL, weights, checks.append)
    assert "out_proj.bias differs by up to 0" in checks[-1].detail

"""Caches in place of growing ones: the same numbers, one buffer, loud where it is full, read whole if mostly filled."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from export_forms import random_weights
from onnx_sessions import opened
from relskew_core import BlockSpec, Span, attention_block
from relskew_core.export import caches_in_place, to_onnx

SPEC = BlockSpec(32, 4, Span.causal(20), causal=True, num_kv_heads=2)
NAMES: dict[str, Any] = {"past": "past_", "present": "present_"}
ROOM = 12
PLAIN = BlockSpec(32, 4, Span.causal(20), causal=True)


def growing(**options: Any) -> onnx.ModelProto:
    """Return a block whose cache is joined by Concat, as those are that torch exports."""
    return to_onnx(SPEC, random_weights(SPEC), past=True, profile="trt", **{"opset": 24, **options})


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return list[Any](opened(model).run(None, feeds))


def empty(length: int, batch: int = 1) -> dict[str, Any]:
    return {f"past_{name}": np.zeros((batch, 2, length, 8), np.float32) for name in ("key", "value")}


@pytest.mark.parametrize("batch", [1, 3])
def test_caches_in_place_give_the_numbers_of_growing_ones(batch: int) -> None:
    model = growing()
    before = model.SerializeToString()
    changed = caches_in_place(model, **NAMES)
    assert model.SerializeToString() == before
    onnx.checker.check_model(changed, full_check=True)
    kinds = [node.op_type for node in changed.graph.node]
    assert kinds.count("TensorScatter") == 2
    x = np.random.default_rng(0).standard_normal((batch, ROOM, 32)).astype(np.float32)
    grows, fixed, start = empty(0, batch), empty(ROOM, batch), 0
    for size in (4, 1, 3, 4):
        piece = {"x": x[:, start : start + size]}
        wanted = run(model, {**piece, **grows})
        found = run(changed, {**piece, **fixed, "past_length": np.array([start])})
        start += size
        np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
        for cache, grown in zip(found[1:], wanted[1:], strict=True):
            assert cache.shape == (batch, 2, ROOM, 8)
            np.testing.assert_array_equal(cache[:, :, :start], grown)
        grows, fixed = (dict(zip(grows, caches[1:], strict=True)) for caches in (wanted, found))
    with pytest.raises(Exception, match="TensorScatter"):
        run(changed, {"x": x[:, :1], **fixed, "past_length": np.array([ROOM])})
    with pytest.raises(Exception, match="TensorScatter"):
        run(changed, {"x": x[:, :2], **fixed, "past_length": np.array([ROOM - 1])})


def test_onnxruntime_writes_into_the_given_cache() -> None:
    """onnxruntime writes into the given cache, and reads nothing after its filled part."""
    session = opened(caches_in_place(growing(), **NAMES))
    x = np.random.default_rng(1).standard_normal((1, 5, 32)).astype(np.float32)
    filling = {name: np.full_like(array, 1e3) for name, array in empty(ROOM).items()}
    buffers = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in filling.items()}
    steps = []
    for position in range(5):
        binding = session.io_binding()
        binding.bind_cpu_input("x", np.ascontiguousarray(x[:, position : position + 1]))
        binding.bind_cpu_input("past_length", np.array([position]))
        for name, buffer in buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past", "present"), buffer)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        steps.append(binding.get_outputs()[2].numpy())
    wanted = run(growing(), {"x": x, **empty(0)})
    np.testing.assert_allclose(np.concatenate(steps, axis=1), wanted[0], atol=1e-5)
    np.testing.assert_array_equal(buffers["past_key"].numpy()[:, :, :5], wanted[1])
    assert (buffers["past_key"].numpy()[:, :, 5:] == 1e3).all()


def test_caches_have_one_length_and_the_metadata_says_in_place() -> None:
    model = growing()
    helper.set_model_props(model, {"relskew.decoder": "growing"})
    changed = caches_in_place(model, **NAMES)
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*changed.graph.input, *changed.graph.output)
    }
    assert list(shapes) == ["x", "past_key", "past_value", "past_length", "y", "present_key", "present_value"]
    assert shapes["past_key"] == shapes["present_value"] == ["batch", 2, "cache_length", 8]
    assert shapes["past_length"] == [1]
    assert changed.metadata_props[0].value == "in_place"


def test_outputs_that_are_no_caches_stay() -> None:
    model = growing()
    for name in ("present_more", "key"):  # names without "past", and the name of the past without "present"
        model.graph.node.append(helper.make_node("Identity", ["y"], [name], name=name))
        model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("batch", None, 32)))
    changed = caches_in_place(model, **NAMES)
    y, *_, more, key = run(changed, {"x": np.ones((1, 2, 32), np.float32), **empty(4), "past_length": np.array([0])})
    assert (y == more).all()
    assert (y == key).all()


def node_of(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    """Return the node that makes a tensor."""
    (node,) = (node for node in model.graph.node if output in node.output)
    return node


def test_a_softcap_and_other_names_of_the_standard_are_read() -> None:
    """A softcap; an axis counted from the end; the standard's operators under their other name."""
    model = growing()
    (attention,) = (node for node in model.graph.node if node.op_type == "Attention")
    attention.attribute.append(helper.make_attribute("softcap", 0.1))
    for name in ("present_key", "present_value"):
        (axis,) = node_of(model, name).attribute
        axis.i = -2
    model.opset_import[0].domain = "ai.onnx"
    changed = caches_in_place(model, **NAMES)
    x = np.random.default_rng(2).standard_normal((1, 6, 32)).astype(np.float32)
    (plain, *_), (wanted, *_) = (run(each, {"x": x, **empty(0)}) for each in (growing(), model))
    assert np.abs(plain - wanted).max() > 0.1
    found = run(changed, {"x": x, **empty(ROOM), "past_length": np.array([0])})[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(("name", "bounds", "wanted"), [
    ("past_key", {"start": 2, "end": 3}, [3]),
    ("present_key", {"start": 2, "end": 3}, [5]),
    ("present_value", {"start": -2, "end": -1}, [5]),
    ("past_value", {"end": 2}, [1, 2]),
    ("present_value", {"start": -1}, [8]),
    ("past_key", {"end": 0}, []),
], ids=str)  # fmt: skip
def test_the_shape_of_a_cache_is_that_of_its_filled_part(name: str, bounds: dict[str, Any], wanted: list[int]) -> None:
    model = growing()
    model.graph.node.append(helper.make_node("Shape", [name], ["asked"], name="asked", **bounds))
    model.graph.output.append(helper.make_tensor_value_info("asked", onnx.TensorProto.INT64, [len(wanted)]))
    x = np.zeros((1, 2, 32), np.float32)
    assert run(model, {"x": x, **empty(3)})[-1].tolist() == wanted
    changed = caches_in_place(model, **NAMES)
    assert run(changed, {"x": x, **empty(ROOM), "past_length": np.array([3])})[-1].tolist() == wanted


def reads_the_past() -> onnx.ModelProto:
    model = growing()
    model.graph.node.append(helper.make_node("Relu", ["past_key"], ["more"], name="more"))
    return model


def asks_for_much_of_a_shape(**bounds: Any) -> onnx.ModelProto:
    model = growing()
    model.graph.node.append(helper.make_node("Shape", ["past_key"], ["more"], name="more", **bounds))
    return model


def gives_what_it_takes() -> onnx.ModelProto:
    model = growing()
    taken = [helper.make_tensor_value_info(f"{time}_more", onnx.TensorProto.FLOAT, [1]) for time in ("past", "present")]
    model.graph.input.extend(taken)
    model.graph.output.append(taken[1])
    return model


def joined(axis: int = 2, *, backwards: bool = False) -> onnx.ModelProto:
    """Return a decoder that joins its values in another way."""
    model = growing()
    join = node_of(model, "present_value")
    join.attribute[0].i = axis
    join.input[:] = [*join.input][:: -1 if backwards else 1]
    return model


def without_operators() -> onnx.ModelProto:
    model = growing()
    model.opset_import[0].domain = "other"
    return model


@pytest.mark.parametrize(("make", "options", "message"), [
    (lambda: growing(opset=23), NAMES, "must have opset 24, which brought TensorScatter, got 23"),
    (growing, {}, r"must have outputs present\.… and inputs past_key_values\.… with the same endings"),
    (lambda: to_onnx(SPEC, random_weights(SPEC), past=True, opset=24), NAMES, "must make present_key by a Concat"),
    (reads_the_past, NAMES, "must read past_key by its Concat and by attention alone, got more"),
    (asks_for_much_of_a_shape, NAMES, "must read only axis 2 of a cache's shape, got more"),
    (lambda: asks_for_much_of_a_shape(start=2), NAMES, "must read only axis 2 of a cache's shape.*, got more"),
    (lambda: asks_for_much_of_a_shape(end=3), NAMES, "must read only axis 2 of a cache's shape.*, got more"),
    (gives_what_it_takes, NAMES, "must make present_more by a Concat of past_more and new values on axis 2"),
    (lambda: joined(axis=3), NAMES, "must make present_value by a Concat of past_value .* on axis 2"),
    (lambda: joined(backwards=True), NAMES, "must make present_value by a Concat of past_value and new values"),
    (without_operators, NAMES, "must have opset 24, which brought TensorScatter, got 0"),
])  # fmt: skip
def test_graphs_without_growing_caches_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        caches_in_place(make(), **options)
    with pytest.raises(TypeError, match=r"`model` must be an onnx\.ModelProto"):
        caches_in_place("decoder.onnx")  # type: ignore[arg-type]


def in_place(spec: BlockSpec, dtype: str, converted: bool) -> onnx.ModelProto:
    """Return a block with caches in place, as `to_onnx` makes it or converted from growing caches."""
    weights = random_weights(spec)
    if not converted:
        return to_onnx(spec, weights, past=True, in_place=True, dtype=dtype)
    growing = to_onnx(spec, weights, past=True, profile="trt", opset=24, dtype=dtype)
    return caches_in_place(growing, **NAMES)


def ran(model: onnx.ModelProto, feeds: dict[str, Any], folder: Path) -> tuple[list[Any], set[str]]:
    """Return the outputs, and the operators of all nodes that ran in a branch."""
    session = opened(model, enable_profiling=True, profile_file_prefix=str(folder / "profile"))
    outputs = list[Any](session.run(None, feeds))
    events = json.loads(Path(session.end_profiling()).read_text())
    names = [event["name"] for event in events if event.get("cat") == "Node"]
    return outputs, {part for name in names for part in ("whole", "filled") if f"/{part}/attention" in name}


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(
    ("spec", "dtype", "least"),
    [(PLAIN, "float32", 7), (SPEC, "float32", 9), (PLAIN, "float16", 10)],
    ids=["float32", "grouped", "float16"],
)
def test_a_mostly_filled_cache_is_not_copied(
    spec: BlockSpec, dtype: str, least: int, converted: bool, tmp_path: Path
) -> None:
    """``least``: from how many positions on the cache is read whole for one token."""
    model = in_place(spec, dtype, converted)
    onnx.checker.check_model(model, full_check=True)
    x = np.random.default_rng(0).standard_normal((2, ROOM, 32)).astype(dtype)
    wanted: Any = attention_block(x.astype(np.float32), random_weights(spec), spec)
    shape = (2, spec.num_kv_heads, ROOM, spec.head_dim)
    caches = dict.fromkeys(("past_key", "past_value"), np.full(shape, 1e3, dtype))  # unseen, but finite
    name = "past_length" if converted else "past_lengths"
    for past in range(ROOM):
        lengths = np.full(1 if converted else 2, past)
        outputs, branches = ran(model, {"x": x[:, past : past + 1], **caches, name: lengths}, tmp_path)
        assert branches == {"whole" if past + 1 >= least else "filled"}, past
        error = np.linalg.norm(outputs[0] - wanted[:, past : past + 1]) / np.linalg.norm(wanted[:, past : past + 1])
        assert error <= (2e-6 if dtype == "float32" else 3e-3)
        caches = dict(zip(caches, outputs[1:], strict=True))


def test_a_prompt_reads_the_filled_part(tmp_path: Path) -> None:
    """Every query would be multiplied by the empty part."""
    model, shape = in_place(PLAIN, "float32", False), (1, 4, ROOM, 8)
    feeds = {"past_key": np.zeros(shape, np.float32), "past_value": np.zeros(shape, np.float32)}
    for size, branch in ((8, "filled"), (ROOM, "whole")):
        x = np.ones((1, size, 32), np.float32)
        assert ran(model, {"x": x, **feeds, "past_lengths": np.zeros(1, np.int64)}, tmp_path)[1] == {branch}


def test_chunk_size_none_makes_no_branches(tmp_path: Path) -> None:
    models = [
        to_onnx(PLAIN, random_weights(PLAIN), past=True, in_place=True, chunk_size=size) for size in ("auto", None)
    ]
    assert [node.op_type for model in models for node in model.graph.node if node.op_type == "If"] == ["If"]
    x, cache = np.ones((1, ROOM, 32), np.float32), np.zeros((1, 4, ROOM, 8), np.float32)
    feeds = {"x": x, "past_key": cache, "past_value": cache, "past_lengths": np.zeros(1, np.int64)}
    (first, _), (second, branches) = (ran(model, feeds, tmp_path) for model in models)
    assert not branches
    np.testing.assert_allclose(first[0], second[0], atol=1e-5)


@pytest.mark.parametrize("change", ["boolean", "causal", "read twice"])
def test_other_attentions_read_the_filled_part(change: str, tmp_path: Path) -> None:
    model = to_onnx(PLAIN, random_weights(PLAIN), past=True, profile="trt", opset=24)
    (attention,) = (node for node in model.graph.node if node.op_type == "Attention")
    if change == "boolean":
        shown = helper.make_node("Greater", [attention.input[3], "lowest"], ["shown"], name="shown")
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(-1e29, np.float32), "lowest"))
        model.graph.node.insert(list(model.graph.node).index(attention), shown)
        attention.input[3] = "shown"
    elif change == "causal":
        next(one for one in attention.attribute if one.name == "is_causal").i = 1
    else:
        model.graph.node.append(helper.make_node("Identity", ["present_key"], ["again"], name="again"))
        model.graph.output.append(helper.make_tensor_value_info("again", 1, ("batch", 4, None, 8)))
    changed = caches_in_place(model, **NAMES)
    assert not [node for node in changed.graph.node if node.op_type == "If"]
    x = np.random.default_rng(0).standard_normal((1, 9, 32)).astype(np.float32)
    empty, full = (dict.fromkeys(("past_key", "past_value"), np.zeros((1, 4, n, 8), np.float32)) for n in (0, ROOM))
    wanted, _ = ran(model, {"x": x, **empty}, tmp_path)
    found, _ = ran(changed, {"x": x, **full, "past_length": np.array([0])}, tmp_path)
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)

"""Caches in place of growing ones: the same numbers, one buffer, loud where it is full, read whole if mostly filled."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from export_forms import IN_PLACE, exported, random_weights
from onnx_sessions import opened, shapes, step
from relskew_core import BlockSpec, Span, attention_block
from relskew_core.export import caches_in_place, to_onnx

SPEC = BlockSpec(32, 4, Span.causal(20), causal=True, num_kv_heads=2)
NAMES: dict[str, Any] = {"past": "past_", "present": "present_"}
ROOM = 12
PLAIN = BlockSpec(32, 4, Span.causal(20), causal=True)


def growing(spec: BlockSpec = SPEC, **options: Any) -> onnx.ModelProto:
    """Return a block whose cache is joined by Concat, as those are that torch exports."""
    return to_onnx(spec, random_weights(spec), past=True, **{"profile": "trt", "opset": 24, **options})


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return list[Any](opened(model).run(None, feeds))


def empty(length: int, batch: int = 1, heads: int = 2) -> dict[str, Any]:
    return {f"past_{name}": np.zeros((batch, heads, length, 8), np.float32) for name in ("key", "value")}


@pytest.mark.parametrize("batch", [1, 3])
def test_caches_in_place_give_the_numbers_of_growing_ones(batch: int) -> None:
    model = growing()
    helper.set_model_props(model, {"relskew.decoder": "growing"})
    before, changed = model.SerializeToString(), caches_in_place(model, **NAMES)
    assert model.SerializeToString() == before
    onnx.checker.check_model(changed, full_check=True)
    assert changed.metadata_props[0].value == "in_place"
    sizes = shapes((*changed.graph.input, *changed.graph.output))
    assert list(sizes) == ["x", "past_key", "past_value", "past_length", "y", "present_key", "present_value"]
    assert sizes["past_key"] == sizes["present_value"] == ["batch", 2, "cache_length", 8]
    assert sizes["past_length"] == [1]
    assert [node.op_type for node in changed.graph.node].count("TensorScatter") == 2
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
    for more in (1, 2):
        with pytest.raises(Exception, match="TensorScatter"):
            run(changed, {"x": x[:, :more], **fixed, "past_length": np.array([ROOM + 1 - more])})


def test_onnxruntime_writes_into_the_given_cache() -> None:
    """It reads nothing after its filled part."""
    session = opened(caches_in_place(growing(), **NAMES))
    x = np.random.default_rng(1).standard_normal((1, 5, 32)).astype(np.float32)
    filling = {name: np.full_like(array, 1e3) for name, array in empty(ROOM).items()}
    buffers = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in filling.items()}
    steps = [step(session, buffers, x=x[:, n : n + 1], past_length=np.array([n])) for n in range(5)]
    wanted = run(growing(), {"x": x, **empty(0)})
    np.testing.assert_allclose(np.concatenate(steps, axis=1), wanted[0], atol=1e-5)
    np.testing.assert_array_equal(buffers["past_key"].numpy()[:, :, :5], wanted[1])
    assert (buffers["past_key"].numpy()[:, :, 5:] == 1e3).all()


def test_outputs_that_are_no_caches_stay() -> None:
    model = growing()
    for name in ("present_more", "key"):  # names without "past", and the name of the past without "present"
        model.graph.node.append(helper.make_node("Identity", ["y"], [name], name=name))
        model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("batch", None, 32)))
    changed = caches_in_place(model, **NAMES)
    y, *_, more, key = run(changed, {"x": np.ones((1, 2, 32), np.float32), **empty(4), "past_length": np.array([0])})
    assert ((y == more) & (y == key)).all()


def test_a_softcap_and_other_names_of_the_standard_are_read() -> None:
    """A softcap; an axis counted from the end; the standard's operators under their other name."""
    model = growing()
    (attention,) = (node for node in model.graph.node if node.op_type == "Attention")
    attention.attribute.append(helper.make_attribute("softcap", 0.1))
    for node in model.graph.node:
        if node.output[0] in ("present_key", "present_value"):
            node.attribute[0].i = -2
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


def read(op_type: str, **attributes: Any) -> Callable[[onnx.ModelProto], object]:
    more = helper.make_node(op_type, ["past_key"], ["more"], name="more", **attributes)
    return lambda model: model.graph.node.append(more)


def give_what_is_taken(model: onnx.ModelProto) -> None:
    taken = [helper.make_tensor_value_info(f"{time}_more", onnx.TensorProto.FLOAT, [1]) for time in ("past", "present")]
    model.graph.input.extend(taken)
    model.graph.output.append(taken[1])


def join(model: onnx.ModelProto, axis: int, order: int) -> None:
    (node,) = (node for node in model.graph.node if "present_value" in node.output)
    node.attribute[0].i, node.input[:] = axis, [*node.input][::order]


JOIN = "must make present_value by a Concat of past_value and new values on axis 2"
SHAPE = "must read only axis 2 of a cache's shape.*, got more"


@pytest.mark.parametrize(("spoil", "options", "names", "message"), [
    (None, {"opset": 23}, NAMES, "must have opset 24, which brought TensorScatter, got 23"),
    (None, {}, {}, r"must have outputs present\.… and inputs past_key_values\.… with the same endings"),
    (None, {"profile": "ort"}, NAMES, "must make present_key by a Concat"),
    (read("Relu"), {}, NAMES, "must read past_key by its Concat and by attention alone, got more"),
    (read("Shape"), {}, NAMES, SHAPE),
    (read("Shape", start=2), {}, NAMES, SHAPE),
    (read("Shape", end=3), {}, NAMES, SHAPE),
    (give_what_is_taken, {}, NAMES, "must make present_more by a Concat of past_more and new values on axis 2"),
    (lambda model: join(model, 3, 1), {}, NAMES, JOIN),
    (lambda model: join(model, 2, -1), {}, NAMES, JOIN),
    (lambda model: setattr(model.opset_import[0], "domain", "other"), {}, NAMES, "must have opset 24, .* got 0"),
])  # fmt: skip
def test_graphs_without_growing_caches_are_refused(spoil: Any, options: Any, names: Any, message: str) -> None:
    model = growing(**options)
    if spoil:
        spoil(model)
    with pytest.raises(ValueError, match=message):
        caches_in_place(model, **names)
    with pytest.raises(TypeError, match=r"`model` must be an onnx\.ModelProto"):
        caches_in_place("decoder.onnx")  # type: ignore[arg-type]


def in_place(spec: BlockSpec = PLAIN, **options: Any) -> onnx.ModelProto:
    return to_onnx(spec, random_weights(spec), past=True, in_place=True, **options)


def ran(model: onnx.ModelProto, feeds: dict[str, Any], folder: Path) -> tuple[list[Any], set[str]]:
    """Return the outputs, and the operators of all nodes that ran in a branch."""
    session = opened(model, enable_profiling=True, profile_file_prefix=str(folder / "profile"))
    outputs = list[Any](session.run(None, feeds))
    events = json.loads(Path(session.end_profiling()).read_text())
    names = [event["name"] for event in events if event.get("cat") == "Node"]
    return outputs, {part for name in names for part in ("whole", "filled") if f"/{part}/attention" in name}


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(("of", "dtype", "least"), [
    (PLAIN, "float32", 7), (SPEC, "float32", 9), (PLAIN, "float16", 10),
])  # fmt: skip
def test_a_mostly_filled_cache_is_not_copied(of: Any, dtype: Any, least: int, converted: bool, tmp_path: Path) -> None:
    """``least``: from how many positions on the cache is read whole for one token."""
    model = caches_in_place(growing(of, dtype=dtype), **NAMES) if converted else in_place(of, dtype=dtype)
    onnx.checker.check_model(model, full_check=True)
    x = np.random.default_rng(0).standard_normal((2, ROOM, 32)).astype(dtype)
    wanted: Any = attention_block(x.astype(np.float32), random_weights(of), of)
    shape = (2, of.num_kv_heads, ROOM, of.head_dim)
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
    """Every query would be multiplied by the empty part; with ``chunk_size=None`` there is no branch."""
    for size, branch in ((8, "filled"), (ROOM, "whole")):
        feeds = {"x": np.ones((1, size, 32), np.float32), **empty(ROOM, heads=4), "past_lengths": np.array([0])}
        first, found = ran(in_place(), feeds, tmp_path)
        second, none = ran(in_place(chunk_size=None), feeds, tmp_path)
        assert (found, none) == ({branch}, set())
        np.testing.assert_allclose(first[0], second[0], atol=1e-5)


@pytest.mark.parametrize("change", ["boolean", "causal", "read twice"])
def test_other_attentions_read_the_filled_part(change: str) -> None:
    model = growing(PLAIN)
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
    wanted = run(model, {"x": x, **empty(0, heads=4)})
    found = run(changed, {"x": x, **empty(ROOM, heads=4), "past_length": np.array([0])})
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)


# Of `to_onnx`: rows with separate pasts, pieces, rejections


@pytest.mark.parametrize("form", ["in place: cache", "in place: cache, zero, values, mask"])
def test_too_many_positions_fail_before_the_cache_is_written(form: str) -> None:
    """On a GPU nothing checks where TensorScatter writes."""
    model, _, _ = exported(form)
    inputs, presents = ["x", "past_key", "past_value", "past_lengths"], ["present_key", "present_value"]
    for node in (node for node in model.graph.node if node.output[0] in presents):
        node.op_type = "Identity"  # which gives its argument, the new keys or values, for any lengths
        node.input[:] = node.input[1:2]
        del node.attribute[:]
    session = opened(onnx.utils.Extractor(model).extract_model(inputs, presents))
    draw = np.random.default_rng(0)
    for past, fits in (([0, 3], True), ([4, 1], True), ([0, 5], False), ([7, 7], False)):
        feeds = {name: draw.standard_normal((2, 2, 6, 4), np.float32) for name in ("past_key", "past_value")}
        feeds |= {"x": draw.standard_normal((2, 2, 8), np.float32), "past_lengths": np.array(past)}
        feeds = {each.name: feeds[each.name] for each in session.get_inputs()}
        if fits:
            session.run(None, feeds)
        else:
            with pytest.raises(Exception, match=r"cache/new_present_(key|value)"):
                session.run(None, feeds)


@pytest.mark.parametrize("options", [{}, {"past": True, "in_place": True}], ids=["clipped", "in place"])
def test_no_pad_in_bfloat16(options: dict[str, Any]) -> None:
    spec = BlockSpec(8, 2, Span.clipped(3) if not options else Span(3, 0, "clip"), causal=bool(options))
    kinds = {}
    for dtype in ("float16", "bfloat16"):
        model = to_onnx(spec, random_weights(spec), dtype=dtype, **options)
        graphs = [model.graph, *model.functions]
        graphs += [part.g for node in model.graph.node for part in node.attribute if part.HasField("g")]
        kinds[dtype] = {node.op_type for graph in graphs for node in graph.node}
    assert "Pad" in kinds["float16"]
    assert "Pad" not in kinds["bfloat16"]


def test_rows_of_different_lengths_in_one_buffer() -> None:
    """Each row continues where its prompt ended; padding of shorter prompts is written there, and overwritten later."""
    spec, options = IN_PLACE["in place: cache"]
    spec = replace(spec, embed_dim=8 * spec.num_heads, head_dim=8)
    weights = random_weights(spec)
    session = opened(to_onnx(spec, weights, **options))
    x = np.random.default_rng(0).standard_normal((3, 9, spec.embed_dim)).astype(np.float32)
    lengths, nothing = np.array([4, 1, 6]), empty(9, 3, spec.num_kv_heads)
    caches = {name: onnxruntime.OrtValue.ortvalue_from_numpy(cache) for name, cache in nothing.items()}
    whole: Any = attention_block(x, weights, spec)
    y = step(session, caches, x=x[:, :6], past_lengths=np.zeros(3, np.int64))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(y[row, :length], whole[row, :length], atol=1e-5)
    for _ in range(3):
        y = step(session, caches, x=x[range(3), lengths][:, None], past_lengths=lengths)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(y[row, 0], whole[row, length], atol=1e-5)
        lengths = lengths + 1
    # Row 1 was padded to 6 positions, and the others have their own.
    assert caches["past_key"].numpy()[:, 0].any(-1).sum(-1).tolist() == [max(6, length) for length in lengths]

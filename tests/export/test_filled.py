"""Caches of a fixed length: a mostly filled one is read whole, any other by its filled part, with the same numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from export_forms import random_weights
from onnx_sessions import opened
from relskew_core import BlockSpec, Span, attention_block
from relskew_core.export import caches_in_place, to_onnx

SPEC = BlockSpec(32, 4, Span.causal(20), causal=True)
GROUPED = BlockSpec(32, 4, Span.causal(20), causal=True, num_kv_heads=2)
ROOM = 12


def in_place(spec: BlockSpec, dtype: str, converted: bool) -> onnx.ModelProto:
    """Return a block with caches in place, as `to_onnx` makes it or converted from growing caches."""
    weights = random_weights(spec)
    if not converted:
        return to_onnx(spec, weights, past=True, in_place=True, dtype=dtype)
    growing = to_onnx(spec, weights, past=True, profile="trt", opset=24, dtype=dtype)
    return caches_in_place(growing, past="past_", present="present_")


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
    [(SPEC, "float32", 7), (GROUPED, "float32", 9), (SPEC, "float16", 10)],
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
    model, shape = in_place(SPEC, "float32", False), (1, 4, ROOM, 8)
    feeds = {"past_key": np.zeros(shape, np.float32), "past_value": np.zeros(shape, np.float32)}
    for size, branch in ((8, "filled"), (ROOM, "whole")):
        x = np.ones((1, size, 32), np.float32)
        assert ran(model, {"x": x, **feeds, "past_lengths": np.zeros(1, np.int64)}, tmp_path)[1] == {branch}


def test_without_control_flow(tmp_path: Path) -> None:
    models = [to_onnx(SPEC, random_weights(SPEC), past=True, in_place=True, chunk_size=size) for size in ("auto", None)]
    assert [node.op_type for model in models for node in model.graph.node if node.op_type == "If"] == ["If"]
    x, cache = np.ones((1, ROOM, 32), np.float32), np.zeros((1, 4, ROOM, 8), np.float32)
    feeds = {"x": x, "past_key": cache, "past_value": cache, "past_lengths": np.zeros(1, np.int64)}
    (first, _), (second, branches) = (ran(model, feeds, tmp_path) for model in models)
    assert not branches
    np.testing.assert_allclose(first[0], second[0], atol=1e-5)


@pytest.mark.parametrize("change", ["boolean", "causal", "read twice"])
def test_other_attentions_read_the_filled_part(change: str, tmp_path: Path) -> None:
    model = to_onnx(SPEC, random_weights(SPEC), past=True, profile="trt", opset=24)
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
    changed = caches_in_place(model, past="past_", present="present_")
    assert not [node for node in changed.graph.node if node.op_type == "If"]
    x = np.random.default_rng(0).standard_normal((1, 9, 32)).astype(np.float32)
    empty, full = (dict.fromkeys(("past_key", "past_value"), np.zeros((1, 4, n, 8), np.float32)) for n in (0, ROOM))
    wanted, _ = ran(model, {"x": x, **empty}, tmp_path)
    found, _ = ran(changed, {"x": x, **full, "past_length": np.array([0])}, tmp_path)
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)

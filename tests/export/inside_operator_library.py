"""The operator library: every option of a call in onnxruntime and through its header, against the definition."""

import _ctypes
import ctypes
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import compiled_cases
import dense
import oracles
from compiled_cases import close, narrow
from export_forms import exported
from libraries import GATES
from onnx_sessions import opened, step
from operator_runs import needs_library, run, session_of, side_by_side
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends._compiled import _kernels
from relskew_core.export import custom_ops_library, save, without_operator
from relskew_core.export._nodes.operator import INPUTS, OUTPUTS, attributes_of
from relskew_core.export._nodes.operator_nodes import NUMBERS, _quantising

pytestmark = needs_library

CASES = [case for case in compiled_cases.CASES if not case.call().get("dropout")]
SPAN = Span.causal(64)


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def call(length: int = 50) -> dict[str, Any]:
    q, k, v = (random(2, heads, length, 16, seed=heads + place) for place, heads in enumerate((4, 2, 2)))
    return {"q": q, "k": k, "v": v, "rel_k": random(4, 64, 16)}


QUANTISED = ("past_key_int8", "past_value_int8", "past_key_scale", "past_value_scale")
TABLES = ("rel_k_int8", "rel_v_int8", "rel_k_scale", "rel_v_scale")
CAUSAL: dict[str, Any] = {"left": 63, "right": 0, "causal": 1}


def node_of(case: dense.Case, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a case for a node, with four axes, and its attributes."""
    made = problem(Arguments(**{name: narrow(x, dtype) for name, x in case.arrays().items()}, **case.call()))
    operands, options = made.operands(), made.options
    arrays = {} if made.sinks is None else {"sinks": np.ascontiguousarray(made.sinks)}
    for name, x in operands._asdict().items():
        if x is None or name == "seed":
            continue
        if name == "mask" and x.dtype != np.bool_:
            name = "added"
        if name in ("q", "k", "v", "rel_q") and x.ndim != 4:
            x = x.reshape(-1, *x.shape[-3:])
        elif name.endswith(("segments", "positions")):
            x = np.asarray(x, np.int64).reshape(-1, x.shape[-1])
        elif name in ("mask", "added") and operands.q.ndim > 4:
            x = np.broadcast_to(x, (*operands.q.shape[:-3], *x.shape[-3:])).reshape(-1, *x.shape[-3:])
        arrays[name] = x
    return {name: arrays[name] for name in INPUTS if name in arrays}, attributes_of(options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_of_a_call_is_the_definition(case: dense.Case, dtype: str) -> None:
    given = {name: narrow(x, dtype) for name, x in case.arrays().items()}
    expected = relative_attention(**given, **case.call(), return_lse=True, impl="portable")
    arrays, attributes = node_of(case, dtype)
    out, lse = run(arrays, ("out", "lse"), threads=2, **attributes)
    close(out.reshape(expected[0].shape), expected[0])
    close(lse.reshape(expected[1].shape), expected[1])


def test_the_cases_have_every_input_of_a_node() -> None:
    found = set().union(*(node_of(case, "float32")[0] for case in CASES))
    assert set(INPUTS) - found == {"offset", "span_left", "span_right", "past_key", "past_value", *QUANTISED, *TABLES}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_projected_heads_are_read_where_they_are(dtype: str) -> None:
    arrays = {name: x.astype(dtype) for name, x in call().items()}
    expected = oracles.relative_attention(**arrays, span=SPAN, causal=True).out
    heads = {name: side_by_side(arrays[name]) for name in "qkv"}
    (out,) = run({**arrays, **heads}, num_heads=4, kv_num_heads=2, threads=2, **CAUSAL)
    assert oracles.relative_error(out, side_by_side(expected)) < GATES[dtype]


def test_the_reach_of_a_table_may_be_an_input() -> None:
    arrays = {**call(), "rel_k": random(4, 93, 16)}
    expected = oracles.relative_attention(**arrays, span=Span(52, 40, "clip")).out
    for shape in ((), (1,)):
        reach = {"span_left": np.full(shape, 52), "span_right": np.full(shape, 40)}
        (out,) = run({**arrays, **reach}, left=1, right=2, beyond="clip")
        assert oracles.relative_error(out, expected) < GATES["float32"]


def test_sinks_may_be_of_each_query() -> None:
    arrays = {**call(), "sinks": random(2, 4, 50)}
    expected = oracles.relative_attention(**arrays, span=SPAN, causal=True).out
    (out,) = run(arrays, **CAUSAL)
    assert oracles.relative_error(out, expected) < GATES["float32"]
    (out,) = run({**arrays, "offset": np.array([0, 9])}, **CAUSAL)  # items that are calls by themselves
    later = oracles.relative_attention(**{name: x[1:] if len(x) == 2 else x for name, x in arrays.items()},
                                       span=SPAN, causal=True, offset=9).out  # fmt: skip
    assert oracles.relative_error(out, np.concatenate([expected[:1], later])) < GATES["float32"]
    (out,) = run({**arrays, "sinks": arrays["sinks"][:1]}, **CAUSAL)
    shared = oracles.relative_attention(**{**arrays, "sinks": arrays["sinks"][[0, 0]]}, span=SPAN, causal=True).out
    assert oracles.relative_error(out, shared) < GATES["float32"]


def past_of(arrays: dict[str, Any], filled: int, room: int) -> tuple[dict[str, Any], dict[str, Any]]:
    new = {**arrays, **{name: arrays[name][:, :, filled:] for name in "qkv"}}
    caches = {}
    for name, x in (("past_key", arrays["k"]), ("past_value", arrays["v"])):
        caches[name] = np.zeros((*x.shape[:2], room, x.shape[3]), x.dtype)
        caches[name][:, :, :filled] = x[:, :, :filled]
    return new, caches


@pytest.mark.parametrize("filled", [0, 1, 40, 49])
def test_a_past_gives_the_outputs_of_the_whole(filled: int) -> None:
    arrays = call()
    expected = oracles.relative_attention(**arrays, span=SPAN, causal=True).out
    new, past = past_of(arrays, filled, filled)
    out, keys, values = run({**new, **past}, ("out", "present_key", "present_value"), **CAUSAL)
    assert oracles.relative_error(out, expected[:, :, filled:]) < GATES["float32"]
    np.testing.assert_array_equal(keys, arrays["k"])
    np.testing.assert_array_equal(values, arrays["v"])


def test_caches_are_written_in_place_where_each_item_ends() -> None:
    arrays, filled = call(), (30, 40)
    heads = {name: side_by_side(np.stack([x[:, n : n + 10] for x, n in zip(arrays[name], filled, strict=True)]))
             for name in "qkv"}  # fmt: skip
    past = {name: np.zeros((2, 2, 60, 16), np.float32) for name in ("past_key", "past_value")}
    for item, n in enumerate(filled):
        past["past_key"][item, :, :n] = arrays["k"][item, :, :n]
        past["past_value"][item, :, :n] = arrays["v"][item, :, :n]
    segments = np.repeat(np.array([[0, 1], [3, 4]]), 30, axis=1)
    mask = np.random.default_rng(1).random((2, 1, 10, 60)) < 0.8
    given = {**arrays, **heads, "mask": mask, "k_segments": segments, "offset": np.array(filled)}
    names = ("out", "present_key", "present_value")
    session = session_of({**given, **past}, names, num_heads=4, kv_num_heads=2, **CAUSAL)
    copied = session.run(list(names), {**given, **past})
    caches = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x.copy()) for name, x in past.items()}
    found = step(session, caches, **given)
    for item, n in enumerate(filled):
        expected = oracles.relative_attention(
            arrays["q"][item, :, n : n + 10], arrays["k"][item, :, : n + 10], arrays["v"][item, :, : n + 10],
            arrays["rel_k"], SPAN, causal=True, offset=n, mask=mask[item, :, :, : n + 10],
            segments=(segments[item, n : n + 10], segments[item, : n + 10]),
        ).out  # fmt: skip
        for out in (found, copied[0]):
            assert oracles.relative_error(out[item], side_by_side(expected[None])[0]) < GATES["float32"]
        for place, name in enumerate(("key", "value"), 1):
            written = caches[f"past_{name}"].numpy()[item, :, : n + 10]
            np.testing.assert_array_equal(written, arrays[name[0]][item, :, : n + 10])
            np.testing.assert_array_equal(copied[place][item, :, : n + 10], written)
            assert not copied[place][item, :, n + 10 :].any()


def in_int8(x: Any) -> tuple[Any, Any]:
    """Return rows rounded to whole multiples of a scale of each row, and the scales."""
    wide = x.astype(np.float32)
    scales = np.abs(wide).max(axis=-1) / np.float32(127)
    return np.rint(wide / np.where(scales > 0, scales, 1)[..., None]).astype(np.int8), scales


def quantised(arrays: dict[str, Any], filled: int, room: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the inputs behind a past in int8, the presents, and the call with the rounded keys and values."""
    new, past = past_of(arrays, filled, room)
    inputs = dict(zip(QUANTISED[:2], (past["past_key"], past["past_value"]), strict=True))
    for name, scale in zip(QUANTISED[:2], QUANTISED[2:], strict=True):
        inputs[name], inputs[scale] = in_int8(inputs[name])
    whole, presents = dict(arrays), {}
    for name, kind in (("k", "key"), ("v", "value")):
        rows, scales = presents[f"present_{kind}_int8"], presents[f"present_{kind}_scale"] = in_int8(arrays[name])
        whole[name] = (rows * scales[..., None]).astype(arrays[name].dtype)
    return {**new, **inputs}, {name: presents[name] for name in OUTPUTS if name in presents}, whole


OF_INT8: dict[str, dict[str, Any]] = {
    "table": {},
    "values": {"rel_v": random(1, 64, 16, seed=5)},
    "keys": {"key_table": random(4, 64, 16, seed=6)},
    "softcap": {"softcap": 2.0},
    "documents": {"segments": np.repeat(np.array([0, 1, 3]), (20, 15, 15))},
    "float16": {},
    "float64": {},
}


@pytest.mark.parametrize("filled", [0, 20, 49], ids="after {}".format)
@pytest.mark.parametrize("kind", OF_INT8)
def test_caches_in_int8_are_attention_to_the_rounded_rows(kind: str, filled: int) -> None:
    dtype, gate = kind if kind in GATES else "float32", GATES["float16" if kind == "float16" else "float32"]
    options, arrays = OF_INT8[kind], {name: x.astype(dtype) for name, x in call().items()}
    added = {name: x for name, x in options.items() if name in INPUTS}
    attributes = CAUSAL | {name: x for name, x in options.items() if name == "softcap"}
    if kind == "documents":
        added["k_segments"] = options["segments"][None]
    for room in (filled, 60):  # growing, and in place
        given, presents, whole = quantised(arrays, filled, room)
        if room == 60:
            given["offset"] = np.array([filled])
        out, *made = run({**given, **added}, ("out", *presents), threads=2, **attributes)
        expected = oracles.relative_attention(**whole, span=SPAN, causal=True, **options).out
        assert oracles.relative_error(out, expected[:, :, filled:]) < gate
        for name, x in zip(presents, made, strict=True):
            np.testing.assert_array_equal(x[:, :, :50], presents[name])
            assert not x[:, :, 50:].any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("filled", [0, 49], ids="after {}".format)
def test_tables_in_int8_are_read_where_the_call_needs_them(dtype: str, filled: int) -> None:
    """Tables with rows before and after those of the call, next to caches in int8."""
    arrays = {name: x.astype(dtype) for name, x in call().items() if name != "rel_k"}
    given, _, whole = quantised(arrays, filled, filled)
    for name, heads in (("rel_k", 4), ("rel_v", 1)):
        rows, scales = given[f"{name}_int8"], given[f"{name}_scale"] = in_int8(random(heads, 80, 16, seed=heads))
        whole[name] = (rows * scales[..., None]).astype(dtype)[:, 7:71]
    names = ("out", *(name for name in OUTPUTS if name.startswith("present") and name.endswith(("int8", "scale"))))
    out, *_ = run(given, names, **{**CAUSAL, "lead": 70})
    expected = oracles.relative_attention(**whole, span=SPAN, causal=True).out[:, :, filled:]
    assert oracles.relative_error(out, expected) < GATES["float16" if dtype == "float16" else "float32"]


def test_caches_in_int8_are_written_where_each_item_ends() -> None:
    arrays, filled = call(), np.array([30, 40])
    given, presents, _ = quantised(arrays, 40, 60)
    heads = {name: np.stack([x[:, n : n + 10] for x, n in zip(arrays[name], filled, strict=True)]) for name in "qkv"}
    out, *made = run({**given, **heads, "offset": filled}, ("out", *presents), **CAUSAL)
    for item, n in enumerate(filled):
        whole = {
            name: x[item : item + 1, :, : n + 10] for name, x in quantised(arrays, 40, 60)[2].items() if name in "qkv"
        }
        expected = oracles.relative_attention(**whole, rel_k=arrays["rel_k"], span=SPAN, causal=True).out[:, :, n:]
        assert oracles.relative_error(out[item], expected[0]) < GATES["float32"]
        for name, x in zip(presents, made, strict=True):
            np.testing.assert_array_equal(x[item, :, : n + 10], presents[name][item, :, : n + 10])


def test_rows_without_a_scale() -> None:
    """Zeros stay zeros, what is not finite becomes NaN, and quotients by a scale of few bits do not overflow."""
    given, presents, _ = quantised(call(), 0, 0)
    given["k"][:, :, 10], given["k"][:, :, 11], given["v"][0, 0, 49, 3] = 0, 180 * 2.0**-149, np.inf
    out, rows, _, keys, values = run(given, ("out", *presents), **CAUSAL)
    assert (rows[:, :, 11] >= 0).all()
    assert not keys[:, :, 10].any()
    assert np.isnan(values[0, 0, 49])
    assert np.isfinite(np.delete(values.ravel(), 49)).all()
    assert np.isnan(out[0, :2, 49]).all()  # both heads of the group, and the last query alone
    assert np.isfinite(out[1]).all()


def test_results_are_the_same_on_any_number_of_threads() -> None:
    arrays = {"q": random(1, 4, 700, 64), "k": random(1, 4, 700, 64, seed=1), "v": random(1, 4, 700, 64, seed=2)}
    alone, shared = (run(arrays, threads=threads, causal=1)[0] for threads in (1, 2))
    np.testing.assert_array_equal(alone, shared)


def test_empty_batches_and_lengths_give_nothing() -> None:
    arrays = call()
    for axis in (0, 2):
        empty = {name: x[:0] if axis == 0 else x[:, :, :0] for name, x in arrays.items() if name != "rel_k"}
        (out,) = run({**empty, "rel_k": arrays["rel_k"]}, **CAUSAL)
        assert out.shape == empty["q"].shape


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"rel_k": random(4, 41, 16)}, {"left": 40},
     r"`rel_k` reaches relative positions -40 \.\.\. 0, but this call needs -49 \.\.\. 0"),
    ({"rel_k": random(3, 64, 16)}, {}, "`rel_k` has a different size"),
    ({"k": random(2, 3, 50, 16)}, {}, "`v` has a different size|must be a multiple"),
    ({"q": random(4, 50)}, {}, "must be"),
    ({"mask": np.ones((1, 1, 50, 50), bool), "added": random(1, 1, 50, 50)}, {},
     "pass either `mask` or `added`, not both"),
    ({"q_segments": np.zeros((1, 50), np.int64)}, {}, "for queries and keys"),
    ({"q_segments": np.zeros((1, 9), np.int64), "k_segments": np.zeros((1, 50), np.int64)}, {}, "length of 50, got 9"),
    ({"sinks": random(3)}, {}, "`sinks` must have a number for each head"),
    ({"sinks": random(3, 4, 50), "offset": np.array([0, 9])}, {}, "`sinks` must .* or for each query of each head"),
    ({"sinks": random(2, 4, 49)}, {}, "`sinks` must have a number for each head, or for each query"),
    ({"offset": np.array([1, 2, 3])}, {}, "`offset` must be one number"),
    ({"span_left": np.array([63, 63])}, {}, "`span_left` and `span_right` must be numbers"),
    ({"span_left": np.array(40)}, {}, "`rel_k` has a different size|reaches relative positions -40"),
    ({}, {"beyond": "far"}, "`beyond` must be"),
    ({}, {"interface": 2}, "a later version of relskew"),
    (quantised(call(), 0, 9)[0] | past_of(call(), 0, 9)[1], {}, "pass a past, or a past in int8, not both"),
    ({name: x for name, x in quantised(call(), 0, 9)[0].items() if name != QUANTISED[2]}, {},
     "must have one scale for each of its rows"),
    ({**quantised(call(), 0, 9)[0], QUANTISED[0]: np.zeros((2, 2, 9, 8), np.int8)}, {}, "the sizes of the new keys"),
    ({**quantised(call(), 0, 9)[0], QUANTISED[2]: random(2, 2, 8)}, {}, "a past in int8 must have one scale"),
    (quantised(call(), 0, 9)[0], {}, "must give the present"),
    ({"rel_v_int8": np.zeros((4, 64, 16), np.int8)}, {}, "a table in int8 must have one scale for each of its rows"),
    ({"rel_v_scale": random(4, 64)}, {}, "a table in int8 must have one scale"),
    ({"rel_k_int8": np.zeros((4, 64, 16), np.int8), "rel_k_scale": random(4, 64)}, {}, "a table either in int8 or not"),
    ({"rel_v_int8": np.zeros((4, 64, 16), np.int8), "rel_v_scale": random(4, 63)}, {}, "`rel_v_scale` has a different"),
    *(({"rel_k": None, name: random(*shape)}, {"left": 40}, f"`{name}` reaches relative positions -40")
      for name, shape in {"rel_v": (4, 41, 16), "rel_bias": (4, 41), "key_table": (4, 41, 16)}.items()),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "attributes", "match"), WRONG, ids=[match for *_, match in WRONG])
def test_wrong_nodes_are_refused_by_name(arrays: dict[str, Any], attributes: dict[str, Any], match: str) -> None:
    given = {name: x for name, x in {**call(), **arrays}.items() if x is not None}
    with pytest.raises(Exception, match=match):
        run(given, **{**CAUSAL, **attributes})


def test_a_full_cache_says_how_full() -> None:
    new, past = past_of(call(), 40, 45)
    with pytest.raises(Exception, match="room for 45 positions: 40 are filled, and 10 do not fit"):
        run({**new, **past, "offset": np.array([40])}, ("out", "present_key", "present_value"), **CAUSAL)


def test_an_older_runtime_is_refused() -> None:
    """Older runtimes have a shorter table: they return none for our version, and one for the first version."""
    said: list[bytes] = []

    def hear(_: int, text: bytes) -> int:
        said.append(text)
        return len(said)

    make_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(hear)
    table = (ctypes.c_void_p * 1)(ctypes.cast(make_status, ctypes.c_void_p))
    functions = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
        lambda version: ctypes.addressof(table) if version < 17 else None
    )
    base = (ctypes.c_void_p * 2)(ctypes.cast(functions, ctypes.c_void_p))
    register = ctypes.CDLL(str(custom_ops_library())).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, base) == 1
    assert b"onnxruntime 1.17 or newer" in said[0]


def test_the_library_offers_two_functions_and_its_kernels() -> None:
    listing = shutil.which("objdump")
    if listing is None:
        pytest.skip("no objdump is here")
    names = subprocess.run([listing, "-T", custom_ops_library()], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r"\*UND\*.*\b(_Z\w+|__gxx\w+|Py\w+)$", names, re.MULTILINE)
    offered = re.findall(r"^\S+ g .*\.text.* (\S+)$", names, re.MULTILINE)
    module = Path(_kernels.__file__)  # where it is linked to the library, it takes the kernels from there
    taken = subprocess.run([listing, "-T", str(module)], capture_output=True, text=True, check=True).stdout
    kernels = set(re.findall(r"\*UND\*.* (_Z\S+)$", taken, re.MULTILINE)) & set(offered)
    assert set(offered) == {"RegisterCustomOps", "relskew_attention", *kernels}


def test_subnormal_rows_do_not_overflow_without_the_library() -> None:
    lengths = {"zero": 0, "total": 1, "axis": 2, "starts": 0}
    numbers: dict[str, Any] = {**NUMBERS, **{name: {"value_ints": [value]} for name, value in lengths.items()}}
    constants = [helper.make_node("Constant", [], [f"cache/{name}"], **value) for name, value in numbers.items()]
    feeds: dict[str, Any] = {
        "past/k": np.zeros((1, 1, 1, 1), np.int8),
        "past_scale/k": np.zeros((1, 1, 1), np.float32),
        "new/k": np.full((1, 1, 1, 1), 180 * 2.0**-149, np.float32),
    }
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, types[name], x.shape) for name, x in feeds.items()]
    output = helper.make_tensor_value_info("present/k", onnx.TensorProto.INT8, [1, 1, 1, 1])
    graph = helper.make_graph([*constants, *_quantising("k", "filled")], "one row", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    assert opened(model).run(None, feeds)[0] == 0


# Graphs whose attention is a node, with the library and without

SMALL = BlockSpec(8, 2, Span.causal(8), causal=True)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_a_session_runs_the_operator_instead_of_the_function(level: str) -> None:
    """No text of onnx says so: runtimes decide."""
    (model, *_), (right, *_) = exported(SMALL, operator=True), exported(SMALL)
    (function,) = model.functions
    made = [("Sub", [function.input[0]] * 2, "zero"), ("Add", ["seven", "zero"], function.output[0])]
    del function.node[:]
    function.node.append(onnx.helper.make_node("Constant", [], ["seven"], value_floats=[7.0]))
    function.node.extend(onnx.helper.make_node(kind, given, [result]) for kind, given, result in made)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)}
    settings = {"graph_optimization_level": getattr(onnxruntime.GraphOptimizationLevel, level)}
    with_it, without = (opened(model, library=each, **settings).run(None, feeds)[0] for each in (True, False))
    expected = opened(right).run(None, feeds)[0]
    np.testing.assert_allclose(with_it, expected, rtol=0, atol=1e-5)
    assert np.abs(without - expected).max() > 1


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"excludes a bias by distance in half precision.* got dtype float16"):
        exported(BlockSpec.alibi(8, 2), operator=True, dtype="float16")
    for form in ("cross, clip, short", "cross, zero, short"):
        with pytest.raises(ValueError, match=r"`operator=True` requires a `max_length` that cuts both ends .* got 5"):
            exported(form, operator=True)
    with pytest.raises(ValueError, match=r"`model_or_path` must have nodes relskew::RelativeAttention"):
        without_operator(exported(SMALL)[0])
    with pytest.raises(TypeError, match=r"`model_or_path` must be an onnx.ModelProto or a path, got int 3"):
        without_operator(3)  # type: ignore[arg-type]


def test_without_operator_reads_a_file(tmp_path: Path) -> None:
    model, *_ = exported(SMALL, operator=True)
    path = save(model, tmp_path / "block.onnx")
    assert without_operator(path) == without_operator(str(path)) == without_operator(model)
    assert any(entry.domain == "relskew" for entry in model.opset_import)


# ``relskew_attention`` of relskew.h with keys, values and tables in int8, called through its structures

C_TYPES = {"size_t": ctypes.c_size_t, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "double": ctypes.c_double}


class Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("axes", ctypes.c_int32), ("sizes", ctypes.c_int64 * 4),
        ("steps", ctypes.c_int64 * 4),
    )  # fmt: skip


@cache
def call_type() -> type[ctypes.Structure]:
    text = re.sub(
        r"/\*.*?\*/",
        "",
        (Path(__file__).parents[2] / "backends/_compiled/include/relskew.h").read_text(),
        flags=re.DOTALL,
    )
    (body,) = re.findall(r"typedef struct relskew_call \{(.*?)\}", text, re.DOTALL)
    types = {**C_TYPES, "relskew_array": Array}
    fields = [
        (name.strip(), types[kind]) for kind, names in re.findall(r"(\w+) ([^;]+);", body) for name in names.split(",")
    ]
    return type("Call", (ctypes.Structure,), {"_fields_": fields})


def view(x: Any) -> Array:
    steps = [stride // x.itemsize for stride in x.strides]
    return Array(x.ctypes.data, x.ndim, (ctypes.c_int64 * 4)(*x.shape), (ctypes.c_int64 * 4)(*steps))


def attend(views: dict[str, Array], library: ctypes.CDLL | None = None, **numbers: Any) -> str:
    made: Any = call_type()(type=1, window_left=-1, window_right=-1, blocks_before=-1, causal=1, **numbers, **views)
    made.size, made.scale, made.rel_scale = ctypes.sizeof(made), np.nan, np.nan
    error = ctypes.create_string_buffer(200)
    function = (library or ctypes.CDLL(str(custom_ops_library()))).relskew_attention
    assert function(ctypes.byref(made), error, ctypes.c_size_t(200)) == bool(error.value)
    return error.value.decode()


def arrays(queries: int, keys: int, width: int) -> dict[str, Any]:
    """Return a call in int8, with heads side by side, rows that lie apart, and scales by position."""
    draw = np.random.default_rng(0)
    k, v = (draw.integers(-127, 128, (2, keys, 2, width + 3), np.int8)[..., :width] for _ in range(2))
    k_scale, v_scale = (draw.random((2, keys, 2), np.float32) / 64 for _ in range(2))
    return {
        "q": draw.standard_normal((2, 4, queries, width), np.float32),
        "k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2),
        "k_scale": k_scale.swapaxes(1, 2), "v_scale": v_scale.swapaxes(1, 2),
        "rel_k": draw.standard_normal((4, keys, width), np.float32),
        "key_table": draw.standard_normal((1, keys, width), np.float32),
        "out": np.zeros((2, 4, queries, width), np.float32),
    }  # fmt: skip


def tables(rows: int, width: int) -> dict[str, Any]:
    """Return tables in int8, with rows that lie apart, one for each head and one for all."""
    draw = np.random.default_rng(1)
    rel_k, rel_v = (draw.integers(-127, 128, (heads, rows, width + 3), np.int8)[..., :width] for heads in (4, 1))
    scales = (draw.random((heads, rows), np.float32) / 64 for heads in (4, 1))
    return {"rel_k": rel_k, "rel_v": rel_v, **dict(zip(("rel_k_scale", "rel_v_scale"), scales, strict=True))}


def widen(arrays: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        arrays[name] = arrays[name] * arrays.pop(f"{name}_scale")[..., None]


@pytest.mark.parametrize("width", [16, 21])
@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize(("narrow", "rows"), [("keys", 600), *itertools.product(("tables", "both"), (600, 40))])
def test_arrays_in_int8_are_what_they_round_to(narrow: str, rows: int, queries: int, width: int) -> None:
    """With any strides; tables are whole, or clipped."""
    given, offset, clipped = arrays(queries, 600, width), 600 - queries, narrow != "keys"
    if clipped:
        given |= tables(rows, width)
        del given["key_table"]
    widen(given, "kv" if narrow == "tables" else ())
    views = {name: view(x) for name, x in given.items()}
    assert not attend(views, left=rows - 1, beyond=int(clipped), offset=offset, threads=2)
    out = given.pop("out")
    widen(given, [name for name in (*"kv", "rel_k", "rel_v") if f"{name}_scale" in given])
    span = Span.causal(rows, "clip" if clipped else "error")
    expected = oracles.relative_attention(**given, span=span, causal=True, offset=offset).out
    assert oracles.relative_error(out, expected) < GATES["float32"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_library_stays_for_threads_that_begin_after_it_is_closed(tmp_path: Path) -> None:
    copy = shutil.copy(custom_ops_library(), tmp_path)
    library, given = ctypes.CDLL(str(copy)), arrays(70, 600, 16)
    assert not attend({name: view(x) for name, x in given.items()}, library, left=599, offset=530, threads=8)
    _ctypes.dlclose(library._handle)
    assert str(copy) in Path("/proc/self/maps").read_text()


def resized(array: Array, axis: int, size: int) -> None:
    array.sizes[axis] = size


SPOILT: list[tuple[str, Callable[[Array], object], str]] = [
    *((name, lambda x: setattr(x, "data", None), f"`{name}` is missing")
      for name in ("k_scale", "v_scale", "k", "v", "rel_k")),
    ("k_scale", lambda x: setattr(x, "data", x.data + 1), "`k_scale` must be aligned"),
    ("k_scale", lambda x: setattr(x, "axes", 5), "`k_scale` must have up to 4 axes, got 5"),
    ("v_scale", lambda x: setattr(x, "axes", -1), "`v_scale` must have up to 4 axes, got -1"),
    ("k_scale", lambda x: resized(x, 2, 59), "`k_scale` has a different size"),
    ("v_scale", lambda x: resized(x, 1, 4), "`v_scale` has a different size"),
    ("v", lambda x: resized(x, 2, 61), "`v` has a different size"),
    ("rel_v", lambda x: resized(x, 1, 59), "`rel_v` has a different size"),
    ("rel_k_scale", lambda x: resized(x, 1, 59), "`rel_k_scale` has a different size"),
    ("rel_v_scale", lambda x: resized(x, 0, 3), "`rel_v_scale` has a different size"),
    ("k", lambda x: resized(x, 3, 17), "`k` has a different size"),
    ("k", lambda x: x.steps.__setitem__(3, 2), "`k` must be contiguous along its last axis"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "message"), SPOILT, ids=[f"{name}: {told}" for name, _, told in SPOILT])
def test_wrong_arrays_in_int8_are_refused(name: str, spoil: Callable[[Array], object], message: str) -> None:
    given = {**arrays(2, 60, 16), **tables(60, 16)}
    views = {own: view(x) for own, x in given.items()}
    spoil(views[name])
    assert message in attend(views, left=59, offset=58)
    assert not given["out"].any()

"""Every form of the block in every profile, against float64, in every runtime here; in chunks, in place, as a node."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import ndonnx
import numpy as np
import onnx
import onnxruntime
import pytest

from export_forms import FORMS, IN_PLACE, PROFILES, exported, made, random_weights, valid
from onnx_sessions import NOTHING_OPTIMISED, grown, opened
from operator_runs import needs_library
from relskew_core import BlockSpec, Span, attention_block, init_weights, relative_attention
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

TRACED = [
    "full", "full, values, one key head", "clip, values", "bias, zero, window", "causal", "causal, window", "blocks",
    "cross",
]  # fmt: skip


@pytest.mark.no_cover
@pytest.mark.parametrize(("form", "queries"), [*((form, 7) for form in TRACED), ("clip, values", 1), ("cross", 1)])
def test_a_graph_traced_by_ndonnx_gives_the_same_numbers(form: str, queries: int) -> None:
    spec, draw = FORMS[form][0], np.random.default_rng(0)
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


# The loop over chunks of queries: the same numbers, and memory that does not grow with the square of the length


def run(model: onnx.ModelProto, **inputs: Any) -> np.ndarray[Any, Any]:
    return np.asarray(opened(model).run(None, inputs)[0])


BY_HEAD = [
    BlockSpec(16, 4, Span.full(9), rel_bias=True, sinks=True),
    BlockSpec(16, 4, Span.clipped(2), num_kv_heads=2, rel_values=True, rel_bias=True, sinks=True),
    BlockSpec(16, 4, Span.full(9), num_kv_heads=2, rel_values=True, shared_table=True),
    BlockSpec(16, 4, Span.causal(9), causal=True, num_kv_heads=2, rel_values=True),
    BlockSpec(16, 4, Span.causal(9), causal=True, num_kv_heads=1),
    BlockSpec(16, 4, Span.clipped(2), rel_keys=False, rel_values=True),  # no table adds logits
]


@pytest.mark.parametrize("spec", BY_HEAD)
@pytest.mark.parametrize("shape", [None, (2, 4, 9, 9), (2, 1, 9, 9), (1, 4, 1, 9), (1, 1, 9, 1)])
def test_each_head_in_chunks_reads_its_own_rows_and_masks(spec: BlockSpec, shape: tuple[int, ...] | None) -> None:
    weights, draw = random_weights(spec), np.random.default_rng(3)
    x = draw.standard_normal((2, 9, 16)).astype(np.float32)
    mask = None if shape is None else draw.random(shape) < 0.7
    model = to_onnx(spec, weights, chunk_size=4, mask=mask is not None)
    y = run(model, x=x) if mask is None else run(model, x=x, mask=mask)
    np.testing.assert_allclose(y, attention_block(x, weights, spec, mask=mask), atol=2e-5)


@pytest.mark.parametrize(("length", "looped"), [(1, False), (3, False), (4, True)])
def test_a_loop_only_where_there_are_more_queries(length: int, looped: bool, tmp_path: Path) -> None:
    spec, options, weights = made("cache, grouped, no bias")
    model = to_onnx(spec, weights, chunk_size=3, **options)
    session = opened(model, enable_profiling=True, profile_file_prefix=str(tmp_path / "profile"))
    past = np.ones((1, 2, 2, 2), np.float32)
    session.run(None, {"x": np.ones((1, length, 8), np.float32), "past_key": past, "past_value": past})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event["args"]["op_name"] for event in events if event["cat"] == "Node"]
    assert "If" in ran
    # One loop over the two key heads, and one over the chunks in each of its turns.
    assert (ran.count("Loop"), "Attention" in ran) == (3 if looped else 0, not looped)


def test_memory() -> None:
    """All at once, one tensor of logits has 2 * 4096 * 4096 * 4 = 128 MiB."""
    spec, x = BlockSpec(16, 2, Span.causal(4096), causal=True), np.ones((1, 4096, 16), np.float32)
    found: list[Any] = []
    for chunk_size in ("auto", None):
        session = opened(to_onnx(spec, random_weights(spec), chunk_size=chunk_size))
        found.append(grown(partial(session.run, None, {"x": x})))
    if None in found:
        pytest.skip("only Linux counts the peak of one call")
    assert found[0] < 64 * 2**20 < 128 * 2**20 < found[1]


def test_chunks_are_chosen_for_long_inputs() -> None:
    """Where an input may have more than 256 queries, in the profile whose short inputs go without a loop."""

    def chunks(spec: BlockSpec, **options: Any) -> bool:
        graph = to_onnx(spec, random_weights(spec), **options).graph
        assert {node.op_type for node in graph.node}.isdisjoint({"Loop"})
        return any(node.op_type == "If" for node in graph.node)

    long, clip = BlockSpec(4, 2, Span.causal(257), causal=True), BlockSpec(4, 2, Span.clipped(3))
    assert all(map(chunks, (long, clip, BlockSpec(4, 2, Span.causal(256), causal=True, cross=True))))
    assert chunks(long, device="cpu")
    assert chunks(clip, device="cuda", chunk_size=4)
    short = BlockSpec(4, 2, Span.causal(256), causal=True), BlockSpec(4, 2, Span.full(256))
    assert not any(map(chunks, (*short, BlockSpec(4, 2, Span.causal(600), causal=True, block_size=300))))
    few: list[dict[str, Any]] = [{"max_length": 256}, {"chunk_size": None}, {"profile": "portable"}]
    assert not any(chunks(clip, **options) for options in few)
    assert not any(chunks(long, **options) for options in ({"device": "cuda"}, {"past": True}))


# Where tables, windows, blocks and `max_length` end a graph: it is right, or fails and says which table ends

LENGTHS = range(1, 6)

REACHING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {}),
    "causal, portable": ({"causal": True}, {"profile": "portable"}),
    "full": ({}, {}),
    "cross, in chunks": ({"cross": True}, {"chunk_size": 2}),
    "blocks": ({"causal": True, "block_size": 2}, {}),
}


@pytest.mark.parametrize("beyond", ["clip", "zero", "error"])
@pytest.mark.parametrize("form", REACHING)
def test_a_graph_is_right_or_fails_past_its_table(form: Any, beyond: Any) -> None:
    block, export = REACHING[form]
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 1, max(LENGTHS), 2)).astype(np.float32) for _ in "qkv")
    cross, ran = block.get("cross", False), 0
    for reach, window, longest in itertools.product((0, 2), (None, 1, 3), (None, 1, 3, 4)):
        left, right = reach, 0 if block.get("causal") else reach
        spec = BlockSpec(2, 1, Span(left, right, beyond), window=(window, None), **block)
        table = random.standard_normal((1, spec.span.rows, 2)).astype(np.float32)
        try:
            model = to_onnx(spec, {"rel_k": table}, projections=False, max_length=longest, **export)
        except ValueError:  # more rows than the table has
            assert beyond == "error"
            assert longest is not None
            assert longest > reach + 1
            continue
        run = opened(model, **NOTHING_OPTIMISED).run
        for n in LENGTHS:
            m = 3 if cross else n
            given: dict[str, Any] = {"q": q[:, :, :n], "k": k[:, :, :m], "v": v[:, :, :m]}
            try:
                (out,) = list[Any](run(None, given))
            except Exception:
                # A covered or extended table must run up to max_length.
                assert max(n, m) > (longest or n) or beyond == "error", (reach, window, longest, n)
                continue
            if not np.isfinite(out).all():
                continue
            how: dict[str, Any] = {name: getattr(spec, name) for name in ("causal", "window", "block_size")}
            right_out = relative_attention(given["q"], given["k"], given["v"], table, spec.span, offset=0, **how)
            np.testing.assert_allclose(out, right_out, atol=1e-5, err_msg=str((reach, window, longest, n)))
            ran += 1
    assert ran > 20


@pytest.mark.parametrize("profile", ["ort", "portable"])
@pytest.mark.parametrize("window", [(2**70, 2**31), (2**70, 1), (2, 2**70)], ids=str)
def test_a_window_longer_than_any_length_is_none(window: tuple[int, int], profile: Any) -> None:
    spec = BlockSpec(8, 2, Span.clipped(2), window=window)
    weights, x = init_weights(spec, seed=0), np.random.default_rng(0).standard_normal((2, 7, 8)).astype(np.float32)
    found = opened(to_onnx(spec, weights, profile=profile), **NOTHING_OPTIMISED).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, np.asarray(attention_block(x, weights, spec)), atol=1e-5)


ENDING = BlockSpec(8, 2, Span.causal(6), causal=True)
NAMED: dict[str, tuple[BlockSpec, dict[str, Any], str]] = {
    "ort": (ENDING, {}, "skew/rows/rel_k_reaches_5_back"),
    "portable": (ENDING, {"profile": "portable"}, "skew/rows/rel_k_reaches_5_back"),
    "max_length": (ENDING, {"max_length": 4}, "skew/rows/rel_k_reaches_3_back"),
    "chunks": (ENDING, {"chunk_size": 2}, "guard/keys_both/rel_k_reaches_5_back"),
    "full": (BlockSpec(8, 2, Span.full(6)), {}, "skew/rows/rel_k_reaches_5_back_and_5_ahead"),
    "ahead alone": (BlockSpec(8, 2, Span(2, 5), window=(2, None)), {}, "skew/rows/rel_k_reaches_5_ahead"),
    "a bias": (BlockSpec(8, 2, Span.full(6), rel_keys=False, rel_bias=True), {}, "rel_bias_reaches_5_back_and_5_ahead"),
    "values": (BlockSpec(8, 2, Span.full(6), rel_keys=False, rel_values=True), {}, "rel_v_reaches_5_back_and_5_ahead"),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_node_that_fails_names_the_table(name: str) -> None:
    spec, options, told = NAMED[name]
    session, x = opened(exported(spec, **options)[0]), np.ones((1, 7, 8), np.float32)
    assert session.run(None, {"x": x[:, : options.get("max_length", 6)]})[0].size
    with pytest.raises(Exception, match=f"{told}'"):
        session.run(None, {"x": x})


def test_behind_a_past_a_table_shorter_than_blocks_ends_the_graph() -> None:
    """At the beginning of a block, too, where attention sees itself alone: loudly, and not before."""
    spec = BlockSpec(8, 2, Span(0, 1), block_size=2, blocks_before=0)
    model, _, weights = exported(spec, past=True)
    session = opened(model)
    x, none, two = np.ones((1, 1, 8), np.float32), np.zeros((1, 2, 0, 4), np.float32), np.ones((1, 2, 2, 4), np.float32)
    y, _ = attention_block(x, weights, spec, past=(none, none))
    found = session.run(None, {"x": x, "past_key": none, "past_value": none})[0]
    np.testing.assert_allclose(found, y, rtol=0, atol=1e-6)
    y, _ = attention_block(x, weights, spec, past=(two, two))
    assert np.all(np.isfinite(y))
    with pytest.raises(Exception, match="rel_k_reaches_0_back"):
        session.run(None, {"x": x, "past_key": two, "past_value": two})


def test_a_table_without_an_end_names_none() -> None:
    for spec in (BlockSpec(8, 2, Span.clipped(3)), BlockSpec(8, 2, Span.causal(4), causal=True, window=(3, None))):
        model, *_ = exported(spec)
        assert not any("reaches" in node.name for node in model.graph.node)


BLOCKS = {1: BlockSpec(8, 2, Span.causal(16), causal=True, block_size=8),
          2: BlockSpec(8, 2, Span(23, 7), block_size=8, blocks_before=2)}  # fmt: skip


@pytest.mark.parametrize("before", BLOCKS)
@pytest.mark.parametrize(("length", "blocks", "size"), [(1, 1, 1), (5, 1, 5), (8, 1, 8), (9, 2, 8), (24, 3, 8)])
def test_an_input_shorter_than_a_block_costs_what_it_is_long(before: int, length: int, blocks: int, size: int) -> None:
    model, *_ = exported(BLOCKS[before])
    names = [f"relskew/compute/blocks/{name}" for name in ("queries", "keys_values_folded")]
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    queries, keys = list[Any](opened(model).run(names, {"x": np.ones((2, length, 8), np.float32)}))
    assert queries.shape == (2 * blocks, size, 8)
    assert keys.shape == (2 * blocks, (1 + before) * size, 16)


# Graphs in onnxruntime on CUDA: the numbers, and that every node on data runs there

ON_CUDA = ["full", "full, grouped", "causal", "cache, mask", "cross", "clip, values", "bias alone", "core: causal"]
CUDA: list[tuple[str, dict[str, Any]]] = [
    *((form, {"profile": profile, "dtype": dtype}) for form in ON_CUDA
      for profile in PROFILES for dtype in ("float32", "float16", "bfloat16")),
    ("causal", {"chunk_size": 3}), ("causal", {"past": True, "in_place": True}),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif("CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="without CUDA here")
@pytest.mark.parametrize(("form", "options"), CUDA, ids=str)
def test_validate_passes_on_cuda(form: str, options: dict[str, Any]) -> None:  # pragma: gpu only
    report = valid(*exported(form, **options), providers=["cuda"], batches=(2,))
    assert any("use_tf32=0" in check.detail for check in report.checks if check.name == "placement")

"""The translation of torch's operator, call by call: numbers, shapes, and the graphs to the letter."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
import torch_calls
from relskew_core import Span
from relskew_core._kernel.call import KINDS, LABELS, Arguments, Operands, Options, Part, unsupported
from relskew_core._kernel.problem import problem
from relskew_core._positions.visibility import Visibility
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.operator import flat
from relskew_core.export import torch_translation_table
from relskew_core.export._nodes.emitter import Value
from relskew_core.export._translate.call import TracedCall
from relskew_core.export._translate.emitter import TracedEmitter
from relskew_core.export._translate.translation import SUPPORTED
from traced_calls import CASES, FOLDER, WRITTEN, Case, Drawn, Operators, Traced, exporting, written

ATTENTION = OPERATOR.op._opoverload
SINGLE, HALF, DOUBLE = map(np.dtype, ("float32", "float16", "float64"))
PAST = CASES["past"]


@pytest.mark.parametrize("name", WRITTEN)
def test_graph(name: str) -> None:
    """``tests/support/traced_calls.py`` writes them anew; what changed is to be read."""
    assert written(name) == (FOLDER / f"{name}.txt").read_text()


def test_no_other_graph_is_there() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*WRITTEN}


@pytest.mark.parametrize(("opset", "dtype"), [(18, SINGLE), (23, SINGLE), (23, HALF), (24, DOUBLE)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_translated_calls_have_the_numbers_and_shapes_of_the_call(name: str, opset: int, dtype: np.dtype[Any]) -> None:
    """For every size from one translation, or of fixed sizes in double precision; all recorded shapes are right."""
    case, gate = CASES[name], {SINGLE: 5e-6, HALF: 1e-2, DOUBLE: 1e-12}[dtype]
    with exporting(opset) as translate:
        traced = translate(case, dtype, fixed=dtype == DOUBLE)
        run = traced.session(everything=dtype != DOUBLE)
        for sizes in case.sizes if dtype == SINGLE else case.sizes[:1]:
            *made, out, lse = run(case.feeds(sizes, dtype))
            check_numbers((out, lse), case.promised(sizes, SINGLE if dtype == HALF else dtype), gate)
            if dtype != DOUBLE:
                check_shapes(traced, made)
        assert (out.dtype, lse.dtype) == (dtype, SINGLE if dtype == HALF and lse.size else dtype)
        for node in traced.graph if dtype == HALF else ():
            if node.op_type == "Attention":
                assert node.attributes.get_int("softmax_precision") == onnx.TensorProto.FLOAT
                assert len(node.outputs) == 1  # other outputs would be computed in vain


def check_numbers(results: Any, promised: Any, gate: float) -> None:
    for result, right in zip(results, promised, strict=True):
        assert result.shape == right.shape
        np.testing.assert_allclose(result, right, rtol=gate, atol=gate)


def check_shapes(traced: Traced, made: list[np.ndarray[Any, Any]]) -> None:
    """Compare recorded shapes with actual ones, and shapes of equal names with each other."""
    known: dict[tuple[bool, str], int] = {}
    for x, (_, value) in zip(made, traced.computed, strict=True):
        assert x.dtype == value.dtype, value
        for size, told in zip(x.shape, value.shape, strict=True):
            turned = value.name.partition("/attention_1/")[2].startswith("keys/")  # queries and keys exchanged
            assert size == (told if isinstance(told, int) else known.setdefault((turned, told), size)), value


@settings(max_examples=50, deadline=None)
@given(strategies.rich_calls(), st.sampled_from([18, 23]), st.sampled_from([SINGLE, DOUBLE]), *[st.booleans()] * 2)
def test_random_calls_have_the_numbers_of_the_call(call: Any, opset: int, dtype: Any, fixed: bool, asks: bool) -> None:
    arguments = {name: x for name, x in {**call.arrays, **call.options}.items() if name not in ("dropout", "seed")}
    case, sizes = Drawn(arguments, fixed=fixed, asks=asks), (0, 0, 0)
    with exporting(opset) as translate:
        traced = translate(case, dtype)
        *made, out, lse = traced.session(everything=True)(case.feeds(sizes, dtype))
        check_shapes(traced, made)
        check_numbers((out, lse), case.promised(sizes, dtype), 1e-4 if dtype == SINGLE else 1e-11)


@pytest.mark.parametrize("left_out", ["", "rel_v"])
@pytest.mark.parametrize("opset", [18, 23])
def test_positions_past_a_table_give_nan_to_pairs_that_are_seen(opset: int, left_out: str) -> None:
    call, sizes = CASES["placed: a short table"].call, (2, 7, 9)
    case = Case({name: x for name, x in call.items() if name != left_out})
    placed = {
        "positions": lambda *sizes: [np.arange(x) * 5 % 8 for x in sizes[1:]],
        "segments": lambda batch, *sizes: [np.arange(batch * x).reshape(batch, x) % 4 for x in sizes],
    }
    reaching = Case({**case.call, **placed, "span": Span(2, 1, "zero")})
    with exporting(opset) as translate:
        feeds = reaching.feeds(sizes, SINGLE)
        out, _ = translate(case).session(everything=False)(feeds)
        queries, keys = (np.broadcast_to(feeds[f"{side}_positions"], (2, n)) for side, n in (("q", 7), ("k", 9)))
        own = feeds["q_segments"][:, :, None] == feeds["k_segments"][:, None, :]
        far = queries[:, :, None] - keys[:, None, :] > 2
        short = (own & far).any(axis=2)
        assert short.any()
        assert (far.any(axis=2) & ~short).any()
        expected = np.where(short[:, None, :, None], np.nan, reaching.promised(sizes, SINGLE)[0])
        np.testing.assert_allclose(out, expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("opset", [18, 23])
def test_tables_that_are_too_short_give_nan(opset: int) -> None:
    """What torch knew of the lengths ONNX has forgotten."""
    case = Case({**CASES["fitted"].call, "causal": True}, fitted=True)
    short = Case({"rel_k": np.ones((4, 4, 6), np.float32), "span": Span(2, 1, "zero"), "causal": True}, fitted=True)
    sizes = (2, 7, 9)
    with exporting(opset) as translate:
        out, _ = translate(case).session(everything=False)(short.feeds(sizes, SINGLE))
        expected = short.promised(sizes, SINGLE)[0]
        expected[:, :, 3:] = np.nan
        np.testing.assert_allclose(out, expected, rtol=5e-6, atol=5e-6)


def tensor(name: str, *shape: Any) -> Any:
    return ir.val(name, ir.DataType.FLOAT, shape)


def operators() -> Any:
    Operators.graph = ir.Graph([], [], nodes=[], opset_imports={"": 23})
    return Operators("", 23)


def call_of(operands: Operands, offset: Any, op: Any = None) -> TracedCall:
    return TracedCall(TracedEmitter(op or operators(), SINGLE, "attention"), operands, offset)


@pytest.mark.parametrize(("queries", "keys", "offset", "aligned"), [
    ("n", "n", 0, True), ("n", "m", 0, False), ("n", "n + 2", 2, True), ("n", "n + 2", 1, False), (5, 5, 0, True),
    (5, 7, 2, True), (5, 7, 0, False), (5, 7, 3, False), ("n", 7, 2, False), (5, "m", 2, False),
    (None, None, 0, False), ("n", None, 0, False), (None, "n", 0, False), ("n", "n", None, False),
])  # fmt: skip
def test_lengths_are_aligned_only_where_symbols_say_so(queries: Any, keys: Any, offset: Any, aligned: bool) -> None:
    """``None``: nothing, not even a name, or an offset that is an input."""
    for leading in ((), (2,), (2, 3)):
        q, k, v = (tensor(name, *leading, 4, n, 6) for name, n in (("q", queries), ("k", keys), ("v", keys)))
        call = call_of(Operands(q, k, v), ir.val("offset", ir.DataType.INT64, ()) if offset is None else offset)
        assert (call.aligned, call.square) == (aligned, aligned and offset == 0)


CACHE, FIRST = tensor("cache", 2, 4, "past", 6), tensor("first", "past", 1)
LENGTHS: dict[str, Callable[[Any], Any]] = {
    "of an axis": lambda op: op.Squeeze(op.Shape(CACHE, start=2, end=3)),
    "of the first axis": lambda op: op.Squeeze(op.Shape(FIRST, end=1)),
    "through all that changes no number": lambda op: op.Cast(
        op.Identity(op.Reshape(op.Shape(CACHE, start=2, end=3), FIRST)), to=7
    ),
}
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "of another axis": lambda op: op.Squeeze(op.Shape(CACHE, start=1, end=2)),
    "of two axes": lambda op: op.Squeeze(op.Shape(CACHE, start=2, end=4)),
    "of all axes from one on": lambda op: op.Squeeze(op.Shape(CACHE, start=2)),
    "computed": lambda op: op.Neg(op.Neg(op.Squeeze(op.Shape(CACHE, start=2, end=3)))),
}


@pytest.mark.parametrize("name", [*LENGTHS, *NUMBERS])
def test_an_offset_is_known_as_a_length_or_not(name: str) -> None:
    q, k, v = (tensor(name, 2, 4, n, 6) for name, n in (("q", "n"), ("k", "past + n"), ("v", "past + n")))
    op = operators()
    call = call_of(Operands(q, k, v), (LENGTHS | NUMBERS)[name](op), op)
    assert call.aligned == (name in LENGTHS)
    assert not call.square


def test_the_default_opset_makes_one_node_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(onnxscript.values, "Opset", lambda *names: asked.append(names))
    torch_translation_table()
    assert asked == [("", 23)]


def test_an_input_that_is_left_out_is_none() -> None:
    g = TracedEmitter(operators(), SINGLE, "attention")
    x = g.adopt(tensor("x", 2), "x", (2,))
    g.node("Clip", [x, None, g.constant(1.0, SINGLE)], "clipped", [Value("y", (2,), SINGLE)])
    node = Operators.graph[-1]
    assert (node.op_type, node.inputs[0].name, node.inputs[1]) == ("Clip", "x", None)


def test_calls_of_a_graph_are_counted() -> None:
    with exporting(18) as translate:
        first = translate(PAST)
        second, other = translate(PAST, behind=first), translate(PAST)
    for traced, start in ((first, "attention_1"), (second, "attention_2"), (other, "attention_1")):
        names = [value.name for _, value in traced.values if value.name.startswith("relskew/compute/")]
        assert {name.split("/")[2] for name in names} == {start}


@pytest.mark.parametrize(("sizes", "changes", "words"), [
    ({"q": (2, 4, 5, 6)}, {"dropout": 0.5}, "`dropout` belongs to training: call `model.eval()` before the export"),
    ({"seed": (2, 4, 5, 6)}, {"part": Part(key=1)}, "`seed` and `part` cannot be exported to ONNX"),
    ({"q": (2, "some", 5, 6)}, {}, "`q` must have a fixed number of heads and a fixed width "),
    ({"k": (2, 4, 5, "some")}, {}, "`k` must have a fixed number of heads and a fixed width "),
], ids=["dropout", "others", "heads", "width"])  # fmt: skip
def test_what_no_graph_has_is_refused(sizes: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    sizes = {**dict.fromkeys("qkv", (2, 4, 5, 6)), **sizes}
    operands = Operands(**{name: tensor(name, *x) for name, x in sizes.items()})
    graph = ir.Graph([x for x in operands if x is not None], [], nodes=[], opset_imports={"": 23})
    _, options = CASES["clip, values" if changes else "nothing"].operands((2, 5, 5), SINGLE)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - all of its words are held to
        torch_translation_table()[ATTENTION](*operands, *flat(replace(options, **changes)))
    told = str(caught.value)
    assert told == words if changes else told.startswith(words) and "'some'" in told
    assert len(graph) == 0


@pytest.mark.parametrize("more", [{"block_size": 2, "causal": True}, {"offset": -1}], ids=str)
def test_tables_of_dynamic_lengths_that_are_refused(more: dict[str, Any]) -> None:
    case = Case({**CASES["fitted: clip"].call, **more}, fitted=True)
    with exporting(23) as translate, pytest.raises(ValueError, match="`span` must be of numbers to be exported"):
        translate(case)


def test_an_opset_out_of_range_is_refused() -> None:
    assert ATTENTION in torch_translation_table()
    for opset in (17, 25):
        with pytest.raises(ValueError, match=f"`opset` must be 18 … 24, got {opset}"):
            torch_translation_table(opset)
    with pytest.raises(TypeError, match="`opset` must be an int"):
        torch_translation_table(18.0)  # type: ignore[arg-type]


REFUSED = {"seed", "dropout", "part", "axis_tables", "sides"}
"""Fields of a call that no graph has: of training, of a call that is split over processes, and of grids in kernels."""


def defaults_of(kind: Any) -> list[str]:
    fields, missing = dataclasses.fields(kind), dataclasses.MISSING
    return [x.name for x in fields if x.default is not missing or x.default_factory is not missing]


def test_every_field_of_a_call_is_tried_in_graphs_or_refused() -> None:
    q, k, v = torch.zeros(2, 4, 5, 6), torch.zeros(2, 2, 7, 6), torch.zeros(2, 2, 7, 5)
    labels = {f"{name}s": (torch.zeros(2, 5).long(), torch.zeros(2, 7).long()) for name in ("position", "segment")}
    groups: list[tuple[tuple[Any, ...], dict[str, Any], dict[str, dict[str, Any]]]] = [
        ((q, k, v), {"mask": torch.ones(2, 1, 5, 7).bool()}, torch_calls.CROSS),
        ((q, q[:, :2], q[:, :2]), {}, torch_calls.ALONG),
        ((q, k, v), labels, torch_calls.PLACED),
    ]
    tried = {"rel_q"}  # of which `CASES` has its own
    for arrays, more, calls in groups:
        for call in calls.values():
            options = call | more
            asks = options.pop("return_lse", False)
            offset = {} if "positions" in options else {"offset": 0}  # lengths differ
            checked = problem(Arguments(*arrays, **{**offset, **options}), return_lse=asks)
            tried.update(unsupported(checked.given, checked.options, frozenset()))
    fields = {name.partition("_")[2] if name in LABELS else name for name in KINDS}
    fields.update(name for kind in (Options, Span, Visibility) for name in defaults_of(kind))
    fields.remove("by_value")
    assert fields - tried == REFUSED
    assert not REFUSED & SUPPORTED

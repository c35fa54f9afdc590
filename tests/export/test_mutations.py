"""`validate` must notice a wrong graph in every form: the core, biases, caches in place, chunks, functions."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from export_forms import IN_PLACE, made
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import to_onnx, validate

FORMS: dict[str, dict[str, Any]] = {
    "cache": {}, "cache, mask": {"dtype": "float16"}, "core: causal": {}, "core: cross": {}, "bias, full, grouped": {},
    "bias alone, cache": {}, "in place: cache": {}, "in place: cache, zero, values, mask": {},
    "causal, values": {"chunk_size": 3}, "causal": {"operator": True},
    "full, grouped": {"profile": "portable", "operator": True}, "causal, window": {"chunk_size": 5},
}  # fmt: skip
SCOPES = {"causal, values": "long/", "causal, window": "short/"}
"""Which branch of a graph with chunks is changed."""


def graphs(model: onnx.ModelProto) -> Iterator[Any]:
    """The graph and the functions of a model, and all that is nested in them."""

    def nested(graph: Any) -> Iterator[Any]:
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    yield from nested(attribute.g)

    for graph in (model.graph, *model.functions):
        yield from nested(graph)


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    return (node for graph in graphs(model) for node in graph.node)


def failures(form: Any, mutate: Callable[[onnx.ModelProto], None]) -> set[str]:
    """Validate a form as it is, which must pass, and then changed."""
    spec, own, weights = made(form)
    chunks = {} if form in IN_PLACE else {"chunk_size": None}
    model = to_onnx(spec, weights, **own, **chunks | FORMS.get(form, {}))
    assert validate(model, spec, weights, batches=(2,), lengths=[2, 6]).ok
    mutate(model)
    return {check.name for check in validate(model, spec, weights, batches=(2,), lengths=[2, 6]).failures}


def change(model: onnx.ModelProto, key: str, how: Callable[[Any], Any]) -> None:
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == key)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(how(array)).astype(array.dtype), key))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["one percent", "flipped", "shifted"])
def test_a_changed_table_is_noticed(form: Any, how: str) -> None:
    for key in [key for key in made(form)[2] if key.startswith("rel_")]:

        def mutate(model: onnx.ModelProto, key: str = key) -> None:
            (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == key)
            sizes = list(tensor.dims)
            # Positions are on the longest axis, unless a table has fewer rows than columns.
            axis = len(sizes) - 1 if key == "rel_bias" or sizes[-1] > sizes[-2] else len(sizes) - 2
            changes: dict[str, Callable[[Any], Any]] = {
                "one percent": lambda table: table * 1.01,
                "flipped": lambda table: np.flip(table, axis),
                "shifted": lambda table: np.roll(table, 1, axis),
            }
            change(model, key, changes[how])

        found = failures(form, mutate)
        assert "weights" in found
        assert found & {"y", "out"}, key


@pytest.mark.parametrize("form", FORMS)
def test_a_skew_off_by_one_is_noticed(form: Any) -> None:
    """Drop one entry too few in front and one more behind, so that every shape stays right."""
    start = f"relskew/compute/{SCOPES.get(form, '')}skew/rows"

    def mutate(model: onnx.ModelProto) -> None:
        (shifted,) = (node for node in nodes(model) if node.name.startswith(start))
        (owner,) = (graph for graph in graphs(model) if any(node.name == shifted.name for node in graph.node))
        place = [node.name for node in owner.node].index(shifted.name)
        kept = shifted.output[0]
        owner.node[place].output[0] = "rolled/whole"
        numbers = {"flat": [0, 0, -1], "first": [0], "second": [1], "end": [2**62], "axis": [2]}
        made = [
            onnx.helper.make_node("Constant", [], [f"rolled/{name}"], value_ints=value)
            for name, value in numbers.items()
        ]
        cut = [f"rolled/{name}" for name in ("second", "end", "axis")]
        made.append(onnx.helper.make_node("Shape", ["rolled/whole"], ["rolled/shape"]))
        made.append(onnx.helper.make_node("Reshape", ["rolled/whole", "rolled/flat"], ["rolled/entries"]))
        made.append(onnx.helper.make_node("Slice", ["rolled/entries", *cut], ["rolled/rest"]))
        cut = [f"rolled/{name}" for name in ("first", "second", "axis")]
        made.append(onnx.helper.make_node("Slice", ["rolled/entries", *cut], ["rolled/one"]))
        made.append(onnx.helper.make_node("Concat", ["rolled/rest", "rolled/one"], ["rolled/all"], axis=2))
        made.append(onnx.helper.make_node("Reshape", ["rolled/all", "rolled/shape"], [kept]))
        for index, node in enumerate(made):
            owner.node.insert(place + 1 + index, node)

    assert failures(form, mutate) & {"y", "out"}


@pytest.mark.parametrize("form", ["core: causal", "bias alone, cache", "causal", "causal, window"])
def test_a_lost_causal_attribute_is_noticed(form: Any) -> None:
    def mutate(model: onnx.ModelProto) -> None:
        (attention,) = (node for node in nodes(model) if node.op_type == "Attention")
        (causal,) = (attribute for attribute in attention.attribute if attribute.name == "is_causal")
        assert causal.i == 1
        causal.i = 0

    assert failures(form, mutate) & {"y", "out"}


@pytest.mark.parametrize("form", ["in place: cache", "in place: cache, zero, values, mask"])
def test_a_visible_future_is_noticed(form: Any) -> None:
    def mutate(model: onnx.ModelProto) -> None:
        (buffer,) = (node for node in nodes(model) if node.name == "relskew/compute/relative/buffer")
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "nothing"))
        buffer.input[0] = "nothing"

    assert "y" in failures(form, mutate)


@pytest.mark.parametrize("form", ["causal, values"])
def test_a_lost_causal_condition_is_noticed(form: Any) -> None:
    def mutate(model: onnx.ModelProto) -> None:
        name = f"relskew/compute/{SCOPES.get(form, '')}visible/causal"
        (causal,) = (node for node in nodes(model) if node.name == name)
        causal.op_type, causal.input[1] = "Equal", causal.input[0]  # true for every key

    assert failures(form, mutate) & {"y", "out"}


@pytest.mark.parametrize("form", ["core: causal", "core: cross"])
def test_a_wrong_scale_of_the_core_is_noticed(form: Any) -> None:
    def mutate(model: onnx.ModelProto) -> None:
        (scaled,) = (node for node in nodes(model) if node.name == "relskew/compute/q/scaled")
        change(model, scaled.input[1], lambda scale: scale * 1.1)

    assert "out" in failures(form, mutate)


@pytest.mark.parametrize("form", ["sinks", "sinks, stream", "in place: sinks, cache, mask"])
def test_sinks_of_other_heads_are_noticed(form: Any) -> None:
    found = failures(form, lambda model: change(model, "sinks", lambda sinks: np.roll(sinks, 1, axis=0)))
    assert {"weights", "y"} <= found


@pytest.mark.parametrize("form", ["segments", "segments, cache", "segments, stream", "in place: segments, cache"])
def test_lost_segments_are_noticed(form: Any) -> None:
    def mutate(model: onnx.ModelProto) -> None:
        (same,) = (node for node in nodes(model) if node.name == "relskew/compute/visible/segment")
        same.op_type = "GreaterOrEqual"

    assert "y" in failures(form, mutate)


@pytest.mark.parametrize("profile", ["ort", "portable"])
def test_a_wrong_band_past_a_clip_is_noticed(profile: Any) -> None:
    """Some positions far past the table do not have the logits of its edge: only an input that is long has them."""
    spec = BlockSpec(8, 2, Span.clipped(3))
    weights = init_weights(spec, seed=0)
    model = to_onnx(spec, weights, profile=profile, chunk_size=None)
    assert validate(model, spec, weights, batches=(2,)).ok
    (extended,) = (node for node in nodes(model) if node.name == "relskew/compute/relative/extended")
    whole, extended.output[0] = extended.output[0], "band/of"
    numbers = {"zero": 0, "one": 1, "two": 2, "last": -1, "far": -120, "near": -110}
    made = [onnx.helper.make_node("Constant", [], [f"band/{name}"], value_int=n) for name, n in numbers.items()]
    steps = [
        ("Shape", ["of"], "shape"), ("Gather", ["shape", "last"], "columns"), ("Div", ["columns", "two"], "queries"),
        ("Range", ["zero", "columns", "one"], "places"), ("Sub", ["places", "queries"], "r"),
        ("GreaterOrEqual", ["r", "far"], "after"), ("LessOrEqual", ["r", "near"], "before"),
        ("And", ["after", "before"], "within"), ("CastLike", ["within", "of"], "added"),
    ]  # fmt: skip
    made += [onnx.helper.make_node(op, [f"band/{x}" for x in given], [f"band/{y}"]) for op, given, y in steps]
    made.append(onnx.helper.make_node("Add", ["band/of", "band/added"], [whole]))
    place = [node.name for node in model.graph.node].index(extended.name)
    for index, node in enumerate(made):
        model.graph.node.insert(place + 1 + index, node)
    assert "y" in {check.name for check in validate(model, spec, weights, batches=(2,)).failures}


RANGES: dict[str, tuple[BlockSpec, dict[str, Any], list[tuple[str, int, int]]]] = {
    "past a clip": (BlockSpec(8, 2, Span.clipped(6)), {}, [("x", 36, 60), ("x", 4, 6), ("x", 150, 230)]),
    "between chunks": (BlockSpec(8, 2, Span.clipped(6)), {"chunk_size": 100}, [("x", 130, 195), ("x", 20, 30)]),
    "of a long table": (BlockSpec(8, 2, Span.causal(400), causal=True), {}, [("x", 45, 70), ("x", 200, 300)]),
    "of a past": (BlockSpec(8, 2, Span.causal(6, beyond="clip"), causal=True), {"past": True},
                  [("past_key", 36, 60), ("past_key", 120, 190), ("x", 36, 60)]),
    "of a memory": (BlockSpec(8, 2, Span.clipped(6), cross=True), {}, [("x", 36, 60), ("memory", 36, 60)]),
}  # fmt: skip
"""Inputs with a length in one range, the first and the last, are wrong."""


@pytest.mark.parametrize("kind", RANGES)
def test_wrong_results_in_a_range_of_lengths_are_noticed(kind: str) -> None:
    """No edge of the table or of a chunk is in the range."""
    spec, options, ranges = RANGES[kind]
    weights = init_weights(spec, seed=0)
    for name, first, last in ranges:
        model = to_onnx(spec, weights, **options)
        result = model.graph.output[0].name
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = ["right" if name == result else name for name in names]
        axis = 2 if name == "past_key" else 1
        numbers = {"first": first, "last": last}
        made = [onnx.helper.make_node("Constant", [], [f"range/{key}"], value_ints=[n]) for key, n in numbers.items()]
        made.append(onnx.helper.make_node("Shape", [name], ["range/length"], start=axis, end=axis + 1))
        steps = [
            ("GreaterOrEqual", ["range/length", "range/first"], "range/from"),
            ("LessOrEqual", ["range/length", "range/last"], "range/to"),
            ("And", ["range/from", "range/to"], "range/in"),
            ("CastLike", ["range/in", "right"], "range/added"), ("Add", ["right", "range/added"], result),
        ]  # fmt: skip
        model.graph.node.extend([*made, *(onnx.helper.make_node(op, given, [y]) for op, given, y in steps)])
        report = validate(model, spec, weights, runtimes=["reference"])
        assert "y" in {check.name for check in report.failures}, (name, first, last)


def test_a_lost_block_is_noticed() -> None:
    """A stream whose blocks see one block too few."""

    def mutate(model: onnx.ModelProto) -> None:
        (exists,) = (node for node in nodes(model) if node.name == "relskew/compute/visible/exists")
        exists.op_type = "Greater"

    assert "y" in failures("stream", mutate)


def test_a_wrong_scale_of_attention_is_noticed() -> None:
    """In either branch, where the whole cache or its filled part is read."""
    for form, count in (("in place: cache", 2), ("bias, full, grouped", 1), ("causal", 1)):
        for place in range(count):

            def mutate(model: onnx.ModelProto, place: int = place, count: int = count) -> None:
                found = [node for node in nodes(model) if node.op_type == "Attention"]
                assert len(found) == count
                next(attribute for attribute in found[place].attribute if attribute.name == "scale").f = 1.1

            assert "y" in failures(form, mutate)

"""`validate` must notice a wrong graph in every form: the core, biases, caches in place, chunks, functions."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import IN_PLACE, change, made
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
    model = to_onnx(spec, weights, **own, **({} if form in IN_PLACE else {"chunk_size": None}) | FORMS.get(form, {}))
    assert not wrong(form, model)
    return model.SerializeToString()


def wrong(form: str, model: onnx.ModelProto) -> set[str]:
    spec, _, weights = made(form)
    return {check.name for check in validate(model, spec, weights, batches=(2,), lengths=[2, 6]).failures}


@pytest.mark.parametrize("form", FORMS)
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
        found = wrong(form, model)
        assert "weights" in found
        assert found & {"y", "out"}, key


@pytest.mark.parametrize("form", FORMS)
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
    assert wrong(form, model) & {"y", "out"}


def attribute(name: str, **values: Any) -> Callable[..., None]:
    """Return a change of a node's attribute."""

    def changed(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        (found,) = (found for found in node.attribute if found.name == name)
        for kind, value in values.items():
            assert getattr(found, kind) != value
            setattr(found, kind, value)

    return changed


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
                                attribute("is_causal", i=0)),
    "a visible future": (["in place: cache", "in place: cache, zero, values, mask"], "relative/buffer", 1, no_buffer),
    "a lost causal condition": (["causal, values"], "long/visible/causal", 1, always),
    "a wrong scale of the core": (["core: causal", "core: cross"], "q/scaled", 1,
                                  lambda model, node: change(model, node.input[1], lambda scale: scale * 1.1)),
    "lost segments": (SEGMENTS, "visible/segment", 1, operator("GreaterOrEqual")),
    "a block too few": (["stream"], "visible/exists", 1, operator("Greater")),
    "a wrong scale": (["bias, full, grouped", "causal"], "Attention", 1, attribute("scale", f=1.1)),
    # of the whole cache and of its filled part
    "a wrong scale of a branch": (["in place: cache"], "Attention", 2, attribute("scale", f=1.1)),
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
        assert wrong(form, model) & {"y", "out"}


@pytest.mark.parametrize("form", ["sinks", "sinks, stream", "in place: sinks, cache, mask"])
def test_sinks_of_other_heads_are_noticed(form: str) -> None:
    model = onnx.ModelProto.FromString(right(form))
    change(model, "sinks", lambda sinks: np.roll(sinks, 1, axis=0))
    assert {"weights", "y"} <= wrong(form, model)


def test_a_past_that_is_the_same_for_all_rows_is_noticed() -> None:
    model = onnx.ModelProto.FromString(right("in place: cache"))
    (scatter,) = (node for node in model.graph.node if node.output[0] == "present_key")
    for node in onnx.parser.parse_graph("g () => () {longest = ReduceMax(past_lengths) rows = Shape(past_lengths) "
                                        "same = Expand(longest, rows)}").node[::-1]:  # fmt: skip
        model.graph.node.insert(0, node)
    scatter.input[2] = "same"
    assert wrong("in place: cache", model) >= {"y", "present_key"}


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

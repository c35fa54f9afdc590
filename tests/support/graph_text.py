"""Models as text, a line for each node.

``PYTHONPATH=. python tests/support/graph_text.py`` writes the files of ``tests/export/graphs``.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from export_forms import FORMS, IN_PLACE, PROFILES
from relskew_core import BlockSpec
from relskew_core.export import caches_in_place, to_onnx
from relskew_core.export._form.plan import GraphPlan, make_plan

FOLDER = Path(__file__).resolve().parents[1] / "export" / "graphs"
CHUNKS, TRT, PORTABLE = {"chunk_size": 3}, *({"profile": name} for name in ("trt", "portable"))
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    re.sub(r"\W+", "-", " ".join([form, *map(str, options.values())])): (form, options)
    for options, forms in (
        ({},
         "causal; values alone, window; cross, clip, short; cross, window; bias, clip, cross, values; "
         "segments, clip, values, mask; core: blocks, clip, values; stream, clip, window; segments, stream; "
         "in place: core: cache, grouped, no bias; in place: shared table, values, bias; alibi; no positions; "
         "in place: bias alone, cache; in place: values alone, mask; in place: cache, mask; "
         "in place: cache, zero, values, mask; in place: segments, cache, mask, sinks"),
        ({"dtype": "float16"}, "full, mask; alibi, window, mask; in place: cache"),
        (PORTABLE | {"dtype": "float16"}, "causal, window"),
        ({"dtype": "float64"}, "full, shared table"),
        (PORTABLE, "full, uneven table; cross, window, mask; stream, none before, values"),
        (TRT, "causal, short; stream, cache, short table; alibi, grouped, cache"),
        (CHUNKS,
         "core: window, mask; core: full, grouped; cross, window, mask; bias alone, cache; "
         "segments, clip, values, mask; sinks, causal, grouped; alibi, grouped, cache"),
        (CHUNKS | TRT, "cache, mask"),
        (CHUNKS | PORTABLE, "cache, window, mask; segments, cache"),
        ({"dtype": "bfloat16"}, "sinks, mask, values"),
        (TRT | {"opset": 24}, "cache, grouped, no bias"),
    )
    for form in forms.split("; ")
}  # fmt: skip
CHANGED = "cache-grouped-no-bias-trt-24"
"""What each file of the folder shows: a form, and how it is exported. Between them they come to every line."""


def model_of(name: str) -> onnx.ModelProto:
    """Export a form that is written down, with weights that no generator of random numbers has a part in."""
    form, options = WRITTEN[name]
    spec, own = (FORMS | IN_PLACE)[form]
    if name == CHANGED:  # its heads have a width of 8
        spec = replace(spec, embed_dim=8 * spec.num_heads, head_dim=8)
    model = to_onnx(spec, _weights(spec, **own), **own, **options)
    return caches_in_place(model, past="past_", present="present_") if name == CHANGED else model


def _weights(spec: BlockSpec, *, projections: bool = True, **others: Any) -> dict[str, np.ndarray[Any, Any]]:
    shapes = spec.weight_shapes(projections=projections)
    return {
        key: (np.arange(int(np.prod(shape)), dtype=np.float32) % 31 / 8 - index).reshape(shape)
        for index, (key, shape) in enumerate(shapes.items())
    }


def plans() -> str:
    """Write what is decided for every form before its first node: which rows are stored where, and what is in use."""
    lines = []
    for name, (spec, own) in (FORMS | IN_PLACE).items():
        profiles = PROFILES if name in FORMS else PROFILES[:1]
        made = {profile: make_plan(spec, np.dtype(np.float32), profile=profile, **own) for profile in profiles}
        lines.append(
            " | ".join([f"{name}: {_rows(made['ort'])}", *(f"{key}{_uses(plan)}" for key, plan in made.items())])
        )
        if "max_length" not in own and not own.get("past"):
            short = make_plan(spec, np.dtype(np.float16), **own, max_length=3)
            lines.append(f"{name}, up to 3: {_rows(short)} | ort{_uses(short)}")
    return "\n".join(lines) + "\n"


def _rows(plan: GraphPlan) -> str:
    (start, stop), added = plan.kept_rows, "".join(f" +{count}" for count in plan.added_rows)
    ends = ", ".join(f"{end.rows} {end.past_edge}" for end in (plan.left, plan.right))
    return f"{ends}; rows {start} to {stop}{added}, {plan.lead} of {plan.columns} is 0{plan.reach}"


def _uses(plan: GraphPlan) -> str:
    kinds = ("local", "fused", "causal_attribute", "dead_rows")
    return "".join(f" {kind}" for kind in kinds if getattr(plan, kind)) + f" {plan.masked_value:g}"


def text(model: onnx.ModelProto) -> str:
    """Write everything that a model holds but for the numbers of its weights, of which there is the digest."""
    return "\n".join(_lines(model)) + "\n"


def _lines(model: onnx.ModelProto) -> Iterator[str]:
    yield f"{model.graph.name}: {_opsets(model)}, IR {model.ir_version}, by {model.producer_name}"
    yield model.graph.doc_string
    yield ""
    for entry in model.metadata_props:
        if entry.key != "relskew.version":
            yield f"{entry.key} = {entry.value}"
    yield ""
    for tensor in model.graph.initializer:
        yield _told(f"{tensor.name}: {_type(tensor.data_type)} {_shape(tensor.dims)}", tensor.doc_string)
    yield ""
    yield from of_graph(model.graph)
    for function in model.functions:
        yield ""
        inputs, outputs = ", ".join(map(_short, function.input)), ", ".join(map(_short, function.output))
        yield _told(f"function {function.domain}.{function.name}({inputs}) → {outputs}", function.doc_string)
        yield f"    {_opsets(function)}"
        types = {value.name: _typed(value) for value in function.value_info}
        for node in function.node:
            yield from _node(node, types, "    ")


def of_graph(graph: onnx.GraphProto, indent: str = "") -> Iterator[str]:
    types = {value.name: _typed(value) for value in (*graph.input, *graph.output)}
    types |= {value.name: _told(_typed(value), value.doc_string) for value in graph.value_info}
    for value in graph.input:
        yield indent + _told(f"input {_short(value.name)}: {types[value.name]}", value.doc_string)
    for node in graph.node:
        yield from _node(node, types, indent)
    for value in graph.output:
        yield indent + _told(f"output {_short(value.name)}: {types[value.name]}", value.doc_string)


def _node(node: onnx.NodeProto, types: dict[str, str], indent: str) -> Iterator[str]:
    plain = {a.name: _plain(helper.get_attribute_value(a)) for a in node.attribute if not a.HasField("g")}
    given = [*map(_short, node.input), *(f"{name}={plain[name]}" for name in sorted(plain))]
    named = "" if list(node.output) == [node.name] else f" as {_short(node.name)}"
    domain = f"{node.domain}." if node.domain else ""
    made = ", ".join(f"{_short(name)}: {types[name]}" if name in types else _short(name) for name in node.output)
    notes = "".join(f" -- {entry.key} = {entry.value}" for entry in node.metadata_props)
    yield f"{indent}{made} = {domain}{node.op_type}({', '.join(given)}){named}{notes}"
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield _told(f"{indent}    {attribute.name} {_short(attribute.g.name)}", attribute.g.doc_string)
            yield from of_graph(attribute.g, indent + "        ")


def _plain(value: Any) -> Any:
    return numpy_helper.to_array(value).tolist() if isinstance(value, onnx.TensorProto) else value


def _told(line: str, doc: str) -> str:
    return f"{line} -- {doc}" if doc else line


def _short(name: str) -> str:
    """Leave out what most names start with: ``@`` is a node on data, ``#`` one on lengths, ``%`` a constant."""
    for start, mark in (("relskew/compute/", "@"), ("relskew/shape/", "#"), ("relskew/constant/", "%")):
        name = name.replace(start, mark)
    return name or "-"


def _type(number: int) -> str:
    return onnx.TensorProto.DataType.Name(number).lower()


def _shape(dims: Any) -> str:
    return f"({', '.join(str(dim) for dim in dims)})"


def _typed(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    shape = _shape(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return f"{_type(tensor.elem_type)} {shape if tensor.HasField('shape') else 'of any shape'}"


def _opsets(owner: onnx.ModelProto | onnx.FunctionProto) -> str:
    return ", ".join(f"{entry.domain or 'onnx'} {entry.version}" for entry in owner.opset_import)


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    write(FOLDER, {name: text(model_of(name)) for name in WRITTEN} | {"plans": plans()})

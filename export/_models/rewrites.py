"""Changes to graphs of torch's exporter: tensors stored once, what onnxruntime rejects, and a memory split off."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from relskew_core.export._nodes.functions import all_graphs, names_read, rename

SMALLEST = 256  # the least bytes of tensors that are compared


def store_once(model: onnx.ModelProto) -> None:
    """Remove tensors that equal others, as they are or transposed; a ``Transpose`` then makes the latter."""
    large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= SMALLEST]
    results = {value.name for value in model.graph.output}
    # Results stay; tensors of the state dict keep their names.
    large.sort(key=lambda tensor: (tensor.name not in results, tensor.name.endswith("/constant")))
    shapes = {(tensor.data_type, tuple(tensor.dims)) for tensor in large}
    kept: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    names: dict[str, str] = {}
    turned: dict[str, onnx.NodeProto] = {}
    for tensor in large:
        kind, shape, content = tensor.data_type, tuple(tensor.dims), _digest(tensor.raw_data)
        same, other = kept.get((kind, shape, content)), None
        if same is None and len(shape) == 2 and (kind, shape[::-1]) in shapes:
            across = _digest(np.ascontiguousarray(numpy_helper.to_array(tensor).T).view(np.uint8).data)
            other = kept.get((kind, shape[::-1], across))
            same = other and f"{other}/transposed"
        if same is None or tensor.name in results:
            kept[kind, shape, content] = tensor.name
            continue
        names[tensor.name] = same
        if other is not None:
            turned[same] = onnx.helper.make_node("Transpose", [other], [same], name=same, perm=[1, 0])
    if not names:
        return
    remaining = [tensor for tensor in model.graph.initializer if tensor.name not in names]
    nodes = [*turned.values(), *model.graph.node]
    rename(nodes, names)
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.initializer.extend(remaining)
    model.graph.node.extend(nodes)


def _digest(content: bytes | memoryview) -> bytes:
    """Return a hash of the content, because keeping all contents would take as much memory as the model."""
    return hashlib.sha256(content).digest()


_EXACT = ("Add", "Sub", "Mul", "Div")
"""Float32 has enough bits that these results, rounded to bfloat16, are the same as those in bfloat16."""


def compute_in_float32(model: Any) -> None:
    """Compute sums and products of bfloat16 in float32, and round the results: Falcon has such in ALiBi's bias."""
    import onnx_ir as ir

    def cast(x: Any, node: Any, dtype: ir.DataType) -> Any:
        return ir.node("Cast", [x], attributes={"to": dtype}, metadata_props=dict(node.metadata_props))

    for node in list(model.graph):
        (result, *_) = node.outputs
        if node.op_type not in _EXACT or node.domain or result.dtype != ir.DataType.BFLOAT16:
            continue
        wide = [cast(x, node, ir.DataType.FLOAT) for x in node.inputs]
        inner = ir.node(node.op_type, [x.outputs[0] for x in wide], metadata_props=dict(node.metadata_props))
        rounded = cast(inner.outputs[0], node, ir.DataType.BFLOAT16)
        made = [*wide, inner, rounded]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], made, [result], rounded.outputs)


def keep_sums(model: Any) -> None:
    """Write sums that a layer norm reads as ``Sum``: onnxruntime's node for ``Add`` and norm takes longer than both."""
    import onnx_ir as ir

    for node in model.graph:
        made = node.inputs[0].producer() if node.op_type == "LayerNormalization" else None
        if made is not None and made.op_type == "Add" and node.outputs[0].dtype == ir.DataType.FLOAT:
            made.op_type = "Sum"


def expand_rotary(model: Any) -> None:
    """Expand the cosines and sines of ``RotaryEmbedding`` to the batch: onnxruntime rejects a batch of one."""
    import onnx_ir as ir

    def constant(name: str, numbers: list[int]) -> Any:
        return ir.node("Constant", [], attributes={"value": ir.tensor(np.array(numbers, np.int64), name=name)})

    for node in list(model.graph):
        if node.op_type != "RotaryEmbedding" or node.domain or any(node.inputs[3:]):  # position ids select these rows
            continue
        x, *caches = node.inputs[:3]
        if any(cache.shape is not None and cache.shape[0] != 1 for cache in caches):
            continue
        ones = constant("ones", [1, 1])
        batch = ir.node("Shape", [x], attributes={"start": 0, "end": 1})
        sizes = ir.node("Concat", [batch.outputs[0], ones.outputs[0]], attributes={"axis": 0})
        made = [ir.node("Expand", [cache, sizes.outputs[0]]) for cache in caches]
        for place, expand in enumerate(made, 1):
            node.replace_input_with(place, expand.outputs[0])
        model.graph.insert_before(node, [ones, batch, sizes, *made])


MADE = "memory."  # the numbered names of the results of the memory's graph, and of the decoder's inputs for them


def memory_path(path: str | os.PathLike[str]) -> Path:
    return Path(path).with_name(f"{Path(path).stem}_memory.onnx")


def split_off(model: onnx.ModelProto, inputs: Sequence[str]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Split the nodes that depend on these inputs alone into a model; return it and the rest, which uses its output."""
    graph = model.graph
    given = {value.name for value in graph.input}
    of_memory, others = set(inputs), given - set(inputs)
    first: list[onnx.NodeProto] = []
    later: list[onnx.NodeProto] = []
    fixed: list[onnx.NodeProto] = []  # these depend on no input, and both graphs may need them
    for node in graph.node:
        read = set(names_read([node]))
        if read & others:
            others.update(node.output)
            later.append(node)
        elif read & of_memory:
            of_memory.update(node.output)
            first.append(node)
        else:
            fixed.append(node)
    needed = set(names_read(later)) | {value.name for value in graph.output}
    crossing = [name for node in first for name in node.output if name in needed]
    crossing = [*(name for name in inputs if name in needed), *crossing]
    if not crossing:
        raise ValueError(f"`memory` must affect the outputs of `model`, got a model that reads none of {list(inputs)}")
    renamed = {name: f"{MADE}{number}" for number, name in enumerate(crossing)}
    known = {value.name: value for value in (*graph.value_info, *graph.input)}
    between = []
    for old, new in renamed.items():
        between.append(onnx.ValueInfoProto())
        between[-1].CopyFrom(known[old])
        between[-1].name = new
    passed = [onnx.helper.make_node("Identity", [name], [renamed[name]]) for name in inputs if name in renamed]
    made = {old: new for old, new in renamed.items() if old not in inputs}
    taken = [value for value in graph.input if value.name in inputs]
    kept = [value for value in graph.input if value.name not in inputs]
    memory = _part(model, [*fixed, *_with_names(first, made), *passed], taken, between)
    return memory, _part(model, [*fixed, *_with_names(later, renamed)], [*kept, *between], list(graph.output))


def _part(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
) -> onnx.ModelProto:  # fmt: skip
    needed = {value.name for value in outputs}
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed.update(names_read([node]))
            kept.append(node)
    part = onnx.ModelProto(
        ir_version=model.ir_version, producer_name=model.producer_name, producer_version=model.producer_version,
        opset_import=model.opset_import, metadata_props=model.metadata_props,
    )  # fmt: skip
    graph = part.graph
    graph.name = model.graph.name
    graph.node.extend(reversed(kept))
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    made = {name for node in kept for name in node.output} - {value.name for value in outputs}
    graph.value_info.extend(value for value in model.graph.value_info if value.name in made)
    called = {(node.domain, node.op_type, node.overload) for inner in all_graphs(graph) for node in inner.node}
    part.functions.extend(one for one in model.functions if (one.domain, one.name, one.overload) in called)
    return part


def _with_names(nodes: Sequence[onnx.NodeProto], names: Mapping[str, str]) -> list[onnx.NodeProto]:
    copies = onnx.GraphProto(node=nodes).node
    rename(copies, names)
    return list(copies)

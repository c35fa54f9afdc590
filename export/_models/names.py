"""Names that describe the source of a node, for errors, profiles and viewers, without details of the machine."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, count
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from relskew_core.export._nodes.functions import rename

SCOPES = "pkg.torch.onnx.name_scopes"
_RELSKEW = re.compile(r"relskew/(?:compute|shape)/attention_(\d+)/(.*)")
_COMPILED = re.compile(r"\b_orig_mod\.|\._orig_mod$")
"""The parts that ``torch.compile`` adds to the names of modules."""

_SYMBOL = re.compile(r"\b[su]\d+\b")


def first_free(name: str, taken: Collection[str]) -> str:
    """Return a name, followed by a number if it is taken."""
    return next(found for found in chain([name], (f"{name}_{number}" for number in count(2))) if found not in taken)


def name_nodes(model: Any, prefix: str) -> None:
    """Name nodes by their module and purpose, and their outputs by the node.

    ``prefix`` is left out of modules' names. torch's notes, which hold paths of the machine's files, are removed.
    """
    import onnx_ir

    nodes = list(onnx_ir.traversal.RecursiveGraphIterator(model.graph))
    ends = [*model.graph.inputs, *model.graph.outputs]
    stored = list(model.graph.initializers.items())
    made = [value for name, value in stored if not name.startswith(prefix)]
    results = {value.name for value in model.graph.outputs}
    taken = {value.name for value in (*ends, *made)}
    fixed = {id(value) for value in (*ends, *model.graph.initializers.values())}

    def free(name: str) -> str:
        found = first_free(name, taken)
        taken.add(found)
        return found

    for name, value in stored:
        if name.startswith(prefix):
            value.name = free(_COMPILED.sub("", name.removeprefix(prefix)))
    homes = _homes(nodes, prefix)
    calls = [_RELSKEW.fullmatch(node.name or "") for node in nodes]
    in_module: dict[str, set[str]] = defaultdict(set)
    for home, call in zip(homes, calls, strict=True):
        if call:
            in_module[home].add(call[1])
    for node, home, call in zip(nodes, homes, calls, strict=True):
        parts = [home] if home else []
        if call and (not home or len(in_module[home]) > 1):
            parts.append(f"attention_{call[1]}")
        node.name = free("/".join([*parts, call[2] if call else node.op_type]))
        for index, value in enumerate(node.outputs):
            if id(value) not in fixed:
                value.name = node.name if index == 0 else free(f"{node.name}/{index}")
    for value in made:  # constants folded from others
        if value.uses() and value.name not in results:
            value.name = free(f"{value.uses()[0].node.name}/constant")
    for holder in (model, model.graph, *nodes, *_values(model, nodes)):
        holder.metadata_props.clear()


def name_lengths(model: Any, names: Mapping[str, str]) -> None:
    """Replace torch's symbols, and sums of them that have a name, in the shapes of all tensors."""
    import onnx_ir

    def renamed(size: Any) -> int | str | None:
        # equal names mean equal lengths, so an unknown length gets no name
        if isinstance(size, int) or size.value is None:
            return size if isinstance(size, int) else None
        text = _SYMBOL.sub(lambda match: names.get(match[0], match[0]), size.value)
        if "(" not in text:  # torch writes the terms of a sum in either order
            text = " + ".join(sorted(text.split(" + ")))
        return names.get(text, text)

    for value in _values(model, list(onnx_ir.traversal.RecursiveGraphIterator(model.graph))):
        if value.shape is not None:
            value.shape = onnx_ir.Shape([renamed(size) for size in value.shape])


def _homes(nodes: Sequence[Any], prefix: str) -> list[str]:
    """Return the module that made each node; nodes in a loop or branch belong to the module of the loop."""
    inherited: dict[int, str] = {}
    homes = []
    for node in nodes:
        homes.append(inherited.get(id(node.graph)) or _module_of(node, prefix))
        for attribute in node.attributes.values():
            if attribute.type.name == "GRAPH":
                inherited[id(attribute.value)] = homes[-1]
    return homes


def _module_of(node: Any, prefix: str) -> str:
    """Return the path of the module that made a node, empty for the model itself or if unknown."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    path: str = scopes[-2] if len(scopes) > 1 else ""
    return _COMPILED.sub("", path.removeprefix(prefix)) if path.startswith(prefix) else ""


def _values(model: Any, nodes: Sequence[Any]) -> list[Any]:
    made = [value for node in nodes for value in node.outputs]
    return [*model.graph.inputs, *model.graph.initializers.values(), *made]


SMALLEST = 256
"""The least bytes of tensors that are compared."""


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
"""Float32 has so many more bits that these results, rounded to bfloat16, are the same as those in bfloat16."""


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

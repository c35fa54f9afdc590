"""Tensors with equal content are stored once: shared tables, or an embedding that is also the head."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
from onnx import numpy_helper

from relskew_core.export._graph.functions import rename

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

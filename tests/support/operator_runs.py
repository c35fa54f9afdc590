"""Single nodes ``relskew::RelativeAttention``, run by onnxruntime with the operator library."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnx_sessions import opened
from relskew_core.export._files.library import found_library
from relskew_core.export._nodes.operator import DOMAIN, INPUTS, NAME, OUTPUTS

__all__ = ["INPUTS", "NAME", "model_of", "needs_library", "run", "session_of", "side_by_side"]
needs_library = pytest.mark.skipif(found_library() is None, reason="no operator library was compiled at installation")


def model_of(arrays: dict[str, Any], wanted: Sequence[str] = ("out",), **attributes: Any) -> onnx.ModelProto:
    """Return one node with the inputs that are given and the outputs that are wanted."""
    inputs, outputs = ([name if name in own else "" for name in names]
                       for names, own in ((INPUTS, arrays), (OUTPUTS, wanted)))  # fmt: skip
    for names in (inputs, outputs):
        while not names[-1]:
            names.pop()
    node = helper.make_node(NAME, inputs, outputs, domain=DOMAIN, **attributes)
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in arrays.items()}
    of_lse = TensorProto.DOUBLE if types["q"] == TensorProto.DOUBLE else TensorProto.FLOAT
    made = dict.fromkeys(OUTPUTS, types["q"]) | {"lse": of_lse}
    made |= {name: types[name.replace("present", "past")] for name in wanted if name.endswith(("_int8", "_scale"))}
    graph = helper.make_graph([node], "node",
                              [helper.make_tensor_value_info(name, types[name], x.shape) for name, x in arrays.items()],
                              [helper.make_tensor_value_info(name, made[name], None) for name in wanted])  # fmt: skip
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def session_of(
    arrays: dict[str, Any], wanted: Sequence[str] = ("out",), threads: int = 1, **attributes: Any
) -> onnxruntime.InferenceSession:
    return opened(model_of(arrays, wanted, **attributes), library=True, intra_op_num_threads=threads)


def run(arrays: dict[str, Any], wanted: Sequence[str] = ("out",), threads: int = 1, **attributes: Any) -> list[Any]:
    return session_of(arrays, wanted, threads, **attributes).run(list(wanted), arrays)


def side_by_side(x: Any) -> Any:
    """Return heads ``(batch, heads, length, D)`` as projections give them."""
    batch, heads, length, width = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch, length, heads * width)

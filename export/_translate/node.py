"""A call of torch's operator as one node for the operator library, which is also a function of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from relskew_core._kernel.call import Operands, Options
from relskew_core.export._form.weights import DTYPES
from relskew_core.export._nodes.emitter import Emitter, Shape, Value
from relskew_core.export._nodes.operator import DOMAIN, INPUTS, NAME, OUTPUTS, VERSION, attributes_of
from relskew_core.export._nodes.operator_nodes import ALIGNED
from relskew_core.export._translate.call import Ends
from relskew_core.export._translate.emitter import TracedEmitter


def _argument(name: str, given: Any) -> Any:
    """Return an operand inside the function: its name there, and its facts from the call."""
    producer = given.producer if name == "offset" else lambda: None  # nodes outside are not read by a function
    return SimpleNamespace(name=name, shape=given.shape, dtype=given.dtype, producer=producer)


class BodyEmitter(TracedEmitter):
    """Emits the nodes of a function; its arguments keep their names."""

    initializer = Emitter.initializer
    node = Emitter.node

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__(None, dtype, "attention")
        self.notes: dict[str, str] = {}

    def adopt(self, tensor: Any, name: str, shape: Shape, dtype: np.dtype[Any] | None = None) -> Value:
        return Value(tensor.name, shape, dtype or self.dtype)

    def tensor(self, value: Value) -> Any:
        return value

    def note(self, value: Value, key: str, text: str) -> None:
        self.notes[key] = text

    def function(self, inputs: Sequence[str], outputs: Sequence[str], opset: int, attributes: Any) -> Any:
        """Return the emitted nodes as a function with the results ``outputs``, or with none."""
        graph = self.graph("body")
        tensors = self._model.graph.initializer
        made = {output for node in graph.node for output in node.output} | {tensor.name for tensor in tensors}
        constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors]
        constants += [helper.make_node("Constant", [], [name], value_ints=[0]) for name in outputs if name not in made]
        imports = [helper.make_opsetid("", opset)]
        return helper.make_function(DOMAIN, NAME, inputs, outputs, [*constants, *graph.node], imports, list(attributes))


class Functions:
    def __init__(self) -> None:
        self.made: dict[bytes, onnx.FunctionProto] = {}

    def add(self, function: onnx.FunctionProto) -> str:
        key = function.SerializeToString(deterministic=True)
        if key not in self.made:
            function.overload = f"call_{len(self.made) + 1}"
            self.made[key] = function
        return self.made[key].overload


def add_functions(model: onnx.ModelProto, functions: Functions) -> None:
    used = {node.overload for node in model.graph.node if node.domain == DOMAIN}
    model.functions.extend(function for function in functions.made.values() if function.overload in used)
    if used and all(entry.domain != DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def is_served(operands: Operands) -> bool:
    return len(operands.q.shape) == 4 and str(operands.q.dtype.numpy()) in DTYPES


def write_node(
    op: Any, operands: Operands, options: Options, ends: Ends | None, opset: int, functions: Functions,
    emit: Callable[..., Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Write a call as a node; ``emit(body, opset, operands, options, ends)`` makes its function."""
    import onnx_ir

    given = {name: x for name, x in operands._asdict().items() if x is not None}
    arguments: dict[str, Any] = {name: _argument(name, x) for name, x in given.items()}
    mask = given.pop("mask", None)
    if mask is not None:
        given["mask" if mask.dtype.numpy() == np.bool_ else "added"] = mask
        arguments["mask"] = _argument("mask" if "mask" in given else "added", mask)
    offset, within = options.visibility.offset, options
    if not isinstance(offset, int):
        given["offset"] = offset
        within = replace(options, visibility=replace(options.visibility, offset=_argument("offset", offset)))
    within_ends = None
    if ends is not None:
        sides = ("span_left", "span_right")
        given |= {
            side: op.Constant(value_int=end) if isinstance(end, int) else end
            for side, end in zip(sides, ends, strict=True)
        }
        within_ends = tuple(_argument(side, given[side]) for side in sides)
    last = max(place for place, name in enumerate(INPUTS) if name in given)
    names = INPUTS[: last + 1]
    attributes = attributes_of(options)
    body = BodyEmitter(np.dtype(operands.q.dtype.numpy()))
    made = emit(body, opset, Operands(**arguments), within, within_ends)
    attributes[ALIGNED] = int(body.aligned)
    results = [made[0].name, *(f"none/{name}" for name in OUTPUTS[1 : OUTPUTS.index("lse")]), made[1].name]
    results = results if options.return_lse else results[:1]
    overload = functions.add(body.function(names, results, opset, attributes))
    node = op.Identity(operands.q).producer()  # an example node with the right results
    node.op_type, node.domain, node.overload, node.name = NAME, DOMAIN, overload, "relskew/compute/attention"
    node.version = None
    node.resize_inputs(len(names))
    for place, name in enumerate(names):
        node.replace_input_with(place, given.get(name))
    node.resize_outputs(len(results))
    for name, value in attributes.items():
        node.attributes[name] = onnx_ir.convenience.convert_attribute(name, value)
    node.metadata_props.update(body.notes)
    outputs = list(node.outputs)
    for unused in outputs[1:-1]:
        unused.name = ""
    empty = onnx_ir.tensor(np.zeros(0, body.dtype))
    return outputs[0], outputs[-1] if options.return_lse else op.Constant(value=empty)

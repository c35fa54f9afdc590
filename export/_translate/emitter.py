"""The emitter's calls as calls of onnxscript, so that the block's functions can extend graphs of torch's exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from relskew_core.export._nodes.emitter import BOOL, INT64, Emitter, Shape, Value


class TracedEmitter(Emitter):
    """Emits into the graph that onnxscript's current evaluator is making, with the operators of one opset.

    The names of values are unique within one call only; the graph builder renames them. Nodes keep their
    names, after the name of the call: runtimes show them in their errors.
    """

    def __init__(self, op: Any, dtype: np.dtype[Any], call: str) -> None:
        super().__init__(dtype, scope=f"{call}/")
        self._op = op
        self._tensors: dict[str, Any] = {}
        self.aligned = False  # whether there is one key for each position of the past and for each query

    @contextmanager
    def within(self, scope: str) -> Iterator[None]:
        outer, self.scope = self.scope, f"{self.scope}{scope}/"
        yield
        self.scope = outer

    def adopt(self, tensor: Any, name: str, shape: Shape, dtype: np.dtype[Any] | None = None) -> Value:
        self._tensors[self._claim(name)] = tensor
        return Value(name, shape, dtype or self.dtype)

    def note(self, value: Value, key: str, text: str) -> None:
        self.tensor(value).producer().metadata_props[key] = text

    def tensor(self, value: Value) -> Any:
        return self._tensors[value.name]

    def typed(self, value: Value) -> Any:
        """Return the tensor of a value with its element type and its shape."""
        import onnx_ir

        tensor = self.tensor(value)
        tensor.dtype = onnx_ir.DataType.from_numpy(value.dtype)
        if tensor.shape is None:  # what comes from around the body has the names of its axes
            tensor.shape = onnx_ir.Shape(value.shape)
        return tensor

    def initializer(self, name: str, array: np.ndarray, doc: str = "") -> Value:
        import onnx_ir

        return self.adopt(self._op.Constant(value=onnx_ir.tensor(array)), name, array.shape, array.dtype)

    def node(
        self, op_type: str, inputs: Sequence[Value | None], path: str, outputs: Sequence[Value], **attributes: Any
    ) -> None:
        given = [None if value is None else self.tensor(value) for value in inputs]
        made = getattr(self._op, op_type)(*given, **attributes)
        made = made if isinstance(made, Sequence) else [made]
        node = made[0].producer()
        node.name = path
        node.resize_outputs(len(outputs))
        for value, tensor in zip(outputs, node.outputs, strict=True):
            self._tensors[self._claim(value.name)] = tensor

    def loop(self, count: Value, name: str, emit: Callable[[Any, Value], Value]) -> Value:
        """Run the body that ``emit`` makes ``count`` times and stack its results; it gets an emitter and the turn."""
        import onnx_ir

        body = InnerEmitter(self, name)
        path = body.path("")
        iteration = onnx_ir.val(f"{path}iteration", onnx_ir.DataType.INT64, [])
        running = onnx_ir.val(f"{path}running", onnx_ir.DataType.BOOL, [])
        goes_on = body.compute("Identity", [body.adopt(running, "running", (), BOOL)], "goes_on", (), BOOL)
        result = emit(body, body.adopt(iteration, "iteration", (), INT64))
        outputs = [body.typed(goes_on), body.typed(result)]
        graph = onnx_ir.Graph([iteration, running], outputs, nodes=body.nodes, name=f"{path}body")
        # The condition is optional, but not for onnx's reference evaluator.
        given = [self.tensor(count), self.tensor(self.constant(True, BOOL))]
        node = onnx_ir.node("Loop", given, {"body": graph}, name=self.path(name))
        self._record(node)
        shape = ("turns", *result.shape)
        return self.adopt(node.outputs[0], f"{name}/stacked", shape)

    def either(self, condition: Value, name: str, like: Value, **branches: Callable[[Any], Any]) -> Any:
        """Return the tensor, like ``like``, of the first branch if ``condition``, else of the second."""
        import onnx_ir

        bodies = {}
        for kind, (scope, emit) in zip(("then_branch", "else_branch"), branches.items(), strict=True):
            body = InnerEmitter(self, scope)
            found = body.adopt(emit(body), "found", like.shape)
            out = body.typed(body.compute("Identity", [found], "branch", like.shape))
            bodies[kind] = onnx_ir.Graph([], [out], nodes=body.nodes, name=f"{self.path(name)}/{scope}")
        node = onnx_ir.node("If", [self.tensor(condition)], bodies, name=self.path(name))
        self._record(node)
        return node.outputs[0]

    def _record(self, node: Any) -> None:
        """Add a node to the graph directly, because onnxscript's own loop treats all inputs as carried ones."""
        from onnxscript import evaluator

        made: Any = evaluator.default()
        made.nodes.append(node)


class InnerEmitter(TracedEmitter):
    """Emits into the body of a loop, whose nodes can read outer tensors, but not the reverse."""

    def __init__(self, outer: TracedEmitter, scope: str) -> None:
        vars(self).update(vars(outer))
        self.scope = f"{outer.scope}{scope}/"
        self._lengths, self._constants = dict(outer._lengths), dict(outer._constants)
        self.nodes: list[Any] = []
        self._op = _Recorder(self.nodes)

    def adopt(self, tensor: Any, name: str, shape: Shape, dtype: np.dtype[Any] | None = None) -> Value:
        if tensor.name is None:  # names must be unique across a body and the graph around it
            tensor.name = f"{self.path('')}{name}"
        return super().adopt(tensor, f"{self.scope}{name}", shape, dtype)

    def node(
        self, op_type: str, inputs: Sequence[Value | None], path: str, outputs: Sequence[Value], **attributes: Any
    ) -> None:
        import onnx_ir

        super().node(op_type, inputs, path, outputs, **attributes)
        for value in outputs:
            self.tensor(value).shape = onnx_ir.Shape([x if isinstance(x, int) else None for x in value.shape])
            self.typed(value).name = value.name

    def _record(self, node: Any) -> None:
        self.nodes.append(node)


class _Recorder:
    """The interface of onnxscript's operators to a graph, for the body of a loop."""

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        import onnx_ir

        def add(*inputs: Any, **attributes: Any) -> Any:
            self._nodes.append(onnx_ir.node(op_type, inputs, attributes))
            return self._nodes[-1].outputs[0]

        return add

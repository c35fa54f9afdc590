"""A small builder of ONNX graphs: readable names, constants stored once, and all known shapes recorded."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper

from relskew_core.export._form.weights import DTYPES

Shape: TypeAlias = tuple[int | str, ...]
INT64_MAX = 2**63 - 1
CONSTANT = "relskew/constant/"  # the prefixes of tensors that are not weights


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph: its name, its shape (a string is a symbolic dimension) and its element type."""

    name: str
    shape: Shape
    dtype: np.dtype[Any]


Dim: TypeAlias = "int | Value"  # a length: an int if it is known at export, else an int64 tensor of shape (1,)
INT64 = np.dtype(np.int64)
INT32 = np.dtype(np.int32)
BFLOAT16 = DTYPES["bfloat16"]  # the type in which onnxruntime has no ``Pad``
BOOL = np.dtype(np.bool_)


class Emitter:
    """Collects inputs, initializers and nodes; the same calls in the same order give the same bytes.

    ``compute`` makes a node that works on data and ``index`` one that works on lengths and positions. Their names
    start with ``relskew/compute/`` and ``relskew/shape/``, so that a placement check can distinguish them. What an
    emitter of a branch makes has the branch's name, ``scope``, in front.
    """

    def __init__(self, dtype: np.dtype[Any], outer: Emitter | None = None, scope: str = "") -> None:
        self.dtype = dtype
        self.scope: str = scope if outer is None else outer.scope + scope
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._infos: list[onnx.ValueInfoProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._lengths: dict[tuple[Any, ...], Value] = {} if outer is None else dict(outer._lengths)
        # Tensors are written into the final model at once, since each copy of a large model counts. Loops and branches
        # share them.
        self._model: onnx.ModelProto = onnx.ModelProto() if outer is None else outer._model
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {} if outer is None else outer._constants
        self._names: set[str] = set() if outer is None else outer._names
        self._domains: set[str] = set() if outer is None else outer._domains

    @property
    def initializers(self) -> Any:  # a repeated field, with the methods of a list
        return self._model.graph.initializer

    def input(self, name: str, shape: Shape, doc: str, dtype: np.dtype[Any] | None = None) -> Value:
        value = Value(self._claim(name), shape, dtype or self.dtype)
        self._inputs.append(_info(value, doc))
        return value

    def rename(self, value: Value, name: str) -> Value:
        outputs = self._nodes[-1].output
        outputs[list(outputs).index(value.name)] = self._claim(name)
        for info in self._infos:
            if info.name == value.name:
                info.name = name
        return Value(name, value.shape, value.dtype)

    def output(self, value: Value, doc: str) -> None:
        self._outputs.append(_info(value, doc))

    def initializer(self, name: str, array: np.ndarray, doc: str = "") -> Value:
        tensor = self._model.graph.initializer.add()
        tensor.dims.extend(array.shape)
        tensor.data_type, tensor.name, tensor.doc_string = element_type(array.dtype), self._claim(name), doc
        tensor.raw_data = (array.byteswap() if sys.byteorder == "big" else array).tobytes()
        return Value(name, array.shape, array.dtype)

    def constant(self, values: Any, dtype: Any = INT64) -> Value:
        array = np.asarray(values, dtype=dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            if array.size <= 4:
                held = "_".join(str(item) for item in array.ravel().tolist())
            else:
                held = hashlib.sha256(key[2]).hexdigest()[:12]
            shape = "x".join(map(str, array.shape)) or "scalar"
            self._constants[key] = self.initializer(f"{CONSTANT}{array.dtype.name}/{shape}/{held}", array)
        return self._constants[key]

    def compute(
        self, op_type: str, inputs: Sequence[Value], name: str, shape: Shape, dtype: np.dtype[Any] | None = None,
        output: str | None = None, **attributes: Any,
    ) -> Value:  # fmt: skip
        """Add a node on data; its output has the graph's element type unless ``dtype`` is given."""
        path = self.path(name)
        value = Value(output or path, shape, dtype or self.dtype)
        self.node(op_type, inputs, path, [value], **attributes)
        return value

    def index(
        self, op_type: str, inputs: Sequence[Value], name: str, shape: Shape = (1,), dtype: np.dtype[Any] = INT64,
        **attributes: Any,
    ) -> Value:  # fmt: skip
        """Add a node on lengths and positions, by default int64 of shape (1,); equal nodes are added once."""
        path = f"relskew/shape/{self.scope}{name}"
        key = (op_type, *(value.name for value in inputs), shape, repr(attributes))
        if key not in self._lengths:
            self._lengths[key] = Value(path, shape, dtype)
            self.node(op_type, inputs, path, [self._lengths[key]], **attributes)
        return self._lengths[key]

    def node(
        self, op_type: str, inputs: Sequence[Value | None], path: str, outputs: Sequence[Value], **attributes: Any
    ) -> None:
        names = [self._claim(value.name) for value in outputs]
        self._infos.extend(_info(value) for value in outputs)
        given = ["" if value is None else value.name for value in inputs]
        self._nodes.append(helper.make_node(op_type, given, names, name=path, **attributes))
        self._domains |= {attributes.get("domain", "")}

    def path(self, name: str) -> str:
        return f"relskew/compute/{self.scope}{name}"

    def choose(
        self, condition: Value, name: str, outputs: Sequence[Value], **branches: Callable[[Emitter], Sequence[Value]]
    ) -> None:
        """Assign the results of the first branch if ``condition``, else of the second, to ``outputs``."""
        bodies = {}
        for kind, (scope, emit) in zip(("then_branch", "else_branch"), branches.items(), strict=True):
            body = Emitter(self.dtype, self, f"{scope}/")
            for result in emit(body):
                body.output(result, "result of the branch")
            bodies[kind] = body.graph(f"{self.path(name)}/{scope}")
        self.node("If", [condition], self.path(name), outputs, **bodies)

    def loop(self, count: Value, name: str, emit: Callable[[Emitter, Value], Value]) -> Value:
        """Run the body that ``emit`` makes ``count`` times and stack its results; it gets an emitter and the turn."""
        path = self.path(name)
        body = Emitter(self.dtype, self)
        iteration = body.input(f"{path}/iteration", (), "number of the iteration", INT64)
        running = body.input(f"{path}/running", (), "always true", BOOL)
        goes_on = body.compute("Identity", [running], f"{name}/goes_on", (), BOOL)
        result = emit(body, iteration)
        body.output(goes_on, "always true")
        body.output(result, "result of the iteration")
        stacked = Value(f"{path}/stacked", ("iterations", *result.shape), self.dtype)
        # The condition is optional, but not for onnx's reference evaluator.
        self.node("Loop", [count, self.constant(True, BOOL)], path, [stacked], body=body.graph(f"{path}/body"))
        return stacked

    def length(self, value: Value, axis: int, name: str) -> Dim:
        known = value.shape[axis]
        return known if isinstance(known, int) else self.index("Shape", [value], name, start=axis, end=axis + 1)

    def plus(self, a: Dim, b: Dim, name: str) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0 or b == 0:
            return b if a == 0 else a
        return self.index("Add", [self.dim(a), self.dim(b)], name)

    def minus(self, a: Dim, b: Dim, name: str) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        if b == 0:
            return a
        return self.index("Sub", [self.dim(a), self.dim(b)], name)

    def times(self, a: Dim, b: int, name: str) -> Dim:
        return a * b if isinstance(a, int) else self.index("Mul", [a, self.constant([b])], name)

    def dim(self, value: Dim) -> Value:
        return self.constant([value]) if isinstance(value, int) else value

    def scalar(self, value: Dim, name: str) -> Value:
        return self.constant(value) if isinstance(value, int) else self.index("Squeeze", [value], name, ())

    def cut(self, x: Value, axis: int, start: Dim, end: Dim, symbol: int | str, name: str) -> Value:
        bounds = [self.dim(start), self.dim(end), self.constant([axis])]
        return self.compute("Slice", [x, *bounds], name, (*x.shape[:axis], symbol, *x.shape[axis + 1 :]), x.dtype)

    def transpose(self, x: Value, name: str, perm: Sequence[int] | None = None) -> Value:
        *leading, row, column = range(len(x.shape))
        perm = [*leading, column, row] if perm is None else perm
        return self.compute("Transpose", [x], name, tuple(x.shape[axis] for axis in perm), x.dtype, perm=perm)

    def cast(self, x: Value, dtype: np.dtype[Any], name: str) -> Value:
        return self.compute("Cast", [x], name, x.shape, dtype, to=element_type(dtype))

    def range(self, start: tuple[Dim, str], end: tuple[Dim, str], name: str, symbol: int | str) -> Value:
        return self.index("Range", [self.scalar(*start), self.scalar(*end), self.constant(1)], name, (symbol,))

    def dims(self, name: str, *parts: Dim) -> Value:
        groups: list[list[int] | Value] = []
        for part in parts:
            if not isinstance(part, int):
                groups.append(part)
            elif groups and isinstance(groups[-1], list):
                groups[-1].append(part)
            else:
                groups.append([part])
        values = [self.constant(group) if isinstance(group, list) else group for group in groups]
        rank = sum(int(value.shape[0]) for value in values)
        return values[0] if len(values) == 1 else self.index("Concat", values, name, (rank,), axis=0)

    def model(self, name: str, opset: int, ir_version: int, doc: str) -> onnx.ModelProto:
        self._model.graph.MergeFrom(self.graph(name, doc))
        self._model.ir_version = ir_version
        self._model.opset_import.append(helper.make_opsetid("", opset))
        self._model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in sorted(self._domains - {""}))
        return self._model

    def graph(self, name: str, doc: str | None = None) -> onnx.GraphProto:
        """Return the collected nodes as a graph, without initializers."""
        outputs = {info.name for info in self._outputs}
        infos = [info for info in self._infos if info.name not in outputs]
        return helper.make_graph(self._nodes, name, self._inputs, self._outputs, value_info=infos, doc_string=doc)

    def _claim(self, name: str) -> str:
        if name in self._names:
            raise ValueError(f"two tensors of the graph would be called {name!r}")
        self._names.add(name)
        return name


def element_type(dtype: np.dtype[Any]) -> int:
    return helper.np_dtype_to_tensor_dtype(dtype)


def _info(value: Value, doc: str = "") -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, element_type(value.dtype), value.shape, doc_string=doc)

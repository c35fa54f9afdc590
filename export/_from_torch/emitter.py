"""The emitter's calls as calls of onnxscript, so that the recipes of the block serve graphs that others are making."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from relskew_core.export._graph.emitter import Emitter, Shape, Value


class TracedEmitter(Emitter):
    """Emits into the graph that onnxscript's current evaluator is making, with the operators of one opset.

    The names of values are unique within one call only; the graph builder renames them. Nodes keep theirs,
    behind the name of the call: runtimes show them in their errors.
    """

    def __init__(self, op: Any, dtype: np.dtype[Any], call: str) -> None:
        super().__init__(dtype, scope=f"{call}/")
        self._op = op
        self._tensors: dict[str, Any] = {}
        self.aligned = False  # whether the keys are known to be those of the past and one for each query

    @contextmanager
    def within(self, scope: str) -> Iterator[None]:
        """Put a name in front of all that is made meanwhile."""
        outer, self.scope = self.scope, f"{self.scope}{scope}/"
        yield
        self.scope = outer

    def adopt(self, tensor: Any, name: str, shape: Shape, dtype: np.dtype[Any] | None = None) -> Value:
        """Make a tensor of the graph known under a name."""
        self._tensors[self._claim(name)] = tensor
        return Value(name, shape, dtype or self.dtype)

    def note(self, value: Value, key: str, text: str) -> None:
        """Annotate the node that made a value, for the graph builder."""
        self.tensor(value).producer().metadata_props[key] = text

    def tensor(self, value: Value) -> Any:
        """Return the tensor of the graph for a value."""
        return self._tensors[value.name]

    def initializer(self, name: str, array: np.ndarray, doc: str = "") -> Value:
        """Store an array."""
        import onnx_ir

        return self.adopt(self._op.Constant(value=onnx_ir.tensor(array)), name, array.shape, array.dtype)

    def node(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        path: str,
        outputs: Sequence[Value],
        **attributes: Any,
    ) -> None:
        """Add a node that has these outputs and no others: an `Attention` would compute all that it could give."""
        given = [None if value is None else self.tensor(value) for value in inputs]
        made = getattr(self._op, op_type)(*given, **attributes)
        made = made if isinstance(made, Sequence) else [made]
        node = made[0].producer()
        node.name = path
        node.resize_outputs(len(outputs))
        for value, tensor in zip(outputs, made, strict=False):
            self._tensors[self._claim(value.name)] = tensor

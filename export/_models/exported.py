"""The results of an export: inputs and outputs of its graphs, fixed axes and the reasons, and the checks."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from relskew_core._array.checks import check_bool, check_choice, check_int, check_real, describe, explains, wraps
from relskew_core._array.extras import warn_caller
from relskew_core.export._check.inspect import Check
from relskew_core.export._files.save import write
from relskew_core.export._form.plan import checked_chunk
from relskew_core.export._nodes.functions import opset_of
from relskew_core.export._quantise import quantise

Result = TypeVar("Result")
Why = Callable[[str, int], str]  # returns the reason why an axis of an input is fixed


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a graph.

    Parameters
    ----------
    name, dtype, shape : str, str, tuple of int or str
        Its name and its type; its lengths, and names of those that vary.
    fixed : mapping of int to str
        For each axis of an input with a fixed length, the reason why it does not vary.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    fixed: Mapping[int, str] = field(default_factory=dict)

    @property
    def varies(self) -> tuple[int, ...]:
        """The axes that may have any length."""
        return tuple(axis for axis, size in enumerate(self.shape) if isinstance(size, str))


@dataclass(frozen=True, slots=True)
class ExportedGraph:
    """One graph of an export.

    Parameters
    ----------
    file, opset, inputs, outputs : str, int, tuple of GraphTensor, tuple of GraphTensor
        The name of its file, empty if there is none; the version of the standard operators; tensors in order.
    in_float32 : str
        With ``weights``, the operators that keep large weights in float32, and their size, if there are any.
    """

    file: str
    opset: int
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    in_float32: str = ""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The graphs of an export, and the checks that they passed.

    Parameters
    ----------
    path : pathlib.Path or None
        The file or folder that was written, if one was requested.
    graphs, checks : tuple of ExportedGraph, tuple of Check
        Graphs that belong together, and every comparison with torch, with its relative L2 error and the bound.
    unchecked : tuple of str
        Inputs that the graph accepts and the model rejects, so that there is nothing to compare with.

    Examples
    --------
    >>> x = GraphTensor("x", "float32", ("batch", 8), {1: "a width"})
    >>> check = Check("y", "onnxruntime 1.31.1", "CPU", "one row", True, 1e-7, 1e-4)
    >>> made = ExportedGraph("block.onnx", 23, (x,), ())
    >>> report = ExportReport(None, (made,), (check,))
    >>> print(report)
    block.onnx, opset 23
      input x float32 (batch, 8)
        axis 1 is 8: a width
    checked in onnxruntime 1.31.1: 1 comparison, worst error 1.0e-07 (y, one row; at most 1e-04)
    """

    path: Path | None
    graphs: tuple[ExportedGraph, ...]
    checks: tuple[Check, ...] = ()
    unchecked: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return several lines of text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for graph in self.graphs:
            yield f"{graph.file or 'not saved'}, opset {graph.opset}"
            for kind, tensors in (("input", graph.inputs), ("output", graph.outputs)):
                for tensor in tensors:
                    yield f"  {kind} {tensor.name} {tensor.dtype} ({', '.join(map(str, tensor.shape))})"
                    yield from (f"    axis {axis} is {tensor.shape[axis]}: {why}" for axis, why in tensor.fixed.items())
            if graph.in_float32:
                yield f"  weights in float32: {graph.in_float32}"
        measured = [check for check in self.checks if check.error is not None]
        if not measured:
            yield "not checked"
        else:
            worst = max(measured, key=lambda check: (check.error or 0) / (check.gate or 1))
            count = f"{len(self.checks)} comparison{'s' * (len(self.checks) > 1)}"
            where = ", ".join(dict.fromkeys(check.runtime for check in self.checks))
            bound = f"{worst.name}, {worst.case}; at most {worst.gate:.0e}"
            yield f"checked in {where}: {count}, worst error {worst.error:.1e} ({bound})"
        yield from (f"unchecked: {text}" for text in self.unchecked)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as mappings, lists, strings and numbers."""
        found = asdict(self)
        found["path"] = None if self.path is None else str(self.path)
        return found

    def to_json(self) -> str:
        """Return a JSON object with ``path``, ``graphs``, ``checks`` and ``unchecked``."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of all exporters of torch models, which take their signatures and this text from here.

    Parameters
    ----------
    opset : int, optional
        Version of the standard operators, 18 … 28; by default 23, or 24, the lowest one possible, with caches in place.
    dtype : str or dtype, optional
        ``float16``, ``bfloat16``, ``float32`` or ``float64``: export a copy of the model whose parameters, buffers and
        caches have this dtype, for example to export a bfloat16 model in float16. Floating tensors of an example are
        cast too, and the check compares with that copy. Frequencies of rotary positions in a model of transformers
        keep their dtype, as when it is loaded in a dtype.
    tolerance : float, optional
        Largest relative L2 error of the check; by default 1e-4 for float32, and 5e-2 with caches in int8.
    device : {"cpu", "cuda"}, optional
        Where the graphs will run: on CUDA ``chunk_size="auto"`` is no loop, as in :func:`to_onnx`.
    operator : bool, default False
        Write attention as nodes ``relskew::RelativeAttention``, which are also functions of the model, as
        :func:`to_onnx` does. Calls that the operator does not support, such as those with a span that depends on the
        input, are written as without it. The check runs the graph with the operator library and without it.
    weights : {"weights-8", "weights-4", "dynamic"}, optional
        Store the weights of a float32 model in fewer bits, with this kind of :func:`quantize`. The graphs are checked
        before and after it; the second time, the default ``tolerance`` is 0.1, 0.5 or 0.3. What stays in float32 is in
        the report, and in a warning. ``"weights-8"`` rounds least and is the fastest for single tokens, ``"dynamic"``
        for long inputs and batches. Tied weights are stored once.
    check : bool, default True
        Compare with torch in onnxruntime before a file appears.
    report : callable, optional
        Called with an :class:`ExportReport` when everything is written, such as ``print``: inputs and outputs, which
        axes vary, why others are fixed, and every comparison with its error.
    overwrite : bool, default False
        Replace existing files.
    external_threshold : int, default 2**30
        As in :func:`save`.
    """

    opset: int | None = None
    dtype: Any = None
    tolerance: float | None = None
    device: Literal["cpu", "cuda"] | None = None
    operator: bool = False
    weights: quantise.Weights | None = None
    check: bool = True
    report: Callable[[ExportReport], object] | None = None
    overwrite: bool = False
    external_threshold: int = 2**30

    def __post_init__(self) -> None:
        for name in ("operator", "check", "overwrite"):
            check_bool(name, getattr(self, name))
        if self.weights is not None:
            check_choice("weights", self.weights, get_args(quantise.Weights))
        checked_chunk("auto", self.device)
        check_int("external_threshold", self.external_threshold, minimum=0)
        if self.report is not None and not callable(self.report):
            raise TypeError(f"`report` must be a function of an ExportReport, got {describe(self.report)}")
        if self.tolerance is not None and check_real("tolerance", self.tolerance) < 0:
            raise ValueError(f"`tolerance` must be at least 0, got {self.tolerance}")


def exports(function: Callable[..., Result]) -> Callable[..., Result]:
    """Give an exporter the arguments and the text of :class:`ExportOptions`, which it is passed as ``options``."""
    own, shared = inspect.signature(function), inspect.signature(ExportOptions).parameters
    _, _, text = inspect.cleandoc(ExportOptions.__doc__ or "").partition("----------\n")
    function.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("{options}", text)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        chosen = {name: kwargs.pop(name) for name in shared if name in kwargs}
        return function(*args, **kwargs, options=ExportOptions(**chosen))

    parameters = [one for name, one in own.parameters.items() if name != "options"]
    parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in shared.values()]
    vars(call)["__signature__"] = own.replace(parameters=parameters)
    return explains(call)


def announce(step: str) -> None:
    """Print what begins, if someone watches: an export takes seconds to minutes."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"relskew: {step}", file=sys.stderr)


Compare = Callable[[Sequence[Path], bool, float | None, list[Check]], None]
"""Compares files with a model, perhaps with the operator library, within a tolerance or that of the model's dtype.

It records the comparisons, or raises an error.
"""


def publish(
    graphs: Sequence[onnx.ModelProto], targets: Sequence[Path], options: ExportOptions, compare: Compare, *,
    path: Path | None, why: Why, texts: Mapping[str, str] | None = None, unchecked: Sequence[str] = (),
) -> Sequence[onnx.ModelProto]:  # fmt: skip
    """Save graphs that belong together if the finished files do what the model does; then warn, report, return them.

    ``compare`` may add to ``unchecked``, inputs that the graph accepts and the model rejects. ``path`` is None for a
    graph that the caller does not keep as a file.
    """
    checks: list[Check] = []

    def save(targets: Sequence[Path], tolerance: float | None, texts: Mapping[str, str] | None = None) -> None:
        def check(files: Sequence[Path]) -> None:
            for library in (False, True)[: 1 + options.operator]:
                announce(f"comparing with torch{' with the operator library' * library} …")
                compare(files, library, tolerance, checks)

        write(
            graphs, targets, overwrite=options.overwrite, external_threshold=options.external_threshold,
            check=check if options.check else None, texts=texts,
        )  # fmt: skip

    tolerance, left = options.tolerance, [""] * len(graphs)
    if options.weights is not None:
        _check_float32(graphs)
        if options.check:
            with tempfile.TemporaryDirectory() as folder:
                save([Path(folder, target.name) for target in targets], None)
        made = [quantise.quantised(graph, options.weights) for graph in graphs]
        graphs, left = [graph for graph, _ in made], [kept for _, kept in made]
        tolerance = quantise.TOLERANCES[options.weights] if tolerance is None else tolerance
    save(targets, tolerance, texts)
    for case in dict.fromkeys(unchecked):
        warn_caller(f"the exported graph accepts inputs that `model` rejects, unchecked: {case}")
    quantise.warn_left("; ".join(filter(None, left)))
    if options.report is not None:
        names = ["" if path is None else target.name for target in targets]
        found = [described(graph, name, why, kept) for graph, name, kept in zip(graphs, names, left, strict=True)]
        options.report(ExportReport(path, tuple(found), tuple(checks), tuple(dict.fromkeys(unchecked))))
    return graphs


def _check_float32(graphs: Sequence[onnx.ModelProto]) -> None:
    kinds = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE
    for tensor in (tensor for graph in graphs for tensor in graph.graph.initializer):
        if tensor.data_type in kinds and len(tensor.dims) > 1:
            dtype = tensor_dtype_to_np_dtype(tensor.data_type).name
            raise ValueError(
                f"`weights` requires a model in float32, got {tensor.name!r} of {dtype}: pass dtype='float32'"
            )


def described(model: onnx.ModelProto, file: str, why: Why, in_float32: str = "") -> ExportedGraph:
    inputs = tuple(_tensor(value, why) for value in model.graph.input)
    outputs = tuple(_tensor(value, None) for value in model.graph.output)
    return ExportedGraph(file, opset_of(model), inputs, outputs, in_float32)


def _tensor(value: onnx.ValueInfoProto, why: Why | None) -> GraphTensor:
    kind = value.type.tensor_type
    shape = tuple(size.dim_param or (size.dim_value if size.HasField("dim_value") else "?") for size in kind.shape.dim)
    fixed = (
        {} if why is None else {axis: why(value.name, axis) for axis, size in enumerate(shape) if isinstance(size, int)}
    )
    return GraphTensor(value.name, tensor_dtype_to_np_dtype(kind.elem_type).name, shape, fixed)

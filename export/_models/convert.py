"""A torch module as a graph with the same inputs and outputs, in the order of their leaves."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import onnx
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from relskew_core import __version__
from relskew_core._array.checks import describe
from relskew_core.backends._torch.decomposed import operators_kept
from relskew_core.export._form.plan import EXPORTER_OPSET, PROFILES, checked_chunk, checked_opset
from relskew_core.export._form.weights import check_dtype
from relskew_core.export._models.exported import ExportOptions, announce
from relskew_core.export._models.names import name_lengths, name_nodes
from relskew_core.export._models.rewrites import compute_in_float32, expand_rotary, keep_sums, store_once
from relskew_core.export._models.sharing import share
from relskew_core.export._translate.translation import REACH, torch_translation_table

_PREFIX = "model."
_SIZE = re.compile(r"\[(\d+)\]\.size\(\)\[(\d+)\]$")

Axis = tuple[int, int]  # an input and one of its axes


class Flat(nn.Module):
    """A model as a function from the tensors in its arguments to the tensors in its results."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        paths, self._structure = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        self._given = [value for _, value in paths]
        self._places = [place for place, value in enumerate(self._given) if isinstance(value, Tensor)]
        first = list(inspect.signature(model.forward).parameters)
        self.input_names = [_input_name(paths[place][0], first) for place in self._places]
        self.output_names: list[str] = []

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the given tensors as separate ones, because torch treats the same tensor as one input."""
        return tuple(self._given[place].detach() for place in self._places)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = list(self._given)
        for place, value in zip(self._places, inputs, strict=True):
            given[place] = value
        args, kwargs = pytree.tree_unflatten(given, self._structure)
        paths = pytree.tree_flatten_with_path(self.model(*args, **kwargs))[0]
        found = [(path, value) for path, value in paths if isinstance(value, Tensor)]
        self.output_names = [_output_name(path) for path, _ in found]
        return tuple(value for _, value in found)


class Conversion(NamedTuple):
    """A graph, and torch's facts about the lengths of its inputs: ints, and expressions of symbols."""

    model: onnx.ModelProto
    shapes: list[tuple[Any, ...]]
    reach: int | None  # the number of positions that the tables allow, including the past


def convert(
    flat: Flat, axes: Sequence[Mapping[int, Any]], options: ExportOptions, *, input_names: Sequence[str],
    output_names: Sequence[str], lengths: Callable[[Sequence[tuple[Any, ...]]], Mapping[tuple[int, int], str]],
    sums: Mapping[str, str] | None = None, metadata: Mapping[str, str] | None = None, prefix: str = _PREFIX,
    chunk_size: int | Literal["auto"] | None = None,
) -> Conversion:  # fmt: skip
    """Export a model; ``axes`` lists the varying axes of each input, and ``lengths`` names them from all shapes.

    ``sums`` has names for sums of those names, in alphabetical order. ``prefix`` is left out of modules' names.
    """
    announce(f"exporting {', '.join(output_names[:2])} …")
    opset = checked_opset(PROFILES["ort"].opset if options.opset is None else options.opset)
    exported = min(opset, EXPORTER_OPSET)
    chunk_size = checked_chunk(chunk_size, options.device)
    table = torch_translation_table(exported, chunk_size=chunk_size, operator=options.operator)
    table[torch.ops.aten.rsub.Scalar] = _subtraction_from_a_number(exported)
    with evaluating(flat), _quiet(), torch.no_grad(), operators_kept():
        program = torch.onnx.export(
            flat, flat.inputs(), dynamo=True, opset_version=exported, dynamic_shapes=(tuple(axes),),
            custom_translation_table=table, input_names=list(input_names), output_names=list(output_names),
            verbose=False,
        )  # fmt: skip
    assert program is not None
    assert program.exported_program is not None
    shapes = _shapes(program.exported_program)
    model = program.model
    reaches = [int(node.metadata_props[REACH]) for node in model.graph if REACH in node.metadata_props]
    reach = min(reaches, default=None)
    names = {str(shapes[index][axis]): name for (index, axis), name in reversed(list(lengths(shapes).items()))}
    share(model)
    keep_sums(model)
    expand_rotary(model)
    if not any(x.dtype == torch.bfloat16 for x in (*flat.inputs(), *flat.parameters(), *flat.buffers())):
        compute_in_float32(model)
    name_nodes(model, prefix)
    name_lengths(model, {**names, **(sums or {})})
    noted = {"relskew.version": __version__, **(metadata or {}), **({} if reach is None else {REACH: str(reach)})}
    model.metadata_props.update(noted)
    made = table.model(program)
    store_once(made)
    for entry in (*made.opset_import, *(one for function in made.functions for one in function.opset_import)):
        if entry.domain == "":
            entry.version = max(entry.version, opset)  # all operators in the graph are the same in both opsets
    oldest: int = onnx.helper.find_min_ir_version_for(made.opset_import, ignore_unknown=True)
    # Older runtimes reject newer IR versions; functions need version 10.
    made.ir_version = max(min(made.ir_version, oldest), 10 if made.functions else 0)
    return Conversion(made, shapes, reach)


def _subtraction_from_a_number(opset: int) -> Callable[..., Any]:
    """Return the translation of ``1.0 - mask``, in which torch's exporter stops if the mask has integers."""
    import onnx_ir as ir
    import onnxscript
    from onnx_ir.tensor_adapters import from_torch_dtype

    op = onnxscript.values.Opset("", opset)

    def translate(x: Any, number: float, alpha: float = 1) -> Any:
        dtype = x.dtype
        if isinstance(number, float) and not dtype.is_floating_point():
            dtype = from_torch_dtype(torch.get_default_dtype())
            x = op.Cast(x, to=dtype)
        if alpha != 1:
            x = op.Mul(x, op.Constant(value=ir.tensor(alpha, dtype)))
        return op.Sub(op.Constant(value=ir.tensor(number, dtype)), x)

    return translate


class Varying(NamedTuple):
    """The axes of each input that vary, those that cannot, and the reasons for fixed ones, if known."""

    axes: list[dict[int, Any]]
    never: frozenset[Axis]
    frames: dict[Axis, Any]


def varying(flat: Flat) -> Varying:
    # torch fixes an axis of length 1 in any case, and prints a warning if it was asked about it.
    every = [
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(value.shape) if size > 1} for value in flat.inputs()
    ]
    with evaluating(flat), _quiet(), torch.no_grad(), operators_kept():
        program = torch.export.export(flat, flat.inputs(), dynamic_shapes=(tuple(every),))
    shapes, whole = _shapes(program), _heads_and_widths(program)
    symbolic = {
        (index, axis): size.free_symbols
        for index, shape in enumerate(shapes)
        for axis, size in enumerate(shape)
        if not isinstance(size, int)
    }
    never = frozenset(place for place, symbols in symbolic.items() if symbols & whole)
    axes: list[dict[int, Any]] = [{} for _ in shapes]
    for index, axis in symbolic.keys() - never:
        axes[index][axis] = torch.export.Dim.DYNAMIC
    return Varying(axes, never, _frames(program))


def _heads_and_widths(program: torch.export.ExportedProgram) -> set[Any]:
    calls = [node for node in program.graph.nodes if node.target in torch_translation_table()]
    arrays = [x.meta["val"] for node in calls for x in node.args[:3]]
    sizes = [size for x in arrays for size in (x.shape[-3], x.shape[-1]) if not isinstance(size, int)]
    return {symbol for size in sizes for symbol in size.node.expr.free_symbols}


def _frames(program: torch.export.ExportedProgram) -> dict[Axis, Any]:
    """Return the source lines that fixed axes of inputs, if this release of torch reports them."""
    found: dict[Axis, Any] = {}
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    env = values[-1].fake_mode.shape_env
    symbols, lines = getattr(env, "source_to_var", {}), getattr(env, "replacements_slocs", {})
    for source, symbol in symbols.items():
        place = _SIZE.search(str(source))
        frame = getattr(lines.get(symbol), "framework_loc", None)
        if place and hasattr(frame, "lineno"):
            found[int(place[1]), int(place[2])] = frame
    return found


def checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {describe(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "`model` must be a module in Python: give the one that torch.jit scripted or traced, got "
            f"{type(model).__name__}"
        )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.device.type != "cpu":
            way = "load its weights" if value.device.type == "meta" else "call `model.cpu()`"
            raise ValueError(f"`model` must be on the CPU: {way} first, got {name!r} on {value.device}")
    return getattr(model, "_orig_mod", model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        log.setLevel(level)


def _shapes(program: torch.export.ExportedProgram) -> list[tuple[Any, ...]]:
    named = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    vals = [named[name].meta["val"] for name in program.graph_signature.user_inputs]
    return [tuple(size if isinstance(size, int) else _plain(size.node.expr) for size in val.shape) for val in vals]


def _plain(size: Any) -> Any:
    return int(size) if size.is_Integer else size


def _input_name(path: Any, parameters: Sequence[str]) -> str:
    by_name, first, *rest = map(_part, path)
    if not by_name:
        first = parameters[first] if first < len(parameters) else f"input_{first}"
    return "_".join(map(str, (first, *rest)))


def _output_name(path: Any) -> str:
    if not path:
        return "output"
    name = "_".join(str(_part(key)) for key in path)
    return f"output_{name}" if name[0].isdigit() else name


def _part(key: Any) -> Any:
    return next(getattr(key, kind) for kind in ("idx", "key", "name") if hasattr(key, kind))


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def torch_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None:
        return None
    return getattr(torch, check_dtype(dtype))


def in_dtype(model: AnyModule, dtype: torch.dtype | None) -> AnyModule:
    """Return a copy of a model whose floating parameters and buffers have ``dtype``, or the model if that is None.

    The frequencies of rotary positions stay as ``from_pretrained(dtype=...)`` leaves them: rounded to half precision,
    they turn a thousandth position by another angle.
    """
    if dtype is None:
        return model
    # Each tensor is cast once and then released, and shared tensors stay shared.
    known: dict[int, Any] = {}
    exact = _frequencies(model)
    for value in (*model.parameters(), *model.buffers()):
        new = value.detach().clone() if id(value) in exact else cast(value.detach(), dtype)
        is_parameter = isinstance(value, nn.Parameter)
        known[id(value)] = nn.Parameter(new, requires_grad=False) if is_parameter else new
    # torch.nn.utils.weight_norm keeps the product of its parameters as a plain attribute, which torch refuses to copy
    # and the module computes anew in each call.
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, Tensor) and not value.is_leaf:
            known[id(value)] = cast(value.detach(), dtype)
    with torch.no_grad():
        return copy.deepcopy(model, known)


def _frequencies(model: nn.Module) -> set[int]:
    """Return the buffers from which Hugging Face models compute rotary positions, in float32 for every dtype."""
    homes = [module for module in model.modules() if type(module).__module__.startswith("transformers.")]
    named = [pair for module in homes for pair in module.named_buffers(recurse=False)]
    return {id(value) for name, value in named if name.endswith("inv_freq")}


def cast(given: Any, dtype: torch.dtype) -> Any:
    return given.to(dtype) if isinstance(given, Tensor) and given.is_floating_point() else given

"""``torch_to_onnx``: any torch model, in one call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx

from relskew_core._array.checks import check_int, describe
from relskew_core._array.extras import warn_caller
from relskew_core.export._check.inspect import Check
from relskew_core.export._files.publish import check_target, target_path
from relskew_core.export._models.exported import ExportOptions, exports, publish
from relskew_core.export._models.names import first_free

if TYPE_CHECKING:
    from torch import Tensor, nn


@exports
def torch_to_onnx(
    model: nn.Module,
    inputs: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    vary: Mapping[str, Iterable[int]] | None = None,
    chunk_size: int | Literal["auto"] | None = "auto",
    options: ExportOptions,
) -> onnx.ModelProto:
    """Write a torch model as an ONNX graph with dynamic batch and lengths, checked against torch.

    Every call of :func:`relskew_core.relative_attention` and every module of this library becomes a few nodes, as with
    :func:`to_onnx`; torch's exporter writes the rest. This needs torch, onnxscript and, for the check, onnxruntime.

    The check compares the example, and other lengths of the axes that vary, including 1, with values drawn from those
    of the example. A length that ``model`` rejects cannot be compared; a warning says where the graph still returns
    numbers. If the results differ from torch's, a ``RuntimeError`` says where, and nothing is written.

    Parameters
    ----------
    model : torch.nn.Module
        The model, on the CPU. It is exported in evaluation mode, and its mode is restored.
    inputs : Tensor, tuple or mapping of str
        Example arguments: one argument, positional arguments, or keyword arguments. Tensors in lists, tuples and
        mappings are inputs too; other values are constants of the graph.
    path : str or path-like, optional
        Where to save the graph too, all or nothing, as :func:`save` does.
    input_names, output_names : sequence of str, optional
        Names for the tensors of the arguments and the results; by default those that the model uses. A result with the
        name of an argument, such as a mask that is returned, is then called ``output_mask``.
    vary : mapping of str to iterables of int, optional
        The axes that must vary, by the names of inputs; all others are then fixed. By default, every axis that is
        longer than 1 in the example varies unless the model fixes it, except for heads and widths of attention. Pass a
        batch of 2 and lengths above 1. If an axis is fixed although ``model`` accepts other lengths, a warning names
        it, with the line that fixed it if torch reports the line.
    chunk_size : int, "auto" or None, default "auto"
        As in :func:`torch_translation_table`: for more queries than this number, attention is a ``Loop`` over this many
        queries at a time, and memory grows linearly with the length. None: no control flow.
    {options}

    Returns
    -------
    onnx.ModelProto
        The graph.

    See Also
    --------
    to_onnx : one attention block, without torch.
    decoder_to_onnx : a decoder with caches.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.export import torch_to_onnx
    >>> from relskew_core.layers.torch import RelativeMultiheadAttention
    >>> encoder = RelativeMultiheadAttention(BlockSpec(8, 2, Span.clipped(4)))
    >>> graph = torch_to_onnx(encoder, torch.randn(2, 5, 8), output_names=["y"]).graph
    >>> [
    ...     size.dim_param or size.dim_value
    ...     for size in graph.input[0].type.tensor_type.shape.dim
    ... ]
    ['batch', 'x_length', 8]

    Two inputs, by the names of the arguments, of which only the batch varies:

    >>> given = {"x": torch.randn(2, 5, 8), "mask": torch.ones(5, 5, dtype=torch.bool)}
    >>> graph = torch_to_onnx(encoder, given, vary={"x": [0]}, check=False).graph
    >>> [x.name for x in graph.input]
    ['x', 'mask']

    Into a file, with attention over all queries at once for longer inputs too:

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "encoder.onnx"
    ...     model = torch_to_onnx(encoder, torch.randn(2, 5, 8), path, chunk_size=None)
    ...     path.exists()
    True
    """
    import torch
    from torch.utils import _pytree as pytree

    from relskew_core.export._models import convert
    from relskew_core.export._models.fixed import explained, fixed_by_chance, reasons_of

    model = convert.checked_model(model)
    target = None if path is None else target_path(path)
    if target is not None:
        check_target(target, options.overwrite)
    wanted = convert.torch_dtype(options.dtype)
    args, kwargs = pytree.tree_map(lambda x: x if wanted is None else convert.cast(x, wanted), _arguments(inputs))
    flat = convert.Flat(convert.in_dtype(model, wanted), args, kwargs)
    leaves = flat.inputs()
    if not leaves:
        raise ValueError(f"`inputs` must hold a tensor, got {describe(inputs)}")
    with convert.evaluating(flat), torch.no_grad():
        try:
            given = flat(*leaves)  # which also records the names of the results
        except Exception as error:
            if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
                error.add_note("To generate tokens with `model`, use encoder_decoder_to_onnx(model, folder).")
            raise
    if not given:
        raise ValueError("`model` must return a tensor for `inputs`, got none")
    names = _names("input_names", input_names, flat.input_names)
    results = _names("output_names", output_names, flat.output_names, names)
    varies = convert.varying(flat) if vary is None else convert.Varying(_axes(leaves, names, vary), frozenset(), {})
    converted = convert.convert(
        flat, varies.axes, options, input_names=names, output_names=results, lengths=partial(_lengths, names),
        chunk_size=chunk_size,
    )  # fmt: skip
    chance = [] if vary is not None else fixed_by_chance(flat, converted.shapes, varies.never)
    for text in explained(chance, names, leaves, varies.frames):
        warn_caller(text)
    unchecked: list[str] = []

    def compare(files: Sequence[Path], library: bool, tolerance: float | None, checks: list[Check]) -> None:
        from relskew_core.export._models.compare import check_equal, gives_numbers, results_of, runner

        run = runner(files[0], names, operator=library)
        with convert.evaluating(flat):
            for number, case in enumerate(_cases(leaves, converted.shapes)):
                label = "inputs of " + ", ".join(
                    f"{name} {tuple(x.shape)}" for name, x in zip(names, case, strict=True)
                )
                try:
                    wanted = results_of(flat, case)
                except Exception as error:
                    if number == 0:
                        raise
                    if not library and gives_numbers(run, case):
                        unchecked.append(f"{label} ({type(error).__name__}: {error})")
                    continue
                check_equal(results, run(case, label), wanted, label, tolerance, checks)

    reasons = reasons_of(leaves, varies, chance, named=vary is not None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx") if target is None else target
        (made,) = publish(
            [converted.model], [file], options, compare, path=target, unchecked=unchecked,
            why=lambda name, axis: reasons[names.index(name), axis],
        )  # fmt: skip
    return made


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from torch import Tensor

    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor | tuple | list):
        return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), {}
    raise TypeError(f"`inputs` must be a tensor, a tuple of arguments or a mapping of names, got {describe(inputs)}")


def _names(argument: str, given: Any, usual: list[str], inputs: Sequence[str] = ()) -> list[str]:
    """Return the given names, or the usual ones, made different from each other and from those of inputs."""
    if given is None:
        names: list[str] = []
        for name in usual:
            free = f"output_{name}" if name in inputs else name
            names.append(first_free(free, {*inputs, *names}))
        return names
    names = list(given)
    if isinstance(given, str) or len(names) != len(usual) or len(set(names)) != len(names):
        raise ValueError(f"`{argument}` must be {len(usual)} different names, for {usual}, got {given!r}")
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"`{argument}` must be names, strings that are not empty, got {given!r}")
    taken = [name for name in names if name in inputs]
    if taken:
        raise ValueError(f"`{argument}` must differ from the names of the inputs, {list(inputs)}, got {taken}")
    return names


def _axes(leaves: Sequence[Tensor], names: Sequence[str], vary: Mapping[str, Iterable[int]]) -> list[dict[int, Any]]:
    from torch.export import Dim

    if not isinstance(vary, Mapping):
        raise TypeError(f"`vary` must be a mapping from names of inputs to axes, got {describe(vary)}")
    wrong = {name: axes for name, axes in vary.items() if name not in names}
    if wrong:
        raise ValueError(f"`vary` must name inputs, {list(names)}, got {sorted(wrong)}")
    found: list[dict[int, Any]] = []
    for value, name in zip(leaves, names, strict=True):
        given = vary.get(name, ())
        if not isinstance(given, Iterable):
            raise TypeError(f"`vary[{name!r}]` must be a list of axes, got {describe(given)}")
        axes = [check_int(f"vary[{name!r}]", axis) for axis in given]
        if any(not -value.ndim <= axis < value.ndim for axis in axes):
            raise ValueError(f"`vary[{name!r}]` must be axes of {describe(value)}, got {axes}")
        found.append({axis % value.ndim: Dim.DYNAMIC for axis in axes})
    return found


def _lengths(names: Sequence[str], shapes: Sequence[tuple[Any, ...]]) -> dict[tuple[int, int], str]:
    """Return the names of lengths in the graph: "batch" for the first axis of all, and others by their input."""
    batch = shapes[0][0] if shapes[0] else None
    found = {(0, 0): "batch"} if shapes[0] else {}
    for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        vary = [axis for axis, size in enumerate(shape) if not isinstance(size, int) and size != batch]
        for axis in vary:
            found[index, axis] = f"{name}_length" if len(vary) == 1 else f"{name}_axis_{axis}"
    return found


def _cases(leaves: Sequence[Tensor], shapes: Sequence[tuple[Any, ...]]) -> Iterator[list[Tensor]]:
    """Return the example, and inputs of other lengths with values drawn from it."""
    import torch

    from relskew_core.export._models.fixed import drawn

    yield [value.clone() for value in leaves]
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = [dict(zip(shape, value.shape, strict=True)) for shape, value in zip(shapes, leaves, strict=True)]
    shown = {symbol: size for given in sizes for symbol, size in given.items() if getattr(symbol, "is_Symbol", False)}
    symbols = sorted(shown, key=str)
    # Sizes that are equal in the example stay equal: torch does not always derive that they must be.
    changes: tuple[Callable[[int], int], ...] = (lambda size: 1, lambda size: max(1, size - 1), lambda size: size + 1)
    for change in changes if symbols else ():
        choice = {symbol: change(shown[symbol]) for symbol in symbols}
        case = []
        for shape, value in zip(shapes, leaves, strict=True):
            lengths = [size if isinstance(size, int) else int(size.subs(choice)) for size in shape]
            case.append(drawn(value, lengths, generator))
        yield case

"""``decoder_to_onnx``: a torch decoder with its caches, under the names that runtimes expect."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx

from relskew_core._array.checks import check_bool, check_int, describe
from relskew_core.export._caches import CACHE_LENGTH, caches_in_place
from relskew_core.export._profiles import IN_PLACE_OPSET, checked_opset
from relskew_core.export._publish import check_target
from relskew_core.export._save import write
from relskew_core.export._whole.genai import check_config, config_text, write_config

if TYPE_CHECKING:
    from torch import Tensor, nn

GROWING = "growing"
"""The caches of a graph: all keys and values so far, one longer with every token."""

IN_PLACE = "in_place"
"""The caches of a graph: buffers of one length, of which the input ``past_length`` says how much is filled."""


def decoder_to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    past: Callable[[int], Any] | None = None,
    in_place: bool = False,
    length: int | None = None,
    contrib: bool = False,
    genai: Literal[False] | Mapping[str, Any] = False,
    tolerance: float | None = None,
    operator: bool = False,
    check: bool = True,
    overwrite: bool = False,
    external_threshold: int = 2**30,
) -> Path:
    """Write a decoder of torch as one ONNX graph with caches, checked against torch.

    Its inputs are ``input_ids (batch, length)`` of int64 and, for every layer ``N``, ``past_key_values.N.key`` and
    ``past_key_values.N.value (batch, heads, past_length, D)``; its outputs ``logits (batch, length, vocabulary)``,
    ``present.N.key`` and ``present.N.value``: the names of optimum and onnxruntime-genai. One graph serves prompts,
    pieces and single tokens of any batch; :func:`generate` decodes with it. Needs torch, onnxscript and, for the check,
    onnxruntime.

    Parameters
    ----------
    model : torch.nn.Module
        Called as ``model(tokens, past)``; returns ``(logits, past)``, with a cache for every layer, each a pair of keys
        and values, in a list or tuple. On the CPU; exported in evaluation, and left in the mode it was in.
    path : str or path-like
        Where to save the graph, all or nothing, as :func:`save` does.
    opset : int, optional
        Version of the standard operators, 18 … 28; by default 23, and 24, the least, with ``in_place``.
    past : callable, optional
        ``past(batch)`` returns the caches of a first call: pairs of tensors ``(batch, heads, 0, D)``. By default
        that is ``model.empty_cache(batch)`` if the model has it, else a list of ``empty_cache(batch)`` of every
        causal ``RelativeMultiheadAttention`` without ``cross``, in the order of ``model.modules()``.
    in_place : bool, default False
        Give the caches one length, ``(batch, heads, cache_length, D)``, and the graph one more input, ``past_length
        (1,)`` of int64: how many positions of them are filled, the same for every row of the batch. A runtime writes
        into the buffer that is bound as past and as present, and copies nothing, where caches that grow are copied at
        every step. The runtime must support ``TensorScatter``.
    length : int, optional
        Positions that the caches have room for, with ``in_place``; by default the runtime takes any ``cache_length``.
        At most what the tables reach.
    contrib : bool, default False
        Attend by onnxruntime's own ``GroupQueryAttention``, with ``in_place``. It reads caches where they lie, and is
        the faster one in onnxruntime, so take it where no other runtime must run the file. It takes heads whose width 8
        divides, attention without relative values, and several tokens behind a past for a batch of one alone.
    genai : mapping or False, default False
        Also write ``genai_config.json`` next to the file, with which onnxruntime-genai runs the folder: entries of its
        ``model`` part, such as ``{"eos_token_id": 2, "context_length": 2048}``. The token, or the list of tokens, that
        ends a text must be among them: the runtime stops at token 0 where no other is named, and takes none outside the
        vocabulary. Not with ``in_place``.
    tolerance : float, optional
        Largest relative L2 error of the check; by default 1e-4 for float32.
    operator : bool, default False
        Write attention as nodes ``relskew::RelativeAttention``, which are functions of the model at the same time, as
        :func:`to_onnx` does; with ``in_place`` they write the caches themselves. Not with ``contrib``. The check runs
        the graph with the operator library and without it; :func:`generate` registers the library by itself.
    check : bool, default True
        Compare logits and caches with torch in onnxruntime: single tokens, whole prompts, prompts in pieces, other
        batches, long pasts; and see that it fails past the tables, and where a cache is full.
    overwrite : bool, default False
        Replace files that are there.
    external_threshold : int, default 2**30
        As of :func:`save`.

    Returns
    -------
    pathlib.Path
        The path of the graph.

    Raises
    ------
    RuntimeError
        If the graph's results are not torch's; nothing is written then.
    FileExistsError, ValueError, TypeError, OSError
        If an argument, or what the model returns, does not fit; torch's own errors where it cannot export a model.

    Notes
    -----
    ``metadata_props`` hold ``relskew.decoder``, the kind of the caches, and ``relskew.reach``, how many positions the
    tables allow, if they end. Past them the runtime fails; its error names the module, the table and its reach.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.export import decoder_to_onnx, generate
    >>> from relskew_core.layers.torch import RelativeMultiheadAttention
    >>> class Decoder(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = torch.nn.Embedding(10, 8)
    ...         self.attention = RelativeMultiheadAttention(
    ...             BlockSpec(8, 2, Span.causal(16), causal=True)
    ...         )
    ...
    ...     def forward(self, tokens, past):
    ...         y, cache = self.attention(self.embedding(tokens), past=past[0])
    ...         return y @ self.embedding.weight.T, [cache]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = decoder_to_onnx(Decoder(), Path(folder) / "decoder.onnx")
    ...     tokens = generate(path, [1, 2, 3], 5)
    ...     fixed = decoder_to_onnx(
    ...         Decoder(), Path(folder) / "fixed.onnx", in_place=True, length=12
    ...     )
    ...     len(tokens), len(generate(fixed, [1, 2, 3], 5))
    (5, 5)
    """
    import torch

    from relskew_core.export._whole.compare import runner, runner_in_place
    from relskew_core.export._whole.convert import Flat, check_model, convert, evaluating
    from relskew_core.export._whole.decoder_check import check_decoder, check_full

    check_model(model)
    check_bool("check", check)
    if check_bool("operator", operator) and contrib:
        raise ValueError("`operator=True` excludes `contrib=True`: one of them attends")
    opset = _opset(opset, in_place, length, contrib, genai)
    target = Path(path)
    check_target(target, check_bool("overwrite", overwrite))
    if genai is not False:
        check_config(target.parent, genai, overwrite)
    empty = _empty_past(model, past)
    with evaluating(model), torch.no_grad():
        shown = _shown(model, empty)
    flat = Flat(model, shown, {})
    caches = flat.inputs()[1:]
    layers = len(caches) // 2
    kinds = [(layer, kind) for layer in range(layers) for kind in ("key", "value")]
    input_names = ["input_ids", *(f"past_key_values.{layer}.{kind}" for layer, kind in kinds)]
    output_names = ["logits", *(f"present.{layer}.{kind}" for layer, kind in kinds)]
    vary, cached = torch.export.Dim.DYNAMIC, range(1, 1 + len(caches))
    converted = convert(
        flat,
        [{0: vary, 1: vary}, *({0: vary, 2: vary} for _ in caches)],
        opset=opset,
        input_names=input_names,
        output_names=output_names,
        lengths=lambda _: {(0, 0): "batch", (0, 1): "length", **{(index, 2): "past_length" for index in cached}},
        sums={"length + past_length": "total_length"},
        metadata={"relskew.decoder": GROWING},
        operator=operator,
    )

    graph, reach = converted.model, converted.reach
    if in_place:
        graph = _in_place(graph, reach, length, contrib)

    def compare(file: Path) -> None:
        for library in (False, True)[: 1 + operator]:
            run = (
                runner_in_place(file, input_names, length, operator=library)
                if in_place
                else runner(file, input_names, operator=library)
            )
            with evaluating(flat):
                check_decoder(flat, run, output_names, reach=length or reach, tolerance=tolerance, grouped=contrib)
                if in_place and length is None:  # else that was the end
                    check_full(flat, run)

    config = None
    if genai is not False:
        config = config_text(target.name, graph, genai, reach)
    saved = write(
        graph,
        target,
        overwrite=overwrite,
        external_threshold=external_threshold,
        check=compare if check else None,
    )
    if config is not None:
        write_config(saved.parent, config)
    return saved


def _opset(opset: int | None, in_place: bool, length: int | None, contrib: bool, genai: Any) -> int:
    """Return the version of the operators, if the arguments that are for caches in place fit together."""
    check_bool("in_place", in_place)
    check_bool("contrib", contrib)
    if not in_place:
        for name, value, unset in (("length", length, None), ("contrib", contrib, False)):
            if value != unset:
                raise ValueError(f"`{name}` requires `in_place=True`: caches that grow have none, got {name}={value!r}")
        return 23 if opset is None else opset
    if genai is not False:
        raise ValueError(
            "`in_place=True` excludes `genai`: onnxruntime-genai gives no `past_length` to a graph, got genai="
            f"{describe(genai)}"
        )
    if opset is not None and checked_opset(opset) < IN_PLACE_OPSET:
        raise ValueError(f"`in_place=True` requires `opset={IN_PLACE_OPSET}`, of TensorScatter, or newer, got {opset}")
    if length is not None:
        check_int("length", length, minimum=1)
    return IN_PLACE_OPSET if opset is None else opset


def _in_place(growing: onnx.ModelProto, reach: int | None, length: int | None, contrib: bool) -> onnx.ModelProto:
    """Return a decoder with caches in place, of ``length`` if there is one."""
    if length is not None and reach is not None and length > reach:
        raise ValueError(f"`length` must be at most {reach}, the positions that the model's tables reach, got {length}")
    fixed = caches_in_place(growing, contrib=contrib)
    for value in (*fixed.graph.input, *fixed.graph.output, *fixed.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if length is not None and size.dim_param == CACHE_LENGTH:
                size.dim_value = length
    return fixed


def _empty_past(model: nn.Module, past: Callable[[int], Any] | None) -> Callable[[int], Any]:
    """Return what makes the caches of a first call."""
    from relskew_core.layers.torch import RelativeMultiheadAttention

    if past is not None:
        if not callable(past):
            raise TypeError(f"`past` must be a function that returns the caches of a batch, got {describe(past)}")
        return past
    own = getattr(model, "empty_cache", None)
    if callable(own):
        return own
    layers = [
        module
        for module in model.modules()
        if isinstance(module, RelativeMultiheadAttention) and module.spec.causal and not module.spec.cross
    ]
    if not layers:
        raise ValueError(
            "`past` must be given where the model has no `empty_cache` and no causal RelativeMultiheadAttention: a "
            "function that returns for a batch one pair of keys and values (batch, heads, 0, D) a layer"
        )
    return lambda batch: [layer.empty_cache(batch) for layer in layers]


def _shown(model: nn.Module, empty: Callable[[int], Any]) -> tuple[Tensor, Any]:
    """Return the arguments of an example, whose lengths are neither 0 nor 1 and all differ from the batch."""
    import torch

    batch, length = 2, 3
    past = empty(batch)
    given = _check_caches("what `past(batch)` returns", past, batch, 0)
    result = model(torch.zeros((batch, length), dtype=torch.int64, device="cpu"), past)
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise TypeError(f"`model` must return (logits, past), got {describe(result)}")
    logits, present = result
    if logits.ndim != 3 or logits.shape[:2] != (batch, length) or not logits.is_floating_point():
        raise ValueError(
            f"`model` must return logits (batch, length, vocabulary), got {describe(logits)} for tokens (2, 3)"
        )
    if _check_caches("the past that `model` returns", present, batch, length) != given:
        raise ValueError("`model` must return as many caches as it is given, of the same heads and widths")
    return torch.zeros((batch, 2), dtype=torch.int64, device="cpu"), present


def _check_caches(name: str, caches: Any, batch: int, length: int) -> list[tuple[int, int]]:
    """Return heads and width of every tensor of the caches, if they are keys and values of that many positions."""
    import torch

    pairs = list(caches) if isinstance(caches, tuple | list) else []
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"{name} must be a list with one pair of keys and values a layer (caches that grow, `empty_cache(batch)`), "
            f"got {describe(caches)}"
        )
    for tensor in (tensor for pair in pairs for tensor in pair):
        right = isinstance(tensor, torch.Tensor) and tensor.ndim == 4
        if not right or (tensor.shape[0], tensor.shape[2]) != (batch, length):
            raise ValueError(
                f"{name} must hold tensors (batch, heads, positions, D), of {batch} and {length} positions here, got "
                f"{describe(tensor)}"
            )
    return [(tensor.shape[1], tensor.shape[3]) for pair in pairs for tensor in pair]

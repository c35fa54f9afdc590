"""``decoder_to_onnx``: a torch decoder with its caches, under the names that runtimes expect."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx

from relskew_core._array.checks import check_bool, check_choice, check_int, describe
from relskew_core.export._check.inspect import Check
from relskew_core.export._files.publish import check_target, target_path
from relskew_core.export._form.plan import IN_PLACE_OPSET, checked_opset
from relskew_core.export._models.caches import INT8, PAST_LENGTH, caches_in_place
from relskew_core.export._models.exported import ExportOptions, exports, publish
from relskew_core.export._models.genai import NAME as CONFIG
from relskew_core.export._models.genai import check_config, config_text
from relskew_core.export._models.rewrites import memory_path, split_off
from relskew_core.export._nodes.in_place import CACHE_LENGTH

if TYPE_CHECKING:
    from torch import Tensor, nn

GROWING = "growing"  # the caches of a graph: all keys and values so far, one longer with every token
IN_PLACE = "in_place"  # the caches of a graph: buffers of a fixed length; the input ``past_length`` is the filled part


@exports
def decoder_to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    memory: Tensor | Sequence[Tensor] | None = None,
    past: Callable[[int], Any] | None = None,
    in_place: bool = False,
    length: int | None = None,
    cache_dtype: Literal["int8"] | None = None,
    genai: Literal[False] | Mapping[str, Any] = False,
    options: ExportOptions,
) -> Path:
    """Write a torch decoder as one ONNX graph with caches, checked against torch.

    Its inputs are ``input_ids (batch, length)`` of int64 and, for every layer ``N``, ``past_key_values.N.key`` and
    ``past_key_values.N.value (batch, heads, past_length, D)``; its outputs ``logits (batch, length, vocabulary)``,
    ``present.N.key`` and ``present.N.value``: the names of optimum and onnxruntime-genai. One graph serves prompts,
    pieces and single tokens of any batch; :func:`generate` decodes with it. Needs torch, onnxscript and, for the check,
    onnxruntime.

    The check compares logits and caches for single tokens, whole prompts, prompts in pieces, other batches and long
    pasts; and the graph must fail past the tables and when a cache is full. If the results differ from torch's, a
    ``RuntimeError`` says where, and nothing is written.

    ``metadata_props`` contain ``relskew.decoder``, the kind of the caches, and ``relskew.reach``, the number of
    positions that the tables allow, if it is limited. Beyond it the runtime fails; its error names the module, the
    table and its reach.

    Parameters
    ----------
    model : torch.nn.Module
        A model on the CPU, called as ``model(tokens, past)``. It returns ``(logits, past)``, with a pair of keys and
        values for every layer, in a list or tuple. A decoder of transformers needs no changes if it keeps its past in a
        ``DynamicCache`` of keys and values: pass ``replace_attention(model)``, or one with ``register_attention``. The
        model is exported in evaluation mode, and its mode is restored.
    path : str or path-like
        Where to save the graph, all or nothing, as :func:`save` does.
    memory : Tensor or sequence of Tensor, optional
        Tensors to which the decoder attends besides its text, such as the states of an encoder
        ``(batch, memory_length, width)``, and a mask ``(batch, memory_length)``: an example, longer than 1. The model
        is called as ``model(tokens, past, memory)``, with one argument for each tensor; one of transformers takes
        ``encoder_hidden_states`` and ``encoder_attention_mask``. Everything that depends on the memory alone, such as
        its keys and values, becomes a second graph next to the first: ``decoder_memory.onnx`` for ``decoder.onnx``,
        from inputs with the names of the arguments to outputs ``memory.N``. Pass these outputs to the decoder at every
        step. Not with ``genai``.
    past : callable, optional
        ``past(batch)`` returns the caches of a first call: pairs of tensors ``(batch, heads, 0, D)``. By default, they
        come from ``model.empty_cache(batch)`` if the model has this method, from the cache that a model of transformers
        fills, or otherwise from ``empty_cache(batch)`` of every causal ``RelativeMultiheadAttention`` without
        ``cross``, in the order of ``model.modules()``.
    in_place : bool, default False
        Give the caches one length, ``(batch, heads, cache_length, D)``, and the graph one more input,
        ``past_length (1,)`` of int64: how many positions of them are filled, the same for every row of the batch. A
        runtime writes into the buffer that is bound as past and as present, and copies nothing, whereas growing caches
        are copied at every step. The runtime must support ``TensorScatter``. With ``operator``, its nodes write the
        caches themselves.
    length : int, optional
        With ``in_place``, the number of positions of the caches, at most what the tables reach; by default the runtime
        accepts any ``cache_length``.
    cache_dtype : {"int8"}, optional
        With ``in_place`` and ``operator``, store keys and values in int8, rounded when they are written, with a scale
        in float32 for each row: a quarter of the memory of float32, and a token after a long past takes less time.
        The graph gets inputs ``past_key_values.N.key_scale`` and ``past_key_values.N.value_scale (batch, heads,
        cache_length)``, and outputs ``present.N.key_scale`` and ``present.N.value_scale``. By default the caches have
        the dtype of the model.
    genai : mapping or False, default False
        Also write ``genai_config.json`` next to the file, with which onnxruntime-genai runs the folder: entries of its
        ``model`` part, such as ``{"eos_token_id": 2, "context_length": 2048}``. The token, or the list of tokens, that
        ends a text must be among them: the runtime would otherwise stop at token 0, and it accepts no token outside the
        vocabulary. Not with ``in_place``.
    {options}

    Returns
    -------
    pathlib.Path
        The path of the graph.

    See Also
    --------
    generate : tokens from the file.
    encoder_decoder_to_onnx : encoder and decoder.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.export import decoder_to_onnx, generate
    >>> from relskew_core.layers.torch import RelativeMultiheadAttention
    >>> spec = BlockSpec(8, 2, Span.causal(16), causal=True)
    >>> class Decoder(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = torch.nn.Embedding(10, 8)
    ...         self.attention = RelativeMultiheadAttention(spec)
    ...
    ...     def forward(self, tokens, past):
    ...         y, cache = self.attention(self.embedding(tokens), past=past[0])
    ...         return y @ self.embedding.weight.T, [cache]
    >>> place = tempfile.TemporaryDirectory()
    >>> folder = Path(place.name)
    >>> path = decoder_to_onnx(Decoder(), folder / "decoder.onnx")
    >>> len(generate(path, [1, 2, 3], 5))
    5

    With caches of a fixed length that are filled in place:

    >>> fixed = decoder_to_onnx(Decoder(), folder / "fixed.onnx", in_place=True, length=12)
    >>> len(generate(fixed, [1, 2, 3], 5))
    5

    In half precision, without the comparison with torch, which takes most of the time:

    >>> path = folder / "half.onnx"
    >>> half = decoder_to_onnx(Decoder(), path, dtype="float16", check=False)
    >>> place.cleanup()
    """
    import torch

    from relskew_core.export._models import convert
    from relskew_core.export._models.compare import OF_INT8, after, check_decoder, check_full, runner, runner_in_place
    from relskew_core.export._models.decoder_calls import Causal, Memories, called_alike, empty_past, example, memory_of

    model = convert.checked_model(model)
    options = _for_caches(options, in_place, length, cache_dtype, genai)
    wanted = convert.torch_dtype(options.dtype)
    if memory is not None and genai is not False:
        raise ValueError(f"`memory` excludes `genai`: onnxruntime-genai runs one file, got genai={describe(genai)}")
    target = target_path(path)
    targets = [target] if memory is None else [target, memory_path(target)]
    for one in targets:
        check_target(one, options.overwrite)
    if genai is not False:
        check_config(target.parent, genai, options.overwrite)
    decoder = convert.in_dtype(called_alike(model, past), wanted)
    empty, seen = empty_past(decoder, past), memory_of(memory, wanted)
    with convert.evaluating(decoder), torch.no_grad():
        shown = example(decoder, empty, seen, wanted)
    flat = convert.Flat(decoder, shown, {})
    count = len(flat.inputs()) - 1 - len(seen)
    kinds = [(layer, kind) for layer in range(count // 2) for kind in ("key", "value")]
    seen_names = flat.input_names[1 + count :]
    input_names = ["input_ids", *(f"past_key_values.{layer}.{kind}" for layer, kind in kinds), *seen_names]
    output_names = ["logits", *(f"present.{layer}.{kind}" for layer, kind in kinds)]
    vary = torch.export.Dim.DYNAMIC
    cached, added = range(1, 1 + count), range(1 + count, len(input_names))
    varies = [{0: vary} | ({1: torch.export.Dim.AUTO} if x.shape[1] > 1 else {}) for x in seen]
    called = {(0, 0): "batch", (0, 1): "length", **{(index, 2): "past_length" for index in cached}}
    # Axes with the same length as the first one share its name.
    of_memory = {(index, 1): f"{input_names[index]}_length" if index > added[0] else "memory_length" for index in added}
    converted = convert.convert(
        flat, [{0: vary, 1: vary}, *({0: vary, 2: vary} for _ in cached), *varies], options,
        input_names=input_names, output_names=output_names, lengths=lambda _: {**called, **of_memory},
        sums={"length + past_length": "total_length"}, metadata={"relskew.decoder": GROWING},
        prefix="model.model." if isinstance(decoder, Causal) else "model.",
    )  # fmt: skip
    graphs, reach = [converted.model], converted.reach
    if seen:
        graphs = list(reversed(split_off(converted.model, seen_names)))
    if in_place:
        graphs[0] = _in_place(graphs[0], reach, length, cache_dtype)
    graph = graphs[0]
    read = [*input_names[: 1 + count], *(value.name for value in graphs[-1].graph.output if seen)]
    draw = Memories(seen, [x[1] if isinstance(x[1], int) else None for x in converted.shapes[1 + count :]])

    def compare(files: Sequence[Path], library: bool, tolerance: float | None, checks: list[Check]) -> None:
        run = (
            runner_in_place(files[0], read, length, operator=library, in_int8=cache_dtype is not None)
            if in_place
            else runner(files[0], read, operator=library)
        )
        if seen:
            run = after(files[1], run, seen_names, operator=library)
        with convert.evaluating(flat):
            check_decoder(
                flat, run, output_names, draw, reach=length or reach, checks=checks,
                tolerance=OF_INT8 if tolerance is None and cache_dtype is not None else tolerance,
            )  # fmt: skip
            if in_place and length is None:  # with a length, check_decoder has filled it
                check_full(flat, run, draw)

    texts = {} if genai is False else {CONFIG: config_text(target.name, graph, genai, reach)}
    publish(graphs, targets, options, compare, path=target, why=partial(_why, length), texts=texts)
    return target


def _why(length: int | None, name: str, axis: int) -> str:
    if name == PAST_LENGTH:
        return "one number for all rows"
    if not name.startswith("past_key_values."):
        return "`model` takes no other size"
    return {1: "the heads of the layer", 2: f"`length` is {length}", 3: "the width of a head"}[axis]


def _for_caches(options: ExportOptions, in_place: bool, length: int | None, dtype: Any, genai: Any) -> ExportOptions:
    """Return the options with the opset that the caches need, if the arguments about caches fit together."""
    check_bool("in_place", in_place)
    if dtype is not None:
        check_choice("cache_dtype", dtype, (INT8,))
        if not (in_place and options.operator):
            raise ValueError(
                f"`cache_dtype` requires `in_place=True` and `operator=True`, got in_place={in_place} and "
                f"operator={options.operator}"
            )
    if not in_place:
        if length is not None:
            raise ValueError(f"`length` requires `in_place=True`: caches that grow have none, got length={length!r}")
        return options
    if genai is not False:
        raise ValueError(
            "`in_place=True` excludes `genai`: onnxruntime-genai passes no `past_length` to a graph, got genai="
            f"{describe(genai)}"
        )
    opset = IN_PLACE_OPSET if options.opset is None else checked_opset(options.opset)
    if opset < IN_PLACE_OPSET:
        raise ValueError(f"`in_place=True` requires `opset={IN_PLACE_OPSET}` or newer, for TensorScatter, got {opset}")
    if length is not None:
        check_int("length", length, minimum=1)
    return replace(options, opset=opset)


def _in_place(growing: onnx.ModelProto, reach: int | None, length: int | None, dtype: str | None) -> onnx.ModelProto:
    if length is not None and reach is not None and length > reach:
        raise ValueError(f"`length` must be at most {reach}, the positions that the model's tables reach, got {length}")
    fixed = caches_in_place(growing, cache_dtype=dtype)
    for value in (*fixed.graph.input, *fixed.graph.output, *fixed.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if length is not None and size.dim_param == CACHE_LENGTH:
                size.dim_value = length
    return fixed

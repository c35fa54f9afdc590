"""``encoder_decoder_to_onnx``: a transformers encoder–decoder as graphs that share weights, with optimum's names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relskew_core._files import writing
from relskew_core.export._check.inspect import Check
from relskew_core.export._files.publish import check_target, target_path
from relskew_core.export._models.exported import ExportOptions, exports, publish

if TYPE_CHECKING:
    from torch import nn

FILES = ("encoder_model.onnx", "memory_model.onnx", "decoder_with_past_model.onnx")
"""The encoder; the keys and values of the memory; the decoder, whose past may be empty."""

FIRST = "decoder_model.onnx"
"""The decoder of a first call, which contains the memory's graph, for optimum."""

START = "relskew.decoder_start_token_id"  # the metadata's key for the token with which a text begins


@exports
def encoder_decoder_to_onnx(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    chunk_size: int | Literal["auto"] | None = "auto",
    options: ExportOptions,
) -> Path:
    """Write an encoder–decoder of transformers as ONNX graphs with caches, checked against torch.

    It supports T5, mT5, UMT5, MADLAD, Pop2Piano and other models that decode with an ``EncoderDecoderCache``.
    :func:`generate` decodes with the folder. All graphs share one file of weights, next to them. Pass
    ``replace_attention(model)``: its attention does not materialise a bias for all pairs of positions. Needs torch,
    onnxscript, transformers and, for the check, onnxruntime.

    The check compares all graphs for memories of several lengths and batches, with padding, prompts of the decoder and
    single tokens after them. If the results differ from torch's, a ``RuntimeError`` says where, and nothing is written.

    ``encoder_model.onnx``
        ``input_ids``, ``attention_mask (batch, memory_length)`` of int64 →
        ``last_hidden_state (batch, memory_length, width)``. An audio model takes
        ``input_features (batch, memory_length, width)`` instead of tokens.
    ``memory_model.onnx``
        ``encoder_hidden_states``, the encoder's result → for every layer ``N`` ``present.N.encoder.key`` and
        ``present.N.encoder.value (batch, heads, memory_length, D)``, computed once per text.
    ``decoder_with_past_model.onnx``
        ``encoder_attention_mask``, ``input_ids (batch, length)``, ``past_key_values.N.encoder.…``, and
        ``past_key_values.N.decoder.key`` and ``….value (batch, heads, past_length, D)``, which are empty at first →
        ``logits (batch, length, vocabulary)``, ``present.N.decoder.key`` and ``present.N.decoder.value``.
    ``decoder_model.onnx``
        For runtimes that expect the three files of optimum, the last two for a first call:
        ``encoder_attention_mask``, ``input_ids``, ``encoder_hidden_states`` → ``logits`` and all four presents.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers with ``get_encoder``, on the CPU. It is exported in evaluation mode, and its mode is
        restored.
    folder : str or path-like
        A directory, created if it does not exist. Other files in it are kept: ``model.config.save_pretrained(folder)``
        adds the configuration that optimum needs.
    chunk_size : int, "auto" or None, default "auto"
        As in :func:`torch_to_onnx`, for the encoder.
    {options}

    Returns
    -------
    pathlib.Path
        The folder. The metadata entry ``relskew.set`` is the same in all graphs; :func:`generate` rejects files that
        were not written together.

    Examples
    --------
    T5, here small and random, in a folder, with its weights in one more file:

    >>> import tempfile
    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> from relskew_core.export import encoder_decoder_to_onnx, generate
    >>> from relskew_core.huggingface import replace_attention
    >>> sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "d_ff": 16}
    >>> config = T5Config(**sizes, vocab_size=50, decoder_start_token_id=0)
    >>> model = replace_attention(T5ForConditionalGeneration(config))
    >>> place = tempfile.TemporaryDirectory()
    >>> folder = encoder_decoder_to_onnx(model, place.name)
    >>> sorted(path.suffix for path in folder.iterdir())
    ['.data', '.onnx', '.onnx', '.onnx', '.onnx']

    Tokens from it, without torch or transformers:

    >>> generate(folder, [3, 4, 5, 6], 5).shape
    (5,)

    A batch with padding, which ends where the model ends its text:

    >>> inputs, mask = [[3, 4, 5, 6], [7, 8, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]]
    >>> len(generate(folder, inputs, 5, mask=mask, stop=config.eos_token_id))
    2
    >>> place.cleanup()
    """
    import torch

    from relskew_core.export._models import convert
    from relskew_core.export._models.compare import check_parts
    from relskew_core.export._models.decoder_calls import parts_of

    model = convert.checked_model(model)
    start = _start(model)
    model = convert.in_dtype(model, convert.torch_dtype(options.dtype))
    home = target_path(folder, "folder")
    made = _is_new(home)
    try:
        if made:
            with writing(home, "folder"):  # its name may be too long, or the directory read-only
                home.mkdir()
        targets = [home / name for name in (*FILES, FIRST)]
        for target in targets:
            check_target(target, options.overwrite)
        with convert.evaluating(model), torch.no_grad():
            parts = parts_of(model)
        vary = torch.export.Dim.DYNAMIC
        graphs = [
            convert.convert(
                convert.Flat(part.module, part.example, {}), [dict.fromkeys(names, vary) for names in part.axes],
                options, input_names=part.inputs, output_names=part.outputs, lengths=part.called,
                sums={"length + past_length": "total_length"}, metadata={START: str(start)}, prefix="model.model.",
                chunk_size=chunk_size if part is parts[0] else None,
            ).model
            for part in parts
        ]  # fmt: skip

        def compare(files: Sequence[Path], library: bool, tolerance: float | None, checks: list[Check]) -> None:
            with convert.evaluating(model):
                check_parts(parts, files, tolerance, checks, operator=library)

        publish(graphs, targets, options, compare, path=home, why=_why)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # another file has taken its place
                home.rmdir()
        raise
    return home


def _why(name: str, axis: int) -> str:
    if name.startswith("past_key_values."):
        return "the heads of the layer" if axis == 1 else "the width of a head"
    return "the width of the model"


def _is_new(home: Path) -> bool:
    if os.path.islink(home) or (os.path.exists(home) and not os.path.isdir(home)):
        raise NotADirectoryError(f"`folder` must be a directory or not exist yet, got {os.fspath(home)!r}")
    if os.path.isdir(home):
        return False
    if not os.path.isdir(home.parent):
        raise FileNotFoundError(f"`folder` must lie in a directory that exists, got {os.fspath(home)!r}")
    return True


def _start(model: Any) -> int:
    config = getattr(model, "config", None)
    if not callable(getattr(model, "get_encoder", None)) or not getattr(config, "is_encoder_decoder", False):
        flag = getattr(config, "is_encoder_decoder", None)
        shown = "" if flag is None else f" with config.is_encoder_decoder={flag}"
        raise TypeError(
            "`model` must be an encoder–decoder of transformers, such as T5ForConditionalGeneration, got "
            f"{type(model).__name__}{shown}"
        )
    settings: Sequence[Any] = (getattr(model, "generation_config", None), config)
    for holder in settings:
        token = getattr(holder, "decoder_start_token_id", None)
        if isinstance(token, int):
            return token
    raise ValueError("`model` must have a `decoder_start_token_id` in its config, with which a text begins, got None")

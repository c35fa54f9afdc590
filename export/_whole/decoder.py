"""``decoder_to_onnx``: a decoder of torch with its caches, under the names that runtimes know."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relskew_core._array.checks import check_bool, describe
from relskew_core.export._publish import check_target
from relskew_core.export._save import write
from relskew_core.export._whole.genai import check_config, config_text, write_config

if TYPE_CHECKING:
    from torch import Tensor, nn

GROWING = "growing"
"""The caches of a graph: all keys and values so far, one longer with every token."""


def decoder_to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    opset: int = 23,
    past: Callable[[int], Any] | None = None,
    genai: bool | Mapping[str, Any] = False,
    tolerance: float | None = None,
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
    opset : int, default 23
        Version of the standard operators, 18 … 24.
    past : callable, optional
        ``past(batch)`` returns the caches of a first call: pairs of tensors ``(batch, heads, 0, D)``. By default
        that is ``model.empty_cache(batch)`` if the model has it, else a list of ``empty_cache(batch)`` of every
        causal ``RelativeMultiheadAttention`` without ``cross``, in the order of ``model.modules()``.
    genai : bool or mapping, default False
        Also write ``genai_config.json`` beside the file, with which onnxruntime-genai runs the folder. A mapping gives
        entries of its ``model`` part, such as ``{"eos_token_id": 2, "context_length": 2048}``.
    tolerance : float, optional
        Largest relative L2 error of the check; by default 1e-4 for float32.
    check : bool, default True
        Compare logits and caches with torch in onnxruntime: single tokens, whole prompts, prompts in pieces, other
        batches, long pasts; and see that it fails past the tables.
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
    ...         self.attention = RelativeMultiheadAttention(BlockSpec(8, 2, Span.causal(16), causal=True))
    ...
    ...     def forward(self, tokens, past):
    ...         y, cache = self.attention(self.embedding(tokens), past=past[0])
    ...         return y @ self.embedding.weight.T, [cache]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = decoder_to_onnx(Decoder(), Path(folder) / "decoder.onnx")
    ...     len(generate(path, [1, 2, 3], 5))
    5
    """
    import torch

    from relskew_core.export._whole.convert import Flat, check_model, convert, evaluating
    from relskew_core.export._whole.decoder_check import check_decoder

    check_model(model)
    check_bool("check", check)
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
    vary, cached = torch.export.Dim.DYNAMIC, range(1, 1 + len(caches))
    converted = convert(
        flat,
        [{0: vary, 1: vary}, *({0: vary, 2: vary} for _ in caches)],
        opset=opset,
        input_names=["input_ids", *(f"past_key_values.{layer}.{kind}" for layer, kind in kinds)],
        output_names=["logits", *(f"present.{layer}.{kind}" for layer, kind in kinds)],
        lengths={(0, 0): "batch", (0, 1): "length", **{(index, 2): "past_length" for index in cached}},
        sums={"length + past_length": "total_length"},
        metadata={"relskew.decoder": GROWING},
    )

    def compare(file: Path) -> None:
        with evaluating(flat):
            check_decoder(flat, file, converted.model, reach=converted.reach, tolerance=tolerance)

    config = None
    if genai is not False:
        config = config_text(target.name, converted.model, {} if genai is True else genai, converted.reach)
    saved = write(
        converted.model,
        target,
        overwrite=overwrite,
        external_threshold=external_threshold,
        check=compare if check else None,
    )
    if config is not None:
        write_config(saved.parent, config)
    return saved


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
    result = model(torch.zeros((batch, length), dtype=torch.int64), past)
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise TypeError(f"`model` must return (logits, past), got {describe(result)}")
    logits, present = result
    if logits.ndim != 3 or logits.shape[:2] != (batch, length) or not logits.is_floating_point():
        raise ValueError(
            f"`model` must return logits (batch, length, vocabulary), got {describe(logits)} for tokens (2, 3)"
        )
    if _check_caches("the past that `model` returns", present, batch, length) != given:
        raise ValueError("`model` must return as many caches as it is given, of the same heads and widths")
    return torch.zeros((batch, 2), dtype=torch.int64), present


def _check_caches(name: str, caches: Any, batch: int, length: int) -> list[tuple[int, int]]:
    """Return heads and width of every tensor of the caches, if they are keys and values of so many positions."""
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

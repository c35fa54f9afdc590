"""``generate``: tokens from a decoder's graph, with onnxruntime and NumPy only."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relskew_core._array.checks import check_int, describe, explains
from relskew_core.export._generate.decoder import OpenDecoder, tokens_of
from relskew_core.export._generate.encoded import Array, EncoderDecoder, Opened, Sampler

CPU = ("CPUExecutionProvider",)
_kept: dict[int, tuple[Any, Opened]] = {}
"""The last path, with the state of its files, and the model, by process: a fork can neither use nor close sessions."""


def open_model(path: str | os.PathLike[str], *, providers: Sequence[Any] = CPU) -> Opened:
    """Open the sessions of a decoder or an encoder–decoder once, for many calls of :func:`generate`.

    :func:`generate` does so itself for the last path that it was given. Open models yourself if a program alternates
    between several; the sessions close when nothing refers to the result any more. Several threads may use it.

    Parameters
    ----------
    path : str or path-like
        The file that :func:`decoder_to_onnx` wrote, or the folder that :func:`encoder_decoder_to_onnx` wrote.
    providers : sequence, optional
        Execution providers of onnxruntime.

    Returns
    -------
    object
        The open model, for :func:`generate`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.export import decoder_to_onnx, generate, open_model
    >>> from relskew_core.layers.torch import RelativeMultiheadAttention
    >>> class Decoder(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = torch.nn.Embedding(10, 8)
    ...         spec = BlockSpec(8, 2, Span.causal(16), causal=True)
    ...         self.attention = RelativeMultiheadAttention(spec)
    ...
    ...     def forward(self, tokens, past):
    ...         y, cache = self.attention(self.embedding(tokens), past=past[0])
    ...         return y @ self.embedding.weight.T, [cache]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = decoder_to_onnx(Decoder(), f"{folder}/decoder.onnx", check=False)
    ...     model = open_model(path)
    >>> len(generate(model, [1, 2, 3], 5)), len(generate(model, [4, 5], 5))
    (5, 5)
    """
    if isinstance(path, str | os.PathLike):
        return EncoderDecoder(path, providers) if Path(path).is_dir() else OpenDecoder(path, providers)
    raise TypeError(f"`path` must be a str or a path-like object, got {describe(path)}")


def _opened(model: Any, providers: Sequence[Any]) -> Opened:
    """Return an open model; that of the last path stays open until its files change or another path comes."""
    if isinstance(model, OpenDecoder | EncoderDecoder):
        return model
    if not isinstance(model, str | os.PathLike):
        return OpenDecoder(model, providers)
    whole = Path(model).is_dir()
    folder = Path(model) if whole else Path(model).parent
    named = os.scandir(folder) if folder.is_dir() else ()
    files = [(file.name, file.stat()) for file in named if whole or file.name.startswith(Path(model).stem)]
    states = sorted((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in files)
    key = os.path.abspath(model), repr(providers), states
    last = _kept.get(os.getpid())
    if last is None or last[0] != key:
        del last
        _kept.pop(os.getpid(), None)  # its memory is free before the next model is opened
        last = _kept[os.getpid()] = key, open_model(model, providers=providers)
    return last[1]


@explains
def generate(
    model: Any,
    prompt: Any,
    n: int,
    *,
    mask: Any = None,
    memory: Any = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | Sequence[int] = (),
    stream: Callable[[Any], object] | None = None,
    providers: Sequence[Any] = CPU,
) -> np.ndarray[Any, Any]:
    """Generate tokens from a prompt with the graph of a decoder or an encoder–decoder, greedily or by sampling.

    This needs onnxruntime and NumPy, but not torch. The caches stay in the memory of the runtime from step to step.
    With ``in_place``, each cache of a decoder is one buffer, bound as past and as present, so that nothing is copied;
    it has the length that the graph fixes, or else the length that the prompt and ``n`` tokens need.

    Parameters
    ----------
    model : str, path-like, onnxruntime.InferenceSession, or the result of open_model
        The file that :func:`decoder_to_onnx` wrote, or an open session of it; the folder that
        :func:`encoder_decoder_to_onnx` wrote; or what :func:`open_model` returns for either of them. The sessions of
        the last path stay open for the next call, until another path is passed or its files change.
    prompt : sequence of int, or array of ints of shape (length,) or (batch, length)
        Tokens to continue. The prompts of a batch have the same length, because a decoder has no mask for padding. For
        an encoder–decoder, the input of its encoder, padded to one length, or vectors ``(length, width)`` or
        ``(batch, length, width)`` for audio. The text starts with the model's ``decoder_start_token_id``, which is not
        among the new tokens.
    n : int
        The largest number of new tokens. The prompt and all new tokens but the last must fit the tables, and also the
        caches if the graph fixes their length; an error says how far they reach.
    mask : array of shape (length,) or (batch, length), optional
        1 where a token of ``prompt`` counts and 0 where it is padding, for an encoder–decoder.
    memory : array or sequence of arrays, optional
        The tensors to which a decoder attends besides its text, ``(batch, memory_length, …)`` each, in the order of the
        export; ``model`` must then be a path.
    temperature : float, optional
        Divides the logits before a token is sampled. ``None`` and 0 decode greedily.
    top_k : int, optional
        Sample from this many of the likeliest tokens.
    top_p : float, optional
        Sample from the likeliest tokens with this total probability, after ``top_k``.
    seed : int, optional
        Makes the samples reproducible.
    stop : int or sequence of int, optional
        Tokens after which a row ends; when all rows have ended there are no more steps.
    stream : callable, optional
        Called with the new token of every step as soon as it is computed: an int, or an array (batch,).
    providers : sequence, optional
        Execution providers of onnxruntime, if ``model`` is a path; an open one already has its providers.

    Returns
    -------
    numpy.ndarray of int64
        The new tokens without the prompt, ``(count,)`` or ``(batch, count)``, with ``count`` at most ``n``. A row that
        has ended repeats the token that it ended with.

    Examples
    --------
    Greedily, from a decoder with one attention:

    >>> import tempfile, torch
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
    >>> path = decoder_to_onnx(Decoder(), f"{place.name}/decoder.onnx", check=False)
    >>> generate(path, [1, 2, 3], 5).shape
    (5,)

    Sampled, for a batch of prompts; the seed makes the samples reproducible:

    >>> prompts = [[1, 2, 3], [4, 5, 6]]
    >>> options = {"temperature": 0.8, "top_k": 5, "seed": 0}
    >>> tokens = generate(path, prompts, 5, **options)
    >>> tokens.shape, bool((tokens == generate(path, prompts, 5, **options)).all())
    ((2, 5), True)

    Each token as soon as it is there, and no step after a token that ends the text:

    >>> streamed = []
    >>> tokens = generate(path, [1, 2, 3], 8, stop=[7, 9], stream=streamed.append)
    >>> streamed == tokens.tolist()
    True
    >>> place.cleanup()
    """
    sampler = Sampler.of(temperature, top_k, top_p, seed)
    n = check_int("n", n, minimum=0)
    ends = tokens_of("stop", [stop] if isinstance(stop, int | np.integer) else stop, 1)
    if stream is not None and not callable(stream):
        raise TypeError(f"`stream` must be a function of a token, got {describe(stream)}")
    made: list[Array] = []
    rows, batched, steps = _opened(model, providers).begin(prompt, n, mask, memory, made)
    ended = np.zeros(rows, bool)
    for logits in steps:
        token = sampler(logits).astype(np.int64)
        if made:
            token = np.where(ended, made[-1], token)
        made.append(token)
        if stream is not None:
            stream(token.copy() if batched else int(token[0]))
        ended = np.isin(token, ends)
        if ended.all():
            break
    new = np.stack(made, axis=1) if made else np.zeros((rows, 0), np.int64)
    return new if batched else new[0]

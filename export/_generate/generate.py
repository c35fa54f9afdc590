"""``generate``: tokens from a decoder's graph, with onnxruntime and NumPy only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relskew_core._array.checks import check_int, describe, explains
from relskew_core._array.extras import needs_extra
from relskew_core._array.namespace import check_plain
from relskew_core.export._files.save import SET
from relskew_core.export._generate import encoded
from relskew_core.export._models.caches import PAST_LENGTH
from relskew_core.export._models.decoder import GROWING, IN_PLACE
from relskew_core.export._models.rewrites import MADE, memory_path
from relskew_core.export._nodes.operator_nodes import SCALE

_CACHED = re.compile(rf"past_key_values\.(\d+)\.((?:key|value)(?:{SCALE})?)")


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
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> np.ndarray[Any, Any]:
    """Generate tokens from a prompt with the graph of a decoder or an encoder–decoder, greedily or by sampling.

    This needs onnxruntime and NumPy, but not torch. The caches stay in the memory of the runtime from step to step.
    With ``in_place``, each cache of a decoder is one buffer, bound as past and as present, so that nothing is copied;
    it has the length that the graph fixes, or else the length that the prompt and ``n`` tokens need.

    Parameters
    ----------
    model : str, path-like or onnxruntime.InferenceSession
        The file that :func:`decoder_to_onnx` wrote, or an open session of it, for many calls; or the folder that
        :func:`encoder_decoder_to_onnx` wrote.
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
        Execution providers of onnxruntime, if ``model`` is a path; a session already has its providers.

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
    sampler = encoded.Sampler.of(temperature, top_k, top_p, seed)
    n = check_int("n", n, minimum=0)
    ends = _tokens("stop", [stop] if isinstance(stop, int | np.integer) else stop, 1)
    if stream is not None and not callable(stream):
        raise TypeError(f"`stream` must be a function of a token, got {describe(stream)}")
    made: list[encoded.Array] = []
    steps: Iterator[encoded.Array]
    if isinstance(model, str | os.PathLike) and Path(model).is_dir():
        translator = encoded.EncoderDecoder(model, providers)
        if memory is not None:
            raise ValueError(f"`memory` must be None because `model` is an encoder–decoder, got {describe(memory)}")
        rows, seen, batched = translator.prompt(prompt, mask)
        steps = translator.steps(rows, seen, n, made)
    else:
        if mask is not None:
            raise ValueError(f"`mask` must be None because `model` is a decoder, got {describe(mask)}")
        given = _tokens("prompt", prompt, 2)
        rows, batched = np.atleast_2d(given), given.ndim == 2
        if not rows.size:
            raise ValueError(f"`prompt` must hold a token, got shape {given.shape}")
        decoder = _Decoder(model, providers)
        decoder.check(rows, n)
        decoder.attend_to(model, memory, len(rows), providers)
        steps = decoder.steps(rows, n, made)
    ended = np.zeros(len(rows), bool)
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
    new = np.stack(made, axis=1) if made else np.zeros((len(rows), 0), np.int64)
    return new if batched else new[0]


class _Decoder:
    def __init__(self, model: Any, providers: Sequence[Any]) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise needs_extra("relskew_core.export.generate", "onnxruntime", error) from error
        if isinstance(model, onnxruntime.InferenceSession):
            self._session = model
        elif isinstance(model, str | os.PathLike):
            if not Path(model).is_file():
                raise FileNotFoundError(f"`model` must be a file, got {os.fspath(model)!r}")
            self._session = encoded.with_library(model, providers)
        else:
            raise TypeError(f"`model` must be a path or an onnxruntime.InferenceSession, got {describe(model)}")
        inputs = {value.name: value for value in self._session.get_inputs()}
        outputs = {value.name: value for value in self._session.get_outputs()}
        self._caches = {
            name: f"present.{match[1]}.{match[2]}" for name in inputs if (match := _CACHED.fullmatch(name)) is not None
        }
        missing = {"input_ids"} - set(inputs) | {"logits", *self._caches.values()} - set(outputs)
        meta = self._session.get_modelmeta().custom_metadata_map
        kind = meta.get("relskew.decoder", IN_PLACE if PAST_LENGTH in inputs else GROWING)
        if kind not in (GROWING, IN_PLACE):
            raise ValueError(f"`model` must have caches that are {GROWING!r} or {IN_PLACE!r}, got {kind!r}")
        self._in_place = kind == IN_PLACE
        counted = {PAST_LENGTH} if self._in_place else set()
        missing |= counted - set(inputs)
        self._of_memory = [name for name in inputs if name.startswith(MADE)]
        unknown = set(inputs) - {"input_ids", *self._caches, *self._of_memory} - counted
        if missing or unknown or not self._caches:
            raise ValueError(
                "`model` must be what decoder_to_onnx writes, from input_ids and past_key_values.N.key/.value to "
                f"logits and present.N.key/.value, got inputs {list(inputs)} and outputs {list(outputs)}"
            )
        self._inputs, self._ort, self._set = inputs, onnxruntime, meta.get(SET)
        self._fed: dict[str, Any] = {}
        self._vocabulary = outputs["logits"].shape[2]
        self._ends = {"tables reach": int(meta["relskew.reach"])} if "relskew.reach" in meta else {}
        lengths = [size for name in self._caches if isinstance(size := inputs[name].shape[2], int)]
        self._length = min(lengths) if self._in_place and lengths else None
        if self._length is not None:
            self._ends["caches hold"] = self._length

    def check(self, rows: encoded.Array, n: int) -> None:
        low, high, size = rows.min(), rows.max(), self._vocabulary
        if low < 0 or (isinstance(size, int) and high >= size):
            known = f"0 … {size - 1}" if isinstance(size, int) else "of at least 0"
            raise ValueError(f"`prompt` must hold tokens {known}, got {low} … {high}")
        if not self._ends:
            return
        what, end = min(self._ends.items(), key=lambda item: item[1])
        length = rows.shape[1]
        if length > end:
            raise ValueError(f"`prompt` must be at most {end} tokens, which the model's {what}, got {length}")
        if n > end - length + 1:
            raise ValueError(
                f"`n` must be at most {end - length + 1} after a prompt of {length}: the model's {what} {end} "
                f"positions, got {n}"
            )

    def attend_to(self, model: Any, memory: Any, rows: int, providers: Sequence[Any]) -> None:
        """Compute the inputs of every step that depend on a memory, with the graph next to the decoder's."""
        if not self._of_memory:
            if memory is not None:
                raise ValueError(f"`memory` must be None because the decoder attends to none, got {describe(memory)}")
            return
        if memory is None:
            raise ValueError("`memory` must be given: the decoder attends to one, got None")
        if not isinstance(model, str | os.PathLike):
            raise TypeError(f"`model` must be a path with `memory`, whose graph lies next to it, got {describe(model)}")
        made = encoded.results_for_memory(memory_path(model), memory, rows, self._set, providers)
        self._fed = {name: self._on_device(made[name]) for name in self._of_memory}

    @property
    def _device(self) -> str:
        return "cuda" if self._session.get_providers()[0] == "CUDAExecutionProvider" else "cpu"

    def _on_device(self, array: encoded.Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._device, 0)

    def steps(self, rows: encoded.Array, n: int, made: Sequence[encoded.Array]) -> Iterator[encoded.Array]:
        """Yield the last logits ``n`` times; before the next one, ``made`` must contain the token chosen from them."""
        binding = self._session.io_binding()
        device = self._device
        for name, held in self._fed.items():
            binding.bind_ortvalue_input(name, held)
        room = (self._length or rows.shape[1] + n - 1) if self._in_place else 0
        caches = {}
        for name in self._caches:
            _, heads, _, *width = self._inputs[name].shape
            nothing = np.zeros((len(rows), heads, room, *width), encoded.TYPES[self._inputs[name].type])
            caches[name] = self._on_device(nothing)
        kept = {self._caches[name]: cache for name, cache in caches.items()} if self._in_place else {}
        names = [output.name for output in self._session.get_outputs()]
        filled = 0
        for step in range(n):
            fed = rows if step == 0 else made[-1][:, None]
            binding.bind_ortvalue_input("input_ids", self._on_device(fed))
            if self._in_place:
                binding.bind_cpu_input(PAST_LENGTH, np.array([filled], np.int64))
            for name, cache in caches.items():
                binding.bind_ortvalue_input(name, cache)
            for name in names:  # bind them again, because the lengths of the caches change
                if name in kept:
                    binding.bind_ortvalue_output(name, kept[name])
                else:
                    binding.bind_output(name, "cpu" if name == "logits" else device, 0)
            self._session.run_with_iobinding(binding)
            results = dict(zip(names, binding.get_outputs(), strict=True))
            logits = results["logits"].numpy()[:, -1]
            if np.isnan(logits).any():
                raise ValueError(f"`model` gives NaN after {rows.shape[1] + step} tokens")
            yield logits
            filled += fed.shape[1]
            if not self._in_place:
                caches = {name: results[present] for name, present in self._caches.items()}


def _tokens(name: str, given: Any, most_axes: int) -> encoded.Array:
    try:
        array = np.asarray(check_plain(name, given))
    except ValueError:  # the rows have different lengths
        raise ValueError(
            f"`{name}` must hold rows of one length, got {describe(given)}: a decoder has no mask for padding, so call "
            "`generate` for each length"
        ) from None
    if not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or not 1 <= array.ndim <= most_axes:
        axes = "(length,)" if most_axes == 1 else "(length,) or (batch, length)"
        raise TypeError(f"`{name}` must be ints of shape {axes}, got {array.dtype} {array.shape}")
    return array.astype(np.int64)

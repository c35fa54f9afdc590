"""Tokens from a folder of :func:`encoder_decoder_to_onnx`: encoder and memory once, then the decoder, step by step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from relskew_core._array.checks import check_int, check_real, describe
from relskew_core._array.namespace import check_plain
from relskew_core.export._files.library import found_library, open_session
from relskew_core.export._files.save import SET
from relskew_core.export._models.encoder_decoder import FILES, START

PAST = "past_key_values."
TYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8, "tensor(bool)": np.bool_,
}  # fmt: skip


def with_library(path: str | os.PathLike[str], providers: Sequence[Any]) -> Any:
    import onnxruntime

    if isinstance(providers, str):
        raise TypeError(f"`providers` must be a list of names, got {providers!r}")
    library = found_library() if list(providers) == ["CPUExecutionProvider"] else None
    try:
        return open_session(onnxruntime, path, providers, library=library)
    except Exception as error:  # runtimes raise their own exception types
        raise ValueError(
            f"`model` must be a graph that onnxruntime can open: {error}, got {os.fspath(path)!r}"
        ) from error


def results_for_memory(session: Any, given: Any, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Run the graph of a memory; refuse arrays that do not fit it."""
    inputs = session.get_inputs()
    for value in inputs:
        if value.type not in TYPES:
            raise TypeError(f"`model` must take a memory of numbers, got the input {value.name} of {value.type}")
    arrays = [np.asarray(check_plain("memory", x)) for x in (given if isinstance(given, tuple | list) else [given])]
    fits = len(arrays) == len(inputs) and all(
        array.dtype.kind in "biuf"
        and array.ndim == len(value.shape)
        and array.size
        and array.shape[0] == rows
        and all(size == want for size, want in zip(array.shape, value.shape, strict=True) if isinstance(want, int))
        for array, value in zip(arrays, inputs, strict=True)
    )
    if not fits:
        wanted = ", ".join(f"{value.name} {tuple(value.shape)}" for value in inputs)
        raise ValueError(f"`memory` must be {wanted}, of {rows} rows, got {describe(given)}")
    fed: dict[str, Any] = {
        value.name: array.astype(TYPES[value.type]) for value, array in zip(inputs, arrays, strict=True)
    }
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, fed), strict=True))


Array = np.ndarray[Any, Any]


class Sampler(NamedTuple):
    temperature: float
    top_k: int | None
    top_p: float | None
    random: np.random.Generator

    @classmethod
    def of(cls, temperature: Any, top_k: Any, top_p: Any, seed: Any) -> Sampler:
        temperature = 0.0 if temperature is None else check_real("temperature", temperature)
        if temperature < 0:
            raise ValueError(f"`temperature` must be at least 0, got {temperature}")
        for name, value in (("top_k", top_k), ("top_p", top_p), ("seed", seed)):
            if value is not None and not temperature:
                raise ValueError(f"`{name}` needs `temperature` above 0: without it, nothing is sampled, got {value!r}")
        if top_p is not None and not 0 < check_real("top_p", top_p) <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1, got {top_p}")
        return cls(
            temperature, None if top_k is None else check_int("top_k", top_k, minimum=1), top_p,
            np.random.default_rng(None if seed is None else check_int("seed", seed, minimum=0)),
        )  # fmt: skip

    def __call__(self, logits: Array) -> Array:
        if not self.temperature:
            return np.argmax(logits, axis=1)
        order = np.argsort(-logits, axis=1, kind="stable")  # the most likely tokens first
        sorted_logits = np.take_along_axis(logits, order, axis=1)[:, : self.top_k].astype(np.float64)
        shares = np.exp((sorted_logits - sorted_logits[:, :1]) / self.temperature)
        shares /= shares.sum(axis=1, keepdims=True)
        before = np.cumsum(shares, axis=1) - shares
        if self.top_p is not None:
            shares[before >= self.top_p] = 0  # keep the most likely tokens that together reach top_p
        ends = np.cumsum(shares, axis=1)
        drawn = self.random.random((len(logits), 1)) * ends[:, -1:]
        places = np.minimum((ends <= drawn).sum(axis=1), (shares > 0).sum(axis=1) - 1)
        return np.take_along_axis(order, places[:, None], axis=1)[:, 0]


class Opened(Protocol):
    """A model whose sessions are open, with no state of a call, so that several threads may use it."""

    def begin(self, prompt: Any, n: int, mask: Any, memory: Any, made: Sequence[Array]) -> Begun:
        """Check the arguments of a call; its steps need in ``made`` the tokens chosen from the logits before."""


class Begun(NamedTuple):
    rows: int
    batched: bool  # whether the prompt has an axis for rows
    logits: Iterator[Array]


class EncoderDecoder:
    def __init__(self, folder: str | os.PathLike[str], providers: Sequence[Any]) -> None:
        import onnxruntime

        home = Path(folder)
        missing = [name for name in FILES if not (home / name).is_file()]
        if missing:
            raise FileNotFoundError(f"`model` must be a folder with {', '.join(FILES)}, got {os.fspath(home)!r}")
        sessions = [with_library(home / name, providers) for name in FILES]
        metas = [session.get_modelmeta().custom_metadata_map for session in sessions]
        sets = {meta.get(SET) for meta in metas}
        if len(sets) != 1 or None in sets or START not in metas[0]:
            raise ValueError(
                f"`model` must hold files that encoder_decoder_to_onnx wrote together, got {os.fspath(home)!r}"
            )
        self._encoder, self._memory, self._decoder = sessions
        self._start = int(metas[0][START])
        self._ort = onnxruntime
        self._outputs = [value.name for value in self._decoder.get_outputs()]
        self._inputs = {value.name: value for value in self._decoder.get_inputs()}
        self._vocabulary = self._decoder.get_outputs()[0].shape[2]
        self._source = self._encoder.get_inputs()[0]

    def begin(self, prompt: Any, n: int, mask: Any, memory: Any, made: Sequence[Array]) -> Begun:
        if memory is not None:
            raise ValueError(f"`memory` must be None because `model` is an encoder–decoder, got {describe(memory)}")
        source, seen, batched = self._prompt(prompt, mask)
        return Begun(len(source), batched, self._steps(source, seen, n, made))

    def _prompt(self, given: Any, mask: Any) -> tuple[Array, Array, bool]:
        sounds = self._source.type != "tensor(int64)"
        axes = 2 + sounds
        try:
            source = np.asarray(check_plain("prompt", given))
        except ValueError:
            raise ValueError(
                f"`prompt` must hold rows of one length, got {describe(given)}: pad them, and give a `mask` that is 0 "
                "at the padding"
            ) from None
        wanted = "vectors (length, width) or (batch, length, width)" if sounds else "ints (length,) or (batch, length)"
        if source.dtype.kind not in ("f" if sounds else "iu") or not axes - 1 <= source.ndim <= axes or not source.size:
            raise TypeError(f"`prompt` must be {wanted}, got {source.dtype} {source.shape}")
        batched = source.ndim == axes
        source = source if batched else source[None]
        if sounds:
            source = source.astype(TYPES[self._source.type])
        else:
            source = source.astype(np.int64)
            if source.min() < 0 or source.max() >= self._vocabulary:
                raise ValueError(
                    f"`prompt` must hold tokens 0 … {self._vocabulary - 1}, got {source.min()} … {source.max()}"
                )
        seen = np.ones(source.shape[:2], np.int64) if mask is None else np.asarray(check_plain("mask", mask))
        seen = seen if batched or seen.ndim == 2 else seen[None]
        if seen.shape != source.shape[:2] or seen.dtype.kind not in "biu" or not np.isin(seen, (0, 1)).all():
            raise ValueError(
                f"`mask` must be 1 where `prompt` counts and 0 at padding, of shape {source.shape[:2]}, got "
                f"{describe(mask)}"
            )
        return source, seen.astype(np.int64), batched

    def _steps(self, source: Array, mask: Array, n: int, made: Sequence[Array]) -> Iterator[Array]:
        value = self._ort.OrtValue.ortvalue_from_numpy
        seen = value(mask)
        (memory,) = self._encoder.run_with_ort_values(
            None, {self._source.name: value(np.ascontiguousarray(source)), "attention_mask": seen}
        )
        names = [output.name for output in self._memory.get_outputs()]
        states = self._memory.get_inputs()[0].name
        fed = _pasts(names, self._memory.run_with_ort_values(None, {states: memory}))
        for name, given in self._inputs.items():
            if name.startswith(PAST) and name not in fed:
                _, heads, _, width = given.shape
                fed[name] = value(np.zeros((len(source), heads, 0, width), TYPES[given.type]))
        fed["encoder_attention_mask"] = seen
        tokens = np.full((len(source), 1), self._start, np.int64)
        for step in range(n):
            fed["input_ids"] = value(tokens)
            # a graph without cross-attention has no input for the mask
            results = self._decoder.run_with_ort_values(None, {name: fed[name] for name in self._inputs})
            fed |= _pasts(self._outputs[1:], results[1:])
            logits = results[0].numpy()[:, -1]
            if np.isnan(logits).any():
                raise ValueError(f"`model` gives NaN after {step} tokens")
            yield logits
            tokens = made[-1][:, None]


def _pasts(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return {name.replace("present.", PAST, 1): value for name, value in zip(names, values, strict=True)}

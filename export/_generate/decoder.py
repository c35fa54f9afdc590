"""Tokens from the graph of a decoder, step by step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from relskew_core._array.checks import describe
from relskew_core._array.extras import needs_extra
from relskew_core._array.namespace import check_plain
from relskew_core.export._files.save import SET
from relskew_core.export._generate import encoded
from relskew_core.export._models.caches import PAST_LENGTH
from relskew_core.export._models.decoder import GROWING, IN_PLACE
from relskew_core.export._models.rewrites import MADE, memory_path
from relskew_core.export._nodes.operator_nodes import SCALE

_CACHED = re.compile(rf"past_key_values\.(\d+)\.((?:key|value)(?:{SCALE})?)")


class OpenDecoder:
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
        self._path, self._providers = model, providers
        self._vocabulary = outputs["logits"].shape[2]
        self._ends = {"tables reach": int(meta["relskew.reach"])} if "relskew.reach" in meta else {}
        lengths = [size for name in self._caches if isinstance(size := inputs[name].shape[2], int)]
        self._length = min(lengths) if self._in_place and lengths else None
        if self._length is not None:
            self._ends["caches hold"] = self._length

    def begin(self, prompt: Any, n: int, mask: Any, memory: Any, made: Sequence[encoded.Array]) -> encoded.Begun:
        if mask is not None:
            raise ValueError(f"`mask` must be None because `model` is a decoder, got {describe(mask)}")
        given = tokens_of("prompt", prompt, 2)
        rows, batched = np.atleast_2d(given), given.ndim == 2
        if not rows.size:
            raise ValueError(f"`prompt` must hold a token, got shape {given.shape}")
        self._check(rows, n)
        return encoded.Begun(len(rows), batched, self._steps(rows, n, self._attending_to(memory, len(rows)), made))

    def _check(self, rows: encoded.Array, n: int) -> None:
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

    def _attending_to(self, memory: Any, rows: int) -> dict[str, Any]:
        """Return the inputs of every step that depend on a memory, from the graph next to the decoder's."""
        if not self._of_memory:
            if memory is not None:
                raise ValueError(f"`memory` must be None because the decoder attends to none, got {describe(memory)}")
            return {}
        if memory is None:
            raise ValueError("`memory` must be given: the decoder attends to one, got None")
        made = encoded.results_for_memory(self._memory, memory, rows)
        return {name: self._on_device(made[name]) for name in self._of_memory}

    @cached_property
    def _memory(self) -> Any:
        """The session of the memory's graph; refuses that of another decoder."""
        if not isinstance(self._path, str | os.PathLike):
            raise TypeError(
                f"`model` must be a path with `memory`, whose graph lies next to it, got {describe(self._path)}"
            )
        path = memory_path(self._path)
        if not path.is_file():
            raise FileNotFoundError(f"`model` must have the graph of its memory next to it, {path.name!r}, got none")
        session = encoded.with_library(path, self._providers)
        if self._set is None or session.get_modelmeta().custom_metadata_map.get(SET) != self._set:
            raise ValueError(f"`model` must have the graph of its memory, got {path.name!r}, written for another")
        return session

    @property
    def _device(self) -> str:
        return "cuda" if self._session.get_providers()[0] == "CUDAExecutionProvider" else "cpu"

    def _on_device(self, array: encoded.Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._device, 0)

    def _steps(
        self, rows: encoded.Array, n: int, of_memory: Mapping[str, Any], made: Sequence[encoded.Array]
    ) -> Iterator[encoded.Array]:
        binding = self._session.io_binding()
        device = self._device
        for name, held in of_memory.items():
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


def tokens_of(name: str, given: Any, most_axes: int) -> encoded.Array:
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

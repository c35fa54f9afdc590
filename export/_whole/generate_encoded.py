"""Tokens from a folder of :func:`encoder_decoder_to_onnx`: the encoder once, then the decoder, step by step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relskew_core._array.checks import describe
from relskew_core._array.namespace import check_plain
from relskew_core.export._save import SET
from relskew_core.export._whole.encoder_decoder import FILES, START
from relskew_core.export._whole.generate_memory import TYPES, with_library
from relskew_core.export._whole.sampling import Array


class EncoderDecoder:
    """Three sessions, and the token with which a text begins."""

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
                f"`model` must hold three files that encoder_decoder_to_onnx wrote together, got {os.fspath(home)!r}"
            )
        self._encoder, self._first, self._later = sessions
        self._start = int(metas[0][START])
        self._ort = onnxruntime
        self._vocabulary = sessions[1].get_outputs()[0].shape[2]
        self._source = self._encoder.get_inputs()[0]

    def prompt(self, given: Any, mask: Any) -> tuple[Array, Array, bool]:
        """Return the encoder's input with a batch axis, its mask, and whether the axis was given."""
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

    def steps(self, source: Array, mask: Array, n: int, made: Sequence[Array]) -> Iterator[Array]:
        """Yield the last logits ``n`` times; before the next one, ``made`` must contain the token chosen from them."""
        value = self._ort.OrtValue.ortvalue_from_numpy
        seen = value(mask)
        (memory,) = self._encoder.run_with_ort_values(
            None, {self._source.name: value(np.ascontiguousarray(source)), "attention_mask": seen}
        )
        tokens = np.full((len(source), 1), self._start, np.int64)
        caches: dict[str, Any] = {}
        for step in range(n):
            fed = {"encoder_attention_mask": seen, "input_ids": value(tokens)}
            session = self._later if caches else self._first
            fed |= caches or {"encoder_hidden_states": memory}
            # a graph without cross-attention has no input for the mask
            taken = {one.name for one in session.get_inputs()}
            results = session.run_with_ort_values(None, {name: x for name, x in fed.items() if name in taken})
            names = [one.name for one in session.get_outputs()]
            for name, result in zip(names[1:], results[1:], strict=True):
                caches[name.replace("present.", "past_key_values.", 1)] = result
            logits = results[0].numpy()[:, -1]
            if np.isnan(logits).any():
                raise ValueError(f"`model` gives NaN after {step} tokens")
            yield logits
            tokens = made[-1][:, None]

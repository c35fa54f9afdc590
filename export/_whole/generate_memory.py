"""The inputs of a decoder that depend on a memory, computed once by the graph next to the decoder's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relskew_core._array.checks import describe
from relskew_core._array.namespace import check_plain
from relskew_core.export._library import found_library, open_session
from relskew_core.export._save import SET

TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def with_library(path: str | os.PathLike[str], providers: Sequence[Any]) -> Any:
    """Open a file on the CPU, with the operator library if there is one."""
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


def results_for_memory(
    path: Path, given: Any, rows: int, written_with: str | None, providers: Sequence[Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Run the graph of a memory; refuse that of another decoder, and arrays that do not fit it."""
    if not path.is_file():
        raise FileNotFoundError(f"`model` must have the graph of its memory next to it, {path.name!r}, got none")
    session = with_library(path, providers)
    if written_with is None or session.get_modelmeta().custom_metadata_map.get(SET) != written_with:
        raise ValueError(f"`model` must have the graph of its own memory, got {path.name!r}, written for another")
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

"""Whether a graph gives what its model gives, in onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relskew_core._array.extras import needs_extra

Arrays = list[np.ndarray[Any, Any]]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative L2 errors: of many layers, and far below what a wrong position costs."""


def runner(path: Path, names: Sequence[str]) -> Callable[[Sequence[Tensor], str], Arrays]:
    """Return what runs the file at ``path`` on the tensors that its inputs are called."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise needs_extra("the check of an export", "onnxruntime", error) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # some cases must fail
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    taken = {value.name for value in session.get_inputs()}  # not those that no output depends on

    def run(inputs: Sequence[Tensor], case: str) -> Arrays:
        given = {name: value.numpy() for name, value in zip(names, inputs, strict=True) if name in taken}
        try:
            return list(session.run(None, given))
        except Exception as error:  # of the runtime's own kind
            raise RuntimeError(f"the exported graph fails where `model` does not, for {case}: {error}") from error

    return run


def results_of(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return what torch gives."""
    with torch.no_grad():
        return list(model(*(value.clone() for value in inputs)))


def check_equal(
    names: Sequence[str], given: Arrays, wanted: Sequence[Tensor], case: str, tolerance: float | None
) -> None:
    """Raise unless a runtime's results are torch's."""
    for name, ours, theirs in zip(names, given, wanted, strict=True):
        right = theirs.numpy()
        told = f"the exported graph does not do what `model` does: output {name!r} for {case}"
        if ours.shape != right.shape or ours.dtype != right.dtype:
            raise RuntimeError(f"{told} is {ours.dtype} {ours.shape}, of torch {right.dtype} {right.shape}")
        if not theirs.is_floating_point():
            if not np.array_equal(ours, right):
                raise RuntimeError(f"{told} differs in {np.mean(ours != right):.1%} of its numbers")
            continue
        limit = TOLERANCES[theirs.dtype] if tolerance is None else tolerance
        error = _relative_error(ours, right)
        if not error <= limit:
            raise RuntimeError(f"{told} differs by {error:.1e} relative to its norm, more than {limit:.0e}")


def _relative_error(given: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    known = np.isfinite(right)  # runtimes differ in what becomes of a softmax of nothing
    x, y = (np.where(known, array, 0).astype(np.float64) for array in (given, right))
    norm = np.linalg.norm(y)
    return float(np.linalg.norm(x - y) / norm) if norm else float(np.abs(x).max(initial=0))

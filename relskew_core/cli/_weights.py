"""Weights from files, as the mapping of a block."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relskew_core import BlockSpec, init_weights
from relskew_core._block.spec import ATTENDED
from relskew_core.cli._errors import CliError, must_be_file, need, reading

MOST = 2**26
"""The most weights that are drawn from a seed, which takes seconds; a file may have more."""


def load_weights(path: Path, prefix: str = "", *, projections: bool = True) -> dict[str, Any]:
    """Read the arrays of a ``.npz`` or ``.safetensors`` file or a torch checkpoint, without running code in it.

    Parameters
    ----------
    path : Path
        The file. Of a training checkpoint, which holds more than weights, the ``state_dict`` or ``model`` is taken.
    prefix : str, default ""
        Take only the names that begin with it, and drop it: one block out of a whole model's file.
    projections : bool, default True
        Take the projections too, or the tables alone.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise CliError(f"--weights must be a file ending in {', '.join(READERS)}, got {path}")
    must_be_file(path, "--weights ")
    with reading("--weights", path, path.suffix):
        arrays = reader(path)
    arrays = _inner(arrays)
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise CliError(f"--weights {path}: must hold a mapping from names to arrays, got {type(arrays).__name__}")
    chosen = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    if projections and "q_proj.weight" not in chosen:
        raise CliError(f"--weights {path}: has no {prefix}q_proj.weight; {_prefixes(arrays)}")
    return chosen if projections else {name: array for name, array in chosen.items() if name in ATTENDED}


def _inner(found: Any) -> Any:
    """Return the weights inside a training checkpoint, or the object itself."""
    if isinstance(found, Mapping):
        for key in ("state_dict", "model"):
            if isinstance(found.get(key), Mapping):
                return found[key]
    return found


def chosen_weights(
    spec: BlockSpec, path: Path | None, prefix: str, seed: int | None, *, projections: bool = True
) -> tuple[Mapping[str, Any], str]:
    """Return the weights of the options, and their source in words."""
    if path is None:
        if prefix:
            raise CliError("--prefix says which part of a file to take: it needs --weights")
        wanted = spec.weight_shapes(projections=projections)
        if (count := sum(map(math.prod, spec.weight_shapes().values()))) > MOST:
            raise CliError(f"random weights must be {MOST} numbers at most, and this block has {count}: see --weights")
        drawn = init_weights(spec, seed=seed or 0)
        return {key: drawn[key] for key in wanted}, f"random, seed {seed or 0}"
    if seed is not None:
        raise CliError("--weights and --seed exclude each other")
    weights = load_weights(path, prefix, projections=projections)
    spec.check_weights(weights, projections=projections)
    return weights, f"{path}" + (f", {prefix}*" if prefix else "")


def _npz(path: Path) -> Any:
    if not zipfile.is_zipfile(path):
        raise CliError(f"--weights {path}: cannot be read as .npz: it is not a zip archive")
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _safetensors(path: Path) -> Any:
    return need("safetensors.numpy", "onnx", "reading .safetensors").load_file(path)


def _torch(path: Path) -> Any:
    torch = need("torch", "torch", f"reading {path.suffix}")
    return torch.load(path, map_location="cpu", weights_only=True)


READERS: dict[str, Callable[[Path], Any]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _torch),
}


def _prefixes(arrays: Mapping[str, Any]) -> str:
    ends = sorted(name.removesuffix("q_proj.weight") for name in arrays if name.endswith("q_proj.weight"))
    if ends:
        return f"it has blocks under --prefix {' or '.join(repr(end) for end in ends[:8])}"
    return f"its names are {', '.join(sorted(arrays)[:8]) or 'none'}"

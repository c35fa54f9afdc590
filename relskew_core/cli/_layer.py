"""The attention weights of a block, from its weights and an input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relskew_core import BlockSpec
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._block.block import check_inputs, project_heads, weights_alone
from relskew_core._block.spec import ATTENDED
from relskew_core._block.weights import with_bias
from relskew_core.cli._console import CliError, reading
from relskew_core.cli._export import chosen_weights, load_weights, spec_of_model
from relskew_core.cli._options import BlockOptions


def block_of(
    given: BlockOptions, model: Path | None, weights: Path | None, prefix: str, seed: int | None
) -> tuple[BlockSpec, dict[str, Any], str]:
    if model is not None:
        if given != BlockOptions(embed_dim=None, num_heads=None):  # type: ignore[arg-type]
            raise CliError("--model defines the block: no other option of a block may be given")
        spec, projections, _ = spec_of_model(model)
        if not projections:
            raise CliError(f"{model}: attends without projections: there are no queries and keys to draw")
    elif given.embed_dim is None or given.num_heads is None:
        raise CliError("--embed-dim and --num-heads, or --model, must be given")
    else:
        spec = given.spec(load_weights(weights, prefix) if weights else None)
    arrays, origin = chosen_weights(spec, weights, prefix, seed)
    # As lists, arrays of all libraries and dtypes are equal.
    lists = {key: x if isinstance(x, np.ndarray) else x.tolist() for key, x in arrays.items()}
    return spec, {key: np.asarray(x, dtype=np.float64) for key, x in lists.items()}, origin


def read_input(name: str, path: Path | None, spec: BlockSpec, length: int) -> tuple[Any, str]:
    if path is None:
        return np.random.default_rng(0).standard_normal((length, spec.embed_dim)), "random, seed 0"
    with reading(f"--{name}", path, ".npy"):
        x = np.load(path, allow_pickle=False)
    x = x[0] if getattr(x, "ndim", 0) == 3 and len(x) == 1 else x
    if getattr(x, "ndim", 0) != 2 or x.shape[1] != spec.embed_dim or not np.isrealobj(x):
        raise CliError(f"--{name} {path}: must have shape (length, {spec.embed_dim}), got {getattr(x, 'shape', x)}")
    return x.astype(np.float64), str(path)


def weights_of(spec: BlockSpec, weights: Mapping[str, Any], x: Any, memory: Any) -> Any:
    check_inputs(x, memory, spec)

    def project(name: str, of: Any) -> Any:
        return of @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    xp = namespace_of_arrays({"x": x})
    q, k, v, seen, _ = project_heads(x, spec, project, memory=memory, cache=None, xp=xp)
    tables = with_bias({name: weights.get(name) for name in ATTENDED}, spec, q, k, seen, xp=xp)
    return weights_alone(q, k, v, **tables, **seen)

"""The layer of Keras on its three backends: its page runs, and its values and gradients are the formula's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import oracles
from relskew_core import Span

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "keras_backend.py"
SHAPES: dict[str, tuple[int, ...]] = {"kernel": (6, 2, 4), "bias": (2, 1, 4)}
"""Of a projection, (features, heads, dim)."""


def drawn() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {f"{of}/{part}": shape for of in ("query", "key", "value") for part, shape in SHAPES.items()}
    shapes.update({"out/kernel": (2, 4, 6), "out/bias": (6,), "rel_k": (2, 5, 4), "x": (3, 7, 6), "target": (3, 7, 6)})
    arrays = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    return arrays | {"mask": np.arange(7) < np.asarray([[7], [4], [1]])}


def expected(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the output and the gradients of the mean squared error, in float64."""
    x, target, mask = (torch.tensor(given[name]) for name in ("x", "target", "mask"))
    weights = {
        name: torch.tensor(array, dtype=torch.float64, requires_grad=True)
        for name, array in given.items()
        if name not in ("x", "target", "mask")
    }
    q, k, v = (
        torch.einsum("btd,dhk->bhtk", x.double(), weights[f"{of}/kernel"]) + weights[f"{of}/bias"]
        for of in ("query", "key", "value")
    )
    attended = oracles.attention(q, k, v, weights["rel_k"], span=Span(3, 1, "clip"), mask=mask[:, None, None, :]).out
    out = torch.einsum("bhtk,hkd->btd", attended, weights["out/kernel"]) + weights["out/bias"]
    loss = torch.square(out - target)[mask].mean()  # Keras leaves masked positions out
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return {name: x.detach().numpy() for name, x in zip(("out", *weights), (out, *gradients), strict=True)}


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_the_layer_and_its_page(backend: str, tmp_path: Path) -> None:
    for needed in ("keras", backend):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    given, path = drawn(), os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    np.savez(tmp_path / "given.npz", **given)  # type: ignore[arg-type]
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(PROGRAM), str(ROOT), str(tmp_path / "given.npz"), str(tmp_path / "found.npz")]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found, wanted = np.load(tmp_path / "found.npz"), expected(given)
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=2e-5, err_msg=name)

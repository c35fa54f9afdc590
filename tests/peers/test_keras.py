"""The layer of Keras on its three backends: its page runs, and its values and gradients are the formula's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from relskew_core import Span, conventions

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "keras_backend.py"
SHAPES: dict[str, tuple[int, ...]] = {"kernel": (6, 2, 4), "bias": (2, 1, 4)}
"""Of a projection, (features, heads, dim)."""
POSITIONS = ("keys", "bias", "t5", "alibi")


def drawn() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {f"{of}/{part}": shape for of in ("query", "key", "value") for part, shape in SHAPES.items()}
    shapes.update({"out/kernel": (2, 4, 6), "out/bias": (6,), "x": (3, 7, 6), "target": (3, 7, 6)})
    shapes.update({"keys": (2, 5, 4), "bias": (2, 5), "t5": (32, 2)})
    arrays = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    for of in ("query", "key", "value", "out"):  # as small as layers begin, so that gradients are about 1
        arrays[f"{of}/kernel"] *= np.float32((2 * 4 if of == "out" else 6) ** -0.5)
    return arrays | {"mask": np.arange(7) < np.asarray([[7], [4], [1]])}


def expected(given: dict[str, np.ndarray], positions: str) -> dict[str, np.ndarray]:
    """Return the output and the gradients of the mean squared error, in float64."""
    x, target, mask = (torch.tensor(given[name]) for name in ("x", "target", "mask"))
    weights = {
        name: torch.tensor(array, dtype=torch.float64, requires_grad=True)
        for name, array in given.items()
        if name == positions or "/" in name
    }
    q, k, v = (
        torch.einsum("btd,dhk->bhtk", x.double(), weights[f"{of}/kernel"]) + weights[f"{of}/bias"]
        for of in ("query", "key", "value")
    )
    options: dict[str, Any] = {"span": Span(3, 1, "clip"), "mask": mask[:, None, None, :]}
    if positions == "keys":
        options["rel_k"] = weights["keys"]
    elif positions == "bias":
        options["rel_bias"] = weights["bias"]
    elif positions == "t5":
        t5 = conventions.T5(bidirectional=True, num_buckets=32, max_distance=20)
        options["rel_bias"], options["span"] = t5.load(weights["t5"])
        options["scale"] = 1.0
    else:
        options["span"] = Span(6, 6)
        options["rel_bias"] = -torch.tensor([[2**-4], [2**-8]]).double() * torch.arange(-6, 7).abs()
    attended = oracles.attention(q, k, v, **options).out
    out = torch.einsum("bhtk,hkd->btd", attended, weights["out/kernel"]) + weights["out/bias"]
    loss = torch.square(out - target)[mask].mean()  # Keras leaves masked positions out
    gradients = torch.autograd.grad(loss, list(weights.values()))
    found = zip(("out", *weights), (out, *gradients), strict=True)
    return {f"{positions}: {name}": x.detach().numpy() for name, x in found}


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
@torch.enable_grad()
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
    found = np.load(tmp_path / "found.npz")
    wanted = {name: x for positions in POSITIONS for name, x in expected(given, positions).items()}
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=2e-5, err_msg=name)

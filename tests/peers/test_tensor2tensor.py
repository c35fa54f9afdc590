"""tensor2tensor's attentions with random tables against the same numbers here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers.tensor2tensor_calls import CALLS, inputs

from oracles import relative_error
from relskew_core import (
    Span,
    conventions,
    proximal_bias,
    relative_attention,
    relative_attention_2d,
    relative_logits_2d,
    toeplitz,
)

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("tensor2tensor") / "found.npz"
    places = [str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "TF_CPP_MIN_LOG_LEVEL": "3"}
    program = [sys.executable, str(TESTS / "peers" / "tensor2tensor_calls.py"), str(path)]
    subprocess.run(program, check=True, env=environment, stderr=subprocess.PIPE)
    with np.load(path) as arrays:
        return {name: array.astype(float) for name, array in arrays.items()}


def drawn(found: dict[str, np.ndarray], name: str) -> tuple[dict[str, Any], list[np.ndarray], np.ndarray]:
    """Return queries, keys and values, the tables, and the result."""
    tables = [array for key, array in found.items() if key.startswith(f"{name}: ")]
    given = inputs(CALLS[name][1])
    given["q"] = given["q"] * 8**0.5  # tensor2tensor scales them before
    return {key: given[key] for key in "qkv"}, tables, found[name]


def check(got: Any, want: np.ndarray) -> None:
    assert relative_error(np.asarray(got), want) < 1e-6


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("clipped")])
def test_clipped(name: str, found: dict[str, np.ndarray]) -> None:
    """Shaw's positions, for keys and values: of a whole sequence, with memory and with a cache."""
    qkv, tables, want = drawn(found, name)
    (rel_k, span), (rel_v, _) = map(conventions.SHAW.load, tables)
    n, m = (qkv[key].shape[-2] for key in "qk")
    causal = "hidden" in CALLS[name][1]
    check(relative_attention(**qkv, rel_k=rel_k, span=span, rel_v=rel_v, causal=causal, offset=m - n), want)


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith(("causal", "unmasked"))])
def test_version_2(name: str, found: dict[str, np.ndarray]) -> None:
    """Tables that are shorter than the sequence and longer, causal (Music Transformer) and not."""
    qkv, tables, want = drawn(found, name)
    causal = name.startswith("causal")
    convention = conventions.TENSOR2TENSOR_CAUSAL if causal else conventions.TENSOR2TENSOR_UNMASKED
    (rel_k, span), (rel_v, _) = map(convention.load, tables)
    check(relative_attention(**qkv, rel_k=rel_k, span=span, rel_v=rel_v, causal=causal), want)


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("local")])
def test_local(name: str, found: dict[str, np.ndarray]) -> None:
    """Blocks of three that also see the block before; the original's first block has no table for its values."""
    qkv, tables, want = drawn(found, name)
    (rel_k, span), (rel_v, _) = map(conventions.TENSOR2TENSOR_CAUSAL.load, tables)
    without: Any = relative_attention(**qkv, rel_k=rel_k, span=span, block_size=3)
    check(without[:, :, :3], want[:, :, :3])
    out: Any = relative_attention(**qkv, rel_k=rel_k, span=span, rel_v=rel_v, block_size=3)
    check(out[:, :, 3:], want[:, :, 3:])


def test_2d(found: dict[str, np.ndarray]) -> None:
    """Tables are cut in the middle, and the first one is that of widths."""
    qkv, tables, want = drawn(found, "2d")
    flat = {key: x.reshape(2, 3, 12, 8) for key, x in qkv.items()}
    width, height = (table[:, 4 - count : 3 + count] for table, count in zip(tables, (4, 3), strict=True))
    grid: dict[str, Any] = {"q_grid": (3, 4), "k_grid": (3, 4)}
    check(relative_attention_2d(flat["q"], flat["k"], flat["v"], height, width, **grid), want.reshape(2, 3, 12, 8))
    logits = flat["q"] @ flat["k"].swapaxes(-1, -2) + np.asarray(relative_logits_2d(flat["q"], height, width, **grid))
    weights = np.exp(8**-0.5 * logits)
    check(weights / weights.sum(-1, keepdims=True) @ flat["v"], want.reshape(2, 3, 12, 8))


def test_proximal(found: dict[str, np.ndarray]) -> None:
    bias = proximal_bias(Span.full(7), xp=np, dtype=np.float64)
    check(toeplitz(bias, Span.full(7), n_queries=7, n_keys=7).reshape(7, 7), found["proximal"][0, 0])

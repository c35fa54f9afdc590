"""What a call costs beside its arithmetic: Python calls of a known kind, and what a first call imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relskew_core
from relskew_core import relative_attention
from relskew_core.backends import _compiled

MOST = 60
"""Python calls inside the package."""

PACKAGE = Path(relskew_core.__file__).parent
FOLDERS = tuple(str(path.resolve()) for path in (PACKAGE, PACKAGE / "backends", PACKAGE / "export"))

needs_kernels = pytest.mark.skipif(_compiled.kernels is None, reason="no kernels were compiled")


def of_jax(x: Any) -> Any:
    return pytest.importorskip("jax.numpy").asarray(x)


def python_calls(call: Callable[[], Any]) -> int:
    """Return how many functions of the package are called, once the kind of the call is known."""
    call()
    count = 0

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(FOLDERS)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


@needs_kernels
@pytest.mark.no_cover
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy, of_jax], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("length", [1, 64, 600])
def test_a_call_of_a_known_kind_makes_few_python_calls(library: Callable[..., Any], length: int) -> None:
    rng = np.random.default_rng(0)
    shapes = ((1, 2, length, 8), (1, 2, length, 8), (1, 2, length, 8), (length, 8))
    q, k, v, table = (library(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    assert 0 < python_calls(lambda: relative_attention(q, k, v, table, causal=True)) <= MOST


FIRST = """
import sys, torch
from relskew_core import relative_attention
q, k, v = (torch.randn(1, 2, 512, 16, requires_grad=True) for _ in range(3))
out, lse = relative_attention(q, k, v, torch.randn(512, 16), causal=True, return_lse=True)
(out.sum() + lse.sum()).backward()
print(*(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))))
"""


@needs_kernels
@pytest.mark.no_cover
def test_a_first_long_call_of_torch_imports_no_compiler() -> None:
    before = "import sys, torch; print(*(name for name in sys.modules if name.startswith('sympy')))"
    found, known = (
        set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
        for code in (FIRST, before)
    )
    assert not found - known

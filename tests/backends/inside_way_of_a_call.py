"""The overhead of a call in Python: calls of a known kind, and the imports of a first call."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relskew_core
from libraries import needs_kernels
from relskew_core import (
    Span,
    deberta_buckets,
    relative_attention,
    relative_attention_2d,
    relative_attention_vjp,
    t5_buckets,
)
from relskew_core._array import precision
from relskew_core._functions import prepared
from relskew_core._kernel import problem
from relskew_core._kernel.call import Arguments
from relskew_core.backends import _compiled
from relskew_core.backends._path import PORTABLE

MOST = 60
"""Python calls inside the package."""

PACKAGE = Path(relskew_core.__file__).parent
FOLDERS = tuple(str(path.resolve()) for path in (PACKAGE, PACKAGE / "backends", PACKAGE / "export"))


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


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the arrays that are widened: none yet; and no kind of call is known."""
    found: list[Any] = []

    def cast(x: Any, dtype: Any, *, xp: Any) -> Any:
        if x.dtype == dtype:
            return x
        if dtype == xp.float32:
            found.append(x)
        return xp.astype(x, dtype)

    for module in (precision, problem):
        monkeypatch.setattr(module, "cast", cast)
    monkeypatch.setattr(prepared, "_checked", {})
    return found


def halves(library: Callable[..., Any], length: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng, x = np.random.default_rng(0), (1, 2, length, 8)
    all_shapes = {"q": x, "k": x, "v": x, "rel_k": (length, 8), **shapes}
    return {name: library(rng.standard_normal(shape).astype(np.float16)) for name, shape in all_shapes.items()}


def widened(library: Callable[..., Any]) -> bool:
    """Return whether arrays of half precision are widened before they are computed with."""
    return library is of_jax or _compiled.kernels is None


LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy, of_jax], ids=["numpy", "torch", "jax"])


@LIBRARIES
@pytest.mark.parametrize("length", [1, 64, 600])
def test_no_array_of_half_precision_is_widened_twice_and_none_for_the_kernels(
    library: Callable[..., Any], length: int, copies: list[Any]
) -> None:
    x = halves(library, length)
    for _ in range(2):
        relative_attention(**x, causal=True)
        assert len(copies) == len(x) * widened(library)
        copies.clear()
    for _ in range(2):
        relative_attention_vjp(x["q"], **x, causal=True)
        assert len(copies) == (len(x) + 1) * widened(library)
        copies.clear()


def test_no_tensor_is_widened_twice_where_autograd_decides_who_serves(copies: list[Any]) -> None:
    """Gradients of a mask that is learned, and of log-sum-exps, are not for every way of a short call."""
    x = halves(torch.from_numpy, 8, mask=(8, 8))
    for learned in ("mask", "q"):
        given = {**x, learned: x[learned].clone().requires_grad_()}
        for _ in range(3):
            relative_attention(**given, causal=True, return_lse=True)
            assert len(copies) == len(x) * widened(torch.from_numpy)
            copies.clear()


@needs_kernels
@pytest.mark.no_cover
@LIBRARIES
@pytest.mark.parametrize("length", [1, 64, 600])
@pytest.mark.parametrize("impl", ["auto", "native"])
def test_a_call_of_a_known_kind_makes_few_python_calls(library: Callable[..., Any], length: int, impl: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = ((1, 2, length, 8), (1, 2, length, 8), (1, 2, length, 8), (length, 8))
    q, k, v, table = (library(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    assert 0 < python_calls(lambda: relative_attention(q, k, v, table, causal=True, impl=impl)) <= MOST


@needs_kernels
@pytest.mark.no_cover
@LIBRARIES
@pytest.mark.parametrize("name", ["tables", "a window", "a neighborhood", "a bias", "a small bias"])
def test_a_call_of_a_known_kind_on_grids_makes_few_python_calls(library: Callable[..., Any], name: str) -> None:
    rng, side = np.random.default_rng(0), 3 if name == "a small bias" else 14
    rows, shape = 2 * side - 1, (1, 8, side**2, 16)
    q, k, v = (library(rng.standard_normal(shape).astype(np.float32)) for _ in range(3))
    table_h, table_w = (library(rng.standard_normal((rows, 16)).astype(np.float32)) for _ in range(2))
    given: dict[str, Any] = {"table_h": table_h, "table_w": table_w}
    if name.endswith("bias"):
        given = {"rel_bias": library(rng.standard_normal((8, rows, rows)).astype(np.float32))}
    elif name != "tables":
        given |= {"window": ((2, 2), (2, 2))} if name == "a window" else {"neighborhood": (5, 5)}
    grids: dict[str, Any] = {"q_grid": (side, side), "k_grid": (side, side)}
    assert 0 < python_calls(lambda: relative_attention_2d(q, k, v, **given, **grids)) <= MOST


@pytest.mark.no_cover
@LIBRARIES
def test_a_portable_call_of_a_known_kind_makes_few_python_calls_around_its_kernel(library: Callable[..., Any]) -> None:
    rng, shapes = np.random.default_rng(0), ((1, 2, 64, 8),) * 3 + ((64, 8),)
    q, k, v, table = (library(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)

    call = problem.problem(Arguments(q, k, v, table, causal=True))
    kernel = python_calls(lambda: PORTABLE.attention(call.operands(), call.options, xp=call.xp))
    whole = python_calls(lambda: relative_attention(q, k, v, table, causal=True, impl="portable"))
    assert 0 < whole - kernel <= MOST // 2


@pytest.mark.no_cover
def test_boundaries_of_buckets_are_looked_for_and_not_the_bucket_of_every_position() -> None:
    span = Span.full(100_000)
    assert 0 < python_calls(lambda: t5_buckets(span, num_buckets=32, max_distance=100_000, bidirectional=True)) < 300
    assert 0 < python_calls(lambda: deberta_buckets(span, position_buckets=256, max_distance=100_000)) < 300


OF_TORCH = """
import sys, torch
before = {name for name in sys.modules if name.startswith("sympy")}
from relskew_core import relative_attention, relative_attention_2d, relative_attention_vjp
q, k, v = (torch.randn(1, 2, 512, 16, requires_grad=True) for _ in range(3))
out, lse = relative_attention(q, k, v, torch.randn(512, 16), causal=True, return_lse=True)
(out.sum() + lse.sum()).backward()
print(*{name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))} - before)
"""


OF_JAX = """
import sys
import jax, jax.numpy as jnp
q, table = jnp.ones((1, 2, 512, 16)), jnp.ones((512, 16))
before = {name for name in sys.modules if "pallas" in name}
from relskew_core import relative_attention
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: print(event))
relative_attention(q, q, q, table, causal=True).block_until_ready()
print(*{name for name in sys.modules if "pallas" in name} - before)
"""

OF_NUMPY = """
import sys, numpy as np
before = {name for name in sys.modules if name.startswith("numpy")}
from relskew_core import relative_attention, relative_attention_2d, relative_attention_vjp
x = np.ones((1, 2, 8, 4), "f4")
for impl in ("portable", "auto"):
    relative_attention(x, x, x, np.ones((8, 4), "f4"), causal=True, impl=impl)
    relative_attention_vjp(x, x, x, x, np.ones((8, 4), "f4"), causal=True, impl=impl)
print(*{name for name in sys.modules if name.startswith(("numpy", "array_api_compat.numpy"))} - before)
"""
"""The wrapper of NumPy would import its compiler of Fortran and its tools for tests."""


@pytest.mark.no_cover
@pytest.mark.parametrize(("library", "code"), [
    pytest.param("torch", OF_TORCH, id="torch: no compiler", marks=needs_kernels),
    pytest.param("jax", OF_JAX, id="jax: nothing compiled, no language of kernels", marks=needs_kernels),
    pytest.param("numpy", OF_NUMPY, id="numpy: nothing else", marks=pytest.mark.skipif(
        not hasattr(np, "__array_namespace_info__"), reason="NumPy before 2.1 needs a wrapper")),
])  # fmt: skip
def test_a_first_call_imports_and_compiles_nothing_that_it_does_not_need(library: str, code: str) -> None:
    pytest.importorskip(library)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"

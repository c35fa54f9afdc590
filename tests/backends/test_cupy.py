"""CuPy's path without torch, on NumPy's memory: cuBLAS by its calling convention, the softmax compiled for the CPU."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import pytest

import oracles
from dense import Case
from relskew_core import Span, relative_attention
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends import _cupy
from relskew_core.backends._cupy import blas, device, softmax
from served import served

COMPILER = shutil.which("g++")
# sinks are added after the kernels
CASES = [case for case in served(_cupy.CUBLAS.supports) if "sinks" not in case.by_head]

SHIM = """
#include <algorithm>
#include <cmath>
using namespace std;
struct Index { unsigned x; };
static Index threadIdx = {0}, blockIdx = {0}, blockDim = {1};
#define __global__
#define __device__ static
#define __shared__ static
static void __syncthreads() {}
extern "C" void at_block(unsigned block) { blockIdx.x = block; }
"""
"""One thread per block, without which the rest of the CUDA C++ is plain C++."""


def _column_major(pointer: int, dtype: Any, transposed: int, rows: int, columns: int, pitch: int) -> Any:
    """Return cuBLAS's view of a matrix: ``op(X)`` of rows × columns."""
    stored = (columns, rows) if transposed else (rows, columns)
    size = (stored[1] - 1) * pitch + stored[0]
    flat = np.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(pointer), dtype)
    x = np.lib.stride_tricks.as_strided(flat, stored, (dtype.itemsize, dtype.itemsize * pitch))
    return x.T if transposed else x


class Host(device.Cuda):
    """NumPy's memory, a product with cuBLAS's arguments, and the compiled softmax."""

    def __init__(self, kernels: dict[str, Any]) -> None:
        super().__init__(xp)
        self._kernels = kernels

    def library(self) -> Any:
        return np

    def pointer(self, x: Any) -> int:
        return int(x.ctypes.data)

    def handle(self) -> int:
        return 7

    def gemm(self, dtype: Any) -> Callable[..., None]:
        def product(
            handle: int, of_a: int, of_b: int, m: int, n: int, k: int, alpha: int, a: int, ld_a: int, next_a: int,
            b: int, ld_b: int, next_b: int, beta: int, c: int, ld_c: int, next_c: int, count: int,
        ) -> None:  # fmt: skip
            assert handle == 7
            assert ld_a >= (k if of_a else m)
            assert ld_b >= (n if of_b else k)
            assert ld_c >= m
            factors = [float(_column_major(x, dtype, 0, 1, 1, 1)[0, 0]) for x in (alpha, beta)]
            for item in range(count):
                at = [x + item * step * dtype.itemsize for x, step in ((a, next_a), (b, next_b), (c, next_c))]
                left = _column_major(at[0], dtype, of_a, m, k, ld_a)
                right = _column_major(at[1], dtype, of_b, k, n, ld_b)
                result = _column_major(at[2], dtype, 0, m, n, ld_c)
                # like BLAS: with a factor of 0, old values are not read
                old = factors[1] * result if factors[1] else 0.0
                result[...] = factors[0] * (left @ right) + old

        return product

    def launch(self, dtype: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        library = self._kernels[dtype]
        real = ctypes.c_float if dtype == "float32" else ctypes.c_double
        kinds = {np.int32: ctypes.c_int, np.int64: ctypes.c_longlong, np.float32: real, np.float64: real}
        given = [
            ctypes.c_void_p(x.ctypes.data) if isinstance(x, np.ndarray) else kinds[type(x)](x.item()) for x in arguments
        ]
        for block in range(blocks):
            library.at_block(ctypes.c_uint(block))
            getattr(library, softmax.NAME)(*given)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    if COMPILER is None:
        pytest.skip("no C++ compiler to build the kernel with")
    kernels, folder = {}, tmp_path_factory.mktemp("kernel")
    for dtype in device.REALS:
        source, library = folder / f"{dtype}.cpp", folder / f"{dtype}.so"
        source.write_text(SHIM + device.code(dtype))
        subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
        kernels[dtype] = ctypes.CDLL(str(library))
    return Host(kernels)


def attend(host: Host, case: Case, arrays: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    call = problem(Arguments(**arrays, **case.call(), **options), return_lse=True)
    out, lse = blas.attention(call.operands(), call.options, device=host)
    return call.result(out), call.result(lse)


@pytest.mark.parametrize("chunk_size", [None, 3], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_that_of_the_plain_formula(host: Host, case: Case, chunk_size: int | None) -> None:
    import torch

    out, lse = attend(host, case, case.arrays(), chunk_size=chunk_size)
    tensors: dict[str, Any] = {name: torch.tensor(x) for name, x in case.arrays().items()}
    expected = oracles.attention(**tensors, **case.call())
    np.testing.assert_allclose(out, expected.out.numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse, expected.lse.numpy(), rtol=0, atol=1e-12)


def test_float32(host: Host) -> None:
    case = Case("all", n=20, m=24, tables="rel_k rel_v rel_bias", mask="boolean", options={"softcap": 2.0})
    out, lse = attend(host, case, case.arrays("float32"))
    assert out.dtype == lse.dtype == np.float32
    expected = relative_attention(**case.arrays(), **case.call(), return_lse=True)
    for actual, wanted in zip((out, lse), expected, strict=True):
        assert np.linalg.norm(actual - wanted) <= 2e-6 * np.linalg.norm(wanted)


def test_what_nobody_sees_reaches_nothing(host: Host) -> None:
    case = Case("causal", n=9, m=12, span=Span.full(12), options={"causal": True}, tables="rel_k rel_v")
    arrays = case.arrays()
    clean = attend(host, case, arrays)
    arrays["k"][..., 9:, :] = arrays["v"][..., 9:, :] = np.nan
    arrays["rel_k"][..., 12:, :] = arrays["rel_v"][..., 12:, :] = np.nan
    for one, other in zip(clean, attend(host, case, arrays), strict=True):
        np.testing.assert_array_equal(one, other)


def test_windows_wider_than_32_bits_hide_nothing(host: Host) -> None:
    plain = Case("plain", n=3, m=5)
    whole = attend(host, plain, plain.arrays())
    for options in ({"window": (2**40, 2**31 - 1)}, {"window": (2**31 - 1, 4)}):
        for one, other in zip(whole, attend(host, plain, plain.arrays(), **options), strict=True):
            np.testing.assert_array_equal(one, other)


def test_products_refuse_what_no_stride_describes() -> None:
    x = np.zeros((1, 4, 4))[:, ::2, ::2]
    with pytest.raises(ValueError, match="one of the last two strides must be 1"):
        device._layout(x)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_gradients_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    x = np.zeros((1, 2, 3))
    call = problem(Arguments(x, x, x))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _cupy.serve("attention", call) is _cupy.CUBLAS
    assert not _cupy.CUBLAS.half
    assert "no gradients of its own, and through torch: torch sees no" in str(_cupy.serve("attention_vjp", call))
    monkeypatch.setattr(_cupy, "find_spec", lambda name: None)
    assert "torch is not installed" in str(_cupy.serve("attention_vjp", call))


@pytest.mark.parametrize("boolean", [True, False])
def test_arrays_go_to_torch_without_a_copy(boolean: bool) -> None:
    x = np.ones((2, 3, 4))
    mask = np.ones((3, 3), bool) if boolean else np.ones((3, 3))
    tensors: Any = _cupy.to_torch(problem(Arguments(x, x, x, mask=mask)).given)
    assert tensors.rel_k is None
    assert tensors.q.data_ptr() == x.ctypes.data
    assert tensors.mask.data_ptr() == mask.ctypes.data
    assert str(tensors.mask.dtype) == ("torch.bool" if boolean else "torch.float64")


def test_arrays_that_run_backwards_are_copied() -> None:
    x = np.arange(24.0).reshape(2, 3, 4)[:, ::-1]
    tensor = _cupy._tensor(x)
    np.testing.assert_array_equal(tensor.numpy(), x)


def test_kernel_takes_what_it_is_given() -> None:
    head = softmax.SOURCE.partition("skewed_softmax(")[2].partition(")")[0]
    names = [parameter.split()[-1].lstrip("*") for parameter in head.split(",")]
    assert "#" not in head
    source = Path(blas.__file__).read_text()
    assert [f'"{name}"' in source for name in names[3:]] == [True] * len(names[3:])

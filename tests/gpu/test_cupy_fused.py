"""CuPy on a CUDA device, through torch's fused kernels; ``pytest -m gpu``."""

import importlib
from typing import Any

import numpy as np
import pytest

import dense
import libraries
import oracles
from dense import Case
from relskew_core import relative_attention, relative_attention_vjp
from relskew_core.backends import _cupy
from served import served

CASES = served(_cupy.FUSED.supports)


def _missing() -> str | None:
    return next(row for row in libraries.LIBRARIES if row.name == "CuPy").missing()


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_missing() is not None, reason=str(_missing()))]


def expected(case: Case) -> oracles.Attention:
    torch = importlib.import_module("torch")
    tensors: dict[str, Any] = {name: torch.tensor(x) for name, x in case.arrays().items()}
    return oracles.attention(**tensors, **case.call())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output(case: Case) -> None:
    cupy = importlib.import_module("cupy")
    arrays = {name: cupy.asarray(x) for name, x in case.arrays("float32").items()}
    cupy.cuda.Device().synchronize()  # the arrays were made on another stream
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out, lse = relative_attention(**arrays, **case.call(), return_lse=True, impl="native")
        stream.synchronize()
    for actual, wanted in zip((out, lse), expected(case), strict=True):
        np.testing.assert_allclose(cupy.asnumpy(actual), wanted.numpy(), rtol=0, atol=2e-5)


def test_gradients_through_torch() -> None:
    cupy = importlib.import_module("cupy")
    case = next(case for case in CASES if case.name == "all tables, by head")
    arrays = {name: cupy.asarray(x) for name, x in case.arrays("float32").items()}
    d_out = cupy.asarray(case.d_out().astype("float32"))
    gradients = relative_attention_vjp(d_out, **arrays, **case.call(), impl="native")
    for name, wanted in dense.vjp(case.d_out(), case.arrays(), case.call()).items():
        np.testing.assert_allclose(cupy.asnumpy(getattr(gradients, name)), wanted, rtol=0, atol=2e-5)

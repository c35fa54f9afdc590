"""CuPy on a CUDA device, through torch's fused kernels; ``pytest -m gpu``."""

from typing import Any

import numpy as np
import pytest
import torch

import dense
import libraries
import oracles
from dense import Case
from relskew_core import relative_attention, relative_attention_vjp
from relskew_core.backends import _cupy
from served import served

cupy = pytest.importorskip("cupy")
CASES = served(_cupy.FUSED.supports)
MISSING = next(row for row in libraries.LIBRARIES if row.name == "CuPy").missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output(case: Case) -> None:
    arrays = {name: cupy.asarray(x) for name, x in case.arrays("float32").items()}
    cupy.cuda.Device().synchronize()  # the arrays were made on another stream
    with cupy.cuda.Stream(non_blocking=True) as stream:
        results = relative_attention(**arrays, **case.call(), return_lse=True, impl="native")
        stream.synchronize()
    tensors: dict[str, Any] = {name: torch.tensor(x) for name, x in case.arrays().items()}
    for actual, wanted in zip(results, oracles.attention(**tensors, **case.call()), strict=True):
        np.testing.assert_allclose(cupy.asnumpy(actual), wanted.numpy(), rtol=0, atol=2e-5)


def test_gradients_through_torch() -> None:
    case = next(case for case in CASES if case.name == "all tables, by head")
    arrays = {name: cupy.asarray(x) for name, x in case.arrays("float32").items()}
    d_out = cupy.asarray(case.d_out().astype("float32"))
    gradients = relative_attention_vjp(d_out, **arrays, **case.call(), impl="native")
    for name, wanted in dense.vjp(case.d_out(), case.arrays(), case.call()).items():
        np.testing.assert_allclose(cupy.asnumpy(getattr(gradients, name)), wanted, rtol=0, atol=2e-5)

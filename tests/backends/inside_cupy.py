"""CuPy's path through torch, on NumPy's memory: reasons, arrays that are shared, and the answer without torch."""

from typing import Any

import numpy as np
import pytest
import torch

from relskew_core import backends, relative_attention, relative_attention_vjp
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends import _cupy


def test_native_kernels_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 3))
    expected = relative_attention(x, x, x, impl="portable")
    monkeypatch.setattr(backends, "_module", lambda library: _cupy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for why in ("torch sees no CUDA device", "torch is not installed"):
        backends._prepared.clear()
        np.testing.assert_array_equal(relative_attention(x, x, x), expected)
        message = f"CuPy's fused kernels are those of torch, and {why}"
        with pytest.raises(ValueError, match=message):
            relative_attention(x, x, x, impl="native")
        with pytest.raises(ValueError, match=message):
            relative_attention_vjp(x, x, x, x, impl="native")
        monkeypatch.setattr(_cupy, "find_spec", lambda name: None)
    backends._prepared.clear()


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

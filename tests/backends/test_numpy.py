"""The compiled kernels for NumPy's arrays: dtypes, dropout, refusals, and no warnings on the way."""

import re
from typing import Any

import numpy as np
import pytest

import dense
from libraries import needs_kernels
from relskew_core import backends, relative_attention, relative_attention_vjp

pytestmark = needs_kernels


def arrays(length: int) -> Any:
    return np.random.default_rng(0).standard_normal((4, 3, length, 8))


@pytest.mark.parametrize("offset", [0, 2**31 - 40, -(2**33)], ids=str)
def test_a_seed_drops_the_same_weights_to_the_bit(offset: int) -> None:
    q, k, _, _ = arrays(150)
    every = np.broadcast_to(np.eye(150), (3, 150, 150))  # so the output is the weights
    options: dict[str, Any] = {"offset": offset, "dropout": 0.4, "seed": 5}
    native: Any = relative_attention(q, k, every, **options, impl="native")
    portable: Any = relative_attention(q, k, every, **options, impl="portable")
    assert 0.59 < np.mean(native > 0) < 0.61
    np.testing.assert_array_equal(native > 0, portable > 0)
    np.testing.assert_allclose(native, portable, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("threads", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)], ids=str)
def test_a_number_of_threads_that_is_none_is_refused(threads: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`threads` must be an int"):
        backends.set_numpy_threads(threads)


@pytest.mark.parametrize(("items", "width", "options", "reason"), [
    (0, 8, {"offset": []}, "the values of `offset` are not known, or there are none"),
    (3, 0, {}, "the compiled kernels do not take such sizes, dtypes, offsets, segments or positions"),
], ids=["no items", "no values"])  # fmt: skip
def test_a_refusal_says_why(items: int, width: int, options: dict[str, Any], reason: str) -> None:
    q, k, v = (np.broadcast_to(x, (items, *x.shape)) for x in arrays(150)[:3])
    with pytest.raises(ValueError, match=f"no native path for this call: {re.escape(reason)}$"):
        relative_attention(q, k, v[..., :width], **options, impl="native")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("impl", "dtype"), [("portable", "float32"), ("auto", "float64")])
@pytest.mark.parametrize("case", dense.CASES, ids=str)
def test_nothing_overflows_divides_by_zero_or_underflows_on_the_way(case: dense.Case, impl: Any, dtype: str) -> None:
    arrays, d_out = case.arrays(dtype), case.d_out().astype(dtype)
    with np.errstate(all="raise"):
        relative_attention(**arrays, **case.call(), return_lse=True, impl=impl)
        relative_attention_vjp(d_out, **arrays, **case.call(), impl=impl)

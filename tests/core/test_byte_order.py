"""NumPy's arrays in the byte order of other machines, as their files have them."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dense
import relskew_core as relskew
from relskew_core import BlockSpec, Span, relative_attention, relative_attention_vjp

pytestmark = pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
GATES = {"f2": 3e-3, "f4": 1e-5, "f8": 1e-11}


def swapped(x: Any) -> Any:
    """Return a floating array in the other byte order."""
    return x.astype(x.dtype.newbyteorder("S")) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x


def assert_same(found: Any, expected: NDArray[Any], dtype: str) -> None:
    assert found.dtype.newbyteorder("=") == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=GATES[dtype] * np.abs(expected).max(initial=1))


@pytest.mark.parametrize("case", dense.CASES, ids=str)
def test_calls_in_the_other_byte_order_give_the_same(case: dense.Case, dtype: str) -> None:
    given = {**case.arrays(dtype), **case.call()}
    other = {name: swapped(x) for name, x in given.items()}
    both = (relative_attention(**x, return_lse=True) for x in (other, given))
    for found, expected in zip(*both, strict=True):
        finite = np.isfinite(expected)
        assert (finite == np.isfinite(found)).all()
        assert_same(found[finite], expected[finite], dtype)
    d_out = case.d_out().astype(dtype)
    gradients = relative_attention_vjp(swapped(d_out), **other)
    for name, expected in relative_attention_vjp(d_out, **given)._asdict().items():
        found = getattr(gradients, name)
        assert (found is None) == (expected is None)
        if expected is not None:
            assert found.dtype == other[name].dtype, name
            assert_same(found, expected, dtype)


def test_learned_scales_in_the_other_byte_order_give_the_same(dtype: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 5, 3)).astype(dtype)
    arrays = {"rel_k": rng.standard_normal((9, 3)), "key_table": rng.standard_normal((9, 3)), "scale": np.ones(4) / 2}
    arrays["rel_scale"] = np.asarray(0.7)
    given = {"q": q, "k": k, "v": v, **{name: x.astype(dtype) for name, x in arrays.items()}}
    other = {name: swapped(x) for name, x in given.items()}
    assert_same(relative_attention(**other), relative_attention(**given), dtype)
    gradients = relative_attention_vjp(swapped(v), **other)
    for name, expected in relative_attention_vjp(v, **given)._asdict().items():
        if expected is not None:
            assert_same(getattr(gradients, name), expected, dtype)
    del other["v"], given["v"]
    assert_same(relskew.attention_weights(**other), relskew.attention_weights(**given), dtype)


SPECS = {
    "tables": BlockSpec(8, 2, Span.causal(6), causal=True, rel_values=True, sinks=True),
    "alibi": BlockSpec.alibi(8, 2, causal=True),
    "t5": BlockSpec.t5(8, 2, causal=True),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_blocks_with_a_cache_in_the_other_byte_order_give_the_same(spec: BlockSpec, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 8)).astype(dtype)
    past = tuple(rng.standard_normal((2, 2, 2, 3, 4)).astype(dtype))
    weights: Any = relskew.init_weights(spec, seed=0, dtype=np.dtype(dtype))
    y, present = relskew.attention_block(x, weights, spec, past=past)
    others = {name: swapped(weight) for name, weight in weights.items()}
    found, found_present = relskew.attention_block(swapped(x), others, spec, past=tuple(map(swapped, past)))
    for one, other in zip((found, *found_present), (y, *present), strict=True):
        assert_same(one, other, dtype)


def test_biases_like_an_array_in_the_other_byte_order_are_the_same(dtype: str) -> None:
    like = np.ones(1, dtype)
    found, expected = (relskew.proximal_bias(Span.full(9), like=x) for x in (swapped(like), like))
    np.testing.assert_array_equal(found, expected)

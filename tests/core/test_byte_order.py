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


def assert_same(found: Any, expected: NDArray[Any], dtype: str, gate: float | None = None) -> None:
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=1)
    assert found.dtype.newbyteorder("=") == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=(GATES[dtype] if gate is None else gate) * largest)


LEARNED = dense.Case("learned numbers", n=5, m=5, heads=4, tables="rel_k key_table", by_head="scale rel_scale")


@pytest.mark.parametrize("case", [*dense.CASES, LEARNED], ids=str)
def test_calls_in_the_other_byte_order_give_the_same(case: dense.Case, dtype: str) -> None:
    """To the bit by the portable code, which computes them by ``"auto"``, too: kernels read one byte order."""
    given = {**case.arrays(dtype), **case.call()}
    if case is LEARNED:
        given["rel_scale"] = np.asarray(given["rel_scale"][0])
    other = {name: swapped(x) for name, x in given.items()}
    d_out = case.d_out().astype(dtype)
    own: Any = {"impl": "portable"}
    expected = *relative_attention(**given, return_lse=True, **own), *relative_attention_vjp(d_out, **given, **own)
    for impl, gate in (("portable", 0), ("auto", None)):
        own = {"impl": impl}
        gradients = relative_attention_vjp(swapped(d_out), **other, **own)
        for name, x in gradients._asdict().items():
            assert x is None or not x.ndim or x.dtype == other[name].dtype, name
        found = *relative_attention(**other, return_lse=True, **own), *gradients
        for x, y in zip(found, expected, strict=True):
            assert (x is None) == (y is None)
            if y is not None:
                assert_same(x, y, dtype, gate)
    looked = given.keys() - {"v", "rel_v", "dropout", "seed"}
    weights, of_other = (relskew.attention_weights(**{name: x[name] for name in looked}) for x in (given, other))
    assert_same(of_other, weights, dtype, 0)


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

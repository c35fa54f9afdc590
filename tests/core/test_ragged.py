"""Offsets for each item of a batch: what running every item alone gives, in every integer dtype."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dense
import oracles
from libraries import GATES, LIBRARIES, Library, of_name
from oracles import relative_error
from relskew_core import Span, relative_attention, relative_attention_vjp, relative_logits, relative_values

OFFSETS = [3, -2, 0, 5, 3]
TABLES = ("rel_k", "rel_v", "rel_bias")
PATTERNS: dict[str, dict[str, Any]] = {
    "all": {}, "causal": {"causal": True}, "window": {"window": (2, 1)},
    "causal window": {"causal": True, "window": (3, None)}, "blocks": {"block_size": 3},
}  # fmt: skip


def inputs(
    *, n: int = 4, m: int = 7, span: Span, shared: bool = False, masked: bool = True, batch: int = len(OFFSETS)
) -> dict[str, Any]:
    """Draw the arrays of a batch."""
    given: dict[str, Any] = {"mask": "additive", "mask_shape": (batch, 1, 1, m)} if masked else {}
    case = dense.Case("ragged", n, m, (batch,), heads=4, kv_heads=2, d=6, dv=5, span=span, own_tables=not shared,
                      tables="rel_k rel_v rel_bias", **given)  # fmt: skip
    return case.arrays()


def item(arrays: dict[str, Any], index: int) -> dict[str, Any]:
    return {name: x if name in TABLES else x[index] for name, x in arrays.items()}


@settings(max_examples=150, deadline=None)
@given(offsets=st.lists(st.integers(-9, 9), min_size=1, max_size=4), n=st.integers(1, 5), m=st.integers(1, 6),
       pattern=st.sampled_from(sorted(PATTERNS)), beyond=st.sampled_from(["clip", "zero", "error"]),
       left=st.integers(0, 4), right=st.integers(0, 4), shared=st.booleans(), masked=st.booleans(),
       chunk_size=st.sampled_from([None, 1, 2]))  # fmt: skip
def test_items_of_a_ragged_batch_equal_calls_of_each(
    offsets: list[int], n: int, m: int, pattern: str, beyond: Any, left: int, right: int, shared: bool, masked: bool,
    chunk_size: int | None,
) -> None:  # fmt: skip
    span = Span(20, 20) if beyond == "error" else Span(left, right, beyond)
    arrays = inputs(n=n, m=m, span=span, shared=shared, masked=masked, batch=len(offsets))
    options: dict[str, Any] = {"span": span, **PATTERNS[pattern]}
    out, lse = relative_attention(**arrays, offset=offsets, return_lse=True, chunk_size=chunk_size, **options)
    d_out = np.random.default_rng(1).standard_normal(out.shape)
    gradients = relative_attention_vjp(d_out, **arrays, offset=offsets, chunk_size=chunk_size, **options)
    sums = {name: np.zeros_like(arrays[name]) for name in TABLES}
    for index, offset in enumerate(offsets):
        alone = item(arrays, index)
        expected = relative_attention(**alone, offset=offset, return_lse=True, impl="portable", **options)
        np.testing.assert_allclose(out[index], expected[0], atol=1e-12)
        np.testing.assert_allclose(lse[index], expected[1], atol=1e-12)
        own = relative_attention_vjp(d_out[index], **alone, offset=offset, impl="portable", **options)
        for name in arrays:
            if name in TABLES:
                sums[name] += getattr(own, name)
            else:
                np.testing.assert_allclose(getattr(gradients, name)[index], getattr(own, name), atol=1e-11)
    for name, total in sums.items():
        np.testing.assert_allclose(getattr(gradients, name), total, atol=1e-11)


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
@pytest.mark.parametrize("pattern", ["causal", "blocks"])
def test_ragged_batches_equal_the_oracle_in_every_library(library: Library, pattern: str) -> None:
    library.needed()
    span, dtype = Span(4, 2, "clip"), library.dtypes[0]
    numbers = inputs(span=span)
    with library.setting():
        arrays = {name: library.asarray(x, dtype) for name, x in numbers.items()}
        arrays["offset"] = library.asarray(np.asarray(OFFSETS, dtype=np.int32))
        out = library.call(relative_attention, arrays, span=span, **PATTERNS[pattern])
        for index, offset in enumerate(OFFSETS):
            alone = oracles.relative_attention(**item(numbers, index), offset=offset, span=span, **PATTERNS[pattern])
            assert relative_error(library.to_numpy(out)[index], alone.out) <= GATES[dtype]


def test_gradients_stay_on_the_device_of_their_arrays() -> None:
    span = Span(4, 2, "clip")
    arrays = inputs(span=span)
    d_out = np.random.default_rng(1).standard_normal((len(OFFSETS), 4, 4, 5))
    library = of_name("array-api-strict, second device")
    there = {name: library.asarray(x) for name, x in arrays.items()}
    found = relative_attention_vjp(library.asarray(d_out), **there, span=span, offset=OFFSETS)
    expected = relative_attention_vjp(d_out, **arrays, span=span, offset=OFFSETS)
    for name in arrays:
        gradient: Any = getattr(found, name)
        assert gradient.device == there["q"].device
        np.testing.assert_allclose(library.to_numpy(gradient), getattr(expected, name), atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("known", [True, False], ids=["ints", "array"])
def test_ragged_logits_and_values_equal_those_of_each_item(causal: bool, known: bool) -> None:
    span = Span(3, 2, "clip")
    arrays = inputs(span=span)
    offset = OFFSETS if known else np.asarray(OFFSETS)
    logits = relative_logits(arrays["q"], arrays["rel_k"], span, n_keys=7, offset=offset, causal=causal)
    weights = np.random.default_rng(2).standard_normal(logits.shape)
    values = relative_values(weights, arrays["rel_v"], span, offset=offset, causal=causal)
    for index, one in enumerate(OFFSETS):
        given: dict[str, Any] = {"span": span, "offset": one, "causal": causal}
        alone = relative_logits(arrays["q"][index], arrays["rel_k"], n_keys=7, **given)
        np.testing.assert_allclose(logits[index], alone, atol=1e-12)
        np.testing.assert_allclose(values[index], relative_values(weights[index], arrays["rel_v"], **given), atol=1e-12)


def test_several_leading_axes() -> None:
    span = Span(3, 2, "clip")
    arrays = inputs(span=span, batch=6)
    offsets = np.arange(6) - 1
    whole: Any = relative_attention(**arrays, span=span, offset=offsets)
    folded = {name: x if name in TABLES else x.reshape(2, 3, *x.shape[1:]) for name, x in arrays.items()}
    out: Any = relative_attention(**folded, span=span, offset=offsets.reshape(2, 3))
    np.testing.assert_allclose(out.reshape(whole.shape), whole, atol=1e-14)


def test_a_table_that_is_too_short_for_values_that_nobody_knows_gives_nan() -> None:
    jax = pytest.importorskip("jax")
    arrays = {name: jax.numpy.asarray(x) for name, x in inputs(span=Span(6, 6), masked=False, batch=2).items()}
    attend = jax.jit(lambda offset: relative_attention(**arrays, span=Span(6, 6), offset=offset))
    out = np.asarray(attend(jax.numpy.asarray([2, 9])))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    d_out = jax.numpy.zeros(out.shape)
    with pytest.raises(TypeError, match="`offset` must be known for the gradient of a table"):
        jax.jit(lambda offset: relative_attention_vjp(d_out, **arrays, span=Span(6, 6), offset=offset).rel_k)(
            jax.numpy.asarray([2, 3])
        )


DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SPAN = Span(3, 2, "clip")
RNG = np.random.default_rng(0)
X, TABLE, WEIGHTS = RNG.standard_normal((2, 1, 6, 4)), RNG.standard_normal((6, 4)), RNG.random((2, 1, 6, 6))
CALLS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "attention": (relative_attention, {"q": X, "k": X, "v": X, "rel_k": TABLE}, {"impl": "portable"}),
    "logits": (relative_logits, {"q": X, "table": TABLE}, {"n_keys": 6}),
    "logits of keys": (relative_logits, {"q": X, "table": TABLE}, {"n_queries": 6, "side": "key"}),
    "values": (relative_values, {"weights": WEIGHTS, "table": TABLE}, {}),
}


def dtypes(library: Library) -> tuple[str, ...]:
    """Return all dtypes, or some if each is compiled, which takes a second."""
    if library.traced:
        return ("uint8",)
    return ("int8", "uint64") if library.module in ("jax", "dask") else DTYPES


def furthest(dtype: str) -> int:
    """Return an offset from which the next queries are beyond the range of the small dtypes."""
    return min(int(np.iinfo(dtype).max), 40_000) - 2


@pytest.mark.parametrize("name", CALLS)
def test_one_offset_of_any_integer_dtype_is_its_number(library: Library, name: str) -> None:
    if library.traced:
        pytest.skip("what is traced has no value")
    function, arrays, options = CALLS[name]
    given = {key: library.asarray(x, library.dtypes[0]) for key, x in arrays.items()}
    for dtype in dtypes(library):
        offset = furthest(dtype)
        expected = function(**arrays, span=SPAN, offset=offset, **options)
        got = function(**given, span=SPAN, offset=library.asarray(np.asarray(offset, dtype)), **options)
        assert relative_error(library.to_numpy(got), expected) < GATES[library.dtypes[0]], dtype


@pytest.mark.parametrize("name", CALLS)
def test_offsets_by_item_of_any_integer_dtype_are_their_numbers(library: Library, name: str) -> None:
    function, arrays, options = CALLS[name]
    given = {key: library.asarray(x, library.dtypes[0]) for key, x in arrays.items()}
    for dtype in dtypes(library):
        offsets = (2, furthest(dtype))
        expected = function(**arrays, span=SPAN, offset=offsets, **options)
        every = {**given, "offset": library.asarray(np.asarray(offsets, dtype))}
        got = library.to_numpy(library.call(function, every, span=SPAN, **options))
        assert relative_error(got, expected) < GATES[library.dtypes[0]], dtype


@pytest.mark.parametrize("name", CALLS)
def test_offsets_as_scalars_of_numpy_are_their_numbers(name: str) -> None:
    function, arrays, options = CALLS[name]
    for plain, offset in ((3, np.uint8(3)), ([3, 1], [np.uint8(3), np.uint8(1)])):
        found, expected = (function(**arrays, span=SPAN, offset=x, **options) for x in (offset, plain))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["logits", "logits of keys"])
def test_offsets_of_jax_with_32_bits_are_their_numbers(name: str) -> None:
    jax = pytest.importorskip("jax")
    function, arrays, options = CALLS[name]
    with jax.enable_x64(False):
        given = {key: jax.numpy.asarray(x, "float32") for key, x in arrays.items()}
        for offset in ([2, 30_000], jax.numpy.asarray([2, 250], "uint8")):
            expected = function(**arrays, span=SPAN, offset=[int(each) for each in offset], **options)
            got = np.asarray(function(**given, span=SPAN, offset=offset, **options))
            assert relative_error(got, expected) < GATES["float32"]


@pytest.mark.parametrize("offset", [0, [3, 1]], ids=str)
def test_a_distance_beyond_all_integers_hides_nothing(library: Library, offset: Any) -> None:
    arrays = {name: library.asarray(X, "float32") for name in "qkv"}
    huge = {"window": (2**63, 2**70), "block_size": 2**70}
    actual = library.to_numpy(library.call(relative_attention, arrays, **huge, offset=offset))
    assert relative_error(actual, relative_attention(X, X, X, causal=True, offset=offset)) < GATES["float32"]

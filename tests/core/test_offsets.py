"""Offsets of every integer dtype: none wraps, whether it is one for all or one for each item of a batch."""

from typing import Any

import numpy as np
import pytest

from libraries import GATES, Library
from oracles import relative_error
from relskew_core import Span, relative_attention, relative_logits, relative_values

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
@pytest.mark.parametrize("offset", [np.uint8(3), [np.uint8(3), np.uint8(1)]], ids=["one", "items"])
def test_offsets_as_scalars_of_numpy_are_their_numbers(name: str, offset: Any) -> None:
    function, arrays, options = CALLS[name]
    plain = [int(each) for each in offset] if isinstance(offset, list) else int(offset)
    expected = function(**arrays, span=SPAN, offset=plain, **options)
    np.testing.assert_array_equal(function(**arrays, span=SPAN, offset=offset, **options), expected)


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

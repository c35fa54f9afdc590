"""Offsets for each item of a batch: what running every item alone gives, in every integer dtype."""

from typing import Any

import numpy as np
import pytest

from libraries import GATES, NATIVE, Library
from oracles import relative_error
from relskew_core import Span, relative_attention, relative_attention_vjp, relative_logits, relative_values

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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("known", [True, False], ids=["ints", "array"])
@pytest.mark.parametrize("name", ["logits", "logits of keys", "values"])
def test_ragged_logits_and_values_equal_those_of_each_item(name: str, causal: bool, known: bool) -> None:
    function, arrays, options = CALLS[name]
    options, offsets = {**options, "span": SPAN, "causal": causal}, [3, -2]
    found = function(**arrays, **options, offset=offsets if known else np.asarray(offsets))
    for item, offset in enumerate(offsets):
        alone = {key: x[item] if x.ndim == 4 else x for key, x in arrays.items()}
        np.testing.assert_allclose(found[item], function(**alone, **options, offset=offset), atol=1e-12)


@pytest.mark.parametrize("impl", ["portable", NATIVE])
def test_several_leading_axes(impl: Any) -> None:
    """With a mask and documents that some of the axes share."""
    rng, offsets, documents = np.random.default_rng(1), np.arange(6) - 1, np.arange(6)
    x, mask = rng.standard_normal((4, 6, 1, 6, 4)), rng.standard_normal((3, 1, 1, 6))
    keys = np.arange(36).reshape(6, 6) // 5 % 4
    results = []
    for lead in ((6,), (2, 3)):
        d_out, q, k, v = x.reshape(4, *lead, 1, 6, 4)
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "rel_k": TABLE, "span": SPAN, "impl": impl}
        given |= {"mask": mask if len(lead) == 2 else np.concatenate([mask, mask])}
        given |= {"segments": (documents // 4, keys.reshape(*lead, 6)), "offset": offsets.reshape(lead)}
        gradients = relative_attention_vjp(d_out, **given)
        results.append([relative_attention(**given), gradients.q, gradients.k, gradients.v, gradients.rel_k])
    for whole, folded in zip(*results, strict=True):
        np.testing.assert_allclose(np.reshape(folded, np.shape(whole)), whole, atol=1e-13)


def test_a_table_that_is_too_short_for_values_that_nobody_knows_gives_nan() -> None:
    jax = pytest.importorskip("jax")
    q, table = jax.numpy.asarray(X), jax.numpy.ones((13, 4))
    attend = jax.jit(lambda offset: relative_attention(q, q, q, table, Span(6, 6), offset=offset))
    out = np.asarray(attend(jax.numpy.asarray([1, 9])))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    with pytest.raises(TypeError, match="`offset` must be known for the gradient of a table"):
        jax.jit(lambda offset: relative_attention_vjp(q, q, q, q, table, Span(6, 6), offset=offset).rel_k)(
            jax.numpy.asarray([2, 3])
        )


def dtypes(library: Library) -> tuple[str, ...]:
    """Return all dtypes, or some if each is compiled, which takes a second."""
    if library.traced:
        return ("uint8",)
    return ("int8", "uint64") if library.module in ("jax", "dask") else DTYPES


def furthest(dtype: str) -> int:
    """Return an offset from which the next queries are beyond the range of the small dtypes."""
    return min(int(np.iinfo(dtype).max), 40_000) - 2


@pytest.mark.parametrize("name", CALLS)
def test_offsets_of_any_integer_dtype_are_their_numbers(library: Library, name: str) -> None:
    function, arrays, options = CALLS[name]
    given = {key: library.asarray(x, library.dtypes[0]) for key, x in arrays.items()}
    for dtype in dtypes(library):
        far = furthest(dtype)
        for offset in [(2, far), far][: 1 if library.traced else 2]:  # one that is traced has no value
            expected = function(**arrays, span=SPAN, offset=offset, **options)
            every = {**given, "offset": library.asarray(np.asarray(offset, dtype))}
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

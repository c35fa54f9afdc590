"""Keys times a table: position to content."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dense
import libraries
import oracles
import strategies
from dense import Case
from libraries import NATIVE
from relskew_core import Span, relative_attention, relative_attention_vjp, relative_logits

CASES = [
    Case("keys alone", n=5, m=8, tables="key_table"),
    Case("both sides, causal", n=40, m=40, span=Span.causal(40), tables="rel_k key_table", options={"causal": True}),
    Case("grouped", heads=4, kv_heads=2, span=Span.clipped(2), tables="rel_k rel_v key_table"),
    Case("grouped, shared", heads=4, kv_heads=2, span=Span(1, 3, "zero"), tables="key_table", own_tables=False),
    Case("no heads", heads=None, lead=(), tables="rel_k key_table"),
    Case("one query of a cache", n=1, m=19, span=Span(25, 0), tables="key_table",
         options={"causal": True, "offset": 18}),
    Case("blocks", n=11, m=11, span=Span.causal(6), tables="key_table", options={"block_size": 3, "chunk_size": 4}),
    Case("window, softcap, scales", n=35, m=35, span=Span(4, 2), tables="rel_k key_table",
         options={"window": (4, 2), "softcap": 3.0, "scale": 0.3, "rel_scale": 0.7, "chunk_size": 34}),
    Case("window, several blocks", n=40, m=50, span=Span.full(50), tables="key_table",
         options={"window": (24, 1), "chunk_size": 20}),
    Case("no heads, several blocks", heads=None, lead=(), n=3, m=40, tables="key_table"),
    Case("positions, several blocks", n=6, m=40, span=Span(3, 5, "zero"), tables="rel_k key_table",
         labels={"positions": (np.arange(6) * 5 % 7, np.arange(40) * 3 % 11)}, options={"chunk_size": 4}),
    Case("masked", mask="additive with holes", tables="key_table rel_bias", mask_shape=(2, 1, 7, 7)),
]  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def plain(case: Case) -> dict[str, Any]:
    return {name: option for name, option in case.call().items() if name != "chunk_size"}


@every_case
@pytest.mark.parametrize("library", libraries.LIBRARIES, ids=str)
def test_a_key_table_equals_the_oracle_in_every_library(library: libraries.Library, case: Case) -> None:
    library.needed()
    if library.traced and case is not CASES[2]:
        pytest.skip("compiled once")
    dtype = library.dtypes[0]
    numbers = case.arrays()
    with library.setting():
        arrays = {name: dense.each(lambda y: library.asarray(y, dtype if y.dtype.kind == "f" else None), x)
                  for name, x in numbers.items()}  # fmt: skip
        out, lse = library.call(relative_attention, arrays, return_lse=True, **case.call())
        expected = oracles.relative_attention(**numbers, **plain(case))
        assert oracles.relative_error(library.to_numpy(out), expected.out) <= libraries.GATES[dtype]
        assert oracles.relative_error(library.to_numpy(lse), expected.lse) <= libraries.GATES[dtype]


@every_case
def test_gradients_of_a_key_table_equal_the_dense_formula(case: Case) -> None:
    gradients = relative_attention_vjp(case.d_out(), **case.arrays(), **case.call())
    for name, expected in dense.vjp(case.d_out(), case.arrays(), plain(case)).items():
        np.testing.assert_allclose(getattr(gradients, name), expected, rtol=0, atol=1e-11, err_msg=name)


@settings(max_examples=150, deadline=None)
@given(call=strategies.calls(), seed=strategies.seeds)
def test_a_key_table_equals_its_logits_as_a_mask(call: strategies.Call, seed: int) -> None:
    """A table for the keys, drawn on top of any call, is the same as its logits as a mask."""
    arrays, options = dict(call.arrays), dict(call.options)
    q, k = arrays["q"], arrays["k"]
    if options.get("softcap") is not None or arrays.get("mask", np.zeros(())).dtype == bool:
        options.pop("softcap", None)
        arrays.pop("mask", None)
    span, causal = Span(2, 1, "clip"), options.get("causal", False)
    for name in ("rel_k", "rel_v", "rel_bias", "rel_q"):
        arrays.pop(name, None)
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((*q.shape[-3:-2], span.rows, q.shape[-1]))
    options |= {"span": span, "scale": 1.0, "rel_scale": 1.0}
    out = relative_attention(**arrays, **options, key_table=table)
    keys = k if q.ndim == 2 else np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
    if 0 in (q.shape[-2], k.shape[-2]):
        return
    offset = options.get("offset", 0)
    logits = relative_logits(keys, table, span, n_queries=q.shape[-2], offset=offset, causal=causal, side="key")
    mask = arrays.pop("mask", 0.0) + logits
    np.testing.assert_allclose(out, relative_attention(**arrays, **options, mask=mask), rtol=0, atol=1e-11)


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 6), m=st.integers(1, 6), offset=st.integers(-8, 8), causal=st.booleans(), by_head=st.booleans(),
    beyond=st.sampled_from(["clip", "zero"]), left=st.integers(0, 3), right=st.integers(0, 3),
)  # fmt: skip
@example(n=1, m=1, offset=0, causal=True, by_head=False, beyond="clip", left=2, right=0)  # a single row of the table
def test_logits_of_keys_equal_the_loops(
    n: int, m: int, offset: int, causal: bool, by_head: bool, beyond: Any, left: int, right: int
) -> None:
    rng, span = np.random.default_rng(0), Span(left, right, beyond)
    k = rng.standard_normal((3, 2, m, 4))
    table = rng.standard_normal((*((2,) if by_head else ()), span.rows, 4))
    logits = relative_logits(k, table, span, n_queries=n, offset=offset, causal=causal, side="key")
    by_item = relative_logits(k, table, span, n_queries=n, offset=[offset, 1, offset], causal=causal, side="key")
    np.testing.assert_allclose(by_item[::2], logits[::2], atol=1e-14)
    for i in range(n):
        for j in range(m):
            r = j - i - offset
            row = None if causal and r > 0 else oracles.row_of(r, span)
            expected = 0.0 if row is None else np.sum(k[:, :, j] * table[..., row, :], axis=-1)
            np.testing.assert_allclose(logits[:, :, i, j], expected, atol=1e-12)


def test_a_causal_table_is_long_enough_for_causal_logits_of_keys() -> None:
    rng = np.random.default_rng(1)
    k, table = rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
    logits = relative_logits(k, table, n_queries=3, causal=True, side="key")
    expected = [[table[j - i + 2] @ k[j] if j <= i else 0.0 for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(logits, expected, atol=1e-14)


@pytest.mark.parametrize("span", [Span.clipped(3), Span(5, 2, "zero"), Span(0, 9, "clip"), Span.full(100)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (20, 4)}, {"offset": -25}, {"offset": 40}], ids=str
)
def test_keys_beyond_the_ends_of_a_table_give_the_same_natively(span: Span, options: dict[str, Any]) -> None:
    case = Case("far", n=50, m=60, span=span, heads=4, kv_heads=2, tables="rel_k key_table", own_tables=False)
    results = []
    for impl in (NATIVE, "portable"):
        given: dict[str, Any] = {name: torch.tensor(x) for name, x in case.arrays().items()}
        call = {**given, "span": span, "chunk_size": 16, "impl": impl, "offset": 0, **options}
        out = relative_attention(**call)
        gradients = relative_attention_vjp(torch.tensor(case.d_out()), **call)
        results.append([out, gradients.q, gradients.k, gradients.rel_k, gradients.key_table])
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)

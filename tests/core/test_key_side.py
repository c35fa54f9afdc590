"""Keys times a table: position to content."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import dense
import oracles
import strategies
from dense import Case
from libraries import GATES, LIBRARIES, NATIVE, Library
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


def plain(case: Case) -> dict[str, Any]:
    return {name: option for name, option in case.call().items() if name != "chunk_size"}


@pytest.mark.parametrize(("library", "case"), [
    (library, case) for library in LIBRARIES for case in (CASES[2:3] if library.traced else CASES)  # compiled once
], ids=str)  # fmt: skip
def test_a_key_table_equals_the_oracle_in_every_library(library: Library, case: Case) -> None:
    library.needed()
    dtype = library.dtypes[0]
    numbers = case.arrays()
    with library.setting():
        arrays = {name: dense.each(lambda y: library.asarray(y, dtype if y.dtype.kind == "f" else None), x)
                  for name, x in numbers.items()}  # fmt: skip
        out, lse = library.call(relative_attention, arrays, return_lse=True, **case.call())
        expected = oracles.relative_attention(**numbers, **plain(case))
        assert oracles.relative_error(library.to_numpy(out), expected.out) <= GATES[dtype]
        assert oracles.relative_error(library.to_numpy(lse), expected.lse) <= GATES[dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_a_key_table_equal_the_dense_formula(case: Case) -> None:
    gradients = relative_attention_vjp(case.d_out(), **case.arrays(), **case.call())
    for name, expected in dense.vjp(case.d_out(), case.arrays(), plain(case)).items():
        np.testing.assert_allclose(getattr(gradients, name), expected, rtol=0, atol=1e-11, err_msg=name)


@settings(max_examples=150, deadline=None)
@given(call=strategies.calls(), seed=strategies.seeds)
def test_a_key_table_equals_its_logits_as_a_mask(call: strategies.Call, seed: int) -> None:
    """A table for the keys, drawn on top of any call, is the same as its logits as a mask."""
    arrays, span = {name: x for name, x in call.arrays.items() if name in "qkv"}, Span(2, 1, "clip")
    options = {**call.options, "span": span, "scale": 1.0, "rel_scale": 1.0}
    q, k, added = arrays["q"], arrays["k"], call.arrays.get("mask", np.zeros((), bool))
    if options.pop("softcap") is None and added.dtype != bool:
        arrays["mask"] = added
    table = np.random.default_rng(seed).standard_normal((*q.shape[-3:-2], span.rows, q.shape[-1]))
    out = relative_attention(**arrays, **options, key_table=table)
    keys = k if q.ndim == 2 else np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
    sides = {name: options[name] for name in ("offset", "causal")}
    mask = arrays.pop("mask", 0.0) + relative_logits(keys, table, span, n_queries=q.shape[-2], side="key", **sides)
    np.testing.assert_allclose(out, relative_attention(**arrays, **options, mask=mask), rtol=0, atol=1e-11)


def test_a_causal_table_is_long_enough_for_causal_logits_of_keys() -> None:
    rng = np.random.default_rng(1)
    k, table = rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
    logits = relative_logits(k, table, n_queries=3, causal=True, side="key")
    expected = [[table[j - i + 2] @ k[j] if j <= i else 0.0 for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(logits, expected, atol=1e-14)
    one = relative_logits(k[:1], table, n_queries=1, offset=0, causal=True, side="key")  # a single row of the table
    np.testing.assert_allclose(one, [[table[2] @ k[0]]], atol=1e-14)


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

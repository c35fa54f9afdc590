"""Paged keys and values: the same numbers as of the same call on keys that are gathered by hand."""

from typing import Any

import numpy as np
import pytest
import torch

import oracles
from libraries import GATES, Library
from relskew_core import Span, alibi_bias, paged_attention, relative_attention

B, H, HKV, D, DV, PAGE, POOL = 4, 6, 2, 4, 3, 3, 12
LENGTHS = [7, 3, 12, 9]
TABLE = [[5, 0, 9, -1], [2, 99, -7, 0], [1, 3, 4, 11], [6, 7, 8, -1]]
"""The pages of items: in any order, one page, all pages, and consecutive ones. Unused entries contain nonsense."""

RNG = np.random.default_rng(3)
ROWS = {"rel_k": RNG.standard_normal((H, 20, D)), "rel_v": RNG.standard_normal((20, DV))}
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a table": {"rel_k": ROWS["rel_k"], "span": Span.causal(20)},
    "alibi": {"rel_bias": alibi_bias(H, Span.causal(20), xp=np), "span": Span.causal(20)},
    "a clipped bias, both sides": {"rel_bias": np.arange(5.0), "span": Span.clipped(2), "causal": False},
    "values": {**ROWS, "span": Span.causal(20), "scale": 0.3, "softcap": 2.0},
    "sinks": {"sinks": np.linspace(-1, 1, H), "rel_bias": np.arange(-19.0, 1), "span": Span.causal(20)},
    "a window": {"rel_k": ROWS["rel_k"][:, -4:], "span": Span.causal(4), "window": (3, None)},
    "a window, both sides": {"window": (2, 1), "causal": False},
}


def pages() -> tuple[Any, Any]:
    k, v = (np.random.default_rng(4).standard_normal((POOL, PAGE, HKV, width)) for width in (D, DV))
    for item, length in enumerate(LENGTHS):  # rows that have not been written yet
        if length % PAGE:
            last = TABLE[item][length // PAGE]
            k[last, length % PAGE :] = v[last, length % PAGE :] = np.nan
    k[10] = v[10] = np.nan
    return k, v


def queries(n: int) -> Any:
    return np.random.default_rng(5).standard_normal((B, H, n, D))


def by_hand(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Gather each item's keys, one by one, and attend as always."""
    outs = []
    for item, length in enumerate(LENGTHS):
        own = [(TABLE[item][place // PAGE], place % PAGE) for place in range(length)]
        keys, values = (np.stack([x[where] for where in own], axis=1) for x in (k, v))
        given = {"causal": True, **options, "offset": length - q.shape[-2]}
        outs.append(relative_attention(q[item], keys, values, **given, return_lse=True))
    return [np.stack(parts) for parts in zip(*outs, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_gathered_keys(library: Library, name: str) -> None:
    options, n = CASES[name], (1, 3)[[*CASES].index(name) % 2]
    q, (k, v) = queries(n), pages()
    want, want_lse = by_hand(q, k, v, **options)
    tables = {key: x for key, x in options.items() if isinstance(x, np.ndarray)}
    others = {key: x for key, x in options.items() if key not in tables}
    for dtype in library.dtypes[:1] if library.compiled else library.dtypes:
        floats = {"q": q, "k_pages": k, "v_pages": v, **tables}
        given = {key: library.asarray(x, dtype) for key, x in floats.items()}
        ints = {"page_table": np.asarray(TABLE), "lengths": np.asarray(LENGTHS)}
        given |= {key: library.asarray(x, "int64") for key, x in ints.items()}
        out, lse = library.call(paged_attention, given, **others, return_lse=True)
        assert isinstance(out, library.array_type())
        assert oracles.relative_error(library.to_numpy(out), want) < GATES[dtype]
        assert oracles.relative_error(library.to_numpy(lse), want_lse) < GATES[dtype]


@pytest.mark.parametrize("name", ["a table", "values", "sinks", "a window, both sides"])
def test_what_a_compiler_traces_is_gathered_at_once(name: str) -> None:
    options: dict[str, Any] = {
        key: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for key, x in CASES[name].items()
    }
    q, k, v = (torch.from_numpy(x) for x in (queries(2), *pages()))
    options |= {key: torch.tensor(x, dtype=torch.int32) for key, x in (("page_table", TABLE), ("lengths", LENGTHS))}
    compiled = torch.compile(paged_attention, fullgraph=True, backend="eager")
    want = paged_attention(q, k, v, **options)
    torch.testing.assert_close(compiled(q, k, v, **options), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("traced", [False, True])
def test_sinks_by_query_belong_to_their_items(traced: bool) -> None:
    (k, v), given = pages(), {"q": queries(3), "sinks": np.random.default_rng(6).standard_normal((B, H, 3))}
    want = [by_hand(given["q"], k, v, sinks=item)[0][b] for b, item in enumerate(given["sinks"])]
    places: dict[str, Any] = {"page_table": TABLE, "lengths": LENGTHS}
    if traced:
        k, v = torch.from_numpy(k), torch.from_numpy(v)
        given, places = ({key: torch.tensor(x) for key, x in y.items()} for y in (given, places))
    attend = torch.compile(paged_attention, fullgraph=True, backend="eager") if traced else paged_attention
    np.testing.assert_allclose(attend(k_pages=k, v_pages=v, **given, **places), np.stack(want), rtol=0, atol=1e-13)


def test_lists_arrays_and_empty_items() -> None:
    q, (k, v) = queries(2), pages()
    want = paged_attention(q, k, v, page_table=TABLE, lengths=LENGTHS)
    as_arrays = paged_attention(q, k, v, page_table=np.asarray(TABLE, np.int16), lengths=np.asarray(LENGTHS, np.uint8))
    np.testing.assert_array_equal(as_arrays, want)
    of_numpy: dict[str, Any] = {
        "page_table": [list(row) for row in np.asarray(TABLE)],
        "lengths": list(np.asarray(LENGTHS)),
    }
    np.testing.assert_array_equal(paged_attention(q, k, v, **of_numpy), want)
    empty, lse = paged_attention(q, k, v, page_table=TABLE, lengths=[0, 1, 12, 9], return_lse=True)
    assert not empty[0].any()
    assert np.isneginf(lse[0]).all()
    assert not empty[1, :, 0].any()  # a query before all keys
    np.testing.assert_array_equal(empty[2:], want[2:])
    none = paged_attention(q[:0], k, v, page_table=[], lengths=[])
    assert none.shape == (0, H, 2, DV)


def test_pages_that_no_query_sees_are_not_read() -> None:
    q, (k, v) = queries(1), pages()
    want = paged_attention(q, k, v, page_table=TABLE, lengths=LENGTHS, window=(3, None))
    for item, length in enumerate(LENGTHS):
        for page in TABLE[item][: max(0, length - 4) // PAGE]:
            k[page] = v[page] = np.nan
    np.testing.assert_array_equal(paged_attention(q, k, v, page_table=TABLE, lengths=LENGTHS, window=(3, None)), want)


def test_the_portable_implementation_gives_the_same() -> None:
    q, (k, v) = queries(1), pages()
    given: dict[str, Any] = {"page_table": TABLE, "lengths": LENGTHS}
    portable = paged_attention(q, k, v, **given, impl="portable")
    np.testing.assert_allclose(portable, paged_attention(q, k, v, **given), atol=1e-13)

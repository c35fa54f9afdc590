"""Short calls laid out: which keys and which columns, by one look at every query and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import oracles
from relskew_core import Span
from relskew_core._kernel.call import Options
from relskew_core._kernel.plan import Layout, Plan
from relskew_core._positions.visibility import Visibility

SIDES = st.none() | st.integers(0, 4)
PATTERNS = st.fixed_dictionaries(
    {"left": SIDES, "right": SIDES, "block_size": st.none() | st.integers(1, 4), "blocks_before": st.integers(0, 2)}
)
SPANS = st.builds(Span, st.integers(0, 6), st.integers(0, 6), st.sampled_from(["clip", "zero"]))
OFFSETS, LENGTHS = st.integers(-4, 9), st.integers(1, 6)


def visibility(n: int, m: int, offset: int, pattern: dict[str, Any]) -> Visibility:
    blocks = {"blocks_before": None} if pattern["block_size"] is None else {}
    return Visibility(n, m, offset, **{**pattern, **blocks})


def options(pattern: Visibility, span: Span) -> Options:
    return Options(span, pattern, 1.0, 1.0)


@given(n=LENGTHS, m=LENGTHS, offset=OFFSETS, pattern=PATTERNS, span=SPANS)
def test_layouts(n: int, m: int, offset: int, pattern: dict[str, Any], span: Span) -> None:
    sides: dict[str, Any] = {"window": (pattern["left"], pattern["right"])}
    sides |= {name: pattern[name] for name in ("block_size", "blocks_before")} if pattern["block_size"] else {}
    seen = {(i, j) for i in range(n) for j in range(m) if oracles.sees(i, j, offset=offset, **sides)}
    layout = Layout.of(options(visibility(n, m, offset, pattern), span))
    if layout is None:
        assert not seen
        return
    assert {j for _, j in seen} <= set(range(layout.first, layout.end))
    columns = {n - 1 - i + j - layout.first for i, j in seen}
    assert layout.seen == slice(min(columns), max(columns) + 1)
    assert layout.width == max(max(columns) + 1, layout.end - layout.first)  # no more than is read
    # The first column is the last query's and the first key's.
    assert layout.row == layout.first - (n - 1 + offset) + span.left
    every = [layout.first - (n - 1 + offset) + column for column in range(layout.width)]
    rows = [oracles.row_of(r, span) for r in every]
    assert layout.rows(span) == [span.rows if row is None else row for row in rows]
    assert layout.within(span) == all(-span.left <= r <= span.right for r in every)


@given(m=LENGTHS, offset=OFFSETS, pattern=PATTERNS, span=SPANS, other=st.integers(1, 6))
def test_one_query(m: int, offset: int, pattern: dict[str, Any], span: Span, other: int) -> None:
    own = options(visibility(1, m, offset, pattern), span)
    alike = replace(own, visibility=visibility(1, other, 3, pattern))
    layout = Layout.of_one(alike.visibility, span, m, offset)
    assert layout == Layout.of(own)
    if layout is not None:
        assert Plan(alike, layout).options_for(m) == own


def test_several_queries_have_the_options_of_their_call() -> None:
    own = options(Visibility(2, 3, 1), Span(2, 2))
    layout = Layout.of(own)
    assert layout is not None
    assert Plan(own, layout).options_for(3) is own

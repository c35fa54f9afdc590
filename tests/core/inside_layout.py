"""Chunks and blocks of keys laid out: which keys and columns, by one look at every query and key."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import oracles
from relskew_core import Span
from relskew_core._kernel.call import Options
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.key_side import SMALLEST, blocks
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


@given(
    n=LENGTHS, m=LENGTHS, offset=OFFSETS, pattern=PATTERNS, span=SPANS, start=st.integers(0, 5), by_value=st.booleans()
)
def test_chunks_have_the_columns_that_are_read(
    n: int, m: int, offset: int, pattern: dict[str, Any], span: Span, start: int, by_value: bool
) -> None:
    """As many columns as are read, and no more."""
    whole = replace(visibility(n + 5, m, 0 if by_value else offset, pattern), by_value=by_value)
    chunk = Chunk.of(options(whole, span), start, start + n)
    if by_value:
        low, high = (min(max(r, -span.left), span.right) for r in whole.positions() or (0, 0))
        assert (chunk.low, chunk.high, chunk.spare) == (low, high, 0)
        assert (chunk.first, chunk.end) == (0, m)
        return
    keys = range(chunk.first, chunk.end)
    sides: dict[str, Any] = {"window": (pattern["left"], pattern["right"]), "offset": offset}
    sides |= {name: pattern[name] for name in ("block_size", "blocks_before")} if pattern["block_size"] else {}
    seen = {(i, j) for i in range(start, start + n) for j in range(m) if oracles.sees(i, j, **sides)}
    assert {j for _, j in seen} <= set(keys)
    # Column `spare` is for the first query and the first key; a single query needs no columns before it.
    assert chunk.low + chunk.spare == chunk.first - start - offset
    assert chunk.spare == (n if n > 1 else 0)
    if len(seen) == n * len(keys) > 0:  # the last column that is read is for the last key of the first query
        assert chunk.width == chunk.spare + len(keys)
    assert all(chunk.low <= j - i - offset <= chunk.high for i, j in seen)
    assert len(keys) + (n > 1) <= chunk.width <= chunk.spare + len(keys) or not keys


@given(n=LENGTHS, keys=st.integers(1, 3 * SMALLEST), start=st.integers(0, 5), offset=OFFSETS)
def test_blocks_of_keys_cover_each_key_once(n: int, keys: int, start: int, offset: int) -> None:
    """Each one key at least, and one column before those of their pairs for the skew."""
    whole = options(Visibility(n + 5, keys, offset), Span(2, 1, "clip"))
    chunk = Chunk.of(whole, start, start + n)
    found = list(blocks(chunk, whole, xp=None))
    assert [key for block in found for key in range(block.start, block.stop)] == list(range(keys))
    for block in found:
        count = block.stop - block.start
        assert 1 <= count <= SMALLEST
        assert (block.first, block.end) == (start, start + n)
        pairs = [i + offset - j for i in range(start, start + n) for j in range(block.start, block.stop)]
        assert block.spare == (count if count > 1 else 0)
        assert (block.low + (count > 1), block.high) == (min(pairs), max(pairs))

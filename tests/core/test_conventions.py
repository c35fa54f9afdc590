"""Other people's tables: row by row what they say, and back unchanged."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracles
from libraries import Library
from relskew_core import Span, conventions


class Rows(NamedTuple):
    """Whose row belongs to which relative position, as they write it; ``None`` is zero."""

    name: str
    rows: int
    span: Span
    row: Callable[[int], int | None]
    left: int | None = None

    def __str__(self) -> str:
        return self.name + (f", left={self.left}" if self.left is not None else "")


def clip(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def within(row: int, rows: int) -> int | None:
    return row if 0 <= row < rows else None


ROWS = [
    Rows("VITS", 9, Span(4, 4, "zero"), lambda r: within(r + 4, 9)),
    Rows("TENSOR2TENSOR_CAUSAL", 5, Span(4, 0, "zero"), lambda r: within(r + 4, 5)),
    Rows("TENSOR2TENSOR_UNMASKED", 9, Span(4, 4, "zero"), lambda r: within(r + 4, 9)),
    Rows("SHAW", 7, Span(3, 3, "clip"), lambda r: clip(r, -3, 3) + 3),
    Rows("SHAW", 7, Span(4, 2, "clip"), lambda r: clip(r, -4, 2) + 4, left=4),
    Rows("MUSIC_TRANSFORMER", 6, Span(5, 0), lambda r: r + 5), Rows("TRANSFORMER_XL", 9, Span(4, 4), lambda r: r + 4),
    Rows("TRANSFORMER_XL", 9, Span(8, 0), lambda r: r + 8, left=8),
    Rows("TRANSFORMER_XL", 9, Span(6, 2), lambda r: r + 6, left=6), Rows("UKHOV", 9, Span(4, 4), lambda r: 4 - r),
    Rows("DISTANCE", 9, Span(4, 4), lambda r: -r + 4),
    Rows("SPEECHT5", 8, Span(3, 4, "clip"), lambda r: clip(-r, -4, 3) + 4),
    Rows("INKLING", 6, Span(5, 0, "zero"), lambda r: within(-r, 6)),
]  # fmt: skip
VALUES = {name: value for name, value in vars(conventions).items() if isinstance(value, conventions.Convention)}


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "by head"])
def test_loaded_rows_are_those_that_a_convention_draws(library: Library, rows: Rows, heads: tuple[int, ...]) -> None:
    theirs = np.random.default_rng(0).standard_normal((*heads, rows.rows, 3))
    convention = VALUES[rows.name]
    ours, span = convention.load(library.asarray(theirs, "float32"), left=rows.left)
    assert span == rows.span
    assert isinstance(ours, library.array_type())
    table = library.to_numpy(ours)
    reach = 2 * rows.rows if span.beyond != "error" else 0
    for r in range(-span.left - reach, span.right + reach + 1):
        row, here = rows.row(r), oracles.row_of(r, span)
        assert (row is None) == (here is None)
        if row is not None and here is not None:
            np.testing.assert_array_equal(table[..., here, :], theirs.astype("float32")[..., row, :])
    flat = library.to_numpy(convention.store(ours, span))
    np.testing.assert_array_equal(flat.reshape(theirs.shape), theirs.astype("float32"))


def test_every_convention_is_listed_here() -> None:
    assert set(VALUES) == {rows.name for rows in ROWS}
    assert set(VALUES) < set(conventions.__all__)


@pytest.mark.parametrize("name", VALUES)
def test_every_convention_shows_its_rows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``print`` and ``help`` draw where every relative position lies, and the package's table has a line for it."""
    shown = str(VALUES[name])
    assert re.search(r"^    row +\S", shown, re.MULTILINE)
    assert re.search(r"^    rel +\S", shown, re.MULTILINE)
    assert f">>> {name}.load(" in shown or f" = {name}.load(" in shown
    help(VALUES[name])
    assert re.search(r"^ +row +\S", capsys.readouterr().out, re.MULTILINE)
    assert len([other for other in VALUES.values() if str(other) == shown]) == 1
    assert f"\n``{name}`` " in (conventions.__doc__ or "")


def test_a_convention_of_ones_own_is_shown_by_its_fields() -> None:
    mine = conventions.Convention("mine", "descending", "past", "clip")
    assert str(mine) == repr(mine)
    assert inspect.getdoc(mine) == inspect.getdoc(conventions.Convention)


def test_vits_has_an_axis_for_the_shared_table() -> None:
    ours, span = conventions.VITS.load(np.arange(6.0).reshape(1, 3, 2))
    assert ours.shape == (3, 2)
    assert conventions.VITS.store(ours, span).shape == (1, 3, 2)


def test_a_table_is_stored_where_it_says_the_same() -> None:
    """A span that raises beyond its rows may become anything, and anything one that raises; no rule becomes another."""
    table = np.zeros((3, 2))
    assert conventions.MUSIC_TRANSFORMER.store(table, Span(2, 0, "clip")) is table
    assert conventions.INKLING.store(table, Span(2, 0)).shape == (3, 2)
    with pytest.raises(ValueError, match="`span` must have beyond='zero' or 'error', as tables of VITS have, got Span"):
        conventions.VITS.store(table, Span(1, 1, "clip"))


@given(st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_t5_round_trip(furthest: int, heads: int, bidirectional: bool) -> None:
    t5 = conventions.T5(bidirectional=bidirectional, num_buckets=8, max_distance=furthest + 4)
    theirs = np.arange(1.0, 8 * heads + 1).reshape(8, heads)
    ours, span = t5.load(theirs)
    back = t5.store(ours, span)
    used = np.any(back != 0, axis=1)
    np.testing.assert_array_equal(back[used], theirs[used])
    assert not used[4] or not bidirectional  # the future at distance 0
    again, _ = t5.load(back)
    np.testing.assert_array_equal(again, ours)


def test_what_buckets_share_is_written_from_its_nearest_position() -> None:
    span = Span.full(13)
    distances = np.arange(-12.0, 13.0)
    theirs = conventions.T5(bidirectional=True, num_buckets=8, max_distance=12).store(distances[None], span)
    assert theirs[:, 0].tolist() == [0, -1, -2, -5, 0, 1, 2, 5]
    rows = conventions.DeBERTa(position_buckets=4, max_distance=12).store(distances[:, None], span)
    assert rows[:, 0].tolist() == [12, 3, 2, 1, 0, -1, -2, -3]


@pytest.mark.parametrize("furthest", [None, 12, 40])
@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "by head"])
def test_deberta_round_trip(library: Library, furthest: int | None, heads: tuple[int, ...]) -> None:
    theirs = np.random.default_rng(1).standard_normal((*heads, 16, 2))
    deberta = conventions.DeBERTa(position_buckets=8, max_distance=furthest)
    ours, span = deberta.load(library.asarray(theirs, "float64"))
    table = library.to_numpy(ours)
    for r in (-3, -1, 0, 1, 4):
        np.testing.assert_array_equal(table[..., r + span.left, :], theirs[..., 8 - r, :])
    np.testing.assert_array_equal(table[..., -1, :], theirs[..., 0, :])
    np.testing.assert_array_equal(table[..., 0, :], theirs[..., 15, :])
    back = library.to_numpy(deberta.store(ours, span))
    used = np.any(back != 0, axis=(*range(len(heads)), -1))
    np.testing.assert_array_equal(back[..., used, :], theirs[..., used, :])
    again, _ = deberta.load(back)
    np.testing.assert_array_equal(again, table)
    assert used.all() or furthest is not None


@pytest.mark.parametrize("window", [(2, 3), (1, 1), (4, 4), (2, 3, 1)])
def test_swin_and_beit(library: Library, window: tuple[int, ...]) -> None:
    sizes, spans = [2 * size - 1 for size in window], [Span.full(size) for size in window]
    theirs = np.random.default_rng(2).standard_normal((math.prod(sizes) + 3, 2))
    expected = np.moveaxis(theirs[:-3][::-1].reshape(*sizes, 2), -1, 0)  # their rows go by query - key
    swin = conventions.Swin(window=window)
    bias, *found = swin.load(library.asarray(theirs[:-3], "float64"))
    assert found == spans
    np.testing.assert_array_equal(library.to_numpy(bias), expected)
    np.testing.assert_array_equal(library.to_numpy(swin.store(bias, *spans)), theirs[:-3])
    if len(window) == 2:
        beit = conventions.BEiT(window=(window[0], window[1]))
        bias, prefix, *found = beit.load(library.asarray(theirs, "float64"))
        assert found == spans
        np.testing.assert_array_equal(library.to_numpy(bias), expected)
        np.testing.assert_array_equal(library.to_numpy(prefix).T, theirs[[-2, -3, -1]])
        np.testing.assert_array_equal(library.to_numpy(beit.store(bias, prefix, *spans)), theirs)


their = conventions
FOUR, FLAT, ONE = np.zeros((4, 2)), np.zeros((1, 1, 1)), Span.full(1)
WRONG: list[tuple[str, Callable[[], Any]]] = [
    ("`table` must be an array", lambda: their.VITS.load([1.0])),
    ("`table` must be an array of a real floating dtype", lambda: their.VITS.load(np.zeros((3, 2), int))),
    ("`table` must have shape (R, D) or (H, R, D)", lambda: their.SHAW.load(np.zeros(3))),
    ("`table` must have an odd number of rows, as tables of VITS have, got", lambda: their.VITS.load(FOUR)),
    ("of rows, as tables of Shaw et al. have unless `left` is given, got", lambda: their.SHAW.load(FOUR)),
    ("`table` must have an odd number of rows, as tables of the diagonal form", lambda: their.UKHOV.load(FOUR)),
    ("`table` must have an odd number of rows", lambda: their.TRANSFORMER_XL.load(FOUR)),
    ("`table` must have an even number of rows, as tables of SpeechT5", lambda: their.SPEECHT5.load(FOUR[:3])),
    ("`left` must be less than the number of rows, 4, got 4", lambda: their.SHAW.load(FOUR, left=4)),
    ("`left` must be None: the rows of VITS say it themselves, got 1", lambda: their.VITS.load(FOUR[:3], left=1)),
    ("`span` must be a Span", lambda: their.SHAW.store(FOUR, 4)),  # type: ignore[arg-type]
    ("`table` must have the 3 rows of", lambda: their.TRANSFORMER_XL.store(FOUR, Span(1, 1))),
    ("`span` must reach as far ahead as back, as tables of VITS do", lambda: their.VITS.store(FOUR, Span(1, 2))),
    ("`span` must reach as far ahead as back", lambda: their.UKHOV.store(FOUR, Span(1, 2))),
    ("`span` must end at 0", lambda: their.MUSIC_TRANSFORMER.store(FOUR, Span(1, 2))),
    ("`span` must end at 0", lambda: their.INKLING.store(FOUR, Span(1, 2))),
    ("`span` must reach one further ahead than back", lambda: their.SPEECHT5.store(FOUR, Span(2, 1))),
    ("`order` must be one of", lambda: their.Convention("x", "up", "past", "clip")),  # type: ignore[arg-type]
    ("`reach` must be one of", lambda: their.Convention("x", "ascending", "future", "clip")),  # type: ignore[arg-type]
    ("`bidirectional` must be a bool", lambda: their.T5(bidirectional=1)),  # type: ignore[arg-type]
    ("`num_buckets` must be an int >= 4", lambda: their.T5(bidirectional=True, num_buckets=2)),
    ("`table` must have shape (32, H)", lambda: their.T5(bidirectional=True).load(FOUR)),
    ("`table` must have shape (32, H)", lambda: their.T5(bidirectional=True).load(np.zeros(32))),
    ("`rel_bias` must have shape (H, 3)", lambda: their.T5(bidirectional=True).store(FOUR, Span(1, 1))),
    ("`span` must be a Span", lambda: their.T5(bidirectional=True).store(FOUR, None)),  # type: ignore[arg-type]
    ("shape (6, D) or (H, 6, D)", lambda: their.DeBERTa(position_buckets=3, max_distance=None).load(FOUR)),
    ("`table` must have the 3 rows", lambda: their.DeBERTa(position_buckets=4, max_distance=9).store(FOUR, Span(1, 1))),
    ("`max_distance` must be an int", lambda: their.DeBERTa(position_buckets=3, max_distance=1.5)),  # type: ignore[arg-type]
    ("`window` must be a pair", lambda: their.Swin(window=2)),  # type: ignore[arg-type]
    ("`window[1]` must be an int >= 1", lambda: their.Swin(window=(2, 0))),
    ("`window[0]` must be an int >= 1", lambda: their.BEiT(window=(0, 2))),
    ("`table` must have shape (9, H)", lambda: their.Swin(window=(2, 2)).load(FOUR)),
    ("`rel_bias` must have shape (H, 1, 1)", lambda: their.Swin(window=(1, 1)).store(np.zeros((1, 2, 3)), ONE, ONE)),
    ("`spans` must be (Span(left=0", lambda: their.Swin(window=(1, 2)).store(np.zeros((1, 1, 3)), ONE, ONE)),
    ("`table` must have shape (9 + 3, H)", lambda: their.BEiT(window=(2, 2)).load(FOUR)),
    ("`prefix_bias` must have shape (1, 3)", lambda: their.BEiT(window=(1, 1)).store(FLAT, np.zeros((2, 3)), ONE, ONE)),
]


@pytest.mark.parametrize(("words", "call"), WRONG, ids=[f"{n}: {words}" for n, (words, _) in enumerate(WRONG)])
def test_errors_name_what_does_not_fit(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert words in str(caught.value)

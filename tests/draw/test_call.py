"""Who sees whom: the pictures hold what calls do, worked out a second time by hand; so do those of the pages."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relskew_core import Span, skew, toeplitz
from relskew_core.draw import Picture, draw_call, draw_span

Sees = Callable[[int, int], bool]  # the positions of a query and of a key


def texts(picture: Picture) -> list[list[str]]:
    (panel,) = picture.panels
    return [[cell.text.replace("−", "-") for cell in row] for row in panel.cells]


@pytest.mark.parametrize(("n", "m", "arguments", "sees"), [
    (4, None, {}, lambda i, j: True), (5, None, {"causal": True}, lambda i, j: j <= i),
    (6, None, {"window": (2, 1)}, lambda i, j: -2 <= j - i <= 1),
    (6, None, {"causal": True, "window": (2, None)}, lambda i, j: i - 2 <= j <= i),
    (8, None, {"causal": True, "block_size": 3}, lambda i, j: j <= i and j // 3 >= i // 3 - 1),
    (8, None, {"block_size": 2, "blocks_before": 2}, lambda i, j: i // 2 - 2 <= j // 2 <= i // 2),
    (7, None, {"segments": np.asarray([0, 0, 0, 1, 1, 2, 2]), "causal": True},
     lambda i, j: j <= i and (i < 3, i < 5) == (j < 3, j < 5)),
    (2, None, {"causal": True, "offset": 3}, lambda i, j: j <= i),
    (3, 5, {"window": (1, 1), "offset": -1}, lambda i, j: abs(j - i) <= 1),
], ids=["all", "causal", "window", "past window", "blocks", "stream", "segments", "cache", "cross"])  # fmt: skip
def test_cells_are_seen_as_the_call_sees(n: int, m: int | None, arguments: dict[str, Any], sees: Sees) -> None:
    offset = arguments.get("offset", 0)
    keys = n + offset if m is None else m
    picture, queries = draw_call(n, m, **arguments), range(offset, offset + n)
    assert texts(picture) == [[str(j - i) if sees(i, j) else "" for j in range(keys)] for i in queries]
    assert picture.panels[0].rows == [str(i) for i in queries]


def test_a_picture_speaks_of_hidden_keys_where_there_are_some() -> None:
    assert "hidden" not in draw_call(3).notes[0].lower()
    assert "Hidden keys have none." in draw_call(3, causal=True).notes[0]


def test_positions_name_rows_and_columns() -> None:
    positions = np.asarray([3, 1]), np.asarray([0, 2, 3])
    picture = draw_call(2, 3, causal=True, positions=positions)
    assert texts(picture) == [["-3", "-1", "0"], ["-1", "", ""]]
    assert (picture.panels[0].rows, picture.panels[0].columns) == (["3", "1"], ["0", "2", "3"])


@pytest.mark.parametrize("span", [Span(2, 1, "clip"), Span(1, 2, "zero"), Span.full(5)], ids=str)
def test_rows_are_those_that_the_library_takes(span: Span) -> None:
    numbered = np.arange(1.0, span.rows + 1)[None]  # 0 means that no row is used
    rows = toeplitz(numbered, span, n_queries=4, n_keys=5, offset=0)[0].astype(int) - 1
    expected = [[str(row) if row >= 0 else "–" for row in line] for line in rows]
    assert texts(draw_call(4, 5, span, offset=0)) == expected


def test_a_table_that_is_too_short_is_refused_as_the_call_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"`rel_k` reaches the relative positions -1 … 1, but queries see -3 … 3"):
        draw_call(4, span=Span.full(2))


def test_a_sink_is_a_column_beside_the_keys() -> None:
    picture = draw_call(2, causal=True, sinks=True)
    assert texts(picture) == [["s", "0", ""], ["s", "-1", "0"]]
    assert "the sink" in " ".join(picture.notes)


def test_titles_name_what_was_asked() -> None:
    picture = draw_call(3, causal=True, window=None, offset=0, segments=np.asarray([0, 0, 1]))
    assert picture.title == "3 queries and keys, causal, segments"
    assert draw_call(1).title == "1 query, 1 key"
    assert draw_call(1, 4, window=(2, 0), offset=3).title == "1 query, 4 keys, window=(2, 0), offset=3"


def test_past_and_future_have_different_colours() -> None:
    (panel,) = draw_call(3).panels
    assert [[cell.tone for cell in row] for row in panel.cells] == [[0, 0.5, 1], [-0.5, 0, 0.5], [-1, -0.5, 0]]
    assert len({panel.colour(cell) for cell in panel.cells[1]}) == 3


@pytest.mark.parametrize(("span", "expected"), [
    (Span(1, 2), "✕ ✕ 0 1 2 3 ✕ ✕"), (Span(1, 2, "clip"), "0 0 0 1 2 3 3 3"), (Span(1, 2, "zero"), "– – 0 1 2 3 – –"),
], ids=["error", "clip", "zero"])  # fmt: skip
def test_past_the_ends_of_a_span(span: Span, expected: str) -> None:
    (panel,) = draw_span(span).panels
    assert [cell.text for cell in panel.cells[0]] == expected.split()
    assert panel.columns == ["−3", "−2", "−1", "0", "1", "2", "3", "4"]


def test_of_a_long_span_the_ends_and_the_middle_are_drawn() -> None:
    (panel,) = draw_span(Span.causal(2048, "clip")).panels
    assert panel.columns == ["−2049", "−2048", "−2047", "−2046", "", "−1", "0", "1", "2"]
    assert [cell.text for cell in panel.cells[0]] == ["0", "0", "0", "1", "…", "2046", "2047", "2047", "2047"]
    (both,) = draw_span(Span.full(100)).panels
    assert both.columns[4:8] == ["", "−1", "0", "1"]
    (short,) = draw_span(Span.full(6)).panels
    assert len(short.columns) == 15


def test_spans_stand_one_below_the_other_with_what_each_word_means() -> None:
    picture = draw_span(Span.full(2), Span.clipped(1), Span.clipped(2))
    assert [panel.title for panel in picture.panels] == [
        "−1 … 1, beyond: error", "−1 … 1, beyond: clip", "−2 … 2, beyond: clip",
    ]  # fmt: skip
    assert [note.partition(":")[0] for note in picture.notes[1:]] == ["error", "clip"]


def test_a_span_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match=r"`spans\[1\]` must be a Span, got"):
        draw_span(Span.full(2), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`spans` must name at least one Span, got none"):
        draw_span()


# The pictures of the skew on the pages: their numbers are those that `skew` returns

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
NUMBER = re.compile(r'<text x="([\d.]+)" y="([\d.]+)" dy=".35em"[^>]*>(−?\d+)</text>')


def test_pictures_are_small_and_follow_the_theme() -> None:
    for path in PICTURES.glob("*.svg"):
        assert path.stat().st_size < 12_000
        assert "prefers-color-scheme:dark" in path.read_text()


def test_the_still_picture_shows_the_skew() -> None:
    x, text = np.asarray([range(-3, 4)] * 4), (PICTURES / "skew.svg").read_text()
    rows: dict[float, list[tuple[float, int]]] = {}
    for place, height, number in NUMBER.findall(text):
        rows.setdefault(float(height), []).append((float(place), int(number.replace("−", "-"))))
    after = [[number for place, number in sorted(row) if place > 360] for row in rows.values()]
    for row in skew(x).tolist():
        assert row in after


def test_rows_move_under_their_keys() -> None:
    """Where a number of the moving picture comes to rest: its x and the shift of its row."""
    text = (PICTURES / "skew-animated.svg").read_text()
    assert "script" not in text
    assert "prefers-reduced-motion:no-preference" in text
    rows = re.findall(r'<g class="row" style="--shift:(\S+)px"><g class="gone">.*?</g>(.*?)</g>', text)
    keys = re.search(r'<g class="after">(.*?)</g>', text)
    assert keys is not None
    at = {name: float(x) for x, name in re.findall(r'x="([\d.]+)" y="[\d.]+" dy=".35em">(\d)<', keys[1])}
    assert len(rows) == 5
    for i, (shift, row) in enumerate(rows):
        found = {int(r.replace("−", "-")): float(x) for x, r in re.findall(r'x="([\d.]+)"[^<>]*>([−\d]+)<', row)}
        assert sorted(found) == [j - i for j in range(5)]
        for r, x in found.items():
            assert abs(x + float(shift) - at[str(i + r)]) <= 3

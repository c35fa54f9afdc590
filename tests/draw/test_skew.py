"""The pictures of the skew on the pages: their numbers are those that `skew` returns."""

import re
from pathlib import Path

import numpy as np

from relskew_core import skew

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
NUMBER = re.compile(r'<text x="([\d.]+)" y="([\d.]+)" dy=".35em"[^>]*>(−?\d+)</text>')


def test_pictures_are_small_and_follow_the_theme() -> None:
    for path in PICTURES.glob("*.svg"):
        assert path.stat().st_size < 12_000
        assert "prefers-color-scheme:dark" in path.read_text()


def test_the_still_picture_shows_the_skew() -> None:
    x = np.asarray([range(-3, 4)] * 4)
    text = (PICTURES / "skew.svg").read_text()
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

"""The skew, still and moving: the committed pictures are what the code draws, and hold what `skew` gives."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from relskew_core import skew
from relskew_core.draw import animate_skew, draw_skew

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


ANEW = {
    "skew.svg": "relskew draw skew --save docs/pictures/skew.svg",
    "skew-animated.svg": "relskew draw skew --queries 5 --moving --save docs/pictures/skew-animated.svg",
}
"""What draws the committed pictures again."""


@pytest.mark.parametrize("name", ANEW)
def test_the_committed_pictures_are_what_the_code_draws(name: str, tmp_path: Path) -> None:
    cli = pytest.importorskip("relskew_core.cli")
    path = tmp_path / name
    assert cli.main([str(path) if part.endswith(name) else part for part in ANEW[name].split()[1:]]) == 0
    assert path.read_text() == (PICTURES / name).read_text(), ANEW[name]


def test_every_committed_picture_is_drawn_here() -> None:
    assert {path.name for path in PICTURES.iterdir()} == set(ANEW)


def test_committed_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in PICTURES.iterdir()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > 12_000} == {}


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (4, 2), (2, 5)])
def test_the_panels_hold_what_skew_gives(n: int, m: int) -> None:
    before, after = draw_skew(n, m).panels
    x = np.asarray([range(1 - n, m)] * n)
    texts = [[cell.text.replace("−", "-") for cell in row] for row in after.cells]
    assert texts == skew(x).astype(str).tolist()
    moved = [[text for text in row if text != "·"] for row in ([cell.text for cell in row] for row in before.cells)]
    assert moved == [[cell.text for cell in row] for row in after.cells]
    assert before.columns == [text.replace("-", "−") for text in x[0].astype(str).tolist()]


def test_rows_move_under_their_keys(tmp_path: Path) -> None:
    """Where a number of the moving picture comes to rest: its x and the shift of its row."""
    text = animate_skew(tmp_path / "moving.svg", 3, 4).read_text()
    assert "script" not in text
    assert "prefers-reduced-motion:no-preference" in text
    rows = re.findall(r'<g class="row" style="--shift:(\S+)px"><g class="gone">.*?</g>(.*?)</g>', text)
    keys = re.search(r'<g class="after">(.*?)</g>', text)
    assert keys is not None
    at = {name: float(x) for x, name in re.findall(r'x="([\d.]+)" y="[\d.]+" dy=".35em">(\d)<', keys[1])}
    assert len(rows) == 3
    for i, (shift, row) in enumerate(rows):
        found = {int(r.replace("−", "-")): float(x) for x, r in re.findall(r'x="([\d.]+)"[^<>]*>([−\d]+)<', row)}
        assert sorted(found) == [j - i for j in range(4)]
        for r, x in found.items():
            assert x + float(shift) == pytest.approx(at[str(i + r)], abs=3)


def test_only_an_svg_moves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`path` must end in \.svg for an animated picture, got '.*moving\.png'"):
        animate_skew(tmp_path / "moving.png")
    with pytest.raises(ValueError, match="`n_queries` must be"):
        draw_skew(0)

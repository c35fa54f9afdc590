"""Pictures as files: whole or not there, readable on either paper, and weights as they are."""

import itertools
import re
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import faults
from relskew_core import Span, _files
from relskew_core._array.extras import to_install
from relskew_core.draw import Cell, Panel, Picture, draw_call, draw_span, draw_weights
from relskew_core.draw._picture import DARK, LIGHT

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2, which requires 4.5."""

    def luminance(colour: str) -> float:
        parts = [part / 255 for part in bytes.fromhex(colour[1:])]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("weights", [False, True])
def test_text_is_readable_on_every_colour(mode: dict[str, str], weights: bool) -> None:
    panel = Panel("", [[]], [], [], weights=weights)
    colours = {panel.colour(Cell(tone / 10), mode) for tone in range(-10, 11)}
    assert len(colours) == 21
    assert min(contrast(mode["ink"], colour) for colour in colours) >= 4.5
    assert contrast(mode["faint"], mode["paper"]) >= 4.5
    assert contrast(mode["faint"], panel.colour(Cell(), mode)) >= 4.5


def test_an_svg_has_its_title_and_its_numbers_as_text(tmp_path: Path) -> None:
    path = draw_call(3, causal=True).save(tmp_path / "call.svg")
    root = ElementTree.parse(path).getroot()
    assert root.find(f"{SVG}title").text == "3 queries and keys, causal"  # type: ignore[union-attr]
    numbers = [element.text for element in root.iter(f"{SVG}text")]
    assert numbers.count("0") == 3 + 2  # in the cells, and in the names of the first row and column
    assert numbers.count("−1") == 2
    assert path.read_bytes() == draw_call(3, causal=True).save(tmp_path / "again.svg").read_bytes()
    assert LIGHT["ink"] in path.read_text()
    assert DARK["ink"] in draw_call(3).save(path, dark=True).read_text()


@pytest.mark.parametrize("picture", [
    draw_call(9, 3), draw_span(Span.causal(3000), Span(2, 1, "zero")), draw_call(40, block_size=4, blocks_before=2),
    draw_weights(np.ones((3, 5, 30))), draw_weights(np.ones((1, 1, 1))),
], ids=["narrow", "spans", "large", "weights", "one"])  # fmt: skip
def test_nothing_reaches_beyond_the_edge_or_into_other_text(picture: Picture) -> None:
    """As matplotlib measures the text that it draws."""
    figure: Any = picture._figure(LIGHT)
    figure.draw_without_rendering()
    width, height = figure.canvas.get_width_height()
    texts = [x for x in figure.findobj(match=lambda x: hasattr(x, "get_text")) if x.get_text() and x.get_visible()]
    boxes = [x.get_window_extent() for x in texts]
    assert len(boxes) > 3
    for box in boxes:
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0
    for k, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[k + 1 :])


@pytest.mark.parametrize("n", [3, 40])
def test_a_png_has_the_colours_of_the_cells(n: int, tmp_path: Path) -> None:
    image, picture = pytest.importorskip("matplotlib.image"), draw_call(n, causal=True)
    pixels = image.imread(picture.save(tmp_path / f"{n}.png"))
    assert pixels.shape[1] == 1200
    for cell in (Cell(-1.0), Cell(0.0), Cell()):
        wanted = np.asarray(list(bytes.fromhex(picture.panels[0].colour(cell)[1:]))) / 255
        assert np.abs(pixels[..., :3] - wanted).max(axis=-1).min() < 0.01


def test_large_pictures_are_small_files(tmp_path: Path) -> None:
    """A panel is one image with a pixel for each cell."""
    assert draw_call(200, causal=True).save(tmp_path / "a.svg").stat().st_size < 50_000


def draw(folder: Path, n: int) -> None:
    draw_call(n).save(folder / "call.svg")


draw_old, draw_new = partial(draw, n=2), partial(draw, n=3)


@pytest.mark.no_cover
def test_files_are_whole_after_any_fault(tmp_path: Path) -> None:
    """An interrupt at any line, the end of the process at any step, and a disk that is full."""
    path, whole = tmp_path / "new" / "here" / "call.svg", set()
    for make in (draw_new, draw_old):
        make(path.parent)
        whole.add(path.read_bytes())
    told = re.escape(f"`path` cannot be written: File too large: {str(path)!r}")
    with faults.full_disk(1000), pytest.raises(OSError, match=told):
        draw_new(path.parent)
    assert path.read_bytes() in whole
    for number in itertools.count(1):
        with faults.raising_at(number, _files, failure=KeyboardInterrupt) as reached, suppress(KeyboardInterrupt):
            draw_new(path.parent)
        assert path.read_bytes() in whole
        assert list(path.parent.iterdir()) == [path]
        if not reached():
            break
    assert number > 10
    (tmp_path / "killed").mkdir()
    faults.die_at_every_step(tmp_path / "killed", draw_old, draw_new)
    killed = list((tmp_path / "killed").iterdir())
    assert len(killed) > 3
    for folder in killed:
        assert (folder / "call.svg").read_bytes() in whole
        assert all(name.name == "call.svg" or name.name.endswith(_files.SAVING) for name in folder.iterdir())


def test_other_endings_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = draw_call(2)
    with pytest.raises(ValueError, match=r"`path` must end in \.svg or \.png, got '.*call\.jpg'"):
        picture.save(tmp_path / "call.jpg")
    for where in ("s" * 300 + ".svg", "s" * 300 + "/call.svg"):
        with pytest.raises(OSError, match=r"`path` cannot be written: File name too long: '.*\.svg'"):
            picture.save(tmp_path / where)
    assert (picture._repr_svg_() or "").count("</svg>") == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape(to_install("plot"))):
        picture.save(tmp_path / "call.png")
    assert not list(tmp_path.iterdir())
    assert picture._repr_svg_() is None
    assert repr(picture) == "<Picture '2 queries and keys': 1 panel of 2 × 2 cells; .save(path) writes it>"
    assert len(repr(draw_call(99, causal=True))) < 100


def test_weights_are_drawn_on_one_scale() -> None:
    weights = np.asarray([[[1.0, 0.0], [0.25, 0.75]], [[0.5, 0.5], [0.0, 0.004]]])
    picture = draw_weights(weights, first_query=3)
    assert [[[cell.text for cell in row] for row in panel.cells] for panel in picture.panels] == [
        [["1", ""], [".25", ".75"]], [[".50", ".50"], ["", ".00"]],
    ]  # fmt: skip
    first, second = picture.panels
    assert first.cells[1][0].tone == 0.5
    assert second.cells[0][0].tone == pytest.approx(0.5**0.5)
    assert first.cells[0][1].tone is None
    assert (first.rows, first.columns) == (["3", "4"], ["0", "1"])
    (only,) = draw_weights(weights, heads=[1]).panels
    assert only.title == "head 1"
    assert only.cells[0][0].tone == 1  # the largest weight in the picture


def test_weights_of_other_libraries_and_of_one_head() -> None:
    torch = pytest.importorskip("torch")
    (panel,) = draw_weights(torch.full((2, 2), 0.5, dtype=torch.bfloat16, requires_grad=True)).panels
    assert [cell.text for cell in panel.cells[0]] == [".50", ".50"]


@pytest.mark.parametrize(("weights", "heads", "message"), [
    (np.ones(3), None, r"`weights` must have shape \(H, Lq, Lk\) or \(Lq, Lk\)"),
    (np.ones((0, 2, 2)), None, "no axis of length 0"), (-np.ones((2, 2)), None, "`weights` must all be >= 0"),
    (np.full((2, 2), np.nan), None, "`weights` must all be >= 0.*NaN"),
    (np.ones((2, 2, 2)), [2], r"`heads` must be among the 2 heads 0 … 1, got 2"),
], ids=["axes", "empty", "negative", "nan", "head"])  # fmt: skip
def test_weights_of_another_shape_are_named(weights: np.ndarray, heads: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_weights(weights, heads=heads)

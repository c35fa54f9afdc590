"""Pictures as files: whole or not there, readable on either paper, and weights as they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from relskew_core import Span
from relskew_core._array.extras import to_install
from relskew_core.draw import Picture, draw_call, draw_skew, draw_span, draw_weights
from relskew_core.draw._colours import DARK, HUES, LIGHT, Paint, of_position, of_weight, on, rgb
from relskew_core.draw._svg import png

SVG = "{http://www.w3.org/2000/svg}"


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2, which requires 4.5."""

    def luminance(colour: str) -> float:
        parts = [part / 255 for part in rgb(colour)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [LIGHT, DARK], ids=["light", "dark"])
def test_text_is_readable_on_every_colour(mode: dict[str, str]) -> None:
    paints = [of_position(tone / 10) for tone in range(-10, 11)] + [of_weight(tone / 10) for tone in range(-10, 11)]
    assert {on(mode["paper"], paint) for paint in paints if paint.cover} > {on(mode["paper"], of_position(1))}
    worst = min(contrast(mode["ink"], on(mode["paper"], paint)) for paint in paints)
    assert worst >= 4.5
    assert contrast(mode["faint"], mode["paper"]) >= 4.5


def test_an_svg_says_what_it_shows_and_follows_the_reader() -> None:
    text = draw_call(3, causal=True).svg()
    root = ElementTree.fromstring(text)
    assert root.find(f"{SVG}title").text == "3 queries and keys, causal"  # type: ignore[union-attr]
    assert "prefers-color-scheme:dark" in text
    numbers = [element.text for element in root.iter(f"{SVG}text")]
    assert numbers.count("0") == 3 + 2  # in the cells, and in the headings of the first row and column
    # The styles only affect the picture itself.
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", root.find(f"{SVG}style").text or "")  # type: ignore[union-attr]
    assert all(rule.strip().startswith(".relskew ") for rule in rules), rules


def test_letters_keep_inside_the_picture() -> None:
    for picture in (draw_skew(9, 3), draw_span(Span.causal(3000)), draw_call(30, block_size=4, blocks_before=2)):
        root = ElementTree.fromstring(picture.svg())
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for text in root.iter(f"{SVG}text"):
            size = float(text.get("font-size", 20))
            assert size >= 11
            assert size / 2 <= float(text.attrib["y"]) <= height - size / 2
            long = 0.58 * size * len(text.text or "")
            kinds = text.get("class", "").split()
            start = float(text.attrib["x"]) - (0 if "start" in kinds else long if "end" in kinds else long / 2)
            assert start >= -2
            assert start + long <= width + 2


def test_many_cells_are_one_image() -> None:
    small, large = draw_call(17, causal=True).svg(), draw_call(100, causal=True).svg()
    assert "<image" not in small
    assert "data:image/png;base64," in large
    assert len(large) < len(small)
    assert "<image" not in draw_call(200, 4).svg()  # there is room for numbers in its cells


def test_the_image_holds_the_colours() -> None:
    matplotlib = pytest.importorskip("matplotlib.image")
    import io

    paints = [[Paint("past", 1.0), Paint("empty", 0.0)], [Paint("weight", 0.5), Paint("future", 1.0)]]
    pixels = np.round(255 * matplotlib.imread(io.BytesIO(png(paints)))).astype(int)
    assert pixels.shape == (2, 2, 4)
    assert tuple(pixels[0, 0]) == (*rgb(HUES["past"]), 255)
    assert pixels[0, 1, 3] == 0
    assert tuple(pixels[1, 0]) == (*rgb(HUES["weight"]), 128)


def test_a_png_has_the_cells_colours(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib.image")
    for n in (3, 40):
        pixels = matplotlib.imread(draw_call(n, causal=True).save(tmp_path / f"{n}.png"))
        assert pixels.shape[1] == 1200  # two pixels per cell
        wanted = np.asarray(rgb(on(LIGHT["paper"], of_position(-1)))) / 255
        assert np.abs(pixels[..., :3] - wanted).max(axis=-1).min() < 0.01


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = draw_skew(2).save(tmp_path / "new" / "skew.svg")
    before = path.read_text()

    def broken(self: Picture) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Picture, "svg", broken)
    with pytest.raises(KeyboardInterrupt):
        draw_skew(3).save(path)
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_other_endings_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"`path` must end in \.svg or \.png, got '.*skew\.jpg'"):
        draw_skew(2).save(tmp_path / "skew.jpg")
    for where in ("s" * 300 + ".svg", "s" * 300 + "/skew.svg"):
        with pytest.raises(OSError, match=r"`path` cannot be written: File name too long: '.*\.svg'"):
            draw_skew(2).save(tmp_path / where)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape(to_install("plot"))):
        draw_skew(2).save(tmp_path / "skew.png")
    assert not list(tmp_path.iterdir())
    assert draw_skew(2)._repr_svg_().startswith("<svg")
    assert repr(draw_skew(2)) == "<Picture 'The skew': 2 panels of 2 × 3 and 2 × 2 cells; .save(path) writes it>"
    assert len(repr(draw_call(99, causal=True))) < 100


# Weights


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
    weights = torch.full((2, 2), 0.5, dtype=torch.bfloat16, requires_grad=True)
    (panel,) = draw_weights(weights).panels
    assert [cell.text for cell in panel.cells[0]] == [".50", ".50"]


@pytest.mark.parametrize(
    ("weights", "heads", "message"),
    [
        pytest.param(np.ones(3), None, r"`weights` must have shape \(H, Lq, Lk\) or \(Lq, Lk\)", id="axes"),
        pytest.param(np.ones((0, 2, 2)), None, "no axis of length 0", id="empty"),
        pytest.param(-np.ones((2, 2)), None, "`weights` must all be >= 0", id="negative"),
        pytest.param(np.full((2, 2), np.nan), None, "`weights` must all be >= 0.*NaN", id="nan"),
        pytest.param(np.ones((2, 2, 2)), [2], r"`heads` must be among the 2 heads 0 … 1, got 2", id="head"),
    ],
)
def test_what_are_no_weights_is_named(weights: np.ndarray, heads: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_weights(weights, heads=heads)

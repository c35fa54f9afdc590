"""The demo's melodies and their picture, by numbers: the stripes are where the melody repeats itself."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from relskew_core import attention_block
from relskew_core._array.extras import to_install
from relskew_core.cli import _demo, _drawn, _melody, _verify, main
from relskew_core.cli._drawn import Spot
from relskew_core.cli._melody import Melody, features, melodies, melody, melody_block, recurrence
from relskew_core.cli._stripes import Stripe, main_stripes, picture, shown, stripes

TUNES = list(melodies())
EXAMPLE = Path(__file__).parents[2] / "examples" / "melody.py"


def tune_of(*pitches: int) -> Melody:
    return Melody("test", "A test", "made up", "none", tuple((pitch, 1.0) for pitch in pitches))


# The data


@pytest.mark.parametrize("name", TUNES)
def test_melodies_are_notes_with_a_source_and_rights(name: str) -> None:
    tune = melody(name)
    assert "ublic domain" in tune.rights
    assert tune.title
    assert tune.source
    assert 40 <= len(tune.notes) <= 60
    assert all(55 <= pitch <= 84 and duration in (0.25, 0.5, 0.75, 1, 1.5, 2, 3) for pitch, duration in tune.notes)


def test_melodies_are_written_down_rightly() -> None:
    twinkle, bach = melody("ah-vous-dirai-je"), melody("nun-danket")
    assert [twinkle.pitch_name(i) for i in range(7)] == ["C4", "C4", "G4", "G4", "A4", "A4", "G4"]
    assert sum(duration for _, duration in twinkle.notes) == 6 * 8  # six lines of two bars in 4/4
    assert [bach.pitch_name(i) for i in range(6)] == ["E5", "E5", "E5", "F#5", "F#5", "E5"]
    assert bach.pitch_name(53) == "A4"


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("ah-vous-dirai-je", Stripe(lag=28, first=28, length=14)),
        ("nun-danket", Stripe(lag=14, first=14, length=14)),
        ("o-haupt", Stripe(lag=14, first=14, length=14)),
    ],
)
def test_the_longest_repetition_is_the_one_that_is_sung(name: str, longest: Stripe) -> None:
    assert stripes(melody(name))[0] == longest


def test_stripes_are_all_exact_repetitions() -> None:
    tune = tune_of(1, 2, 3, 9, 1, 2, 3, 1, 2, 3)
    assert stripes(tune, shortest=3) == [Stripe(3, 7, 3), Stripe(4, 4, 3), Stripe(7, 7, 3)]
    assert stripes(tune) == []
    assert stripes(tune_of(5, 5, 5, 5, 5)) == [Stripe(1, 1, 4)]


def test_an_unknown_tune_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tune", "none"]) == 2
    assert "--tune must be one of ah-vous-dirai-je, nun-danket, o-haupt" in capsys.readouterr().err


# The features and the table


@pytest.mark.parametrize("name", TUNES)
def test_features_count_what_two_notes_have_in_common(name: str) -> None:
    tune = melody(name)
    embedded = features(tune)
    alike = embedded @ embedded.T
    full = alike.max()
    assert full == pytest.approx(1)
    for i, j in [(5, 9), (20, 6), (30, 2), (2, 30), (40, 12)]:
        expected = 0.0
        for back in range(_melody.CONTEXT):
            one, other = tune.notes[i - back], tune.notes[j - back]
            expected += (one[0] == other[0]) + 0.25 * (one[1] == other[1])
        assert alike[i, j] == pytest.approx(expected / (1.25 * _melody.CONTEXT))


def test_the_table_counts_recurrences_beyond_chance() -> None:
    # One feature for each of two pitches and one duration, once for each note of the context.
    embedded = features(tune_of(60, 62, 60, 62, 60))
    table = recurrence(embedded)
    assert table.shape == embedded.shape
    # r = -2: of the notes 3, 4 and 5, the two with pitch 60 have a 60 two notes earlier. By chance it would be 3 of 5
    # notes.
    assert table[2, 0] == pytest.approx((2 + 3 / 5) / (2 + 1) - 3 / 5)
    # r = -1: no note has one.
    assert table[3, 0] == pytest.approx(3 / 5 / (2 + 1) - 3 / 5)
    assert np.all(table[4] == 0)


# The picture


@pytest.mark.parametrize("name", TUNES)
def test_both_layouts_hold_the_same_numbers(name: str) -> None:
    numbers = shown(melody(name))
    n = len(numbers.tune.notes)
    for i in range(n):
        for j in range(n):
            if j > i:
                assert np.isnan(numbers.after[i, j])
                assert np.isnan(numbers.attention[i, j])
            else:
                assert numbers.after[i, j] == pytest.approx(numbers.before[i, n - 1 + j - i], abs=1e-12)
        assert np.isnan(numbers.before[i, : n - 1 - i]).all()
        assert not np.isnan(numbers.before[i, n - 1 - i :]).any()


@pytest.mark.parametrize("name", TUNES)
def test_the_panels_are_what_the_text_says(name: str) -> None:
    numbers = shown(melody(name))
    embedded = features(numbers.tune)
    table = recurrence(embedded)
    rates = embedded @ table.T
    i, c = np.indices(rates.shape)
    seen = (c >= len(rates) - 1 - i) & (c < len(rates) - 1)
    expected = _melody.GAIN * rates / rates[seen].max()
    np.testing.assert_allclose(numbers.before[seen], expected[seen], atol=1e-9)
    assert np.all(numbers.before[:, -1] < 0)  # a note does not attend to itself
    logits = np.where(c <= i, _melody.GAIN * embedded @ embedded.T + numbers.after, -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(
        np.nan_to_num(numbers.attention), weights / weights.sum(axis=1, keepdims=True), atol=1e-12
    )


@pytest.mark.parametrize("name", TUNES)
def test_the_stripes_are_where_the_melody_repeats_itself(name: str) -> None:
    numbers = shown(melody(name))
    stripe = numbers.stripes[0]
    rows = np.arange(stripe.first, stripe.first + stripe.length)
    n = len(numbers.tune.notes)
    # Before the skew: the column of the repetition is the brightest in those rows.
    columns = np.nanmean(np.where(np.isnan(numbers.before[rows]), -np.inf, numbers.before[rows]), axis=0)
    assert int(np.argmax(columns)) == n - 1 - stripe.lag
    # After the skew: the diagonal.
    diagonals = [numbers.after[rows, rows - lag].mean() for lag in range(stripe.first + 1)]
    assert int(np.argmax(diagonals)) == stripe.lag
    # The block attends there, too: all notes except the first few, whose context differs.
    looked_at = np.argmax(np.nan_to_num(numbers.attention)[rows], axis=1)
    assert np.array_equal(looked_at[2:], rows[2:] - stripe.lag)
    assert numbers.on_stripe(stripe) > 0.9 > 0.1 > numbers.by_chance(stripe)


def test_the_block_is_an_ordinary_one() -> None:
    x, spec, weights = melody_block(melody("nun-danket"))
    spec.check_weights(weights)
    assert spec.causal
    assert x.shape == (1, 54, spec.embed_dim)


# As a picture


def test_shades_without_colour() -> None:
    strengths = [None, 0.0, 0.2, 0.5], [None, None, 0.7, 0.1]
    upper, lower = ([None if one is None else Spot("", one) for one in row] for row in strengths)
    assert "".join(map(_drawn._shade, upper, lower)) == " ·▓▒"


def test_half_blocks_with_colour() -> None:
    one, other = Spot("#000004", 0.0), Spot("#fcfdbf", 1.0)
    assert _drawn._blocks(one, other) == ("▀", "#000004 on #fcfdbf")
    assert _drawn._blocks(one, None) == ("▀", "#000004")
    assert _drawn._blocks(None, other) == ("▄", "#fcfdbf")
    assert _drawn._blocks(None, None)[0] == " "


def test_repetitions_are_marked_in_every_panel() -> None:
    found = shown(melody("ah-vous-dirai-je"))
    before, after, attention = picture(found).panels
    n = len(found.tune.notes)
    marked = {
        (i, i - stripe.lag) for stripe in main_stripes(found) for i in range(stripe.first, stripe.first + stripe.length)
    }
    for panel, values, full in ((after, found.after, _melody.GAIN), (attention, found.attention, 1.0)):
        for i, row in enumerate(panel.cells):
            for j, cell in enumerate(row):
                wanted = None if j > i else min(max(values[i, j] / full, 0.0), 1.0)
                assert cell.tone == (-wanted if wanted and (i, j) in marked else wanted)
    for i in range(n):
        assert [cell.tone for cell in before.cells[i]] == [None] * (n - 1 - i) + [
            cell.tone for cell in after.cells[i][: i + 1]
        ]


def shown_as(tune: str, width: int, *, colour: bool) -> str:
    console = Console(width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as captured:
        _drawn.show(picture(shown(melody(tune))), console)
    return captured.get()


def test_the_text_shows_the_stripe_without_colour() -> None:
    lines = shown_as("ah-vous-dirai-je", 60, colour=False).splitlines()
    before, _, attention = (lines[k + 1 : k + 22] for k, line in enumerate(lines) if line.startswith("   note i ↓"))
    margin = 3
    assert all(line[margin + 13] in "▓█" for line in before[14:])  # the column r = -28
    for step, line in enumerate(attention[14:]):  # the diagonal, two notes a line
        assert "█" in line[margin + 2 * step : margin + 2 * step + 2]
    assert "42 columns, −41 … 0" in lines[lines.index(before[-1]) + 1]


# The command


def test_picture_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--picture-only", "--tune", "nun-danket"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Nun danket alle Gott" in told
    assert "Notes 15–28 repeat notes 1–14" in told
    assert not any(Path().iterdir())


@pytest.mark.parametrize("name", TUNES)
def test_png(capsys: pytest.CaptureFixture[str], name: str) -> None:
    matplotlib_image = pytest.importorskip("matplotlib.image")
    assert main(["demo", "--picture-only", "--tune", name, "--png", "folder/picture.png"]) == 0
    assert "folder/picture.png" in capsys.readouterr().out
    pixels = matplotlib_image.imread("folder/picture.png")
    assert pixels.shape[1] == 1200
    assert pixels[..., :3].std() > 0.05


def test_png_refused_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert main(["demo", "--picture-only", "--png", "picture.jpg"]) == 2
    assert "--png must be a path ending in .png" in capsys.readouterr().err
    Path("folder.png").mkdir()
    assert main(["demo", "--picture-only", "--png", "folder.png"]) == 2
    assert capsys.readouterr().err.startswith("relskew: error: --png folder.png: ")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", "--picture-only", "--png", "picture.png"]) == 2
    assert f"{to_install('plot')}" in capsys.readouterr().err


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _verify.plan(("numpy",), ("float32",), ("causal",))
    monkeypatch.setattr(_verify, "plan", lambda: plan)


def test_the_whole_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    few(monkeypatch)
    assert main(["demo"]) == 0
    told = capsys.readouterr().out
    assert Path("demo-output/melody.onnx").is_file()
    assert "ok 1 case within the tolerances" in told
    assert "ok the melody through demo-output/melody.onnx in onnxruntime" in told
    assert "not ok" not in told
    assert main(["demo", "--model", "other.onnx"]) == 0
    assert Path("other.onnx").read_bytes() == Path("demo-output/melody.onnx").read_bytes()


def test_the_demo_fails_where_a_gate_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    few(monkeypatch)

    def wrong(*args: Any) -> Any:
        result: Any = attention_block(*args)
        return 1.001 * result

    monkeypatch.setattr(_demo, "attention_block", wrong)
    assert main(["demo"]) == 1
    assert "not ok the melody through" in capsys.readouterr().out


def test_the_demo_needs_a_runtime(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["demo"]) == 2
    assert f"{to_install('onnxruntime')}" in capsys.readouterr().err


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))
    lines = capsys.readouterr().out.splitlines()
    rows, n = lines[1:-1], 42
    assert len(rows) == n
    assert [row[13] for row in rows[28:]] == ["█"] * 14
    assert [rows[i][n + 4 + i - 28] for i in range(28, n)] == ["█"] * 14
    assert lines[-1].index("^") == 13


def test_only_a_few_repetitions_are_named() -> None:
    assert main_stripes(shown(melody("ah-vous-dirai-je"))) == [Stripe(28, 28, 14), Stripe(7, 21, 7)]
    assert len(main_stripes(shown(melody("nun-danket")))) == 3

"""The demo's melodies and their picture, by numbers: the stripes are where the melody repeats itself."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from examples.demo import __main__ as command
from examples.demo import melody as melody_file
from examples.demo.melody import Melody, features, melodies, melody_block, recurrence
from examples.demo.stripes import Stripe, main_stripes, picture, shown, stripes
from relskew_core import attention_block

MELODIES = melodies()
TUNES = list(MELODIES)
EXAMPLE = Path(__file__).parents[2] / "examples" / "melody.py"


def tune_of(*pitches: int) -> Melody:
    return Melody("test", "A test", "made up", "none", tuple((pitch, 1.0) for pitch in pitches))


# The data


@pytest.mark.parametrize("name", TUNES)
def test_melodies_are_notes_with_a_source_and_rights(name: str) -> None:
    tune = MELODIES[name]
    assert "ublic domain" in tune.rights
    assert tune.title
    assert tune.source
    assert 40 <= len(tune.notes) <= 60
    assert all(55 <= pitch <= 84 and duration in (0.25, 0.5, 0.75, 1, 1.5, 2, 3) for pitch, duration in tune.notes)


def test_melodies_are_written_down_rightly() -> None:
    twinkle, bach = MELODIES["ah-vous-dirai-je"], MELODIES["nun-danket"]
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
    assert stripes(MELODIES[name])[0] == longest


def test_stripes_are_all_exact_repetitions() -> None:
    tune = tune_of(1, 2, 3, 9, 1, 2, 3, 1, 2, 3)
    assert stripes(tune, shortest=3) == [Stripe(3, 7, 3), Stripe(4, 4, 3), Stripe(7, 7, 3)]
    assert stripes(tune) == []
    assert stripes(tune_of(5, 5, 5, 5, 5)) == [Stripe(1, 1, 4)]


# The features and the table


@pytest.mark.parametrize("name", TUNES)
def test_features_count_what_two_notes_have_in_common(name: str) -> None:
    tune = MELODIES[name]
    embedded = features(tune)
    alike = embedded @ embedded.T
    full = alike.max()
    assert full == pytest.approx(1)
    for i, j in [(5, 9), (20, 6), (30, 2), (2, 30), (40, 12)]:
        expected = 0.0
        for back in range(melody_file.CONTEXT):
            one, other = tune.notes[i - back], tune.notes[j - back]
            expected += (one[0] == other[0]) + 0.25 * (one[1] == other[1])
        assert alike[i, j] == pytest.approx(expected / (1.25 * melody_file.CONTEXT))


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
    numbers = shown(MELODIES[name])
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
    numbers = shown(MELODIES[name])
    embedded = features(numbers.tune)
    table = recurrence(embedded)
    rates = embedded @ table.T
    i, c = np.indices(rates.shape)
    seen = (c >= len(rates) - 1 - i) & (c < len(rates) - 1)
    expected = melody_file.GAIN * rates / rates[seen].max()
    np.testing.assert_allclose(numbers.before[seen], expected[seen], atol=1e-9)
    assert np.all(numbers.before[:, -1] < 0)  # a note does not attend to itself
    logits = np.where(c <= i, melody_file.GAIN * embedded @ embedded.T + numbers.after, -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(
        np.nan_to_num(numbers.attention), weights / weights.sum(axis=1, keepdims=True), atol=1e-12
    )


@pytest.mark.parametrize("name", TUNES)
def test_the_stripes_are_where_the_melody_repeats_itself(name: str) -> None:
    numbers = shown(MELODIES[name])
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
    x, spec, weights = melody_block(MELODIES["nun-danket"])
    spec.check_weights(weights)
    assert spec.causal
    assert x.shape == (1, 54, spec.embed_dim)


# As a picture


def test_repetitions_are_marked_in_every_panel() -> None:
    found = shown(MELODIES["ah-vous-dirai-je"])
    before, after, attention = picture(found).panels
    n = len(found.tune.notes)
    marked = {
        (i, i - stripe.lag) for stripe in main_stripes(found) for i in range(stripe.first, stripe.first + stripe.length)
    }
    for panel, values, full in ((after, found.after, melody_file.GAIN), (attention, found.attention, 1.0)):
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
        console.print(picture(shown(MELODIES[tune])))
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


def test_picture_only(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["--picture-only", "--tune", "nun-danket"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Nun danket alle Gott" in printed
    assert "Notes 15–28 repeat notes 1–14" in printed
    assert not any(tmp_path.iterdir())
    assert command.main(["--picture-only", "--save", "folder/picture.png"]) == 0
    assert Path("folder/picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        command.main(["--tune", "none"])
    assert "ah-vous-dirai-je" in capsys.readouterr().err


def few(argv: list[str]) -> int:
    from relskew_core.cli import main

    return main([*argv, "--library", "numpy", "--dtype", "float32", "--case", "causal"])


def test_the_whole_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "relskew", few)
    assert command.main([]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert Path("demo-output/melody.onnx").is_file()
    assert "ok 1 case within the tolerances" in printed
    assert "compared with float64: relative error" in printed
    assert "not ok" not in printed


def test_the_demo_fails_if_the_graph_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "relskew", few)

    def wrong(*args: Any) -> Any:
        result: Any = attention_block(*args)
        return 1.001 * result

    monkeypatch.setattr(command, "attention_block", wrong)
    assert command.main([]) == 1
    assert capsys.readouterr().out.endswith("not ok\n")


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))
    lines = capsys.readouterr().out.splitlines()
    rows, n = lines[1:-1], 42
    assert len(rows) == n
    assert [row[13] for row in rows[28:]] == ["█"] * 14
    assert [rows[i][n + 4 + i - 28] for i in range(28, n)] == ["█"] * 14
    assert lines[-1].index("^") == 13


def test_only_a_few_repetitions_are_named() -> None:
    assert main_stripes(shown(MELODIES["ah-vous-dirai-je"])) == [Stripe(28, 28, 14), Stripe(7, 21, 7)]
    assert len(main_stripes(shown(MELODIES["nun-danket"]))) == 3

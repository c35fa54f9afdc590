"""The demo's melodies and their picture, by numbers: the stripes are where the melody repeats itself."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from examples.demo import __main__ as command
from examples.demo import melody as melody_file
from examples.demo.melody import Melody, features, melodies, recurrence
from examples.demo.stripes import Stripe, picture, shown, stripes
from relskew_core import attention_block
from relskew_core.cli import main

MELODIES = melodies()
TUNES = list(MELODIES)


def tune_of(*pitches: int) -> Melody:
    return Melody("test", "A test", "made up", "none", tuple((pitch, 1.0) for pitch in pitches))


@pytest.mark.parametrize("name", TUNES)
def test_melodies_are_notes_with_a_source_and_rights(name: str) -> None:
    tune = MELODIES[name]
    assert "ublic domain" in tune.rights
    assert tune.title
    assert tune.source
    assert 40 <= len(tune.notes) <= 60
    assert all(55 <= pitch <= 84 and duration in (0.25, 0.5, 0.75, 1, 1.5, 2, 3) for pitch, duration in tune.notes)


@pytest.mark.parametrize(("name", "longest"), [
    ("ah-vous-dirai-je", Stripe(lag=28, first=28, length=14)),
    ("nun-danket", Stripe(lag=14, first=14, length=14)),
    ("o-haupt", Stripe(lag=14, first=14, length=14)),
])  # fmt: skip
def test_the_longest_repetition_is_the_one_that_is_sung(name: str, longest: Stripe) -> None:
    assert stripes(MELODIES[name])[0] == longest


def test_stripes_are_all_exact_repetitions() -> None:
    tune = tune_of(1, 2, 3, 9, 1, 2, 3, 1, 2, 3)
    assert stripes(tune, shortest=3) == [Stripe(3, 7, 3), Stripe(4, 4, 3), Stripe(7, 7, 3)]
    assert stripes(tune) == []
    assert stripes(tune_of(5, 5, 5, 5, 5)) == [Stripe(1, 1, 4)]


@pytest.mark.parametrize("name", TUNES)
def test_features_count_what_two_notes_have_in_common(name: str) -> None:
    tune = MELODIES[name]
    embedded = features(tune)
    alike = embedded @ embedded.T
    assert alike.max() == pytest.approx(1)
    for i, j in [(5, 9), (20, 6), (30, 2), (2, 30), (40, 12)]:
        expected = 0.0
        for back in range(melody_file.CONTEXT):
            one, other = tune.notes[i - back], tune.notes[j - back]
            expected += (one[0] == other[0]) + 0.25 * (one[1] == other[1])
        assert alike[i, j] == pytest.approx(expected / (1.25 * melody_file.CONTEXT))


@pytest.mark.parametrize("name", TUNES)
def test_the_panels_are_what_the_text_says(name: str) -> None:
    numbers = shown(MELODIES[name])
    embedded = features(numbers.tune)
    rates = embedded @ recurrence(embedded).T
    i, c = np.indices(rates.shape)
    seen = (c >= len(rates) - 1 - i) & (c < len(rates) - 1)
    expected = melody_file.GAIN * rates / rates[seen].max()
    np.testing.assert_allclose(numbers.before[seen], expected[seen], atol=1e-9)
    assert np.all(numbers.before[:, -1] < 0)  # a note does not attend to itself
    logits = np.where(c <= i, melody_file.GAIN * embedded @ embedded.T + numbers.after, -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.nan_to_num(numbers.attention), weights, atol=1e-12)


@pytest.mark.parametrize("name", TUNES)
def test_the_stripes_are_where_the_melody_repeats_itself(name: str) -> None:
    numbers = shown(MELODIES[name])
    stripe = numbers.stripes[0]
    rows = np.arange(stripe.first, stripe.first + stripe.length)
    # Before the skew: the column of the repetition is the brightest in those rows.
    columns = np.nan_to_num(numbers.before[rows], nan=-np.inf).mean(axis=0)
    assert int(np.argmax(columns)) == len(numbers.tune.notes) - 1 - stripe.lag
    # After the skew: the diagonal.
    assert int(np.argmax([numbers.after[rows, rows - lag].mean() for lag in range(stripe.first + 1)])) == stripe.lag
    # The block attends there, too: all notes except the first few, whose context differs.
    assert np.array_equal(np.argmax(np.nan_to_num(numbers.attention)[rows], axis=1)[2:], rows[2:] - stripe.lag)
    assert numbers.on_stripe(stripe) > 0.9 > 0.1 > numbers.by_chance(stripe)


def test_the_text_shows_the_stripe_without_colour() -> None:
    console = Console(width=60, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(picture(shown(MELODIES["ah-vous-dirai-je"])))
    lines = captured.get().splitlines()
    before, _, attention = (lines[k + 1 : k + 22] for k, line in enumerate(lines) if line.startswith("   note i ↓"))
    margin = 3
    assert all(line[margin + 13] in "▓█" for line in before[14:])  # the column r = -28
    for step, line in enumerate(attention[14:]):  # the diagonal, two notes a line
        assert "█" in line[margin + 2 * step : margin + 2 * step + 2]
    assert "42 columns, −41 … 0" in lines[lines.index(before[-1]) + 1]


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


@pytest.mark.parametrize("factor", [1, 1.001])
def test_the_demo_passes_unless_a_graph_is_wrong(factor: float, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def few(argv: list[str]) -> int:
        return main([*argv, "--library", "numpy", "--dtype", "float32", "--case", "causal"])

    def block(*args: Any) -> Any:
        result: Any = attention_block(*args)
        return factor * result

    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "relskew", few)
    monkeypatch.setattr(command, "attention_block", block)
    assert command.main([]) == (factor != 1)
    out = capsys.readouterr().out
    assert Path("demo-output/melody.onnx").is_file()
    for said in ("ok 1 case within the tolerances", "compared with float64: relative error"):
        assert said in " ".join(out.split())
    assert out.endswith("not ok\n") == (factor != 1)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "melody.py"))
    lines = capsys.readouterr().out.splitlines()
    rows, n = lines[1:-1], 42
    assert len(rows) == n
    assert [row[13] for row in rows[28:]] == ["█"] * 14
    assert [rows[i][n + 4 + i - 28] for i in range(28, n)] == ["█"] * 14
    assert lines[-1].index("^") == 13

"""The example of `docs/chorales.md`: its tunes, its tokens, its files, and the whole of it at its smallest."""

import json
import re
import signal
import subprocess
import sys
import time
import wave
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mido
import numpy as np
import pytest
import torch

from examples.chorales import full, pictures, sample, sound
from examples.chorales.__main__ import TUNE as CONTINUED
from examples.chorales.data import Music, crops, melodies
from examples.chorales.model import KINDS, Decoder, Size
from examples.chorales.tokens import HELD, HIGHEST, LOWEST, NEW, REST, SYMBOLS, Voice, decode, encode, transpositions
from examples.chorales.train import train
from examples.chorales.tunes import Tune, parse, tunes

ROOT = Path(__file__).parents[2]
SMALL = Size(width=16, heads=2, layers=2, hidden=24, reach=8, window=12)
TUNE = """A scale
by: traditional, nowhere
in: A book, 1800
key: D   metre: 3/4   unit: 1/8   form: A B
A  D | F2 z ^F2 _E | c,3 -2
B  =c | d5"""


@pytest.mark.parametrize("tune", tunes(), ids=lambda tune: tune.title)
def test_a_tune_is_free_and_can_be_sung(tune: Tune) -> None:
    assert tune.year <= 1899
    lived = re.fullmatch(r"(?:traditional, [A-Z][\w ]+|[^()]+ \((\d{4})–(\d{4})\))", tune.composer)
    assert lived, tune.composer
    assert lived[2] is None or (int(lived[1]) < tune.year and int(lived[2]) <= 1925)
    pitches = [pitch for pitch, _ in tune.notes if pitch is not None]
    assert len(pitches) >= 12
    assert 55 <= min(pitches) < max(pitches) <= 84
    assert max(pitches) - min(pitches) <= 24
    assert max(abs(np.diff(pitches))) <= 16
    assert sum(steps for _, steps in tune.notes) % tune.bar == 0


def test_notes_are_read_as_written() -> None:
    tune = parse(TUNE)
    assert tune.notes == ((62, 1), (66, 2), (None, 1), (66, 2), (63, 1), (61, 5), (72, 1), (74, 5))
    assert (tune.year, tune.bar, tune.pickup) == (1800, 6, 1)


@pytest.mark.parametrize(("old", "new", "said"), [
    ("F2 z", "F3 z", "bars must have 6 steps, got"),
    ("d5", "d4", "bars must have 6 steps, got"),
    ("_E", "_H", "must be a letter with a length"),
    (", 1800", "", "expected the lines"),
    ("by: ", "of: ", "expected the lines"),
])  # fmt: skip
def test_a_mistyped_tune_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(TUNE.replace(old, new))


def test_held_and_repeated_notes_have_different_tokens() -> None:
    held, struck = encode([[(60, 2)]]), encode([[(60, 1), (60, 1)]])
    assert held == [NEW, 3 + 60 - LOWEST, HELD]
    assert struck == [NEW, 3 + 60 - LOWEST, 3 + 60 - LOWEST]
    assert encode([[(60, 1), (None, 2)]])[2:] == [REST, REST]


def test_tokens_come_back_as_the_voices_they_were() -> None:
    for tune in tunes():
        assert decode(encode([tune.notes])) == [merged(tune.notes)]
    voices: list[Voice] = [[(72, 2), (71, 2)], [(64, 1), (62, 3)], [(48, 3), (None, 1)]]
    assert decode(encode(voices), voices=3) == voices
    assert decode([HELD, HELD, NEW, REST, 40, NEW]) == [[(None, 3), (40 - 3 + LOWEST, 1)]]


def merged(notes: Voice) -> list[tuple[int | None, int]]:
    """Join rests that follow each other, which sound as one."""
    found: list[tuple[int | None, int]] = []
    for pitch, steps in notes:
        before = found.pop()[1] if pitch is None and found and found[-1][0] is None else 0
        found.append((pitch, before + steps))
    return found


def test_held_out_tunes_are_not_learned() -> None:
    music = melodies()
    assert len(music.held_out) == len(tunes()) // 5
    assert not {tuple(piece[0]) for piece in music.learned} & {tuple(piece[0]) for piece in music.held_out}
    assert [one.notes for one in tunes() if one.title == CONTINUED] in music.held_out
    assert len(music.learned) + len(music.held_out) == len(tunes())


def test_a_crop_is_a_piece_of_a_medley() -> None:
    piece: list[Voice] = [[(60 + k, 1) for k in range(4)], [(40 + k, 1) for k in range(4)]]
    rows = crops([piece], 50, 15, np.random.default_rng(0))
    assert rows.shape == (50, 15)
    keys = [encode(piece, up=up) for up in transpositions(piece)]
    for row in rows.tolist():
        first = row.index(NEW)
        assert first % 2 == 0  # the tune begins with the first voice
        assert any(row[:first] == key[len(key) - first :] for key in keys)
        assert row[first : first + 7] in [key[:7] for key in keys]
    assert len({row.index(NEW) for row in rows.tolist()}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_model_without_positions_ignores_the_order(kind: str) -> None:
    """Growing caches change nothing."""
    torch.manual_seed(0)
    model = Decoder(kind, SMALL).eval()
    for table in (x for attention in model.attentions for x in attention.table_parameters() if x.requires_grad):
        torch.nn.init.normal_(table)
    tokens = torch.tensor([[5, 9, 12, 7, 30, 31]])
    with torch.no_grad():
        whole, _ = model(tokens)
        swapped, _ = model(tokens[:, [1, 0, 3, 2, 4, 5]])
        past, steps = model.empty_cache(1), []
        for part in tokens.split([2, 3, 1], dim=1):
            logits, past = model(part, past)
            steps.append(logits)
        one_layer = Decoder(kind, replace(SMALL, layers=1)).eval()
        alike = [one_layer(tokens[:, order])[0][:, -1] for order in ([0, 1, 2, 3, 4, 5], [3, 1, 0, 2, 4, 5])]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole[:, 3], swapped[:, 3], atol=1e-4)
    if kind == "none":
        torch.testing.assert_close(*alike, rtol=1e-5, atol=1e-5)


def test_a_sliding_cache_makes_the_same_music() -> None:
    torch.manual_seed(0)
    model, prompt = Decoder("relative", SMALL).eval(), [NEW, 30, HELD, 32, 30]
    new = sample.go_on(model, prompt, 40, sample.Choice(seed=1))  # far past the window of 12
    with torch.no_grad():
        logits, _ = model(torch.tensor([[*prompt, *new]]))
    choose = sample.Choice(seed=1)
    assert [choose(one.numpy()) for one in logits[0, len(prompt) - 1 : -1]] == new
    assert len(set(new)) > 2


def test_training_on_one_tune_learns_it() -> None:
    torch.manual_seed(0)
    piece: list[Voice] = [[(60, 1), (62, 1), (64, 2)]]
    model = train(Decoder("relative", SMALL), Music([piece], [piece], 1), 80, seed=0)
    tokens = crops([piece], 8, 64, np.random.default_rng(3))
    with torch.no_grad():
        logits, _ = model(tokens[:, :-1])
    # The key changes with every NEW, a quarter to a fifth of the tokens; what follows it keeps the key.
    same_key = tokens[:, 1:] == HELD
    assert (logits.argmax(dim=-1) == tokens[:, 1:])[same_key].float().mean() > 0.95


VOICES: list[Voice] = [[(60, 2), (None, 1), (64, 3)], [(48, 6)]]


def test_midi_comes_back(tmp_path: Path) -> None:
    sound.save_midi(tmp_path / "a.mid", VOICES, tempo=120)
    song = mido.MidiFile(tmp_path / "a.mid")
    assert song.length == pytest.approx(6 * 0.25)
    for track, voice in zip(song.tracks, VOICES, strict=True):
        now, found = 0, list[list[int]]()
        for message in track:
            now += message.time
            if message.type == "note_on":
                found.append([message.note, now])
            elif message.type == "note_off":
                found[-1].append(now)
        ends = np.cumsum([steps for _, steps in voice])
        assert found == [[p, 240 * (end - n), 240 * end] for (p, n), end in zip(voice, ends, strict=True) if p]


def test_wav_holds_the_pitches(tmp_path: Path) -> None:
    sound.save_wav(tmp_path / "a.wav", [[(69, 4), (None, 2), (81, 4)]], tempo=60)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, sound.RATE)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)
    assert len(samples) == 6 * sound.RATE
    for second, hertz in ((0, 440), (3, 880)):
        part = samples[second * sound.RATE : (second + 1) * sound.RATE]
        assert np.abs(np.fft.rfft(part)).argmax() == pytest.approx(hertz, abs=2)
    assert np.abs(samples[int(2.05 * sound.RATE) : int(2.95 * sound.RATE)]).max() == 0


def test_weights_in_pictures_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = Decoder("relative", SMALL).eval()
    tokens = [NEW, 30, HELD, 32, 30, 33, 35, HELD, 30, 31, 32, 33, 34, 35, 36, 37]
    before, seen = model(torch.tensor([tokens]))[0], pictures.attention(model, tokens)
    assert torch.equal(model(torch.tensor([tokens]))[0], before)  # the hooks are removed
    assert [one.shape for one in seen] == [(2, 16, 16)] * 2
    np.testing.assert_allclose(seen[0].sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(seen[0], 1).any()
    assert not np.tril(seen[0], -13).any()  # the window
    look = pictures.furthest_look(seen, tokens, first=8, near=3)
    assert look.query >= 8
    assert tokens[look.query] > HELD
    np.testing.assert_array_equal(look.weights, seen[look.layer][look.head, look.query])


COMMAND = [sys.executable, "-m", "examples.chorales"]
FILES = {"decoder.onnx", "likelihood.png", "roll.png", "tune.mid", "tune.wav"}


def test_the_command_writes_every_file(tmp_path: Path) -> None:
    options = ["--steps", "2", "--tokens", "12", "--out", str(tmp_path)]
    run = subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.search(r"│ relative +│ +104,256 │ \d\.\d{3} │ +\d\.\d{3} │ +\d\.\d{3} │", run.stdout)
    assert re.search(r"12 tokens after 33, the same ones: torch \d+ a second, onnxruntime \d+", run.stdout)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in FILES if name.endswith(".png"))


def test_ctrl_c_leaves_whole_files(tmp_path: Path) -> None:
    kept = tmp_path / "tune.mid"
    kept.write_bytes(b"an older one")
    options = ["--steps", "100000", "--out", str(tmp_path)]
    process = subprocess.Popen([*COMMAND, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "tunes to learn from" in process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Stopped." in said
    assert [path.name for path in tmp_path.iterdir()] == ["tune.mid"]
    assert kept.read_bytes() == b"an older one"


def test_a_part_of_a_score_is_read() -> None:
    def note(quarters: float, pitch: int | None, tie: str | None = None) -> SimpleNamespace:
        pitches = [] if pitch is None else [SimpleNamespace(midi=pitch)]
        own = {"duration": SimpleNamespace(quarterLength=quarters), "isRest": pitch is None, "pitches": pitches}
        return SimpleNamespace(**own, tie=tie and SimpleNamespace(type=tie))

    def part(*notes: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(flatten=lambda: SimpleNamespace(notesAndRests=notes))

    tied = note(1.0, 60, "start"), note(0.5, 60, "stop"), note(0.25, 60), note(1.0, None)
    assert full.voice(part(*tied)) == [(60, 6), (60, 1), (None, 4)]
    assert full.voice(part(note(1 / 3, 60))) is None
    assert full.voice(part(note(4.0, None))) is None


def test_the_record_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, page = full.PAGE.read_text(), tmp_path / "chorales.md"
    page.write_text(shown)
    measured = json.loads(full.RECORD.read_text())
    for name, path in (("PAGE", page), ("PICTURE", tmp_path / "kinds.png"), ("RECORD", tmp_path / "record.json")):
        monkeypatch.setattr(full, name, path)
    full.write(measured)
    assert page.read_text() == shown


def test_transposed_tokens_stay_in_range() -> None:
    for tune in tunes():
        for up in transpositions([tune.notes]):
            assert max(encode([tune.notes], up=up)) < SYMBOLS
    assert list(transpositions([[(HIGHEST - 1, 1), (LOWEST + 2, 1)]])) == [-2, -1, 0, 1]
    with pytest.raises(ValueError, match=r"a pitch must be 36 … 96 after it was transposed, got 90 \+ 7"):
        encode([[(90, 1)]], up=7)


def test_every_kind_learns_as_many_numbers() -> None:
    counts = {kind: Decoder(kind).learned() for kind in KINDS}
    assert max(counts.values()) / min(counts.values()) < 1.002, counts


def test_choice_draws_from_the_likeliest_by_temperature() -> None:
    logits = np.log(np.asarray([0.1, 0.6, 0.3], np.float32))
    assert sample.Choice(top=1)(logits) == 1
    choose = sample.Choice(seed=0, temperature=1.0, top=2)
    drawn = np.bincount([choose(logits) for _ in range(3000)], minlength=3) / 3000
    np.testing.assert_allclose(drawn, [0, 2 / 3, 1 / 3], atol=0.03)

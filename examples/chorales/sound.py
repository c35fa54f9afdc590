"""Music as MIDI and WAV files."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mido
import numpy as np

from examples.chorales.tokens import Voice
from relskew_core._files import whole

TICKS = 480
"""MIDI ticks in a quarter note."""

RATE = 22050
"""WAV samples per second."""

HARMONICS = (1.0, 0.5, 0.3, 0.15, 0.08)


def save_midi(path: Path, voices: Sequence[Voice], *, step: float = 0.5, tempo: int = 112) -> None:
    """Write a track for each voice; a step is this share of a quarter note, of which ``tempo`` are in a minute."""
    song = mido.MidiFile(ticks_per_beat=TICKS)
    for number, voice in enumerate(voices):
        track = song.add_track(f"voice {number + 1}")
        track.append(mido.MetaMessage("set_tempo", tempo=mido.bpm2tempo(tempo)))
        waited = 0
        for pitch, steps in voice:
            length = round(steps * step * TICKS)
            if pitch is None:
                waited += length
                continue
            track.append(mido.Message("note_on", channel=number, note=pitch, velocity=80, time=waited))
            track.append(mido.Message("note_off", channel=number, note=pitch, velocity=0, time=length))
            waited = 0
    with whole(path) as part:
        song.save(part)


def save_wav(path: Path, voices: Sequence[Voice], *, step: float = 0.5, tempo: int = 112) -> None:
    """Write the sound of plucked strings: each note has a few harmonics, of which higher ones fade sooner."""
    seconds = step * 60 / tempo
    longest = max(sum(steps for _, steps in voice) for voice in voices)
    sound = np.zeros(int((longest * seconds + 1) * RATE), dtype=np.float64)
    for voice in voices:
        begins = 0
        for pitch, steps in voice:
            if pitch is not None:
                heard = tone(440 * 2 ** ((pitch - 69) / 12), steps * seconds)
                first = int(begins * seconds * RATE)
                sound[first : first + len(heard)] += heard
            begins += steps
    sound *= 0.8 / max(np.abs(sound).max(), 1e-9)
    with whole(path) as part, wave.open(str(part), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound * 32767).astype("<i2").tobytes())


def tone(frequency: float, seconds: float) -> np.ndarray[Any, Any]:
    """Return one note, which fades, and stops softly where the next one begins."""
    time = np.arange(int(seconds * RATE), dtype=np.int64) / RATE
    waves = [
        loud * np.sin(2 * np.pi * n * frequency * time) * np.exp(-1.5 * n * time)
        for n, loud in enumerate(HARMONICS, 1)
        if n * frequency < RATE / 2
    ]
    edge = np.clip(np.minimum(time / 0.005, (seconds - time) / 0.03), 0, 1)
    return np.asarray(sum(waves) * edge)

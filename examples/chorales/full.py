"""``python -m examples.chorales.full``: six kinds of positions, on Bach's chorales in four parts.

The chorales are read from the package music21 where it is installed; none of its files is part of this project.
"""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from examples.chorales import pictures
from examples.chorales.__main__ import progress
from examples.chorales.data import Music
from examples.chorales.model import KINDS, Decoder
from examples.chorales.tokens import Voice
from examples.chorales.train import BATCH, CROP, RANGES, by_position, by_range, train
from relskew_core._files import whole

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "chorales.md"
PICTURE = PAGE.with_suffix("") / "kinds.png"
RECORD = Path(__file__).with_name("record.json")
MARKS = "<!-- measured: python -m examples.chorales.full --docs -->\n", "<!-- end of measured -->"
COMMON = ", common rate"
"""Kinds that end in this learn their tables at the rate of the rest."""

ROWS = (*KINDS, f"relative{COMMON}", f"learned bias{COMMON}")
GRID = 4
"""The steps of a quarter note: sixteenths."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(min=0.0, help="How long all models learn together, at most.")] = 20.0,
    steps: Annotated[int, typer.Option(min=1, help="How long each model learns, at most.")] = 600,
    seeds: Annotated[int, typer.Option(min=1, help="How often each kind learns.")] = 3,
    docs: Annotated[
        bool, typer.Option("--docs", help=f"Keep the numbers, and remake the table of {PAGE.name}.")
    ] = False,
) -> None:
    """Train six models on the same data, and print the likelihood of the held-out pieces."""
    console = Console(highlight=False, width=120)
    if find_spec("music21") is None:
        console.print("This reads the chorales of music21, which is not installed: .venv/bin/pip install music21")
        raise typer.Exit(2)
    torch.set_num_threads(1)  # more threads do not speed up such small models
    try:
        music = chorales()
        measured = measure(music, steps, 60 * minutes, seeds)
    except KeyboardInterrupt:
        console.print("\nStopped. Nothing was written.")
        raise typer.Exit(130) from None
    console.print(text(measured), markup=False)
    if docs:
        write(measured)


def chorales() -> Music:
    """Return the four-part chorales whose notes lie on the grid, from music21's corpus."""
    from music21 import corpus

    paths = sorted(corpus.getComposer("bach", fileExtensions=("mxl",)))
    with progress("reading the chorales", len(paths)) as report:
        pieces = []
        for number, path in enumerate(paths):
            score = corpus.parse(path)
            voices = [voice(part) for part in score.parts] if len(score.parts) == 4 else []
            lengths = {sum(steps for _, steps in one) for one in voices if one is not None}
            if len(voices) == 4 and None not in voices and len(lengths) == 1:
                pieces.append([one for one in voices if one is not None])
            report(number)
    return Music.of(pieces)


def voice(part: Any) -> Voice | None:
    """Return the notes of one part, or nothing if a note is off the grid."""
    notes: list[tuple[int | None, int]] = []
    for one in part.flatten().notesAndRests:
        steps = one.duration.quarterLength * GRID
        if steps != int(steps):
            return None
        tied = one.tie is not None and one.tie.type in ("stop", "continue")
        pitch = None if one.isRest else int(max(one.pitches).midi)
        if steps and tied and notes and notes[-1][0] == pitch:
            notes[-1] = (pitch, notes[-1][1] + int(steps))
        elif steps:
            notes.append((pitch, int(steps)))
    return notes if any(pitch is not None for pitch, _ in notes) else None


def measure(music: Music, steps: int, seconds: float, seeds: int) -> dict[str, Any]:
    """Train each kind for its share of the time, and return the likelihoods."""
    kinds = [(kind, seed) for seed in range(seeds) for kind in ROWS]
    began = time.monotonic()
    rows = []
    for done, (kind, seed) in enumerate(kinds):
        torch.manual_seed(seed)
        model = Decoder(kind.removesuffix(COMMON))
        if not done:  # on a model that is discarded
            steps = min(steps, affordable(Decoder(kind), music, seconds / len(kinds)))
        with progress(f"learning: {kind}", steps) as report:
            train(model, music, steps, seed=seed, of_tables=1.0 if kind.endswith(COMMON) else 10.0, report=report)
        curve = by_position(model, music)
        rows.append(
            {"kind": kind, "seed": seed, "learned": model.learned(), "curve": [round(float(x), 4) for x in curve]}
        )
    return {
        "pieces": [len(music.learned), len(music.held_out)],
        "steps": steps,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "rows": rows,
    }


def affordable(model: Decoder, music: Music, seconds: float) -> int:
    """Return how many steps fit into this many seconds."""
    train(model, music, 3, seed=0)  # the first steps are slower
    start, tried = time.monotonic(), 20
    train(model, music, tried, seed=0)
    return max(1, int(0.9 * tried * seconds / (time.monotonic() - start)))


def text(measured: dict[str, Any]) -> str:
    """Return the section of the page."""
    learned, held_out = measured["pieces"]
    seeds = len(measured["rows"]) // len(ROWS)
    lines = [
        f"{learned} chorales to learn from, {held_out} held out; {measured['steps']} steps of {BATCH} crops of {CROP} "
        f"tokens; {'one seed' if seeds == 1 else f'means and standard deviations of {seeds} seeds'}.",
        "",
        "| positions | parameters | " + " | ".join(f"{start}–{stop}" for start, stop in RANGES) + " |",
        "| --- | " + " | ".join(["---:"] * (1 + len(RANGES))) + " |",
    ]
    for kind in ROWS:
        rows = [row for row in measured["rows"] if row["kind"] == kind]
        found = np.asarray([by_range(np.asarray(row["curve"])) for row in rows], dtype=np.float64)
        cells = [f"{each.mean():.3f}" + (f" ± {each.std(ddof=1):.3f}" if seeds > 1 else "") for each in found.T]
        lines.append(f"| {kind} | {rows[0]['learned']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(measured: dict[str, Any]) -> None:
    """Save the measurements, and write them into the page."""
    first, last = MARKS
    page = PAGE.read_text("utf-8")
    if first not in page or last not in page:
        raise ValueError(f"{PAGE} must have the lines {first.strip()} and {last}")
    head, _, rest = page.partition(first)
    curves = {
        kind: np.asarray([x["curve"] for x in measured["rows"] if x["kind"] == kind], np.float64) for kind in KINDS
    }
    pictures.plot_likelihood(PICTURE, curves, CROP)
    with whole(RECORD) as part:
        part.write_text(json.dumps(measured) + "\n", "utf-8")
    with whole(PAGE) as part:
        part.write_text(f"{head}{first}\n{text(measured)}\n\n{last}{rest.partition(last)[2]}", "utf-8")


if __name__ == "__main__":
    app()

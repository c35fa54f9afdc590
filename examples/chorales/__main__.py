"""``python -m examples.chorales``: train two models on tunes, and continue a tune with one, in torch and without it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from examples.chorales import pictures, sample, sound
from examples.chorales.data import melodies
from examples.chorales.model import Decoder
from examples.chorales.tokens import decode, encode
from examples.chorales.train import CROP, RANGES, by_position, by_range, train
from examples.chorales.tunes import tunes
from relskew_core.export import decoder_to_onnx, generate

TUNE = "London Bridge"
"""The tune to continue, which is held out of training."""

BARS = 4
"""The notes of the tune that are given."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(min=1, help="How long each model learns.")] = 400,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens are made.")] = 256,
    out: Annotated[Path, typer.Option(help="Where the files go.")] = Path("example-output"),
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
) -> None:
    """Train, draw, generate, export, and generate without torch."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        run(steps, tokens, out, seed, console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. The files that are in {out} are whole.")
        raise typer.Exit(130) from None


def run(steps: int, n: int, out: Path, seed: int, console: Console) -> None:
    """Run all steps."""
    torch.set_num_threads(1)  # more threads do not speed up such small models
    music = melodies()
    console.print(f"{len(music.learned)} tunes to learn from, {len(music.held_out)} held out, crops of {CROP} eighths")
    models, curves = {}, {}
    for kind in ("sinusoids", "relative"):
        torch.manual_seed(seed)
        models[kind] = Decoder(kind)
        with progress(f"learning: {kind}", steps) as report:
            train(models[kind], music, steps, seed=seed, report=report)
        curves[kind] = by_position(models[kind], music)
    console.print(table({kind: (models[kind].learned(), by_range(curves[kind])) for kind in models}))
    pictures.plot_likelihood(out / "likelihood.png", curves, CROP)

    tune = next(one for one in tunes() if one.title == TUNE)
    prompt, model = encode([tune.notes])[: 1 + BARS * tune.bar], models["relative"]
    new, rate = timed(lambda: sample.go_on(model, prompt, n, sample.Choice(seed=seed)), n)
    (voice,) = decode([*prompt, *new])
    sound.save_midi(out / "tune.mid", [voice])
    sound.save_wav(out / "tune.wav", [voice])
    shown = [*prompt, *new][: CROP + 1]
    look = pictures.furthest_look(pictures.attention(model, shown), shown, first=len(prompt), near=2 * tune.bar)
    title = f"{TUNE}, continued from the dashed line on. Arcs: what one head of layer {look.layer + 1} attends to"
    pictures.plot_roll(out / "roll.png", shown, prompt=len(prompt), look=look, title=title)

    path = decoder_to_onnx(model, out / "decoder.onnx", overwrite=True)
    chance = sample.Choice(seed=seed)
    again, rate_onnx = timed(
        lambda: generate(path, prompt, n, temperature=chance.temperature, top_k=chance.top, seed=seed).tolist(), n
    )
    if again != new:
        raise SystemExit(f"the graph made other tokens than torch, from place {differ(again, new)} on")
    console.print(
        f"{n} tokens after {len(prompt)}, the same ones: torch {rate:.0f} a second, onnxruntime {rate_onnx:.0f}"
    )
    console.print("written: " + ", ".join(str(one) for one in sorted(out.iterdir())))


def table(results: dict[str, tuple[int, list[float]]]) -> Table:
    """Return a table of the models' likelihoods by range of positions."""
    made = Table(title="negative log-likelihood a token, in nats, by position", title_justify="left")
    for column in ("positions", "parameters", *(f"{start}–{stop}" for start, stop in RANGES)):
        made.add_column(column, justify="left" if column == "positions" else "right")
    for kind, (count, means) in results.items():
        made.add_row(kind, f"{count:,}", *(f"{mean:.3f}" for mean in means))
    return made


def timed(made: Callable[[], list[int]], n: int) -> tuple[list[int], float]:
    """Return some tokens, and how many were generated per second."""
    start = time.perf_counter()
    return made(), n / (time.perf_counter() - start)


def differ(first: list[int], second: list[int]) -> int:
    """Return the first index at which two lists differ."""
    return next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar on stderr; silent unless stderr is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda _: bar.advance(task)


if __name__ == "__main__":
    app()

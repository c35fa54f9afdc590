"""Likelihood by position, and a piano roll with arcs of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from examples.chorales.model import Decoder
from examples.chorales.tokens import HELD, LOWEST
from relskew_core._files import whole

INK = FAINT = "#747d88"
"""A grey that is legible on white and on black, because the pictures are transparent."""
COLOURS = {
    "relative": "#0072b2",
    "sinusoids": "#d55e00",
    "learned bias": "#009e73",
    "ALiBi": "#cc79a7",
    "none": "#8a8a99",
    "rotary": "#b8860b",
}
"""Colours that are distinguishable with every kind of colour vision."""

SMOOTH = 16
"""The number of positions that are averaged for a point of the curves."""


def plot_likelihood(path: Path, curves: Mapping[str, Array], trained: int) -> None:
    """Draw the negative log-likelihood by position, with the trained range shaded.

    A curve is ``(positions,)``, or ``(seeds, positions)``, whose mean is drawn in a band from the least to the largest.
    """
    figure = Figure(figsize=(7.2, 3.6), dpi=100)
    axis = figure.add_axes((0.09, 0.16, 0.74, 0.72))
    axis.axvspan(0, trained, color=FAINT, alpha=0.15, lw=0)
    drawn = {name: smooth(curve) for name, curve in curves.items()}
    top = max(points.max() for points in drawn.values())
    length = max(curve.shape[-1] for curve in curves.values())
    axis.text(trained / 2, 1.01, "trained", color=FAINT, ha="center", va="bottom", transform=axis.get_xaxis_transform())
    for name, points in drawn.items():
        places = (np.arange(points.shape[-1], dtype=np.int64) + 0.5) * SMOOTH
        axis.plot(places, points.mean(axis=0), color=COLOURS[name], lw=2)
        axis.fill_between(places, points.min(axis=0), points.max(axis=0), color=COLOURS[name], alpha=0.2, lw=0)
    ends = {name: float(curve[..., -4 * SMOOTH :].mean()) for name, curve in curves.items()}
    for name, place in apart(ends, 0.065 * top).items():
        axis.text(1.01, place, name, color=COLOURS[name], va="center", transform=axis.get_yaxis_transform())
    axis.set(xlim=(0, length), ylim=(0, 1.05 * top), xlabel="position of the token")
    axis.set_ylabel("negative log-likelihood, nats")
    axis.set_xticks(range(0, length + 1, trained))
    plain(axis)
    with whole(path) as part:
        figure.savefig(part, transparent=True)


Array = np.ndarray[Any, Any]


def smooth(curve: Array) -> Array:
    """Return means of `SMOOTH` positions, ``(seeds, points)``."""
    seeds = np.atleast_2d(curve)[:, : curve.shape[-1] // SMOOTH * SMOOTH]
    return seeds.reshape(len(seeds), -1, SMOOTH).mean(axis=-1)


def apart(places: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move positions up until no two are closer than ``gap``."""
    moved: dict[str, float] = {}
    last = -np.inf
    for name in sorted(places, key=places.__getitem__):
        last = moved[name] = max(places[name], last + gap)
    return moved


class Look(NamedTuple):
    """A token, and one head's attention to the tokens before it."""

    layer: int
    head: int
    query: int
    weights: Array


@torch.no_grad()
def attention(model: Decoder, tokens: Sequence[int]) -> list[Array]:
    """Return every layer's weights, ``(heads, queries, keys)``."""
    seen: list[Array] = []

    def look(block: Any, args: Any, options: Any) -> None:
        seen.append(block.attention_weights(*args, **options)[0].numpy())

    hooks = [block.register_forward_pre_hook(look, with_kwargs=True) for block in model.attentions]
    try:
        model(torch.tensor([list(tokens)], dtype=torch.int64, device="cpu"))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def furthest_look(weights: Sequence[Array], tokens: Sequence[int], *, first: int, near: int) -> Look:
    """Return the note, from ``first`` on, that attends most to notes more than ``near`` before it, in one head."""
    struck = np.asarray(tokens) > HELD
    distance = np.arange(len(tokens), dtype=np.int64)[:, None] - np.arange(len(tokens), dtype=np.int64)
    far = struck[:, None] & struck & (distance > near)
    far[:first] = False
    shares = np.stack([(one * far).sum(axis=-1) for one in weights])  # layers, heads, queries
    layer, head, query = (int(x) for x in np.unravel_index(shares.argmax(), shares.shape))
    return Look(layer, head, query, weights[layer][head, query])


def plot_roll(path: Path, tokens: Sequence[int], *, prompt: int, look: Look, title: str, arcs: int = 8) -> None:
    """Draw a melody, with the generated part darker, and arcs from one note to those that it attends to."""
    figure = Figure(figsize=(9.6, 3.4), dpi=100)
    axis = figure.add_axes((0.05, 0.13, 0.93, 0.74))
    notes: list[list[int]] = []  # pitch, beginning, end
    for place, token in enumerate(tokens):
        if token > HELD:
            notes.append([token - 3 + LOWEST, place, place + 1])
        elif token == HELD and notes and notes[-1][2] == place:
            notes[-1][2] += 1
    for pitch, start, stop in notes:
        axis.barh(pitch, stop - start - 0.2, left=start, align="center", height=0.8, color=shade(start, prompt))
    pitches = {start: pitch for pitch, start, _ in notes}
    heard = [key for key in np.argsort(-look.weights) if key in pitches and key < look.query][:arcs]
    for key in heard:
        share = float(look.weights[key])
        style = f"arc3,rad=-{0.35 if look.query - key < 24 else 0.22}"
        arrow = {"arrowstyle": "-", "connectionstyle": style, "color": COLOURS["sinusoids"]}
        ends = (look.query + 0.4, pitches[look.query] + 0.4), (key + 0.4, pitches[key] + 0.4)
        axis.annotate("", *ends, arrowprops={**arrow, "lw": 0.8 + 4 * share, "alpha": min(1, 0.35 + share)})
    axis.barh(pitches[look.query], 0.8, left=look.query, height=0.8, color=COLOURS["sinusoids"])
    axis.axvline(prompt - 0.1, color=FAINT, lw=1, ls=(0, (4, 3)))
    top, low = max(pitches.values()), min(pitches.values())
    axis.set(xlim=(0, len(tokens)), ylim=(low - 1.5, top + 0.4 * (top - low) + 3))
    axis.set_xlabel(f"eighths, the first {len(tokens) - 1}")
    octaves = [pitch for pitch in range(low, top + 1) if pitch % 12 == 0]
    axis.set_yticks(octaves, [f"C{pitch // 12 - 1}" for pitch in octaves])
    figure.text(0.05, 0.93, title, color=INK, va="center")
    plain(axis)
    with whole(path) as part:
        figure.savefig(part, transparent=True)


def shade(start: int, prompt: int) -> str:
    """Return the colour of a note: given or generated."""
    return "#9fb8cc" if start < prompt else COLOURS["relative"]


def plain(axis: Any) -> None:
    """Remove frames and ticks without information."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(colors=INK, length=3)
    axis.spines[["left", "bottom"]].set_color(FAINT)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set_color(INK)

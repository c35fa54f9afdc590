"""Training, and the likelihood of held-out pieces by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it

from examples.chorales.data import Music, crops
from examples.chorales.model import Decoder

CROP = 128
BATCH = 16
RATE = 3e-3
FARTHEST = 4 * CROP


def train(
    model: Decoder, music: Music, steps: int, *, seed: int, of_tables: float = 10.0,
    report: Callable[[int], None] = lambda _: None,
) -> Decoder:  # fmt: skip
    """Train on crops of `CROP` positions, tables ``of_tables`` times as fast; ``report`` is called after every step."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameter_groups(RATE, of_tables=of_tables), weight_decay=0.1)
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=max(2, steps), pct_start=0.1)
    model.train()
    for step in range(steps):
        tokens = crops(music.learned, BATCH, CROP + 1, rng)
        logits, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        report(step)
    return model.eval()


@torch.no_grad()
def by_position(model: Decoder, music: Music, *, rows: int = 96, seed: int = 1) -> np.ndarray[Any, Any]:
    """Return the mean negative log-likelihood of a token at each of `FARTHEST` positions, in nats."""
    tokens = crops(music.held_out, rows, FARTHEST + 1, np.random.default_rng(seed))
    losses = [
        F.cross_entropy(model(part[:, :-1])[0].transpose(1, 2), part[:, 1:], reduction="none")
        for part in tokens.split(16)
    ]
    return torch.cat(losses).mean(dim=0).numpy()


RANGES = ((0, CROP), (CROP, 2 * CROP), (2 * CROP, FARTHEST))
"""Within the training length, just past it, and far past it."""


def by_range(likelihood: np.ndarray[Any, Any]) -> list[float]:
    """Return the mean of each of `RANGES`."""
    return [float(likelihood[start:stop].mean()) for start, stop in RANGES]

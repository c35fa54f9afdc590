"""Continuing music token by token, in torch with a sliding cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from examples.chorales.model import Decoder


class Choice:
    """Sampling among the most likely tokens, drawn from the seed like `relskew_core.export.generate`."""

    def __init__(self, *, seed: int = 0, temperature: float = 0.9, top: int = 8) -> None:
        self.rng, self.temperature, self.top = np.random.default_rng(seed), temperature, top

    def __call__(self, logits: np.ndarray[Any, Any]) -> int:
        likely = np.argsort(-logits, kind="stable")[: self.top]
        weights = np.exp((logits[likely] - logits[likely[0]]).astype(np.float64) / self.temperature)
        return int(likely[np.searchsorted(weights.cumsum(), self.rng.random() * weights.sum(), side="right")])


@torch.no_grad()
def go_on(model: Decoder, prompt: Sequence[int], n: int, choose: Choice) -> list[int]:
    """Return ``n`` tokens after the prompt, with caches of only the positions that a query may see."""
    past = model.empty_cache(1, keep=model.size.window)
    tokens = list(prompt)
    new: list[int] = []
    while len(new) < n:
        logits, past = model(torch.tensor([tokens], dtype=torch.int64, device="cpu"), past)
        tokens = [choose(logits[0, -1].numpy())]
        new += tokens
    return new

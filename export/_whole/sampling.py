"""The next token of every row, from its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from relskew_core._array.checks import check_int, check_real

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Chooses the most likely token if there is no temperature, else draws one."""

    temperature: float
    top_k: int | None
    top_p: float | None
    random: np.random.Generator

    @classmethod
    def of(cls, temperature: Any, top_k: Any, top_p: Any, seed: Any) -> Sampler:
        """Check the arguments of :func:`generate`."""
        temperature = 0.0 if temperature is None else check_real("temperature", temperature)
        if temperature < 0:
            raise ValueError(f"`temperature` must be at least 0, got {temperature}")
        for name, value in (("top_k", top_k), ("top_p", top_p), ("seed", seed)):
            if value is not None and not temperature:
                raise ValueError(f"`{name}` needs `temperature` above 0: without it, nothing is sampled, got {value!r}")
        if top_p is not None and not 0 < check_real("top_p", top_p) <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1, got {top_p}")
        return cls(
            temperature,
            None if top_k is None else check_int("top_k", top_k, minimum=1),
            top_p,
            np.random.default_rng(None if seed is None else check_int("seed", seed, minimum=0)),
        )

    def __call__(self, logits: Array) -> Array:
        """Return one token for each row of ``logits (batch, vocabulary)``."""
        if not self.temperature:
            return np.argmax(logits, axis=1)
        order = np.argsort(-logits, axis=1, kind="stable")  # the most likely tokens first
        sorted_logits = np.take_along_axis(logits, order, axis=1)[:, : self.top_k].astype(np.float64)
        shares = np.exp((sorted_logits - sorted_logits[:, :1]) / self.temperature)
        shares /= shares.sum(axis=1, keepdims=True)
        before = np.cumsum(shares, axis=1) - shares
        if self.top_p is not None:
            shares[before >= self.top_p] = 0  # keep the most likely tokens that together reach top_p
        ends = np.cumsum(shares, axis=1)
        drawn = self.random.random((len(logits), 1)) * ends[:, -1:]
        places = np.minimum((ends <= drawn).sum(axis=1), (shares > 0).sum(axis=1) - 1)
        return np.take_along_axis(order, places[:, None], axis=1)[:, 0]

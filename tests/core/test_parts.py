"""Parts of a larger call: they drop what the whole drops, wherever their queries, keys and heads stand in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relskew_core import merge_attention, relative_attention
from relskew_core._functions.attention import attend
from relskew_core._kernel.call import Arguments, Part
from relskew_core._kernel.problem import problem

Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 3, 4, 12, 5))  # two leading axes, four heads
DROPPED: dict[str, Any] = {"dropout": 0.5, "seed": 7}


def attended(q: Any, k: Any, v: Any, part: Part, **options: Any) -> tuple[Any, Any]:
    out, lse = attend(problem(Arguments(q, k, v, **DROPPED, **options), return_lse=True, part=part), "portable")
    return out, lse


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("step", [1, 3])
def test_queries_and_keys(step: int, offset: int, chunk_size: int | None) -> None:
    """Neighbours, or every so many-th."""
    whole = relative_attention(Q, K, V, **DROPPED, offset=offset, impl="portable")
    shares = [slice(start, None, 3) if step == 3 else slice(4 * start, 4 * start + 4) for start in range(3)]
    for own in shares:
        parts = []
        for other in shares:
            part = Part(of_more=True, query=(own.start or 0) + offset, key=other.start or 0, step=step)
            keys = (x[..., other, :] for x in (K, V))
            parts.append(attended(Q[..., own, :], *keys, part, chunk_size=chunk_size))
        out, _ = merge_attention(*zip(*parts, strict=True))
        np.testing.assert_allclose(out, whole[..., own, :], rtol=0, atol=1e-13)


def test_heads() -> None:
    whole = relative_attention(Q, K, V, **DROPPED, impl="portable")
    for own in (slice(0, 2), slice(2, 3), slice(3, 4)):
        x = (each[..., own, :, :] for each in (Q, K, V))
        out, _ = attended(*x, Part(head=own.start, heads=4))
        np.testing.assert_array_equal(out, whole[..., own, :, :])

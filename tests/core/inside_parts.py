"""Parts of a larger call: they drop the same weights as the whole, at any position of queries, keys and heads."""

from typing import Any

import numpy as np
import pytest

from relskew_core import relative_attention
from relskew_core._functions.attention import attend
from relskew_core._kernel.call import Arguments, Part
from relskew_core._kernel.merge import merged
from relskew_core._kernel.problem import problem

SEQUENCES: Any = np.random.default_rng(0).standard_normal((3, 2, 3, 4, 12, 5))  # two leading axes, four heads
Q, K, V = SEQUENCES
DROPPED: dict[str, Any] = {"dropout": 0.5, "seed": 7}


def attended(x: list[Any], part: Part, **options: Any) -> tuple[Any, Any]:
    q, k, v = x
    return attend(problem(Arguments(q, k, v, **DROPPED, **options), return_lse=True, part=part), "portable")


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_parts_of_queries_and_keys_drop_what_the_whole_drops(step: int, offset: int, chunk_size: int | None) -> None:
    """Neighbours, or every so many-th."""
    whole: Any = relative_attention(Q, K, V, **DROPPED, offset=offset, impl="portable")
    starts = range(0, 12, 4) if step == 1 else range(step)
    shares = [slice(start, start + 4 if step == 1 else None, step) for start in starts]
    for own in shares:
        parts = []
        for other in shares:
            part = Part(of_more=True, query=own.start + offset, key=other.start, step=step)
            x = [Q[..., own, :], K[..., other, :], V[..., other, :]]
            parts.append(attended(x, part, chunk_size=chunk_size))
        out, _ = merged(*zip(*parts, strict=True), xp=np)
        np.testing.assert_allclose(out, whole[..., own, :], rtol=0, atol=1e-13)


def test_parts_of_heads_drop_what_the_whole_drops() -> None:
    whole: Any = relative_attention(Q, K, V, **DROPPED, impl="portable")
    for own in (slice(0, 2), slice(2, 3), slice(3, 4)):
        out, _ = attended([each[..., own, :, :] for each in (Q, K, V)], Part(head=own.start, heads=4))
        np.testing.assert_array_equal(out, whole[..., own, :, :])

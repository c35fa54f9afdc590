"""Functions that are no operator of torch, exported for other sizes than those of the example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from relskew_core import (
    Span,
    attention_weights,
    relative_attention,
    relative_attention_2d,
    relative_attention_nd,
    relative_logits,
    relative_values,
    skew,
    toeplitz,
    unskew,
)
from torch_exports import VARY, assert_same, export, random, session

TABLE, NUMBERS, BY_HEAD = random(4, 6), random(4), random(4, 23, 6)
LONG, BOTH, CLIP, ZERO, FULL = random(4, 24, 6), random(23, 23), Span(2, 1, "clip"), Span(1, 2, "zero"), Span.full(12)
SQUARE = {0: VARY, 2: VARY}


class Pieces(nn.Module):
    """Each function by each end of a table: what a length decides elsewhere, nothing may decide here."""

    def forward(self, q: Tensor, k: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        n, m = q.shape[2], k.shape[2]
        weights = attention_weights(q, k, TABLE, CLIP, offset=0, sinks=NUMBERS)
        return (
            relative_logits(q, BY_HEAD, FULL, n_keys=m, offset=0),
            relative_logits(q, TABLE, ZERO, n_keys=m, offset=0, causal=True),
            relative_logits(k, TABLE, CLIP, n_queries=n, offset=3, side="key"),
            relative_logits(q, TABLE, CLIP, n_keys=m, offset=offsets),
            toeplitz(NUMBERS, ZERO, n_queries=n, n_keys=m, offset=1, causal=True) + 0 * offsets[0],
            weights,
            skew(unskew(weights)),
            relative_values(weights, BY_HEAD, FULL, offset=0),
            relative_values(weights, TABLE, CLIP, offset=1, causal=True),
        )


def pieces(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    return random(batch, 4, queries, 6, seed=1), random(batch, 4, keys, 6, seed=2), torch.arange(batch) * 2


def test_pieces_of_attention() -> None:
    model = Pieces()
    run = session(export(model, pieces(2, 5, 7), {"q": SQUARE, "k": SQUARE, "offsets": {0: VARY}}, 18))
    for shape in ((2, 5, 7), (1, 1, 1), (3, 1, 8), (2, 12, 1), (1, 12, 12)):
        assert_same(run(*pieces(*shape)), model, *pieces(*shape))
    past = run(*pieces(1, 13, 4))  # one row past a table with beyond="error": the results must be obviously wrong
    assert [bool(np.isnan(result).any()) for result in past] == [index in (0, 7) for index in range(9)]


class Grid(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        grids: dict[str, Any] = {"q_grid": tuple(q.shape[2:4]), "k_grid": tuple(q.shape[2:4])}
        q, k = q.flatten(2, 3), k.flatten(2, 3)
        both: dict[str, Any] = {**grids, "rel_bias": BOTH, "window": ((1, 2), (0, None))}
        near: Any = relative_attention_2d(q, k, k, *BY_HEAD[:2], **both, return_lse=True)
        shifted: Any = relative_attention_2d(q, k, k, **grids, rel_bias=BOTH, neighborhood=(1, 1))
        deep: dict[str, Any] = {name: (1, *sides) for name, sides in grids.items()}
        of_three: Any = relative_attention_nd(q, k, k, (None, *BY_HEAD[:2]), **deep, rel_bias=BOTH[..., None, :, :])
        return (*near, shifted, of_three)


def test_grids() -> None:
    def grids(batch: int, *sides: int) -> tuple[Tensor, Tensor]:
        return random(batch, 4, *sides, 6, seed=1), random(batch, 2, *sides, 6, seed=2)

    model, vary = Grid(), {0: VARY, 2: VARY, 3: VARY}
    run = session(export(model, grids(2, 2, 3), {"q": vary, "k": vary}, 23))
    for shape in ((2, 2, 3), (1, 1, 1), (3, 5, 1), (1, 4, 12)):
        assert_same(run(*grids(*shape)), model, *grids(*shape))


class Offsets(nn.Module):
    def forward(self, q: Tensor, k: Tensor, by_item: Tensor, of_all: Tensor) -> tuple[Any, ...]:

        return (
            relative_attention(q, k, k, TABLE, CLIP, rel_v=TABLE, offset=by_item),
            relative_attention(q, k, k, LONG, Span.causal(24), causal=True, offset=by_item),
            relative_attention(q, k, k, TABLE, CLIP, block_size=3, blocks_before=1, offset=of_all),
            relative_attention(q, k, k, LONG, Span.causal(24), causal=True, offset=of_all.int()),
        )


@pytest.mark.parametrize("opset", [18, 23])
def test_offsets_that_are_arrays(opset: int) -> None:
    def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
        return (*pieces(batch, queries, keys)[:2], torch.arange(batch) * 2, torch.tensor(batch))

    model = Offsets()
    vary: dict[str, Any] = {"q": SQUARE, "k": SQUARE, "by_item": {0: VARY}, "of_all": None}
    run = session(export(model, inputs(2, 5, 7), vary, opset))
    for shape in ((2, 5, 7), (1, 1, 1), (3, 1, 8), (2, 12, 1)):
        assert_same(run(*inputs(*shape)), model, *inputs(*shape))


def test_a_table_of_integers_that_has_to_reach_is_refused() -> None:
    class Buckets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return toeplitz(torch.arange(5), n_queries=x.shape[0], n_keys=x.shape[0])

    with pytest.raises(ValueError, match="a table of integers with beyond='error'"):
        torch.export.export(Buckets(), (random(2),), dynamic_shapes={"x": {0: VARY}})

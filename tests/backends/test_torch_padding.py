"""Batches whose masks hide keys from all queries of an item, at the ends or between others."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dense
from libraries import NATIVE, needs_kernels
from relskew_core import Span, relative_attention

LENGTH, KEPT = 24, [(0, 24), (0, 20), (5, 24), (3, 9), (0, 0), (0, 20), (0, 20)]
GENERATOR = torch.Generator().manual_seed(0)

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True, "offset": -2},
    "window": {"window": (4, 2)},
    "blocks": {"block_size": 4, "blocks_before": 1},
    "documents": {"segments": torch.arange(LENGTH) // 7},
    "documents by item": {"segments": torch.arange(7 * LENGTH).reshape(7, LENGTH) // 5},
    "positions": {"positions": (torch.arange(LENGTH) * 2, torch.arange(LENGTH).flip(0)), "causal": True},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout": 0.3, "seed": 1},
}


def visible(holes: bool, kept: Sequence[tuple[int, int]] = KEPT) -> Tensor:
    """Return which keys items keep, (7, 1, 1, 24)."""
    keys = torch.arange(LENGTH)
    rows = torch.stack([(keys >= first) & (keys < end) for first, end in kept])
    return (rows & (keys % 5 != 1) if holes else rows)[:, None, None]


CASE = dense.Case("padded", n=LENGTH, m=LENGTH, lead=(7,), heads=4, kv_heads=2, span=Span.clipped(4),
                  tables="rel_k rel_v rel_bias")  # fmt: skip


def results(mask: Tensor, impl: Any, dtype: str, **options: Any) -> list[Any]:
    arrays, d_out = {**CASE.arrays(dtype), "mask": mask.numpy()}, CASE.d_out().astype(dtype)
    attend = partial(relative_attention, span=CASE.span, impl=impl, chunk_size=5, return_lse=True, **options)
    out, lse, gradients = dense.differentiated(attend, arrays, d_out, d_out[..., 0])
    return [out, lse, *gradients.values()]


MASKS = {
    "ends alone": visible(holes=False),
    "holes": visible(holes=True),
    "no keys": visible(holes=False, kept=[(0, 0)]),
}


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_padding_is_what_the_portable_code_makes_of_it(mask: Tensor, kind: Any, options: dict[str, Any]) -> None:
    """Also of an item that keeps no key, by the compiled kernels, which take no call of no keys."""
    for dtype, gate in (("float64", 1e-11), ("float32", 1e-4)):
        added = torch.linspace(-1, 1, LENGTH, dtype=getattr(torch, dtype))
        given = torch.where(mask, added, -torch.inf) if kind == "additive" else mask
        expected = results(given, "portable", dtype, **options)
        for impl in ("auto", NATIVE):
            found = results(given, impl, dtype, **options)
            torch.testing.assert_close(found, expected, rtol=0, atol=gate)
            assert not found[0][4].any()
            assert (found[1][4] == -torch.inf).all()


@pytest.mark.parametrize("length", [LENGTH, 200])
@pytest.mark.parametrize("label", ["none", "segments", "positions"])
def test_an_item_may_keep_no_key_of_those_that_are_kept_by_column(length: int, label: str) -> None:
    attend: Callable[..., Any] = relative_attention
    places = torch.arange(length)
    options: dict[str, Any] = {} if label == "none" else {label: (places // 3, places // 3)}
    q, v = torch.randn(2, 3, 2, length, 8, generator=GENERATOR)
    k = torch.randn(3, 2, 8, length, generator=GENERATOR).mT
    mask = (places < torch.tensor([[length], [0], [5]]))[:, None, None]

    def both(impl: Any) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*given, mask=mask, impl=impl, **options)
        return [out, *torch.autograd.grad(out.sin().sum(), given), attend(q, k, v, mask=mask, impl=impl, **options)]

    torch.testing.assert_close(both("auto"), both("portable"), rtol=0, atol=1e-5)


def test_an_empty_cache_may_have_any_steps() -> None:
    """Where a call alike, of one query, is known to be one for the compiled kernels."""
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 4, 3).mT
    for keys in (3, 0, 3):
        out, lse = relative_attention(q, k[..., :keys, :], k[..., :keys, :], return_lse=True)
        assert bool(out.any()) == bool(torch.all(lse > -torch.inf)) == (keys > 0)


@needs_kernels
@pytest.mark.parametrize("n", [2, LENGTH], ids="{} queries".format)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("ends", [True, False], ids=["ends of items", "keys between others, of all items"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_keys_and_values_of_padding_may_be_anything(n: int, kind: Any, ends: bool, dtype: torch.dtype) -> None:
    """Those at the ends are left out, where they would reach sums as 0 · NaN; of the others only values do so."""
    kept = MASKS["ends alone"] if ends else (torch.arange(LENGTH) % 3 != 1)[None, None, None]
    mask = kept if kind == "boolean" else torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, -torch.inf)
    table = torch.randn(9, 8, generator=GENERATOR).to(dtype)

    def found(poison: float) -> list[Tensor]:
        GENERATOR.manual_seed(0)
        q = torch.randn(7, 2, n, 8, generator=GENERATOR).to(dtype).requires_grad_()
        k, v = torch.randn(2, 7, 2, LENGTH, 8, generator=GENERATOR).to(dtype)
        k, v = k.masked_fill(~kept.mT, poison), v.masked_fill(~kept.mT, poison if ends else 0.0)
        given = [q, k.requires_grad_(), v.requires_grad_(), table.clone().requires_grad_()]
        q, k, v, rel_k = given
        out: Any = relative_attention(q, k, v, rel_k, Span.clipped(4), mask=mask, offset=LENGTH - n, impl=NATIVE)
        return [out, *(torch.autograd.grad(out.sum(), given) if ends else ())]

    expected = found(0.0)
    for poison in (torch.nan, torch.inf, -torch.inf):
        torch.testing.assert_close(found(poison), expected, rtol=0, atol=0)

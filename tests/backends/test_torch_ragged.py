"""torch on CPU: ragged batches, worked off as a call for each offset."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from libraries import NATIVE
from relskew_core import Span, relative_attention, relative_attention_vjp

OFFSETS = [3, -4, -4, 0, 9, -30]
LENGTH, KEYS = 11, 14
CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2), "causal": False},
    "softcap": {"softcap": 2.0, "causal": True},
    "segments": {"segments": (torch.arange(LENGTH) // 4, torch.arange(6 * KEYS).reshape(6, KEYS) // 5)},
    "padded": {"mask": (torch.arange(KEYS) >= torch.arange(6)[:, None])[:, None, None], "causal": True},
    "mask": {"mask": torch.linspace(-1, 1, LENGTH * KEYS, dtype=torch.float64).reshape(LENGTH, KEYS)},
    "blocks": {"block_size": 4},
    "whole blocks": {"block_size": 3, "blocks_before": 2, "window": (7, 1)},
    "dropout": {"dropout": 0.4, "seed": 3, "causal": True},
    "blocks, dropout": {"block_size": 4, "dropout": 0.3, "seed": 5},
    "mask by item": {"mask": torch.linspace(-1, 1, 6 * KEYS, dtype=torch.float64).reshape(6, 1, 1, KEYS)},
}


TWO_AXES: dict[str, dict[str, Any]] = {
    f"two axes, keys of {'each item' if lead else 'all'}": {
        "mask": torch.linspace(-1, 1, math.prod(rows) * KEYS, dtype=torch.float64).reshape(*rows, 1, 1, KEYS),
        "segments": (torch.arange(LENGTH) // 4, (torch.arange(math.prod(lead) * KEYS) // 5 % 4).reshape(*lead, KEYS)),
        "causal": True,
    }
    for lead, rows in (((), (3,)), ((2, 3), (2, 1)))
}  # fmt: skip


def arrays(lead: tuple[int, ...] = (6,)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return {
        "q": draw(*lead, 4, LENGTH, 3), "k": draw(*lead, 2, KEYS, 3), "v": draw(*lead, 2, KEYS, 5),
        "rel_k": draw(4, 9, 3), "rel_v": draw(9, 5), "rel_bias": draw(4, 9), "key_table": draw(9, 3),
    }  # fmt: skip


def by_autograd(impl: Any, given: dict[str, Any], **options: Any) -> list[Tensor]:
    options = {name: x.clone().requires_grad_() if is_additive(x) else x for name, x in options.items()}
    out, lse = relative_attention(**given, span=Span.clipped(4), return_lse=True, impl=impl, **options)
    wanted = [*given.values(), *(x for x in options.values() if is_additive(x))]
    seen = lse > -torch.inf
    return [out, lse, *torch.autograd.grad(out.sin().sum() + lse[seen].cos().sum(), wanted)]


def is_additive(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


@pytest.mark.parametrize("name", [*CALLS, *TWO_AXES])
def test_ragged_batches_are_what_the_portable_code_makes_of_them(name: str) -> None:
    lead, options = ((6,), CALLS[name]) if name in CALLS else ((2, 3), TWO_AXES[name])
    given, offsets = arrays(lead), torch.tensor(OFFSETS).reshape(lead)
    known: Any = OFFSETS if name in CALLS else offsets
    results = [by_autograd(impl, given, offset=known, **options) for impl in (NATIVE, "portable")]
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)
    out, lse = (x.detach() for x in results[1][:2])
    call: dict[str, Any] = {name: x.detach() for name, x in given.items()}
    call |= {"span": Span.clipped(4), "offset": offsets, **options}
    of_forward: dict[str, Any] = {"out": out, "lse": lse, "d_lse": lse.nan_to_num(0, 0, 0).cos()}
    for more in ({}, of_forward):
        found = [relative_attention_vjp(out.sin(), **call, **more, impl=impl) for impl in (NATIVE, "portable")]
        torch.testing.assert_close(*found, rtol=0, atol=1e-11)


def test_ragged_batches_of_half_precision_equal_the_portable_code() -> None:
    half: dict[str, Any] = {name: x.detach().to(torch.bfloat16) for name, x in arrays().items()}
    options: dict[str, Any] = {"span": Span.clipped(4), "offset": OFFSETS, "causal": True}
    found, expected = (relative_attention(**half, **options, impl=impl) for impl in (NATIVE, "portable"))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    single: dict[str, Any] = {name: x.detach().float() for name, x in arrays().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = relative_attention(**single, **options, impl=NATIVE)
    assert isinstance(out, Tensor)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, found, rtol=0.05, atol=0.05)


def test_blocks_of_an_item_whose_queries_follow_its_keys_are_refused_by_name() -> None:
    q, k, v = (x.detach() for x in list(arrays((2,)).values())[:3])
    options: dict[str, Any] = {"offset": [0, KEYS], "block_size": 12}
    with pytest.raises(ValueError, match="take `block_size` with no `offset` past the keys"):
        relative_attention(q, k, v, impl="native", **options)
    found, expected = (relative_attention(q, k, v, impl=impl, **options) for impl in ("auto", "portable"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)

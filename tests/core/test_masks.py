"""Additive masks of zeros and ones, which hide nothing: a warning where their values are known at no cost."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from libraries import Library
from relskew_core import BlockSpec, Span, attention_weights, relative_attention, relative_attention_2d
from relskew_core.layers.torch import MultiheadAttention, RelativeMultiheadAttention

N = 6
FUTURE = np.tril(np.ones((N, N)))
PADDING = np.stack([np.ones((1, 1, N)), np.ones((1, 1, N)) * (np.arange(N) < 4)])
HARMLESS = {
    "zeros": 0 * FUTURE,
    "ones": 0 * FUTURE + 1,
    "infinite": np.where(FUTURE == 0, -np.inf, 0.0),
    "finite": np.where(FUTURE == 0, -1e9, 0.0),
    "other numbers": FUTURE * 0.5,
    "mixed": FUTURE + np.where(np.arange(N) == 3, -np.inf, 0.0),
}


def warned(call: Any) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


def test_ones_that_would_hide_nothing_warn(library: Library) -> None:
    """In libraries whose numbers are in memory."""
    silent = library.traced or library.gpu or library.module in ("dask", "array_api_strict")
    for mask in (FUTURE, FUTURE[None, None], PADDING):
        arrays = {name: library.asarray(np.ones((2, 1, N, 4)), "float32") for name in "qkv"}
        arrays["mask"] = library.asarray(mask, "float32")
        found = warned(lambda arrays=arrays: library.call(relative_attention, arrays))
        if not silent:
            (message,) = found
            assert str(message.message).startswith("`mask` has the numbers 0 and 1 alone, which are added")
            assert message.filename == __file__ or "libraries.py" in message.filename
        assert len(found) == (not silent)


@pytest.mark.parametrize("name", HARMLESS)
def test_other_masks_do_not_warn(name: str) -> None:
    q = np.ones((2, 1, N, 4))
    assert not warned(lambda: relative_attention(q, q, q, mask=HARMLESS[name]))
    assert not warned(lambda: relative_attention(q, q, q, mask=FUTURE == 1))


@pytest.mark.parametrize("n", [300, 3000])
def test_of_large_masks_a_part_is_read(n: int) -> None:
    q = np.ones((n, 2))
    hidden = np.zeros((1, n))
    hidden[0, :5] = 1.0
    for mask in (np.tril(np.ones((n, n))), hidden):
        (message,) = warned(lambda mask=mask: relative_attention(q, q, q, mask=mask))
        way_out = "pass a boolean mask, which is True where a query may attend, as `mask == 1`"
        assert str(message.message).endswith(f"hide nothing: {way_out}")


def test_every_function_with_a_mask_warns() -> None:
    q, mask, x = np.ones((1, N, 4)), FUTURE, torch.ones(2, N, 8)
    grids: dict[str, Any] = {"q_grid": (3, 2), "k_grid": (3, 2)}
    module = RelativeMultiheadAttention(BlockSpec(8, 2, Span.clipped(3)))
    other = MultiheadAttention(8, 2, Span.clipped(3), batch_first=True)
    own = torch.as_tensor(FUTURE, dtype=torch.float32)
    for call in (lambda: attention_weights(q, q, mask=mask), lambda: relative_attention_2d(q, q, q, mask=mask, **grids),
                 lambda: module(x, mask=own), lambda: other(x, x, x, attn_mask=own, need_weights=False)):  # fmt: skip
        (message,) = warned(call)
        assert message.filename == __file__


def test_biases_that_become_masks_do_not_warn() -> None:
    q, bias = np.ones((1, N, 4)), np.eye(5, 3)
    grids: dict[str, Any] = {"q_grid": (3, 2), "k_grid": (3, 2)}
    for _ in range(2):
        assert not warned(lambda: relative_attention_2d(q, q, q, rel_bias=bias, **grids))
        assert not warned(lambda: relative_attention_2d(q, q, q, rel_bias=bias, **grids, window=((1, 1), (1, 1))))


def test_traced_masks_do_not_warn() -> None:
    q, mask = torch.ones(1, N, 4), torch.as_tensor(FUTURE, dtype=torch.float32)

    def attend(mask: Any) -> Any:
        return relative_attention(q, q, q, mask=mask)

    compiled: Any = torch.compile(attend, backend="eager", fullgraph=True)
    mapped: Any = torch.func.vmap(attend)
    assert not warned(lambda: compiled(mask))
    assert not warned(lambda: mapped(mask[None]))
    counter: Any = FlopCounterMode  # has no types
    with counter(display=False):
        assert not warned(lambda: attend(mask))

"""torch's autocast regions, in every public function, with each of its parameters."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import relskew_core
from public_calls import arguments, cases

EXACT = {"deberta_buckets", "merge_attention", "proximal_bias", "alibi_bias", "resize_table", "sinusoidal_table",
         "skew", "t5_buckets", "toeplitz", "toeplitz_2d", "toeplitz_nd", "unskew"}  # fmt: skip
"""Functions that move or make numbers, which a region leaves as they are."""

SUMS = ("lse", "d_lse")
"""Arrays that have the dtype of sums."""


def to(dtype: torch.dtype, given: Any) -> Any:
    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return tree_map_only(torch.Tensor, cast, given)


def without_region(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x if name in SUMS else to(torch.bfloat16, x) for name, x in given.items()}


@pytest.mark.parametrize(("name", "option"), cases())
def test_arrays_are_cast_as_for_attention_on_sequences(name: str, option: str) -> None:
    """All in float32, or queries and keys as a linear layer of the region returns them and parameters as they are."""
    function, given = getattr(relskew_core, name), arguments(name, option, 7)
    sequences = {key: x for key, x in given.items() if key in ("q", "k", "v", "k_pages", "v_pages", "x", "weights")}
    expected = function(**(given if name in EXACT else without_region(given)))
    for mixed in ({}, {} if name in EXACT else to(torch.bfloat16, sequences)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = function(**{**given, **mixed})
        if name == "relative_attention_vjp":  # gradients have the dtype of their arrays
            torch.testing.assert_close(to(torch.bfloat16, found), expected)
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradients_leave_the_region_in_the_dtype_of_the_arrays() -> None:
    q, table = torch.randn(2, 6, 4), torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = relskew_core.relative_attention_2d(q, q, q, table, table, q_grid=(3, 2), k_grid=(3, 2))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert table.grad is not None
    assert table.grad.dtype == torch.float32

"""Tensors of a call that follow from its sizes alone, and that no module holds.

A buffer of them would need a device and a dtype of the weights, which may be on "meta" or offloaded, and averages and
casts would change its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._functions.buckets import alibi_slopes, t5_buckets
from relskew_core._functions.tables import Direction, sinusoid_rates, sinusoids
from relskew_core._positions.span import Span
from relskew_core.backends._torch.transformations import is_transformed

Function = Callable[..., Tensor]


def kept(most: int) -> Callable[[Function], Function]:
    """Make a function keep its last results, but none that a transformation or a mode of torch takes part in.

    Such tensors may be fake or functional, and have no numbers for later calls.
    """

    def decorate(make: Function) -> Function:
        found: dict[Hashable, Tensor] = {}

        @wraps(make)
        def call(*key: Any) -> Tensor:
            if is_transformed():
                return make(*key)
            made = found.get(key)
            if made is None:
                with torch.inference_mode(False), torch.no_grad():  # training may use it next
                    made = make(*key)
                if type(made) is not Tensor:
                    return made
                if len(found) >= most:
                    found.clear()
                found[key] = made
            return made

        return call

    return decorate


@kept(64)
def buckets(
    left: int, right: int, num_buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    """Return T5's bucket of each relative position of a span."""
    rows = t5_buckets(
        Span(left, right), num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional
    )
    return torch.tensor(rows, dtype=torch.int64, device=device)


@kept(64)
def slopes(num_heads: int, first: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ALiBi's slopes of some of the heads."""
    return torch.tensor(alibi_slopes(num_heads)[first : first + count], dtype=dtype, device=device)


@kept(4)
def rows_of_sinusoids(span: Span, dim: int, direction: Direction, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a sinusoid for each relative position of a span."""
    rates = sinusoid_rates(dim, base=10000.0)
    return sinusoids(span, rates, "interleaved", direction, xp=xp, dtype=torch.float64).to(device=device, dtype=dtype)

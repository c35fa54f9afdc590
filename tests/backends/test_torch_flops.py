"""torch's counter of operations, which counts calls as its own attention."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from libraries import needs_kernels
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.layers.torch import RelativeMultiheadAttention

N, M, D, WIDE, ROWS = 40, 56, 8, 6, 11
CLIP = Span.clipped(5)
Q, K, V = torch.randn(2, 4, N, D), torch.randn(2, 2, M, D), torch.randn(2, 2, M, WIDE)
TABLE = torch.randn(ROWS, D)
WHOLE: dict[str, Any] = {"offset": 0}


def counted(options: dict[str, Any]) -> tuple[int, int]:
    """Return the operations of both passes."""
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    found = []
    with FlopCounterMode(display=False) as counter:
        out = relative_attention(q, k, v, **options)
        found.append(counter.get_total_flops())
        out.sum().backward()
        found.append(counter.get_total_flops() - found[0])
    return found[0], found[1]


PAIRS, QUERIES = 2 * 4 * N * M, 2 * 4 * N
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "plain": (WHOLE, PAIRS, 0, 0),
    "causal, as torch": (WHOLE | {"causal": True}, PAIRS, 0, 0),
    "window": (WHOLE | {"window": (3, 1)}, QUERIES * 5, 0, 0),
    "table": (WHOLE | {"rel_k": TABLE, "span": CLIP}, PAIRS, QUERIES * ROWS * D, 0),
    "long table": ({"offset": 0, "rel_k": torch.randn(599, D)}, PAIRS, QUERIES * (N + M - 1) * D, 0),
    "table of values": (WHOLE | {"rel_v": TABLE[:, :WIDE], "span": CLIP}, PAIRS, 0, QUERIES * ROWS * WIDE),
    "table of keys": (WHOLE | {"key_table": TABLE, "span": CLIP}, PAIRS, 2 * 2 * M * ROWS * D, 0),
}


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_both_passes_count_their_products(name: str) -> None:
    options, pairs, of_logits, of_values = CASES[name]
    logits, values = pairs * D + of_logits, pairs * WIDE + of_values
    assert counted(options) == (2 * (logits + values), 2 * (3 * logits + 2 * values))


def test_a_call_without_positions_counts_as_torch_s() -> None:
    shapes = Q.shape, (2, 4, M, D), (2, 4, M, WIDE)
    forward = sdpa_flop_count(*shapes)
    assert counted(WHOLE) == (forward, sdpa_backward_flop_count((2, 4, N, WIDE), *shapes))


def test_a_backward_pass_alone_counts_its_products() -> None:
    q = Q.clone().requires_grad_()
    out = relative_attention(q, K, V, **WHOLE)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == counted(WHOLE)[1]


def test_modules_count_their_attention() -> None:
    layer = RelativeMultiheadAttention(BlockSpec(8, 2, CLIP))
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(3, 7, 8))
    own = 2 * 3 * 2 * 7 * (2 * 7 * 4 + 11 * 4)
    assert counter.get_total_flops() == 4 * 2 * 3 * 7 * 8 * 8 + own

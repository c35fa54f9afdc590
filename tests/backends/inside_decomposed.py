"""Attention for exporters without a translation, against plain loops and the portable kernel."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from dense import each
from relskew_core import Span
from relskew_core._kernel.call import Operands
from relskew_core.backends._torch.decomposed import attention, banded, dense
from traced_calls import CASES

H, D = 4, 3
ZERO, CLIP = Span(2, 1, "zero"), Span(2, 1, "clip")


def drawing() -> Callable[..., Any]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def on(function: Any, *qkv: torch.Tensor, **options: Any) -> torch.Tensor:
    arrays = {name: options.pop(name) for name in Operands._fields if name in options}
    found: torch.Tensor = function(Operands(*qkv, **arrays), **options)
    return found


def formula(*qkv: torch.Tensor, **options: Any) -> oracles.Attention:
    given = {"span": Span(0, 0, "zero"), **dict(zip("qkv", qkv, strict=True)), **options}
    arrays: dict[str, Any] = {
        name: each(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, x) for name, x in given.items()
    }
    return oracles.relative_attention(**arrays)


@pytest.mark.parametrize(("span", "mask"), [(None, "boolean"), (ZERO, None), (CLIP, "additive")])
@pytest.mark.parametrize("window", [(0, 0), (3, 1), (0, 9), (40, 20)])
@pytest.mark.parametrize("length", [1, 9, 40])
def test_banded(length: int, window: tuple[int, int], span: Span | None, mask: str | None) -> None:
    """Blocks of queries with the keys around them, of which padding is hidden."""
    draw = drawing()
    qkv = draw(2, H, length, D), draw(2, H // 2, length, D), draw(2, H // 2, length, D)
    options: dict[str, Any] = {"window": window}
    if span is not None:
        options |= {"span": span, "rel_k": draw(H, span.rows, 2), "rel_bias": draw(H, span.rows)}
        options |= {"rel_q": draw(2, H, length, 2), "rel_scale": 0.3}
    hidden = draw(2, 1, 1, length)
    hidden[..., 0] = 1.0
    if mask is not None:
        options["mask"] = hidden if mask == "additive" else hidden > 0
    want = formula(*qkv, **options)
    got = on(banded, *qkv, **{"rel_k": None, "span": None, **options}).numpy()
    seen = np.isfinite(want.lse)[..., None]  # the output of a query that only sees padding is not used
    assert oracles.relative_error(got * seen, want.out * seen) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_every_option_has_the_numbers_of_the_portable_kernel(name: str) -> None:
    case = CASES[name]
    for sizes in case.sizes:
        given, options = case.operands(sizes, np.float64)
        operands = Operands(*(None if x is None else torch.from_numpy(x) for x in given))
        out, sums = attention(operands, options)
        wanted, total = case.promised(sizes, np.float64)
        np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-11, atol=1e-11)
        if options.return_lse:
            assert sums is not None
            np.testing.assert_allclose(sums.sum(-1).numpy(), total, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tables", [{"rel_k": (7, D)}, {"rel_v": (7, D)}, {"rel_bias": (H, 7)}, {"key_table": (7, D)}])
def test_visible_positions_without_a_row_give_nan(tables: dict[str, tuple[int, ...]]) -> None:
    """And hidden ones give nothing."""
    q, k, v = (torch.randn(2, H, 6, D) for _ in range(3))
    arrays = {name: torch.randn(shape) for name, shape in tables.items()}
    out = on(dense, q, k, v, span=Span(3, 3), window=(4, 3), **arrays)
    assert out.isnan().any(-1).any(1).tolist() == [[False] * 4 + [True] * 2] * 2
    assert on(dense, q, k, v, span=Span(3, 3), window=(3, 3), **arrays).isfinite().all()

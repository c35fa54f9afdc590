"""Attention over grids compared with the models' own modules, and with torch's attention without positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor

from benchmarks.runner import Benchmark, Call, Case, Record, as_time, distance
from relskew_core import relative_attention_2d

PLAIN, RELSKEW, MODULE = "torch's attention, no positions", "relskew", "the module's own code"
MODELS = {
    "SAM, 64 × 64": {"items": 1, "heads": 12, "width": 64, "side": 64, "tokens": 0},
    "SAM's windows, 14 × 14": {"items": 25, "heads": 12, "width": 64, "side": 14, "tokens": 0},
    "Swin's windows, 7 × 7, 64 of them": {"items": 64, "heads": 3, "width": 32, "side": 7, "tokens": 0},
    "Swin's windows, 7 × 7, 16 of them": {"items": 16, "heads": 6, "width": 32, "side": 7, "tokens": 0},
    "BEiT, 14 × 14 and a class token": {"items": 4, "heads": 12, "width": 64, "side": 14, "tokens": 1},
    "a bias of 64 × 64": {"items": 1, "heads": 12, "width": 64, "side": 64, "tokens": 0},
}


class OverGrids(Benchmark):
    """Calls with the sizes of models in float32, on one thread of torch."""

    page = "compiled.md"
    names = (PLAIN, RELSKEW, MODULE)
    measures = frozenset({"time", "memory"})
    tolerance = 1e-4
    legend = "Time and how many times that of the first column, and the memory of a call with its results.\n\n"
    small: ClassVar[Case] = {"items": 1, "heads": 1, "side": 4}

    def cases(self) -> Iterator[Case]:
        for (model, sizes), training in itertools.product(MODELS.items(), (False, True)):
            yield {"model": model, **sizes, "training": training}

    def prepare(self, case: Case, contender: str) -> Call:
        torch.manual_seed(0)
        items, heads, width, side, tokens = (case[x] for x in ("items", "heads", "width", "side", "tokens"))
        rows, lead = 2 * side - 1, (items, heads, tokens + side * side, width)
        attend: Any  # two functions of the tables
        if case["model"].startswith("SAM"):
            tables, attend = [torch.randn(rows, width) for _ in range(2)], (_by_products, _by_tables)
        else:
            tables, attend = (
                [torch.randn(heads, rows, rows), torch.randn(heads, 3)][: 1 + tokens],
                (_by_matrix, _by_bias),
            )
        arrays = [x.requires_grad_(case["training"]) for x in (*(torch.randn(lead) for _ in range(3)), *tables)]
        ways: dict[str, Any] = {
            PLAIN: lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v),
            MODULE: partial(attend[0], side), RELSKEW: partial(attend[1], side),
        }  # fmt: skip
        given = arrays[:3] if contender == PLAIN else arrays

        def call() -> Any:
            out = ways[contender](*given)
            return (out, *torch.autograd.grad(out, given, torch.ones_like(out))) if case["training"] else out

        return call

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        if contender != RELSKEW:
            return None
        expected: Any = self.prepare(case, MODULE)()
        return distance(result, expected)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            line = row.case["model"] + (", with backward" if row.case["training"] else "")
            ratio = "" if row.contender == PLAIN else f", {row.ratio:.2f}"
            yield line, row.contender, f"{as_time(row.cpu or 0.0)}{ratio}, {(row.bytes or 0) / 2**20:.0f} MiB"


def _by_tables(side: int, q: Tensor, k: Tensor, v: Tensor, high: Tensor, wide: Tensor) -> Any:
    return relative_attention_2d(q, k, v, high, wide, q_grid=(side, side), k_grid=(side, side), rel_scale=1.0)


def _by_bias(side: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, of_token: Tensor | None = None) -> Any:
    prefix = 0 if of_token is None else 1
    return relative_attention_2d(
        q, k, v, rel_bias=bias, prefix=(prefix, prefix), prefix_bias=of_token, q_grid=(side, side), k_grid=(side, side)
    )


def _by_products(side: int, q: Tensor, k: Tensor, v: Tensor, high: Tensor, wide: Tensor) -> Tensor:
    """Return SAM's attention: products with gathered rows of both tables, materialised and added to the logits."""
    places = torch.arange(side)
    apart = places - places[:, None] + side - 1  # the key's minus the query's
    queries = q.unflatten(-2, (side, side))
    down = torch.einsum("bnhwc,hkc->bnhwk", queries, high[apart])
    right = torch.einsum("bnhwc,wkc->bnhwk", queries, wide[apart])
    bias = (down[..., :, None] + right[..., None, :]).reshape(*q.shape[:-1], side * side)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _by_matrix(side: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, of_token: Tensor | None = None) -> Tensor:
    """Return Swin's and BEiT's attention: a bias gathered into a matrix, products, a softmax."""
    heads = bias.shape[0]
    matrix = bias.flatten(1).mT[_index(side)].unflatten(0, (side * side, side * side)).permute(2, 0, 1)
    if of_token is not None:
        matrix = torch.cat([of_token[:, 0].reshape(heads, 1, 1).expand(-1, side * side, 1), matrix], -1)
        first = torch.cat([of_token[:, 2:], of_token[:, 1:2].expand(-1, side * side)], -1)
        matrix = torch.cat([first[:, None], matrix], -2)
    weights = (q * q.shape[-1] ** -0.5) @ k.mT + matrix.contiguous()
    return weights.softmax(-1) @ v


@cache
def _index(side: int) -> Tensor:
    """Return the index of the bias for each pair of cells, which modules keep as a buffer."""
    cells = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
    apart = cells[:, None, :] - cells[:, :, None] + side - 1
    return (apart[0] * (2 * side - 1) + apart[1]).flatten()

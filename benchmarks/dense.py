"""Biases of layers, neighborhoods and pages compared with the matrices and gathered keys that are common today."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor

from benchmarks.page import as_time
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case, distance
from relskew_core import BlockSpec, Span, alibi_bias, paged_attention, relative_attention, relative_attention_2d
from relskew_core.layers.torch import RelativeMultiheadAttention

HEADS, DIM = 8, 64
WIDTH, REACH, REQUESTS, PAGE = HEADS * DIM, 64, 16, 16
SPECS: dict[str, BlockSpec] = {
    "`BlockSpec.alibi`": BlockSpec.alibi(WIDTH, HEADS, causal=True, bias=False),
    "`BlockSpec.t5`": BlockSpec.t5(WIDTH, HEADS, bias=False),
    "a layer with a learned bias": BlockSpec(
        WIDTH, HEADS, Span.clipped(REACH), rel_keys=False, rel_bias=True, bias=False
    ),
}
SIZES = {
    **dict.fromkeys(SPECS, 2048),
    "a neighborhood of 7 × 7 in a square": 48,
    f"`paged_attention`, {REQUESTS} requests": 1024,
}


class Dense(Benchmark):
    """Float32, one thread, causal unless the name says otherwise; by sides of squares, or keys of requests."""

    page = "options.md"
    names = ("dense", "relskew")
    measures = frozenset({"time", "memory"})
    tolerance = 1e-4
    seconds = 1.0
    forks = True
    small: ClassVar[Case] = {"length": 32}

    def cases(self) -> Iterator[Case]:
        for name, length in SIZES.items():
            backward = (False,) if "paged" in name else (False, True)
            yield from ({"what": name, "length": length, "backward": each} for each in backward)

    def prepare(self, case: Case, contender: str) -> Call:
        torch.manual_seed(0)
        name, length = case["what"], case["length"]
        make: Any = _layer if name in SPECS else _neighborhood if "neighborhood" in name else _pages
        function, arrays = make(name, length, contender == "relskew")
        if not case["backward"]:
            return torch.no_grad()(function)
        return lambda: torch.autograd.grad(function().square().sum(), arrays)

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        return None if first is None else distance(result, first)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            dense, relskew = (rows[name] for name in self.names)
            column = "with backward" if case["backward"] else "forward"
            line = f"{case['what']}, {case['length']}"
            yield line, column, f"{as_time(relskew.cpu or 0.0)} ({relskew.ratio or 0.0:.2f}×)"
            yield (
                line,
                f"memory, {column}",
                f"{(relskew.bytes or 0) / 2**20:.0f} of {(dense.bytes or 0) / 2**20:.0f} MiB",
            )


def _layer(name: str, length: int, relskew: bool) -> tuple[Callable[[], Tensor], Sequence[Tensor]]:
    """Return a layer, or its projections around attention with a bias that is a matrix by head."""
    spec = SPECS[name]
    layer = RelativeMultiheadAttention(spec)
    x = torch.randn(1, length, WIDTH)
    parameters = list(layer.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(std=0.05)
    if relskew:
        return lambda: layer(x), parameters

    def dense() -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=_matrix(name, layer, length))
        return layer.out_proj(out.transpose(1, 2).flatten(2))

    return dense, parameters


def _matrix(name: str, layer: Any, length: int) -> Tensor:
    relative = torch.arange(length) - torch.arange(length)[:, None]
    if "alibi" in name:
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        return (slopes[:, None, None] * relative).masked_fill(relative > 0, -torch.inf)[None]
    if "t5" in name:
        return F.embedding(_buckets(length), layer.rel_bias).permute(2, 0, 1)[None]
    return layer.rel_bias[:, relative.clamp(-REACH, REACH) + REACH][None]


@cache
def _buckets(length: int) -> Tensor:
    """Return T5's buckets of all pairs (Raffel et al. 2020), computed like its code."""
    relative = torch.arange(length) - torch.arange(length)[:, None]
    far = relative.abs()
    large = 8 + ((far.clamp(min=1).float() / 8).log() / torch.tensor(128 / 8).log() * 8).long()
    return 16 * (relative > 0) + torch.where(far < 8, far, large.clamp(max=15))


def _neighborhood(_: str, side: int, relskew: bool) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return attention to the 7 × 7 nearest cells, shifted at borders like NATTEN's, with a bias by cell."""
    q, k, v = (torch.randn(1, HEADS, side * side, DIM, requires_grad=True) for _ in range(3))
    bias = torch.randn(HEADS, 13, 13, requires_grad=True)
    if relskew:
        return lambda: relative_attention_2d(
            q, k, v, rel_bias=bias, q_grid=(side, side), k_grid=(side, side), neighborhood=(7, 7)
        ), [q, k, v, bias]  # fmt: skip
    place = torch.arange(side)
    start = (place - 3).clamp(0, side - 7)[:, None]
    near = (place >= start) & (place < start + 7)
    seen = (near[:, None, :, None] & near[None, :, None, :]).reshape(side * side, -1)
    apart = (place - place[:, None]).clamp(-6, 6) + 6
    index = (apart[:, None, :, None] * 13 + apart[None, :, None, :]).reshape(side * side, -1)

    def dense() -> Tensor:
        mask = bias.flatten(1)[:, index].masked_fill(~seen, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])

    return dense, [q, k, v, bias]


def _pages(_: str, longest: int, relskew: bool) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return a token's attention with ALiBi for every request, in pages or with gathered keys."""
    count = longest // PAGE
    pool = torch.randn(2, REQUESTS * count, PAGE, HEADS // 4, DIM)
    page_table = torch.randperm(REQUESTS * count).reshape(REQUESTS, count)
    lengths = torch.linspace(longest // 2, longest, REQUESTS).long()
    q, span = torch.randn(REQUESTS, HEADS, 1, DIM), Span.causal(longest)
    bias = alibi_bias(HEADS, span, like=q)
    if relskew:
        return partial(paged_attention, q, *pool, rel_bias=bias, span=span, page_table=page_table, lengths=lengths), []

    def gathered() -> Any:
        k, v = (x[page_table].flatten(1, 2).transpose(1, 2) for x in pool)
        return relative_attention(q, k, v, rel_bias=bias, span=span, causal=True, offset=lengths - 1)

    return gathered, []

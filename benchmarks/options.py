"""Options of a call, biases of layers, neighborhoods and pages, compared with masks, biases and gathers of today."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor

from benchmarks.runner import Benchmark, Call, Case, Record, as_time, distance, pivot
from benchmarks.textbook import attended, future, picked
from relskew_core import BlockSpec, Span, alibi_bias, paged_attention, relative_attention, relative_attention_2d
from relskew_core.layers.torch import RelativeMultiheadAttention

HEADS, DIM, REACH, DROPOUT, SOFTCAP = 8, 64, 64, 0.1, 30.0
LENGTHS = (1024, 4096)


class OptionInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor  # (2 · REACH + 1, D), clipped
    sinks: Tensor
    scale: Tensor
    documents: Tensor
    stamps: Tensor

    @classmethod
    def draw(cls, length: int, *, gradients: bool) -> OptionInputs:
        generator = torch.Generator().manual_seed(0)

        def floats(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).requires_grad_(gradients)

        sizes = [(1, HEADS, length, DIM)] * 3 + [(2 * REACH + 1, DIM), (HEADS,), (HEADS,)]
        stamps = torch.randint(0, 4, (length,), generator=torch.Generator().manual_seed(1)).cumsum(0)
        return cls._make([*(floats(*shape) for shape in sizes), torch.arange(length) * 64 // length, stamps])


def _rows(x: OptionInputs, stamps: Tensor | None = None) -> Tensor:
    steps = torch.arange(x.q.shape[-2]) if stamps is None else stamps
    return (steps[None, :] - steps[:, None]).clamp(-REACH, REACH) + REACH


def _bias(x: OptionInputs, hidden: Tensor, rows: Tensor, scale: Any = DIM**-0.5) -> Tensor:
    return picked(x.q * scale, x.table, rows).masked_fill(hidden, -torch.inf)


def _future(x: OptionInputs) -> Tensor:
    return future(x.q.shape[-2])


def _sdpa(x: OptionInputs, bias: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias, **options)


def _relskew(x: OptionInputs, **options: Any) -> Any:
    return relative_attention(x.q, x.k, x.v, x.table, Span.clipped(REACH), **options)


def _dense_sinks(x: OptionInputs) -> Tensor:
    logits = x.q @ x.k.mT * DIM**-0.5 + _bias(x, _future(x), _rows(x))
    sinks = x.sinks[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ x.v


def _dense_softcap(x: OptionInputs) -> Tensor:
    sums = x.q @ x.k.mT * DIM**-0.5 + picked(x.q * DIM**-0.5, x.table, _rows(x))
    return attended((sums / SOFTCAP).tanh() * SOFTCAP, x.v, _future(x))


def _dense_key_table(x: OptionInputs) -> Tensor:
    return _sdpa(x, picked(x.q * DIM**-0.5, x.table, _rows(x)) + picked(x.k * DIM**-0.5, x.table, _rows(x).mT).mT)


def _offsets(x: OptionInputs, offset: Any) -> Any:
    """Attend with the heads as items of the batch."""
    q, k, v = (y.movedim(1, 0) for y in (x.q, x.k, x.v))
    out: Any = relative_attention(q, k, v, x.table, Span.clipped(REACH), causal=True, offset=offset)
    return out.movedim(0, 1)


def _dense_offsets(x: OptionInputs) -> Tensor:
    steps = torch.arange(x.q.shape[-2])
    r = steps[None, :] - (steps + torch.arange(HEADS)[:, None])[..., None]
    return _sdpa(x, _bias(x, r > 0, r.clamp(-REACH, REACH) + REACH))


def _padding(x: OptionInputs) -> Tensor:
    return (torch.arange(x.q.shape[-2]) < x.q.shape[-2] * 7 // 8)[None, None, None]


def _dense_blocks(x: OptionInputs) -> Tensor:
    block = torch.arange(x.q.shape[-2]) // 128
    behind = block[:, None] - block[None, :]
    return _sdpa(x, _bias(x, (behind < 0) | (behind > 2), _rows(x)))


def _dense_positions(x: OptionInputs) -> Tensor:
    return _sdpa(x, _bias(x, x.stamps[None, :] > x.stamps[:, None], _rows(x, x.stamps)))


def _dense_scales(x: OptionInputs) -> Tensor:
    scale = x.scale[:, None, None]
    scaled = x._replace(q=x.q * scale)
    return F.scaled_dot_product_attention(
        scaled.q, x.k, x.v, attn_mask=_bias(scaled, _future(x), _rows(x), 1.0), scale=1.0
    )


@dataclass(frozen=True)
class Option:
    call: str
    relskew: Callable[[OptionInputs], Any]
    dense: Callable[[OptionInputs], Tensor]
    exact: bool = True  # whether both compute the same numbers


OPTIONS = {
    "none": Option(
        "causal alone", lambda x: _relskew(x, causal=True), lambda x: _sdpa(x, _bias(x, _future(x), _rows(x)))
    ),
    "sinks": Option("sinks=(H,)", lambda x: _relskew(x, causal=True, sinks=x.sinks), _dense_sinks),
    "softcap": Option("softcap=30", lambda x: _relskew(x, causal=True, softcap=SOFTCAP), _dense_softcap),
    "padding": Option(
        "mask=(B, 1, 1, L), not causal",
        lambda x: _relskew(x, mask=_padding(x)),
        lambda x: _sdpa(x, _bias(x, ~_padding(x), _rows(x))),
    ),
    "key_table": Option("key_table=(R, D), not causal", lambda x: _relskew(x, key_table=x.table), _dense_key_table),
    "offsets": Option("offset, by item", lambda x: _offsets(x, [*range(HEADS)]), _dense_offsets),
    "segments": Option(
        "segments, 64 documents",
        lambda x: _relskew(x, causal=True, segments=x.documents),
        lambda x: _sdpa(x, _bias(x, _future(x) | (x.documents[:, None] != x.documents), _rows(x))),
    ),
    "blocks": Option(
        "block_size=128, blocks_before=2", lambda x: _relskew(x, block_size=128, blocks_before=2), _dense_blocks
    ),
    "positions": Option(
        "positions, time stamps", lambda x: _relskew(x, causal=True, positions=(x.stamps, x.stamps)), _dense_positions
    ),
    "scale": Option("scale=(H,)", lambda x: _relskew(x, causal=True, scale=x.scale), _dense_scales),
    "dropout": Option(
        "dropout=0.1",
        lambda x: _relskew(x, causal=True, dropout=DROPOUT, seed=1),
        lambda x: _sdpa(x, _bias(x, _future(x), _rows(x)), dropout_p=DROPOUT),
        exact=False,
    ),
}


class OptionsOfCalls(Benchmark):
    """Every option at two lengths; memory at the longer one."""

    page = "options.md"
    names = ("relskew", "dense")
    tolerance = 1e-5
    seconds = 2.0
    small: ClassVar[Case] = {"length": 512}  # a small call that still takes the path of long ones, with kernels

    def cases(self) -> Iterator[Case]:
        for option in OPTIONS:
            for length in LENGTHS:
                yield from ({"option": option, "length": length, "backward": backward} for backward in (False, True))

    def prepare(self, case: Case, contender: str) -> Call:
        x = OptionInputs.draw(case["length"], gradients=case["backward"])
        function = getattr(OPTIONS[case["option"]], contender)
        if not case["backward"]:
            return lambda: function(x)
        d_out, wanted = torch.ones_like(x.v), [y for y in x if y.is_floating_point()]
        return lambda: torch.autograd.grad(function(x), wanted, d_out, allow_unused=True)

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        if first is None or not OPTIONS[case["option"]].exact:
            return None
        return distance(*([y for y in x if y is not None] if isinstance(x, tuple) else x for x in (result, first)))

    def measures_of(self, case: Case) -> set[str]:
        return {"time", "memory"} if case["length"] == LENGTHS[-1] else {"time"}

    def texts(self, record: Record) -> dict[str, str]:
        def cells() -> Iterator[tuple[str, str, str]]:
            for case, rows in record.by_case():
                relskew, dense, call = rows["relskew"], rows["dense"], OPTIONS[case["option"]].call
                line = call if case["option"] == "none" else f"`{call}`"
                size = f"{case['length']}{', with backward' if case['backward'] else ''}"
                one, other = relskew.fastest or 0.0, dense.fastest or 1.0
                yield line, f"L = {size}", f"{as_time(one)} ({one / other:.2f}×)"
                if relskew.bytes is not None and dense.bytes is not None:
                    yield line, f"memory at {size}", f"{relskew.bytes / 2**20:.0f} of {dense.bytes / 2**20:.0f} MiB"

        ordered = sorted(cells(), key=lambda cell: "memory" in cell[1])
        corner = "relskew, and its multiple of the dense mask"
        return {"": f"{record.where}\n\n{pivot(ordered, corner)}"}


WIDTH, REQUESTS, PAGE = HEADS * DIM, 16, 16
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

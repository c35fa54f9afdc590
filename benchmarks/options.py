"""Options of a call, compared with the dense masks that people write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor

from benchmarks.runner import Benchmark, Call, Case, Record, after, as_time, distance
from benchmarks.textbook import attended, future, picked
from relskew_core import Span, relative_attention

HEADS, DIM, REACH, DROPOUT, SOFTCAP = 8, 64, 64, 0.1, 30.0
LENGTHS = (1024, 4096)


def drawn(length: int, *, gradients: bool) -> Any:
    """Draw the arrays of all options, under their names."""
    generator, steps = torch.Generator().manual_seed(0), torch.arange(length)
    sizes: dict[str, tuple[int, ...]] = dict.fromkeys("qkv", (1, HEADS, length, DIM))
    sizes |= {"table": (2 * REACH + 1, DIM), "sinks": (HEADS,), "scale": (HEADS,)}
    floats = {name: torch.randn(size, generator=generator).requires_grad_(gradients) for name, size in sizes.items()}
    stamps = torch.randint(0, 4, (length,), generator=torch.Generator().manual_seed(1)).cumsum(0)
    padding = (steps < length * 7 // 8)[None, None, None]
    labels = {"documents": steps * 64 // length, "stamps": stamps, "steps": steps, "padding": padding}
    return SimpleNamespace(**floats, **labels, future=future(length))


def but(x: Any, **others: Tensor) -> Any:
    return SimpleNamespace(**vars(x) | others)


def _rows(keys: Tensor, queries: Tensor) -> Tensor:
    return (keys[None, :] - queries[:, None]).clamp(-REACH, REACH) + REACH


def _relative(x: Any, rows: Tensor | None = None) -> Tensor:
    return picked(x.q * DIM**-0.5, x.table, _rows(x.steps, x.steps) if rows is None else rows)


def _sums(x: Any) -> Tensor:
    return x.q @ x.k.mT * DIM**-0.5 + _relative(x)


def _sdpa(x: Any, hidden: Tensor | None = None, rows: Tensor | None = None, **options: Any) -> Tensor:
    bias = _relative(x, rows).masked_fill(x.future if hidden is None else hidden, -torch.inf)
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias, **options)


def _relskew(x: Any, **options: Any) -> Any:
    return relative_attention(x.q, x.k, x.v, x.table, Span.clipped(REACH), **options)


_causal = partial(_relskew, causal=True)


def _dense_sinks(x: Any) -> Tensor:
    logits = _sums(x).masked_fill(x.future, -torch.inf)
    sinks = x.sinks[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ x.v


def _offsets(x: Any) -> Any:
    """Attend with the heads as items of the batch."""
    items = but(x, q=x.q.movedim(1, 0), k=x.k.movedim(1, 0), v=x.v.movedim(1, 0))
    return _causal(items, offset=[*range(HEADS)]).movedim(0, 1)


def _dense_offsets(x: Any) -> Tensor:
    r = x.steps[None, :] - (x.steps + torch.arange(HEADS)[:, None])[..., None]
    return _sdpa(x, r > 0, r.clamp(-REACH, REACH) + REACH)


def _dense_key_table(x: Any) -> Tensor:
    bias = _relative(x) + picked(x.k * DIM**-0.5, x.table, _rows(x.steps, x.steps).mT).mT
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias)


def _dense_blocks(x: Any) -> Tensor:
    behind = (x.steps // 128)[:, None] - x.steps // 128
    return _sdpa(x, (behind < 0) | (behind > 2))


OPTIONS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "none": ("causal alone", _causal, _sdpa),
    "sinks": ("sinks=(H,)", lambda x: _causal(x, sinks=x.sinks), _dense_sinks),
    "softcap": ("softcap=30", lambda x: _causal(x, softcap=SOFTCAP),
                lambda x: attended((_sums(x) / SOFTCAP).tanh() * SOFTCAP, x.v, x.future)),
    "padding": ("mask=(B, 1, 1, L), not causal", lambda x: _relskew(x, mask=x.padding), lambda x: _sdpa(x, ~x.padding)),
    "key_table": ("key_table=(R, D), not causal", lambda x: _relskew(x, key_table=x.table), _dense_key_table),
    "offsets": ("offset, by item", _offsets, _dense_offsets),
    "segments": ("segments, 64 documents", lambda x: _causal(x, segments=x.documents),
                 lambda x: _sdpa(x, x.future | (x.documents[:, None] != x.documents))),
    "blocks": ("block_size=128, blocks_before=2", lambda x: _relskew(x, block_size=128, blocks_before=2),
               _dense_blocks),
    "positions": ("positions, time stamps", lambda x: _causal(x, positions=(x.stamps, x.stamps)),
                  lambda x: _sdpa(x, x.stamps[None, :] > x.stamps[:, None], _rows(x.stamps, x.stamps))),
    "scale": ("scale=(H,)", lambda x: _causal(x, scale=x.scale),
              lambda x: _sdpa(but(x, q=x.q * x.scale[:, None, None] * DIM**0.5))),
    "dropout": ("dropout=0.1", lambda x: _causal(x, dropout=DROPOUT, seed=1), lambda x: _sdpa(x, dropout_p=DROPOUT)),
}  # fmt: skip
"""Every option, as it is written, in relskew, and in its common form."""


class OptionsOfCalls(Benchmark):
    """Every option at two lengths; memory at the longer one."""

    page = "options.md"
    names = ("relskew", "dense")
    corner = "relskew, and its multiple of the dense mask"
    tolerance = 1e-5
    seconds = 2.0
    small: ClassVar[Case] = {"length": 512}  # a small call that still takes the path of long ones, with kernels

    def cases(self) -> Iterator[Case]:
        for option, length, backward in itertools.product(OPTIONS, LENGTHS, (False, True)):
            yield {"option": option, "length": length, "backward": backward}

    def prepare(self, case: Case, contender: str) -> Call:
        x = drawn(case["length"], gradients=case["backward"])
        function: Any = OPTIONS[case["option"]][1 + self.names.index(contender)]
        if not case["backward"]:
            return lambda: function(x)
        d_out, wanted = torch.ones_like(x.v), [y for y in vars(x).values() if y.is_floating_point()]
        return lambda: torch.autograd.grad(function(x), wanted, d_out, allow_unused=True)

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        if first is None or case["option"] == "dropout":  # whose numbers are others
            return None
        return distance(*([y for y in x if y is not None] if isinstance(x, tuple) else x for x in (result, first)))

    def measures_of(self, case: Case) -> set[str]:
        return {"time", "memory"} if case["length"] == LENGTHS[-1] else {"time"}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            relskew, dense, call = rows["relskew"], rows["dense"], OPTIONS[case["option"]][0]
            line = call if case["option"] == "none" else f"`{call}`"
            size = f"{case['length']}{after(case['backward'])}"
            one, other = relskew.fastest or 0.0, dense.fastest or 1.0
            yield line, f"L = {size}", f"{as_time(one)} ({one / other:.2f}×)"
            if relskew.bytes is not None and dense.bytes is not None:
                yield line, f"memory at {size}", f"{relskew.bytes / 2**20:.0f} of {dense.bytes / 2**20:.0f} MiB"

    def order(self, cell: tuple[str, str, str]) -> bool:
        return "memory" in cell[1]

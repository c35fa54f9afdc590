"""Random lives of a cache, against one pass: extended, taken back, reordered, copied, with empty pieces and traces."""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from layers.modules import SPECS, made
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuzz.engine import Target, same
from relskew_core import BlockSpec, Span

ROOM, BATCH = 24, 3
SPECS_OF_CACHES = {
    "table": BlockSpec(8, 4, Span.causal(ROOM), causal=True, num_kv_heads=2, rel_values=True, rel_bias=True),
    "clipped": BlockSpec(8, 2, Span(2, 0, "clip"), causal=True, rel_values=True),
    "alibi": BlockSpec.alibi(8, 4, causal=True),
    "t5": SPECS["t5, causal"],
}


class Example(NamedTuple):
    """A kind of block and of cache, and the steps: lengths to extend by or to take back, orders, copies, traces."""

    spec: str
    kind: str
    steps: list[tuple[str, Any]]

    def __str__(self) -> str:
        return f"{self.spec}, {self.kind}: {self.steps}"


@st.composite
def examples(draw: st.DrawFn) -> Example:
    sizes = st.integers(0, 5)
    step = st.one_of(st.tuples(st.just("extend"), sizes),
                     st.tuples(st.just("take back"), st.lists(sizes, min_size=BATCH, max_size=BATCH)),
                     st.tuples(st.just("reorder"), st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH)),
                     st.tuples(st.sampled_from(["copy", "trace"]), st.just(None)))  # fmt: skip
    kind = draw(st.sampled_from(["growing", "fixed", "by item", "sliding"]))
    return Example(draw(st.sampled_from(sorted(SPECS_OF_CACHES))), kind, draw(st.lists(step, min_size=1, max_size=10)))


@torch.no_grad()
def check(example: Example) -> None:
    spec, keep = SPECS_OF_CACHES[example.spec], 3
    module = made(spec).eval()
    whole = made(replace(spec, window=(keep, 0))).eval() if example.kind == "sliding" else module
    room: dict[str, Any] = {"growing": {}, "sliding": {"keep": keep}}.get(example.kind, {"length": ROOM})
    cache: Any = module.empty_cache(BATCH, **room)
    if example.kind == "by item":
        cache = cache._replace(length=torch.zeros(BATCH, dtype=torch.int64))
    items, generator = [torch.empty(0, 8, dtype=torch.float64)] * BATCH, torch.Generator().manual_seed(0)
    for name, how in example.steps:
        if name == "extend":
            x = torch.randn(BATCH, how, 8, generator=generator, dtype=torch.float64)
            if max(map(len, items)) + how > ROOM:
                continue
            y, cache = module(x, past=cache)
            items = [torch.cat([item, new]) for item, new in zip(items, x, strict=True)]
            for place, item in enumerate(items):
                want = whole(item[None])[0, len(item) - how :]
                same(f"item {place} after {name} {how}", y[place].numpy(), want.numpy(), 1e-11)
        elif name == "take back":
            cache, items = taken_back(cache, items, how, example.kind)
        elif name == "reorder":
            cache = type(cache)(*(x[how] if x.ndim else x for x in cache))
            items = [items[place] for place in how]
        elif name == "copy":
            cache = copy.deepcopy(cache)
        else:
            with FakeTensorMode(allow_non_fake_inputs=True):
                module(torch.zeros(BATCH, 1, 8, dtype=torch.float64), past=cache)


def taken_back(cache: Any, items: list[Tensor], counts: list[int], kind: str) -> tuple[Any, list[Tensor]]:
    """Forget the last positions: those of each item, or as many of all."""
    if kind == "sliding":  # older positions are gone
        return cache, items
    if kind != "by item":
        counts = counts[:1] * len(items)
    lengths = [max(0, len(item) - count) for item, count in zip(items, counts, strict=True)]
    items = [item[:length] for item, length in zip(items, lengths, strict=True)]
    if kind == "growing":
        return type(cache)(*(x[..., : lengths[0], :] for x in cache)), items
    length = torch.tensor(lengths if kind == "by item" else lengths[0], dtype=torch.int64)
    return cache._replace(length=length), items


TARGET = Target("caches", 20, examples(), check)

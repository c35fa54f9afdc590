"""Calls of every kind, by their shapes, and their gradients by autograd of the formula in ``oracles``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oracles import attention
from relskew_core import Span


def differentiated(
    function: Callable[..., Any], arrays: Mapping[str, Any], d_out: NDArray[Any], d_lse: NDArray[Any] | None = None,
    *, second: bool = False,
) -> tuple[Any, Any, dict[str, NDArray[Any]]]:  # fmt: skip
    """Return the results of a function of tensors, and the gradients of every floating one by torch's autograd.

    The second gradients are those of the squared first ones.
    """
    given: dict[str, Any] = {name: each(torch.tensor, x) for name, x in arrays.items()}
    wanted = [given[name].requires_grad_() for name in floating(arrays)]
    out, lse = function(**given)
    pulled = (out * torch.tensor(d_out)).sum()
    if d_lse is not None:  # the lse of queries that see nothing is -inf
        pulled = pulled + (torch.where(lse > -torch.inf, lse, 0.0) * torch.tensor(d_lse)).sum()
    found: Any = [torch.zeros_like(x) for x in wanted]
    if pulled.requires_grad:
        found = torch.autograd.grad(pulled, wanted, create_graph=second, materialize_grads=True)
    squared: Any = sum((x * x).sum() for x in found)
    if second and squared.requires_grad:
        found = torch.autograd.grad(squared, wanted, materialize_grads=True)
    gradients = dict(zip(floating(arrays), (x.detach().numpy() for x in found), strict=True))
    return out.detach().numpy(), lse.detach().numpy(), gradients


def vjp(d_out: NDArray[Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    return differentiated(partial(attention, **options), arrays, d_out)[2]


def each(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to an array, or to both of a pair."""
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def floating(arrays: Mapping[str, Any]) -> list[str]:
    return [name for name, x in arrays.items() if not isinstance(x, tuple) and x.dtype.kind == "f"]


@dataclass(frozen=True)
class Case:
    """A call of ``relative_attention`` by its shapes: the arrays are drawn from a seed."""

    name: str
    n: int = 7
    m: int = 7
    lead: tuple[int, ...] = (2,)
    heads: int | None = 2
    kv_heads: int | None = None
    d: int = 3
    dv: int | None = None
    span: Span | None = None
    tables: str = "rel_k"
    own_tables: bool = True
    rel_q_width: int | None = None
    mask: str | None = None
    mask_shape: tuple[int, ...] | None = None
    by_head: str = ""
    by_query: bool = False  # whether sinks are
    labels: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def arrays(self, dtype: str = "float64") -> dict[str, Any]:
        rng = np.random.default_rng(len(self.name) * 1000 + sum(map(ord, self.name)))
        heads = () if self.heads is None else (self.heads,)
        kv_heads = heads if self.kv_heads is None else (self.kv_heads,)
        dv = self.d if self.dv is None else self.dv
        arrays: dict[str, Any] = {
            "q": rng.standard_normal((*self.lead, *heads, self.n, self.d)),
            "k": rng.standard_normal((*self.lead, *kv_heads, self.m, self.d)),
            "v": rng.standard_normal((*self.lead, *kv_heads, self.m, dv)),
        }
        rows = (self.span or Span.full(max(self.n, self.m))).rows
        of_heads = heads if self.own_tables else ()
        width = self.d if self.rel_q_width is None else self.rel_q_width
        shapes = {"rel_k": (rows, width), "rel_v": (rows, dv), "rel_bias": (rows,), "key_table": (rows, self.d)}
        for name in self.tables.split():
            arrays[name] = rng.standard_normal((*of_heads, *shapes[name]))
        if self.rel_q_width is not None:
            arrays["rel_q"] = rng.standard_normal((*self.lead, *heads, self.n, width))
        if self.mask is not None:
            shape = (*self.lead, *heads, self.n, self.m) if self.mask_shape is None else self.mask_shape
            allowed = rng.random(shape) < 0.7
            additive = np.where(allowed | (self.mask == "additive"), rng.standard_normal(shape), -np.inf)
            arrays["mask"] = allowed if self.mask == "boolean" else additive
        for name in self.by_head.split():
            by_query = self.by_query and name == "sinks"
            arrays[name] = rng.uniform(0.2, 0.8, (*self.lead, *heads, self.n) if by_query else heads or (1,))
        cast = {name: x if x.dtype == bool else x.astype(dtype) for name, x in arrays.items()}
        return cast | {name: each(np.asarray, x) for name, x in self.labels.items()}

    def d_out(self) -> NDArray[np.float64]:
        arrays = self.arrays()
        return np.random.default_rng(5).standard_normal((*arrays["q"].shape[:-1], arrays["v"].shape[-1]))

    def call(self) -> dict[str, Any]:
        """Return the options, the span among them; queries begin where keys begin unless a case says more."""
        offset = {"offset": 0} if self.n != self.m else {}
        return {"span": self.span, **offset, **self.options}


PACKED = [[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3]]  # documents one after the other, in each of two items

STRANGE = ([[3, 1, 1, 3, 5, 5, 1], [0, 0, 2, 2, 2, 0, 9]], [3, 3, 0, 1, 5, 2, 2])
"""Documents in any order, of queries by item and of keys for all; some are of queries or of keys alone."""

STAMPS = ([[5, -2, 0, 0, 9, 1, 3], [4, 4, 4, 2, 1, 0, -7]], [0, 3, 3, -1, 8, 2, 1])  # positions in any order

MASK_SHAPES = [(7,), (7, 7), (7, 1), (1, 7), (1, 1), (2, 1, 7), (2, 7, 7), (2, 1, 1, 7), (1, 2, 7, 1), (2, 1, 7, 7)]

CASES = [
    Case("plain", tables=""), Case("full table"), Case("table shared by heads", own_tables=False),
    Case("causal", span=Span.causal(7), options={"causal": True}),
    Case("causal, longer table", span=Span.causal(12), options={"causal": True}),
    Case("causal, table with a future", span=Span.full(7), options={"causal": True}),
    Case("clipped", n=9, m=9, span=Span.clipped(2), tables="rel_k rel_v"),
    Case("zero beyond", n=9, m=9, span=Span(1, 3, "zero"), tables="rel_k rel_v rel_bias"),
    Case("span on the past alone, all keys ahead", n=3, m=3, span=Span(2, 0, "zero"), options={"offset": -4}),
    Case("clipped, all keys ahead", n=3, m=4, span=Span(2, 1, "clip"), tables="rel_k rel_v", options={"offset": -9}),
    Case("values with relative positions", tables="rel_v"),
    Case("all tables, shared", tables="rel_k rel_v rel_bias", own_tables=False),
    Case("all tables, by head", tables="rel_k rel_v rel_bias"), Case("bias alone", tables="rel_bias"),
    Case("bias alone, shared", tables="rel_bias", own_tables=False),
    Case("window", span=Span(2, 1), tables="rel_k rel_v", options={"window": (2, 1)}),
    Case("window open to the left", span=Span.full(7), options={"window": (None, 1)}),
    Case("causal window", n=12, m=12, span=Span.causal(4), options={"window": (3, None), "causal": True}),
    Case("window, no table", tables="", options={"window": (1, 1)}),
    Case("blocks", n=11, m=11, span=Span.causal(6), tables="rel_k rel_v", options={"block_size": 3}),
    Case("blocks with a past", n=4, m=11, span=Span.causal(6), options={"block_size": 3, "offset": 7}),
    Case("cross, more keys", n=4, m=9), Case("cross, more queries", n=9, m=4, tables="rel_k rel_v"),
    Case("decoding", n=1, m=7, span=Span.causal(7), options={"causal": True, "offset": 6}),
    Case("decoding two", n=2, m=7, span=Span.causal(9), options={"causal": True, "offset": 5}),
    Case("one key", n=5, m=1), Case("one query, one key", n=1, m=1, span=Span.full(1)),
    Case("causal, some see nothing", span=Span.causal(7), options={"causal": True, "offset": -3}),
    Case("window, some see nothing", span=Span.clipped(2), options={"window": (2, 2), "offset": 5}),
    Case("nobody sees anything", span=Span.causal(2), tables="rel_k rel_v", options={"causal": True, "offset": -9}),
    Case("blocks of a stream", n=11, m=11, span=Span(8, 2), tables="rel_k rel_v",
         options={"block_size": 3, "blocks_before": 2}),
    Case("blocks without a past", n=8, m=8, span=Span.clipped(1), tables="rel_k rel_bias",
         options={"block_size": 4, "blocks_before": 0}),
    Case("causal blocks of a stream, with a past", n=4, m=11, span=Span.causal(9), tables="rel_k rel_v",
         options={"block_size": 3, "blocks_before": 2, "causal": True, "offset": 7}),
    Case("blocks of a stream and a window", n=9, m=12, span=Span(4, 2),
         options={"block_size": 3, "blocks_before": 1, "window": (4, 2), "offset": 2}),
    Case("some before the blocks", n=7, m=5, span=Span.clipped(2),
         options={"block_size": 2, "blocks_before": 1, "offset": -3}),
    Case("sinks", tables="rel_k rel_v", by_head="sinks"),
    Case("sinks, and some see nothing else", span=Span.causal(7), by_head="sinks", mask="boolean",
         options={"causal": True, "offset": -3}),
    Case("sinks by query", tables="rel_k rel_v", by_head="sinks", by_query=True),
    Case("sinks by query and scales, grouped", heads=4, kv_heads=2, n=4, m=9, by_head="sinks scale", by_query=True,
         mask="boolean", options={"causal": True, "offset": 2}, span=Span.causal(9)),
    Case("sinks by query, no heads axis", lead=(), heads=None, by_head="sinks", by_query=True),
    Case("packed documents", tables="rel_k rel_v rel_bias", labels={"segments": PACKED}),
    Case("packed documents, for all items", span=Span.causal(7), labels={"segments": PACKED[0]},
         options={"causal": True}),
    Case("documents in any order", tables="rel_k rel_v", mask="additive", labels={"segments": STRANGE}),
    Case("documents, the table meets keys", tables="rel_k key_table", labels={"segments": PACKED}),
    Case("documents, no heads axis", lead=(), heads=None, labels={"segments": PACKED[0]}),
    Case("positions", span=Span(20, 20), tables="rel_k rel_v rel_bias", labels={"positions": STAMPS}),
    Case("positions, clipped and causal", span=Span(3, 2, "clip"), tables="rel_k rel_v", own_tables=False,
         labels={"positions": STAMPS}, options={"causal": True}),
    Case("positions, zero beyond, in a window", span=Span(3, 2, "zero"), tables="rel_k rel_v rel_bias",
         labels={"positions": STAMPS}, options={"window": (6, 4)}),
    Case("positions, a window beyond the table", span=Span(3, 0, "clip"), tables="rel_k rel_v",
         labels={"positions": STAMPS}, options={"window": (None, 0)}),
    Case("positions in blocks, the table meets keys", span=Span.clipped(4), tables="rel_k key_table",
         labels={"positions": STAMPS}, options={"block_size": 3, "blocks_before": 1}),
    Case("positions without tables", tables="", labels={"positions": STAMPS}, options={"causal": True}),
    Case("positions and documents", span=Span.clipped(2), labels={"positions": STAMPS, "segments": PACKED}),
    Case("consecutive positions", n=3, m=5, lead=(2,), tables="rel_k rel_v",
         labels={"positions": ([[2, 3, 4], [0, 1, 2]], [0, 1, 2, 3, 4])}),
    Case("positions, no heads axis", lead=(), heads=None, span=Span.clipped(3), tables="rel_k rel_v rel_bias",
         labels={"positions": (STAMPS[0][0], STAMPS[1])}),
    Case("scales by head", by_head="scale", tables="rel_k rel_v"),
    Case("scales by head, relative ones too", by_head="scale rel_scale", tables="rel_k key_table", own_tables=False),
    Case("scales by head, own relative queries", by_head="scale", rel_q_width=3, tables="rel_k key_table"),
    Case("relative scales by head", by_head="rel_scale", tables="rel_k"),
    Case("a relative scale beside those by head", by_head="scale", options={"rel_scale": 0.4}),
    Case("scales by head, no heads axis", lead=(), heads=None, by_head="scale rel_scale sinks"),
    Case("dropout", tables="rel_k rel_v", options={"dropout": 0.3, "seed": 5}),
    Case("dropout of documents with sinks", by_head="sinks", tables="rel_k rel_v rel_bias", span=Span.causal(13),
         labels={"segments": PACKED}, options={"dropout": 0.4, "seed": 2**31 - 2, "causal": True, "offset": 3}),
    Case("grouped queries", heads=4, kv_heads=2, tables="rel_k rel_v rel_bias"),
    Case("one key head", heads=3, kv_heads=1, own_tables=False),
    Case("values of another width", dv=5, tables="rel_k rel_v"), Case("own relative queries", rel_q_width=3),
    Case("relative queries of another width", rel_q_width=5, span=Span.clipped(2)),
    Case("relative queries unserved", n=3, m=3, rel_q_width=2, span=Span(2, 0, "zero"), options={"offset": -4}),
    Case("scales", options={"scale": 0.3, "rel_scale": -0.7}),
    Case("scales of nothing", options={"scale": 0.0, "rel_scale": 0.0}),
    Case("softcap", tables="rel_k rel_v rel_bias", options={"softcap": 1.5}),
    Case("softcap and everything", span=Span.clipped(3), tables="rel_k rel_v rel_bias", mask="additive with holes",
         rel_q_width=2, options={"softcap": 2.0, "causal": True, "window": (5, None), "offset": 1}),
    Case("no heads axis", lead=(), heads=None, tables="rel_k rel_v rel_bias"),
    Case("no heads axis, causal, masked", lead=(), heads=None, span=Span.causal(7), mask="additive",
         options={"causal": True}),
    Case("no batch axis", lead=(), tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(2, 7, 7)),
    Case("two batch axes", lead=(2, 3), tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(3, 1, 1, 7)),
    *(Case(f"{kind} mask of shape {shape}", tables="rel_k rel_v", mask=kind, mask_shape=shape)
      for kind in ("boolean", "additive", "additive with holes") for shape in MASK_SHAPES),
    Case("additive mask and causal", span=Span.causal(7), mask="additive", options={"causal": True}),
    Case("additive mask and window", tables="rel_k rel_bias", mask="additive", mask_shape=(2, 7, 1),
         options={"window": (1, 2)}),
    Case("keys with tables, grouped", heads=4, kv_heads=2, span=Span.clipped(2), tables="rel_k rel_v key_table"),
    Case("keys with one table, zero beyond", n=5, m=8, heads=4, kv_heads=2, span=Span(1, 3, "zero"), own_tables=False,
         tables="key_table rel_bias", mask="additive with holes", mask_shape=(2, 1, 5, 8)),
    Case("keys with a table, no heads axis", n=3, m=40, lead=(), heads=None, tables="rel_k key_table"),
    Case("keys with a table, window, softcap, scales", n=35, m=35, span=Span(4, 2), tables="rel_k key_table",
         options={"window": (4, 2), "softcap": 3.0, "scale": 0.3, "rel_scale": 0.7}),
    Case("keys with a table, decoding", n=1, m=19, span=Span(25, 0), tables="key_table",
         options={"causal": True, "offset": 18}),
    Case("offsets by item", n=4, lead=(5,), heads=4, kv_heads=2, span=Span(4, 2, "clip"), mask="additive",
         tables="rel_k rel_v rel_bias key_table", mask_shape=(5, 1, 1, 7),
         options={"causal": True, "offset": [3, -2, 0, 5, 3]}),
    Case("offsets by item, in blocks", n=4, span=Span(1, 2, "zero"), tables="rel_k rel_v", own_tables=False,
         options={"block_size": 3, "offset": [3, -2]}),
    Case("offsets by item, in blocks of a stream", m=5, span=Span.clipped(2), tables="rel_k rel_bias", mask="boolean",
         mask_shape=(7, 5), options={"block_size": 3, "blocks_before": 1, "window": (4, 2), "offset": [-3, 2]}),
    Case("offsets by item, a window of documents", span=Span(12, 12), tables="rel_k rel_v",
         labels={"segments": STRANGE}, options={"window": (3, 2), "softcap": 2.0, "offset": [4, -30]}),
    Case("offsets by item, dropout, scales and sinks", span=Span.full(13), tables="rel_k rel_bias",
         by_head="sinks scale", options={"causal": True, "dropout": 0.3, "seed": 5, "offset": [0, 5]}),
]  # fmt: skip

"""Random calls of relative attention: shapes, offsets, spans, patterns, masks and every option, for property tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracles
from dense import each
from libraries import LIBRARIES, NATIVE
from relskew_core import Span, relative_attention

TOLERANCE = 1e-11  # the float64 gate, with room for the largest of thousands of random logits


@dataclass(frozen=True)
class Way:
    row: str
    impl: Any

    def __str__(self) -> str:
        return f"{self.row}, {self.impl}"

    def attend(self, arrays: dict[str, Any], options: dict[str, Any]) -> oracles.Attention:
        library = next(library for library in LIBRARIES if library.name == self.row)
        given = {name: each(library.asarray, array) for name, array in arrays.items()}
        out, lse = relative_attention(**given, **options, return_lse=True, impl=self.impl)
        return oracles.Attention(library.to_numpy(out), library.to_numpy(lse))


WAYS = [Way("numpy", "portable"), Way("numpy", NATIVE), Way("torch, CPU", "auto")]


@dataclass(frozen=True)
class Call:
    arrays: dict[str, Any]
    options: dict[str, Any]

    @property
    def n(self) -> int:
        return int(self.arrays["q"].shape[-2])

    @property
    def m(self) -> int:
        return int(self.arrays["k"].shape[-2])

    @property
    def offset(self) -> int:
        """Position of query 0."""
        return int(self.options["offset"])

    def oracle(self) -> oracles.Attention:
        return oracles.relative_attention(**self.arrays, **{k: v for k, v in self.options.items() if k != "chunk_size"})

    def on(self, way: Way) -> oracles.Attention:
        return way.attend(self.arrays, self.options)

    def but(self, **changes: Any) -> Call:
        """Return the call with other arrays or options; an array changed to ``None`` is left out."""
        arrays = {**self.arrays, **{k: v for k, v in changes.items() if k in ARRAYS}}
        options = {**self.options, **{k: v for k, v in changes.items() if k not in ARRAYS}}
        return replace(self, arrays={k: v for k, v in arrays.items() if v is not None}, options=options)

    def pattern(self) -> NDArray[np.bool_]:
        """Which key which query sees, masks aside, shape (n, m)."""
        names = ("offset", "causal", "window", "block_size", "blocks_before")
        given = {name: self.options[name] for name in names if name in self.options}
        seen = [oracles.sees(i, j, **given) for i in range(self.n) for j in range(self.m)]
        return np.asarray(seen, dtype=bool).reshape(self.n, self.m)

    def visible(self) -> NDArray[np.bool_]:
        """Which key which query sees, masks included, shape (..., n, m)."""
        full = (*self.arrays["q"].shape[:-1], self.m)
        mask = self.arrays.get("mask", np.ones(full, dtype=bool))
        allowed = mask if mask.dtype == np.bool_ else mask > -np.inf
        return np.broadcast_to(allowed, full) & self.pattern()

    def seen_rows(self) -> set[int]:
        """Rows of the tables that the pattern lets some query see."""
        span = self.options["span"]
        i, j = np.nonzero(self.pattern())
        rows = {oracles.row_of(int(r), span) for r in j - i - self.offset}
        return {row for row in rows if row is not None}


ARRAYS = ("q", "k", "v", "rel_k", "rel_v", "rel_bias", "key_table", "rel_q", "mask")

sizes = st.integers(1, 9)
offsets = st.integers(-12, 12)
seeds = st.integers(0, 2**32 - 1)
sides = st.none() | st.integers(0, 6)


@st.composite
def patterns(draw: st.DrawFn, n: int, m: int) -> dict[str, Any]:
    """Which keys a query sees: all, causal, window, local blocks, and their combinations; often aligned at an end."""
    return {"offset": draw(st.sampled_from([0, m - n]) | offsets), "causal": draw(st.booleans()),
            "window": draw(st.none() | st.tuples(sides, sides)),
            "block_size": draw(st.none() | st.integers(1, 4))}  # fmt: skip


@st.composite
def spans(draw: st.DrawFn, positions: list[int], beyond: str | None = None) -> Span:
    """A span of any size; with ``beyond="error"`` it covers ``positions``."""
    beyond = draw(st.sampled_from(["error", "clip", "zero"])) if beyond is None else beyond
    left, right = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    if beyond == "error" and positions:
        left, right = max(left % 3 - min(positions), 0), max(right % 3 + max(positions), 0)
    return Span(left, right, beyond)  # type: ignore[arg-type]  # one of the three


@st.composite
def masks(draw: st.DrawFn, full: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any] | None:
    """No mask, a boolean or an additive one, of any shape that broadcasts."""
    kind = draw(st.sampled_from([None, "boolean", "additive"]))
    if kind is None:
        return None
    axes = draw(st.integers(1, len(full)))
    shape = tuple(draw(st.sampled_from([1, size])) for size in full[len(full) - axes :])
    allowed = rng.random(shape) < draw(st.sampled_from([0.2, 0.7, 1.0]))
    if kind == "boolean":
        return allowed
    return np.where(allowed, rng.standard_normal(shape), -np.inf)


@st.composite
def calls(draw: st.DrawFn, *, beyond: str | None = None, masked: bool = True, all_tables: bool = False) -> Call:
    rng = np.random.default_rng(draw(seeds))
    n, m, d, dv = draw(sizes), draw(sizes), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    batch = draw(st.sampled_from([None, (), (2,)]))  # None: no heads axis either
    lead, kv_lead = ((), ()) if batch is None else ((*batch, kv_heads * group), (*batch, kv_heads))
    options = draw(patterns(n, m))
    size = draw(st.sampled_from([0.3, 1.0, 5.0]))

    arrays: dict[str, Any] = {
        "q": size * rng.standard_normal((*lead, n, d)),
        "k": rng.standard_normal((*kv_lead, m, d)),
        "v": rng.standard_normal((*kv_lead, m, dv)),
    }
    call = Call(arrays, options)
    i, j = np.nonzero(call.pattern())
    options["span"] = draw(spans([int(r) for r in j - i - call.offset], beyond))
    rows = options["span"].rows
    width = draw(st.integers(1, 4)) if draw(st.booleans()) else d  # the width of rel_q, if there is one
    own = draw(st.booleans()) or width != d
    widths = {"rel_k": (width,), "rel_v": (dv,), "rel_bias": ()}
    for name in widths if all_tables else draw(st.sets(st.sampled_from(sorted(widths)))):
        heads = lead[-1:] if draw(st.booleans()) else ()
        arrays[name] = rng.standard_normal((*heads, rows, *widths[name]))
    if "rel_k" in arrays and own:
        arrays["rel_q"] = rng.standard_normal((*lead, n, width))
    mask = draw(masks((*lead, n, m), rng)) if masked else None
    if mask is not None:
        arrays["mask"] = mask
    options["scale"] = draw(st.sampled_from([None, 0.0, 0.25, -1.5]))
    options["rel_scale"] = draw(st.sampled_from([None, 0.0, 0.5, 2.0]))
    options["softcap"] = draw(st.sampled_from([None, 1.0, 20.0]))
    options["chunk_size"] = draw(st.none() | st.integers(1, 10))
    return call


@st.composite
def rich_calls(draw: st.DrawFn) -> Call:
    """A random valid call that may have all the options that :func:`calls` leaves out."""
    call = draw(calls())
    rng = np.random.default_rng(draw(seeds))
    arrays, options = dict(call.arrays), dict(call.options)
    q = arrays["q"]
    heads, leads = q.shape[-3:-2] or (1,), q.shape[:-3]
    for name in draw(st.sets(st.sampled_from(["sinks", "scale", "rel_scale"]))):
        by_query = name == "sinks" and q.ndim > 2 and draw(st.booleans())
        arrays[name] = rng.standard_normal(q.shape[:-1] if by_query else heads)
        options.pop(name, None)

    def labels(low: int, high: int) -> tuple[NDArray[Any], NDArray[Any]]:
        kind = draw(st.sampled_from(["int64", "int32", "int8"]))
        shapes = [(*(leads if draw(st.booleans()) else ()), length) for length in (call.n, call.m)]
        one, two = (rng.integers(low, high, shape).astype(kind) for shape in shapes)
        return one, two

    if draw(st.booleans()):
        arrays["segments"] = labels(0, draw(st.integers(1, 4)))
        if draw(st.booleans()):  # packed documents
            arrays["segments"] = tuple(np.sort(x, axis=-1) for x in arrays["segments"])
    if options["block_size"] is not None:
        options["blocks_before"] = draw(st.none() | st.integers(0, 3))
    if draw(st.booleans()):
        arrays["positions"], options["offset"] = labels(-9, 9), 0
    if draw(st.booleans()):
        options |= {"dropout": draw(st.sampled_from([0.1, 0.5, 0.9])), "seed": draw(st.integers(0, 2**31 - 1))}
    if options["span"].beyond == "error":  # it reaches as far as needed
        options["span"] = Span.full(60)
        for name, axis in (("rel_k", -2), ("rel_v", -2), ("rel_bias", -1)):
            if name in arrays:
                shape = list(arrays[name].shape)
                shape[axis] = options["span"].rows
                arrays[name] = rng.standard_normal(shape)
    return Call(arrays, options)


@st.composite
def extended(draw: st.DrawFn, some: st.SearchStrategy[Call]) -> Call:
    """Draw a call that may have a table for its keys as well, and unless it is in blocks an offset for each item."""
    call = draw(some)
    q, span, rng = call.arrays["q"], call.options["span"], np.random.default_rng(draw(seeds))
    if draw(st.booleans()):
        heads = q.shape[-3:-2] if draw(st.booleans()) else ()
        call = call.but(key_table=rng.standard_normal((*heads, span.rows, q.shape[-1])))
    reaches = span.beyond != "error" or span == Span.full(60)
    by_item = q.ndim == 4 and reaches and "positions" not in call.arrays and call.options["block_size"] is None
    return call.but(offset=[call.offset + int(x) for x in rng.integers(-9, 10, 2)]) if by_item else call


@st.composite
def edge_calls(draw: st.DrawFn) -> Call:
    """A random valid call at an edge: an axis of nothing, an item whose keys are masked, integers at their ends."""
    call = draw(rich_calls())
    edges = [hide_item, label_at_the_ends, reach_far, cut_axis]
    for edge in draw(st.lists(st.sampled_from(edges), max_size=2, unique=True)):
        call = draw(edge(call))
    return call


@st.composite
def hide_item(draw: st.DrawFn, call: Call) -> Call:
    """Let one item, or head, see no key."""
    lead = call.arrays["q"].shape[:-2]
    if 0 in (*lead, call.n, call.m):
        return call
    shape = (*lead[:1], *(1 for _ in lead[1:]), 1 if draw(st.booleans()) else call.n, call.m)  # 1: like a padding mask
    mask = np.random.default_rng(draw(seeds)).random(shape) < draw(st.sampled_from([0.5, 1.0]))
    mask[draw(st.integers(0, len(mask) - 1))] = False
    return call.but(mask=mask)


@st.composite
def label_at_the_ends(draw: st.DrawFn, call: Call) -> Call:
    """Let segments and positions be the least and the largest integers of their dtypes."""
    rng, arrays = np.random.default_rng(draw(seeds)), dict(call.arrays)
    for name in [name for name in ("segments", "positions") if name in arrays]:
        if name == "positions" and call.options["span"].beyond == "error":
            continue  # no table reaches that far
        kinds = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]
        kind: Any = np.dtype(draw(st.sampled_from(kinds)))
        low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
        if name == "positions" and kind.itemsize == 8:
            low, high = -(2**60), 2**60
        ends = np.asarray([low, low + 1, max(low, -1), 0, high - 1, high], kind)
        arrays[name] = tuple(rng.choice(ends, x.shape) for x in arrays[name])
    return Call(arrays, call.options)


@st.composite
def reach_far(draw: st.DrawFn, call: Call) -> Call:
    """Let windows and blocks reach farther than some integers of libraries."""
    far = st.sampled_from([2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63])
    options = dict(call.options)
    if options["window"] is not None:
        options["window"] = draw(st.tuples(st.none() | far, st.none() | far))
    if options.get("blocks_before") is not None:
        options["blocks_before"] = draw(far)
    return Call(call.arrays, options)


AXES = {
    **dict.fromkeys(("q", "rel_q"), ("items", "heads", "queries", "width")),
    "k": ("items", "heads", "keys", "width"),
    "v": ("items", "heads", "keys", "values"),
    "rel_k": ("heads", "rows", "width"),
    "rel_v": ("heads", "rows", "values"),
    "rel_bias": ("heads", "rows"),
    "mask": ("items", "heads", "queries", "keys"),
    **dict.fromkeys(("sinks", "scale", "rel_scale"), ("heads",)),
    "sinks by query": ("items", "heads", "queries"),
    "of queries": ("items", "queries"),
    "of keys": ("items", "keys"),
}


@st.composite
def cut_axis(draw: st.DrawFn, call: Call) -> Call:
    q = call.arrays["q"]
    axis = draw(st.sampled_from(["queries", "keys", "values", *["heads", "items"][: q.ndim - 2]]))

    def cut(name: str, x: NDArray[Any]) -> NDArray[Any]:
        kept = [1 if name == "mask" and size == 1 else 0 for size in x.shape]  # shared axes are not split
        names = AXES["sinks by query" if name == "sinks" and x.ndim > 1 else name][-x.ndim :]
        return x[tuple(slice(n) if own == axis else slice(None) for own, n in zip(names, kept, strict=True))]

    arrays = {
        name: (cut("of queries", x[0]), cut("of keys", x[1])) if isinstance(x, tuple) else cut(name, x)
        for name, x in call.arrays.items()
    }
    return Call(arrays, call.options)


def close(actual: oracles.Attention, expected: oracles.Attention, tolerance: float = TOLERANCE) -> bool:
    """Whether output and log-sum-exp agree, infinities included; no NaN anywhere."""
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        size = max(1.0, float(np.max(np.abs(other), initial=0.0, where=np.isfinite(other))))
        if not np.allclose(one, other, rtol=0, atol=tolerance * size):
            return False
    return True

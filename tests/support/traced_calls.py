"""Calls of torch's operator as its exporter has them translated, with nodes that are ours alone: no model, no exporter.

``PYTHONPATH=. python tests/support/traced_calls.py`` writes the files of ``tests/export/traced``.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import pytest

from graph_text import of_graph, write
from onnx_sessions import NOTHING_OPTIMISED, opened
from relskew_core import Span
from relskew_core._kernel import forward, problem
from relskew_core._kernel.call import TABLES, Arguments, Operands, Options
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.operator import NAMES, flat
from relskew_core.export import torch_translation_table
from relskew_core.export._nodes.emitter import Value
from relskew_core.export._translate import translation
from relskew_core.export._translate.emitter import TracedEmitter
from torch_calls import ALONG, CLIP, CROSS, FULL, LONG, PLACED, TABLE, VALUES

FOLDER = Path(__file__).resolve().parents[1] / "export" / "traced"
Array = np.ndarray[Any, Any]
Sizes = tuple[int, int, int]  # of the batch, the queries and the keys


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _operands(arguments: Arguments, dtype: Any, *, asks: bool) -> tuple[Operands, Options]:
    checked = problem.problem(arguments, return_lse=asks)
    given = [x if x is None or x.dtype.kind != "f" else x.astype(dtype) for x in checked.given]
    return Operands(*given), checked.options


@dataclass(frozen=True)
class Case:
    """A call: arguments, those that depend on the sizes as functions of them."""

    call: Mapping[str, Any]
    along: bool = False  # as many keys as queries
    lead: int = 1  # axes before the heads
    offset: str = ""  # its source, one of `OFFSETS`, if it is not a number
    aligned: bool = False  # there is one key for each position of the past and for each query
    unknown: bool = False  # the number of rows of the tables is unknown
    fitted: bool = False  # the reach of the span is not a number

    @property
    def sizes(self) -> tuple[Sizes, ...]:
        """Those of the example with which it is translated, of another one, what differs being left open, and more."""
        if self.along:
            return (2, 5, 5), (3, 6, 6), (1, 1, 1), (3, 12, 12), (1, 7, 7)
        if self.has_past:
            return (2, 5, 7), (3, 6, 9), (1, 1, 1), (3, 1, 8), (2, 3, 3), (1, 1, 12)
        return (2, 5, 7), (3, 6, 8), (1, 1, 1), (3, 1, 8), (2, 12, 1), (1, 12, 12)

    @property
    def has_past(self) -> bool:
        """Whether the offset is the length of an input."""
        return self.offset == "length"

    def operands(self, sizes: Sizes, dtype: Any) -> tuple[Operands, Options]:
        batch, n, m = sizes
        leading = ((), (batch,), (batch, 3))[self.lead]
        shapes = {"q": (*leading, 4, n, 6), "k": (*leading, 2, m, 6), "v": (*leading, 2, m, 6 if self.along else 5)}
        call: dict[str, Any] = {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items(), 1)}
        call |= {name: x(*sizes) if callable(x) else x for name, x in self.call.items()}
        call = {name: x.numpy() if hasattr(x, "numpy") else x for name, x in call.items()}
        if "positions" not in call:
            call = {"offset": m - n if self.offset else 0, **call}
        asks = call.pop("return_lse", False)
        return _operands(Arguments(**call), dtype, asks=asks)

    def feeds(self, sizes: Sizes, dtype: Any) -> dict[str, Array]:
        operands, options = self.operands(sizes, dtype)
        given: dict[str, Array | None] = operands._asdict()
        if self.has_past:
            given["past"] = np.zeros(options.visibility.offset, dtype)
        if self.fitted:
            given |= {side: np.asarray(getattr(options.span, side)) for side in ("left", "right")}
        return {name: x for name, x in given.items() if x is not None}

    def shapes(self, dtype: Any) -> dict[str, list[int | str]]:
        """Return the shapes of the inputs: a symbol where the first two examples differ."""
        names = {2: "batch", 5: "queries", 7: "past + queries" if self.aligned else "keys"}
        names |= dict.fromkeys((6, 9, 11), "rows")
        example, other = (self.feeds(sizes, dtype) for sizes in self.sizes[:2])
        found: dict[str, list[int | str]] = {
            name: [a if a == b else names[a] for a, b in zip(x.shape, other[name].shape, strict=True)]
            for name, x in example.items()
        }
        if self.unknown:
            for name in found.keys() & set(TABLES):
                found[name] = ["rows" if size == CLIP.rows else size for size in found[name]]
        return found | ({"past": ["past"]} if self.has_past else {})

    def promised(self, sizes: Sizes, dtype: Any) -> list[Array]:
        out, sums = forward.attention(*self.operands(sizes, dtype), xp=xp)
        return [out, np.zeros(0, dtype) if sums is None else sums.sum(-1)]


@dataclass(frozen=True)
class Drawn(Case):
    """Arguments of any sizes, whose lengths are ``fixed`` or left open; ``asks``: for the log-sum-exp."""

    fixed: bool = False
    asks: bool = False

    def operands(self, sizes: Sizes, dtype: Any) -> tuple[Operands, Options]:
        return _operands(Arguments(**self.call), dtype, asks=self.asks)

    def shapes(self, dtype: Any) -> dict[str, list[int | str]]:
        feeds = self.feeds((0, 0, 0), dtype)
        n, m = (feeds[name].shape[-2] for name in "qk")
        queries, keys = "queries", "keys" if n != m or self.call["offset"] else "queries"
        ends: dict[str, tuple[Any, ...]] = {"q": (queries, 0), "rel_q": (queries, 0), "k": (keys, 0), "v": (keys, 0)}
        ends |= {"q_segments": (queries,), "q_positions": (queries,), "k_segments": (keys,), "k_positions": (keys,)}
        if "mask" in feeds:
            sizes_of_mask = zip((queries, keys), feeds["mask"].shape[-2:], (n, m), strict=True)
            ends["mask"] = tuple(name if size == length != 1 else 0 for name, size, length in sizes_of_mask)
        found: dict[str, list[int | str]] = {name: [*x.shape] for name, x in feeds.items()}
        for name in () if self.fixed else ends.keys() & feeds.keys():
            end = [told or size for told, size in zip(ends[name], found[name][-len(ends[name]) :], strict=True)]
            found[name][-len(end) :] = end
        return found


def _length(op: Any, x: Any, axis: int) -> Any:
    return op.Shape(x, start=axis, end=axis + 1)


OFFSETS: dict[str, Callable[..., Any]] = {
    "length": lambda op, past, **inputs: op.Squeeze(_length(op, past, 0)),
    "difference": lambda op, q, k, **inputs: op.Squeeze(op.Sub(_length(op, k, 2), _length(op, q, 2))),
}
"""How an exporter computes an offset."""


def _mask(batch: int, n: int, m: int) -> Array:
    mask = random(batch, 1, n, m, seed=4) > 0
    mask[0, :, 0] = False
    return mask


def _added(batch: int, n: int, m: int) -> Array:
    return np.where(_mask(batch, n, m), random(batch, 1, n, m, seed=5), -np.inf).astype(np.float32)


def _rel_q(batch: int, n: int, m: int) -> Array:
    return random(batch, 4, n, 6, seed=6)


def _of_key_heads(count: int) -> dict[str, Callable[..., Array]]:
    return {name: lambda batch, n, m, d=d: random(batch, count, m, d, seed=12 - d) for name, d in (("k", 6), ("v", 5))}


def _labels(low: int, high: int, seed: int) -> Callable[..., tuple[Array, Array]]:
    def labels(batch: int, n: int, m: int, *more: int) -> tuple[Array, Array]:
        drawn = np.random.default_rng(seed)
        return drawn.integers(low, high, (batch, *more, n)), drawn.integers(low, high, (batch, *more, m))

    return labels


_AT, _OF = _labels(-4, 5, 1), _labels(0, 3, 2)
_CLIPPED: dict[str, Any] = {"rel_k": TABLE, "span": CLIP}
_BIAS: dict[str, Any] = {"rel_bias": VALUES[:, 0]}
_BLOCKS = {**_CLIPPED, "block_size": 3}


def _cases() -> Iterator[tuple[str, Case]]:
    for name, call in CROSS.items():
        yield name, Case(call)
        yield f"{name}, mask", Case({**call, "mask": _mask})
    for name, call in ALONG.items():
        yield f"along: {name}", Case(call, along=True)
        yield (
            f"along: {name}, mask",
            Case({**call, "mask": lambda batch, n, m: random(batch, 1, 1, m, seed=4) > -1}, along=True),
        )
    for name, call in PLACED.items():
        yield f"placed: {name}", Case({**call, "positions": _AT})
        of_one = {"positions": lambda *sizes: (_AT(*sizes)[0][0], _AT(*sizes)[1])}
        yield f"placed: {name}, segments", Case({**call, **of_one, "segments": _OF})


def _fitted(beyond: Any, *tables: str) -> dict[str, Any]:
    """Return tables of as many rows as the sizes say, all that are needed or half of them, and their span."""

    def span(batch: int, n: int, m: int) -> Span:
        return Span(n - 1, m - 1) if beyond == "error" else Span(n // 2, m // 2, beyond)

    def table(*sizes: int, before: tuple[int, ...], after: tuple[int, ...]) -> Array:
        return random(*before, span(*sizes).rows, *after, seed=len(after) + len(before))

    ends: dict[str, Any] = {"rel_k": ((4,), (6,)), "rel_v": ((), (5,)), "rel_bias": ((4,), ()), "key_table": ((), (6,))}
    made = {name: partial(table, before=ends[name][0], after=ends[name][1]) for name in tables}
    return {"span": span, **made}


CASES = dict(_cases()) | {
    "fitted": Case(_fitted("error", "rel_k"), fitted=True),
    "fitted: all": Case(_fitted("error", *TABLES), fitted=True),
    "fitted: clip": Case(_fitted("clip", *TABLES), fitted=True),
    "fitted: zero": Case({**_fitted("zero", *TABLES), "window": (3, 2)}, fitted=True),
    "fitted: offset": Case({**_fitted("clip", "rel_k", "rel_v"), "offset": 1, "causal": True}, fitted=True),
    "fitted: values": Case({**_fitted("error", "rel_v"), "mask": _mask, "return_lse": True}, fitted=True),
    "fitted: keys": Case({**_fitted("error", "key_table"), "causal": True, "softcap": 2.0}, fitted=True),
    "fitted: bias": Case({**_fitted("error", "rel_bias"), "window": (3, 2)}, fitted=True),
    "along: fitted": Case(
        {"rel_k": lambda batch, n, m: random(2 * n - 1, 6, seed=8), "span": lambda batch, n, m: Span.full(n),
         "causal": True}, along=True, fitted=True,
    ),
    "past, fitted": Case(
        {"rel_k": lambda batch, n, m: random(4, m, 6, seed=8), "span": lambda batch, n, m: Span.causal(m),
         "causal": True}, offset="length", aligned=True, fitted=True,
    ),
    "rows not known": Case({**_CLIPPED, "rel_v": VALUES, "key_table": TABLE}, unknown=True),
    "rel_q": Case({**_CLIPPED, "rel_q": _rel_q}),
    "placed: rel_q": Case({**_CLIPPED, "rel_q": _rel_q, "positions": _AT, "causal": True}),
    "window, narrower and wider": Case({"rel_k": TABLE[0], "rel_v": VALUES, "span": CLIP, "window": (1, 3)}),
    "window, wider, zero": Case({"rel_k": TABLE, **_BIAS, "span": Span(2, 1, "zero"), "window": (4, 3)}),
    "far before all keys, values": Case({**_CLIPPED, "rel_v": VALUES, "offset": -9}),
    "along: blocks, key table": Case({**_BLOCKS, "key_table": TABLE}, along=True),
    "along: blocks, rel_q": Case({**_BLOCKS, "rel_q": _rel_q}, along=True),
    "along: blocks, scales": Case({**_BLOCKS, "scale": 0.3, "rel_scale": 0.7}, along=True),
    "no batch, blocks": Case(_BLOCKS, along=True, lead=0),
    "span without tables": Case({"span": Span(1, 0), "window": (None, 3)}),
    "bias, mask, added": Case({**_BIAS, "span": CLIP, "mask": _added}),
    "along: bias, mask, added": Case({**_BIAS, "span": CLIP, "mask": _added, "causal": True}, along=True),
    "far behind all keys, key table": Case({"key_table": TABLE, **_BIAS, "span": CLIP, "offset": 9}),
    "scale of nothing": Case({**_CLIPPED, "scale": 0.0, "rel_scale": 1.0}),
    "mask, added": Case({**_CLIPPED, "mask": _added}),
    "mask, added, values": Case({**_CLIPPED, "mask": _added, "rel_v": VALUES}),
    "mask, added, softcap": Case({**_CLIPPED, "mask": _added, "softcap": 1.5}),
    "segments": Case({**_CLIPPED, "segments": _OF}),
    "segments, mask, values": Case({**_CLIPPED, "segments": _OF, "mask": _mask, "rel_v": VALUES}),
    "one key head, key table": Case({"key_table": TABLE, "span": CLIP, **_of_key_heads(1)}),
    "as many key heads, key table": Case({"key_table": TABLE, "span": CLIP, **_of_key_heads(4)}),
    "placed: a short table": Case(
        {"rel_k": TABLE, "rel_v": VALUES, "span": Span(2, 1), "causal": True, "segments": _OF,
         "positions": lambda batch, n, m: [np.arange(x)[::-1] // 6 for x in (n, m)]}
    ),
    "no batch, lse": Case({**_CLIPPED, "mask": lambda *sizes: _mask(*sizes)[-1], "return_lse": True}, lead=0),
    "no batch, placed": Case({**_CLIPPED, "positions": lambda *sizes: [x[0] for x in _AT(*sizes)]}, lead=0),
    "two batches, lse": Case({**_CLIPPED, "mask": lambda *sizes: _mask(*sizes)[-1], "return_lse": True}, lead=2),
    "two batches, mask": Case({**_CLIPPED, "mask": lambda *sizes: np.stack([_mask(*sizes)] * 3, 1)}, lead=2),
    "two batches, mask of the second": Case(
        {**_CLIPPED, "rel_v": VALUES, "mask": lambda batch, n, m: random(3, 4, n, m, seed=4)}, lead=2
    ),
    "two batches, placed": Case(
        {**_CLIPPED, "rel_v": VALUES, "positions": lambda *sizes: _AT(*sizes, 3),
         "segments": lambda *sizes: (_OF(*sizes, 3)[0], _OF(*sizes)[1][0])}, lead=2
    ),
    "past": Case({"rel_k": LONG[:, :12], "causal": True}, offset="length", aligned=True),
    "past, window, values": Case(
        {"rel_k": LONG[:, :3], "rel_v": VALUES[:3], "span": Span(2, 0), "causal": True, "window": (2, None)},
        offset="length", aligned=True,
    ),
    "past, blocks": Case({**_CLIPPED, "block_size": 3}, offset="length", aligned=True),
    "past, key table": Case({"key_table": TABLE, "span": CLIP, "causal": True}, offset="length", aligned=True),
    "offset unknown": Case({"rel_k": LONG, "span": FULL}, offset="length"),
    "offset unknown, clip, values": Case({**_CLIPPED, "rel_v": VALUES}, offset="length"),
    "offset unknown, key table": Case({"key_table": LONG, "span": FULL}, offset="length"),
    "offset unknown, blocks": Case({**_CLIPPED, "block_size": 3, "blocks_before": 0}, offset="length"),
    "offset a difference": Case({**_CLIPPED, "causal": True}, offset="difference"),
}  # fmt: skip

WRITTEN: dict[str, tuple[str, int, str]] = {
    re.sub(r"\W+", "-", case): (case, opset, dtype)
    for (opset, dtype), cases in {
        (23, "float32"):
            "fitted; fitted: zero; fitted: clip; scale of nothing; past; two batches, mask; no batch, placed; "
            "placed: bias for all, key table; placed: bias alone, window; placed: no tables; "
            "blocks across, before all keys; rel_q; wider windows; as many key heads, key table; "
            "along: causal, values; along: causal; along: blocks, zero; no batch, blocks; mask, added; "
            "bias, mask, added; offset a difference",
        (18, "float16"):
            "fitted: all; no batch, lse; placed: a longer table than the window, segments; "
            "key table, window, softcap",
        (18, "float32"):
            "fitted: values; fitted: bias; past, key table; two batches, placed; placed: zero, causal; "
            "placed: a short table; blocks across; window, narrower and wider; window, wider, zero; nothing; "
            "lse; bias; along: stream, key table, softcap; offset unknown",
        (23, "float16"): "two batches, lse; mask, added, softcap",
        (23, "float64"): "clip, values",
    }.items()
    for case in cases.split("; ")
}  # fmt: skip
"""The case of each file of the folder, for which opset and of which numbers. Between them they come to every line."""


class Operators:
    """What stands for onnxscript's operators of one opset: nodes go into the graph that is being made."""

    graph: Any = None

    def __init__(self, domain: str, version: int) -> None:
        self._domain, self._version = domain, version

    def __getattr__(self, op_type: str) -> Any:
        count = onnx.defs.get_schema(op_type, self._version, self._domain).max_output

        def add(*inputs: Any, **attributes: Any) -> Any:
            node = ir.node(op_type, inputs, attributes, num_outputs=count)
            Operators.graph.append(node)
            return node.outputs[0] if count == 1 else node.outputs

        return add


@dataclass
class Traced:
    """A graph with a translated call, what our side takes its tensors for, and both results."""

    graph: Any
    values: list[tuple[Any, Value]] = field(default_factory=list)
    results: tuple[Any, ...] = ()

    @property
    def computed(self) -> list[tuple[Any, Value]]:
        """All but constants, which older releases of onnxruntime do not give."""
        return [(x, value) for x, value in self.values if x.producer() is None or x.producer().op_type != "Constant"]

    def session(self, *, everything: bool) -> Callable[[Mapping[str, Array]], list[Array]]:
        """Return what computes both results, and before them whatever our side has a name for."""
        self.graph.outputs.clear()
        self.graph.outputs.extend([tensor for tensor, _ in self.computed] if everything else [])
        self.graph.outputs.extend(self.results)
        model = ir.to_proto(ir.Model(self.graph, ir_version=10))
        # Nodes that are folded cannot be outputs in older releases.
        run: Callable[..., Any] = opened(model, **(NOTHING_OPTIMISED if everything else {})).run
        return lambda feeds: list(run(None, dict(feeds)))


Translate = Callable[..., Traced]


@contextmanager
def exporting(opset: int) -> Iterator[Translate]:
    """Give a function that translates cases for an opset."""
    made: list[Traced] = []

    class Noted(TracedEmitter):
        def adopt(self, tensor: Any, name: str, shape: Any, dtype: Any = None) -> Value:
            return self._noted(super().adopt(tensor, name, shape, dtype))

        def node(self, op_type: str, inputs: Any, path: str, outputs: Sequence[Value], **attributes: Any) -> None:
            super().node(op_type, inputs, path, outputs, **attributes)
            for value in outputs:
                self._noted(value)

        def _noted(self, value: Value) -> Value:
            made[-1].values.append((self.tensor(value), value))
            return value

    def translate(case: Case, dtype: Any = np.float32, *, fixed: bool = False, behind: Traced | None = None) -> Traced:
        """Translate into a graph of its own, or into that of another call of the same arrays."""
        feeds = case.feeds(case.sizes[0], dtype)
        shapes = {name: x.shape for name, x in feeds.items()} if fixed else case.shapes(dtype)
        inputs = {name: ir.val(name, ir.DataType.from_numpy(x.dtype), shapes[name]) for name, x in feeds.items()}
        if behind is not None:
            inputs = {x.name: x for x in behind.graph.inputs}
        graph = behind.graph if behind else ir.Graph([*inputs.values()], [], nodes=[], opset_imports={"": opset})
        traced = Traced(graph)
        made.append(traced)
        Operators.graph = traced.graph
        _, options = case.operands(case.sizes[0], dtype)
        if case.offset:
            offset = OFFSETS[case.offset](Operators("", opset), **inputs)
            options = replace(options, visibility=replace(options.visibility, offset=offset))
        operands = Operands(**{name: inputs.get(name) for name in Operands._fields})
        numbers = flat(options)
        for side in ("left", "right") if case.fitted else ():
            numbers[NAMES.index(f"span_{side}")] = inputs[side]
        out, lse = table[OPERATOR.op._opoverload](*operands, *numbers)
        for _ in range(2 * options.return_lse):  # without the second number of each sum
            lse = lse.producer().inputs[0]
        traced.results = out, lse
        return traced

    with pytest.MonkeyPatch.context() as patch:
        with patch.context() as within:
            within.setattr(onnxscript.values, "Opset", Operators)
            table = torch_translation_table(opset, chunk_size=None)
        patch.setattr(translation, "TracedEmitter", Noted)
        patch.setattr(problem, "consecutive_offsets", lambda positions: None)  # positions are not numbers in a graph
        yield translate


def text(traced: Traced) -> str:
    """Write what a call becomes, with the names, dtypes and shapes for which our side takes its tensors."""
    for number, node in enumerate(traced.graph):  # releases name what is not ours differently
        node.outputs[0].name = f"{number}"
    for tensor, value in reversed(traced.values):  # a tensor of several names keeps the first one
        tensor.name, tensor.dtype = value.name, ir.DataType.from_numpy(value.dtype)
        tensor.shape = ir.Shape(value.shape)
    for node in traced.graph:
        node.name = node.name if node.name.startswith("relskew/") else node.outputs[0].name
    traced.graph.outputs[:] = traced.results
    return "\n".join(of_graph(ir.to_proto(traced.graph))) + "\n"


def written(name: str) -> str:
    case, opset, dtype = WRITTEN[name]
    with exporting(opset) as translate:
        return text(translate(CASES[case], np.dtype(dtype)))


if __name__ == "__main__":
    write(FOLDER, {name: written(name) for name in WRITTEN})

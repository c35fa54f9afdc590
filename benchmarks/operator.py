"""The operator in onnxruntime, compared with the same kernel called from NumPy, bare attention and plain graphs."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import helper
from torch import Tensor, nn

from benchmarks.graphs import bound, open_session
from benchmarks.runner import Benchmark, Call, Case, Record, as_time, distance, pivot, verdicts
from relskew_core import BlockSpec, Span, backends, relative_attention
from relskew_core.export import decoder_to_onnx
from relskew_core.export._nodes.operator import DOMAIN, INPUTS, NAME, OUTPUTS
from relskew_core.layers.torch import RelativeMultiheadAttention

HEADS, LAYERS, VOCABULARY = 8, 4, 256
TOKEN, DECODER, CORES = "one token", "a decoder's token", "two threads"
NUMPY, OPERATOR, IN_INT8 = "the kernel, from NumPy", "the operator", "the operator, caches in int8"
BARE = "`Attention` without positions"
GRAPHS: Mapping[str, dict[str, Any]] = {
    "a growing cache": {},
    "in place": {"in_place": True},
    OPERATOR: {"in_place": True, "operator": True},
    IN_INT8: {"in_place": True, "operator": True, "cache_dtype": "int8"},
}
"""Decoders, first those without the operator."""
ON_CORES = {f"{name}, {n} thread{'s' * (n > 1)}": n for name in (NUMPY, OPERATOR) for n in (1, 2)}
TARGETS = {"causal": 1.1, "full": 1.1, TOKEN: 0.8, DECODER: 0.8}
BASES = {"causal": (NUMPY,), "full": (NUMPY,), TOKEN: (BARE,), DECODER: tuple(GRAPHS)[:2]}
"""The contenders whose fastest is the reference of the operator."""


class OperatorNodes(Benchmark):
    """Whole calls, also on two threads, one token after a past, and a token of a decoder; heads are of projections."""

    page = "deploying.md"
    unlike = (BARE, IN_INT8)
    tolerance = 1e-4
    seconds = 3.0

    def begin(self) -> None:
        """Limit the kernels to one thread, too, which calls on two change themselves."""
        super().begin()
        backends.set_numpy_threads(1)

    def cases(self) -> Iterator[Case]:
        for form, lengths in (("causal", (512, 1024, 2048)), ("full", (512, 1024, 2048))):
            yield from ({"form": form, "length": n, "width": 64, "reach": n} for n in lengths)
        for form in (TOKEN, DECODER):
            yield from ({"form": form, "length": past, "width": 64, "reach": 4096} for past in (128, 1024, 4000))
        yield from ({"form": CORES, "length": n, "width": 64, "reach": n} for n in (256, 512, 1024))

    def contenders(self, case: Case) -> Iterable[str]:
        own = {DECODER: tuple(GRAPHS), TOKEN: (BARE, NUMPY, OPERATOR), CORES: tuple(ON_CORES)}
        return own.get(case["form"], (NUMPY, BARE, OPERATOR))

    def prepare(self, case: Case, contender: str) -> Call:
        form, length, width, reach = case.values()
        if form == DECODER:
            return decoding(contender, length, width, reach)
        (q, k, v, table), threads = drawn(form, length, width, reach), ON_CORES.get(contender, 1)
        span = Span.full(reach) if form == "full" else Span.causal(reach)
        if contender.startswith(NUMPY):

            def call() -> Any:
                backends.set_numpy_threads(threads)
                return relative_attention(q, k, v, table, span, causal=form != "full", offset=k.shape[2] - q.shape[2])

            return call
        new = {"q": rows(q), "k": rows(k[:, :, -q.shape[2] :]), "v": rows(v[:, :, -q.shape[2] :])}
        past = {"past_key": k[:, :, :-1], "past_value": v[:, :, :-1]} if form == TOKEN else {}
        if contender == BARE:
            inputs = ("q", "k", "v", "", "past_key", "past_value")
            attributes = {"q_num_heads": HEADS, "kv_num_heads": HEADS, "is_causal": int(form == "causal")}
            return node("Attention", "", inputs, OUTPUTS[: 1 + len(past)], new | past, **attributes)
        room = {name: np.concatenate([x, np.zeros_like(x[:, :, :1])], 2) for name, x in past.items()}
        given = new | {"rel_k": table} | room | ({"offset": np.array([length])} if past else {})
        attributes = {"num_heads": HEADS, "kv_num_heads": HEADS, "left": span.left, "right": span.right}
        outputs, causal = OUTPUTS[: 1 + len(past)], int(form != "full")
        return node(NAME, DOMAIN, INPUTS, outputs, given, threads, causal=causal, **attributes)

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        if contender in self.unlike or case["form"] == DECODER:
            return super().check(case, contender, result, first)
        expected = self.prepare(case, NUMPY)()
        return distance(result, expected if contender.startswith(NUMPY) else rows(expected))

    def texts(self, record: Record) -> dict[str, str]:
        lines, tables = list[tuple[str, str, str, bool]](), dict[str, list[tuple[str, str, str]]]()
        found: dict[str, list[float]] = {}
        for case, rows in record.by_case():
            form, column = case["form"], f"{case['length']}"
            cells = tables.setdefault(form, [])
            if form == CORES:
                for name in (NUMPY, OPERATOR):
                    one, two = (rows[f"{name}, {threads}"].fastest or 0.0 for threads in ("1 thread", "2 threads"))
                    cells.append((name, column, f"{as_time(one)} → {as_time(two)} ({one / two:.2f}×)"))
                continue
            base = min((rows[name] for name in BASES[form] if name in rows), key=lambda row: row.cpu or 0.0)
            found.setdefault(form, []).append((rows[OPERATOR].ratio or 0.0) / (base.ratio or 1.0))
            cells += [(name, column, as_time(row.cpu or 0.0)) for name, row in rows.items()]
            cells.append(("**operator**, multiple", column, f"**{found[form][-1]:.2f}**"))
        for form, ratios in found.items():
            most, of = TARGETS[form], "the best graph without it" if form == DECODER else BASES[form][0]
            text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append((form, f"≤ {most} × {of}", text, max(ratios) <= most))
        about = {form: f"{form[0].upper()}{form[1:]}, by {'past' if 'token' in form else 'length'}:" for form in tables}
        about[CORES] = "Causal, by length, the fastest call of several runs on one thread and on two:"
        parts = [f"{about[form]}\n\n{pivot(cells)}" for form, cells in tables.items()]
        return {"": "\n\n".join([record.where, verdicts(lines), *parts])}


def rows(x: Any) -> Any:
    """Return heads ``(1, heads, length, width)`` side by side, as projections produce them."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(1, x.shape[2], -1)


@functools.lru_cache(maxsize=1)
def drawn(form: str, length: int, width: int, reach: int) -> list[Any]:
    """Draw queries, keys, values and a table: for one token, with the past and it."""
    draw = np.random.default_rng(length)
    n, m = (1, length + 1) if form == TOKEN else (length, length)
    table = 2 * reach - 1 if form == "full" else reach
    sizes = ((1, HEADS, n, width), (1, HEADS, m, width), (1, HEADS, m, width), (HEADS, table, width))
    return [draw.standard_normal(size).astype(np.float32) for size in sizes]


def node(
    kind: str, domain: str, inputs: Any, outputs: Any, given: dict[str, Any], threads: int = 1, **attributes: Any
) -> Call:  # fmt: skip
    """Return a function that runs one node; a present of the size of its past is written in place."""
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in given.items()}
    names = [name if name in given else "" for name in inputs]
    graph = helper.make_graph(
        [helper.make_node(kind, names, outputs, domain=domain, **attributes)], "node",
        [helper.make_tensor_value_info(name, types[name], x.shape) for name, x in given.items()],
        [helper.make_tensor_value_info(name, types["q"], None) for name in outputs],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    session = open_session(model.SerializeToString(), domain == DOMAIN, threads)
    return bound(session, given, domain == DOMAIN, outputs[0])


class Decoder(nn.Module):
    """Layers of attention only, so that nothing hides their time."""

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        spec = BlockSpec(HEADS * width, HEADS, Span.causal(reach), causal=True)
        self.embed = nn.Embedding(VOCABULARY, spec.embed_dim)
        self.layers = nn.ModuleList(RelativeMultiheadAttention(spec) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, past: list[Any]) -> Any:
        x, present = self.embed(tokens), []
        for layer, cache in zip(self.layers, past, strict=True):
            y, grown = layer(x, past=cache)
            x = x + y
            present.append(grown)
        return x @ self.embed.weight.T, present


@functools.lru_cache(maxsize=len(GRAPHS))
def exported(name: str, width: int, reach: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "decoder.onnx")
        return decoder_to_onnx(Decoder(width, reach).eval(), path, check=False, **GRAPHS[name]).read_bytes()


def decoding(name: str, past: int, width: int, reach: int) -> Call:
    """Return a function that runs one token of a decoder after a past."""
    in_place, draw = "in_place" in GRAPHS[name], np.random.default_rng(past)
    session = open_session(exported(name, width, reach), "operator" in GRAPHS[name])
    given = {"input_ids": np.zeros((1, 1), np.int64)} | ({"past_length": np.array([past])} if in_place else {})
    for cache in (value for value in session.get_inputs() if value.name.startswith("past_key_values")):
        whole, filled = cache.type == "tensor(int8)", draw.standard_normal((1, HEADS, past, *cache.shape[3:]))
        room = np.zeros((1, HEADS, (reach if in_place else past) - past, *cache.shape[3:]))
        filled *= 127 / np.abs(filled).max() if whole else 1
        given[cache.name] = np.concatenate([filled, room], 2).astype(np.int8 if whole else np.float32)
    return bound(session, given, in_place, "logits")

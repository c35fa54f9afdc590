"""The operator in onnxruntime, compared with the same kernel called from NumPy, and with bare attention."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from onnx import helper

from benchmarks.graphs import bound, open_session
from benchmarks.runner import Benchmark, Call, Case, Record, as_time, distance, pivot, verdicts
from relskew_core import Span, backends, relative_attention
from relskew_core.export._nodes.operator import DOMAIN, INPUTS, NAME, OUTPUTS

HEADS = 8
TOKEN, CORES = "one token", "two threads"
NUMPY, OPERATOR, BARE = "the kernel, from NumPy", "the operator", "`Attention` without positions"
ON_CORES = {f"{name}, {n} thread{'s' * (n > 1)}": n for name in (NUMPY, OPERATOR) for n in (1, 2)}
TARGETS = {"causal": (1.1, NUMPY), "full": (1.1, NUMPY), TOKEN: (0.8, BARE)}
"""The most time of the operator, as a multiple of another contender's."""


class OperatorNodes(Benchmark):
    """Whole calls, also on two threads, and one token after a past; heads are of projections."""

    page = "deploying.md"
    tolerance = 1e-4
    seconds = 3.0

    def begin(self) -> None:
        """Limit the kernels to one thread, too, which calls on two change themselves."""
        super().begin()
        backends.set_numpy_threads(1)

    def cases(self) -> Iterator[Case]:
        for form, n in itertools.product(("causal", "full"), (512, 1024, 2048)):
            yield {"form": form, "length": n, "width": 64, "reach": n}
        yield from ({"form": TOKEN, "length": past, "width": 64, "reach": 4096} for past in (128, 1024, 4000))
        yield from ({"form": CORES, "length": n, "width": 64, "reach": n} for n in (256, 512, 1024))

    def contenders(self, case: Case) -> Iterable[str]:
        return {TOKEN: (BARE, NUMPY, OPERATOR), CORES: ON_CORES}.get(case["form"], (NUMPY, BARE, OPERATOR))

    def prepare(self, case: Case, contender: str) -> Call:
        form, length, width, reach = case.values()
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
        if contender == BARE:
            return None
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
            found.setdefault(form, []).append((rows[OPERATOR].ratio or 0.0) / (rows[TARGETS[form][1]].ratio or 1.0))
            cells += [(name, column, as_time(row.cpu or 0.0)) for name, row in rows.items()]
            cells.append(("**operator**, multiple", column, f"**{found[form][-1]:.2f}**"))
        for form, ratios in found.items():
            (most, of), text = TARGETS[form], ", ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append((form, f"≤ {most} × {of}", text, max(ratios) <= most))
        about = {form: f"{form[0].upper()}{form[1:]}, by {'past' if form == TOKEN else 'length'}:" for form in tables}
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
    run = bound(session, given, domain == DOMAIN, outputs[0])
    return lambda: run().numpy()

"""Exported graphs compared with those of ``torch.onnx.export`` from textbook code; on CUDA, and quantised."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
import time
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.runner import Benchmark, Call, Case, Record, Row, as_time, distance, left_out, pivot, verdicts
from benchmarks.textbook import attended, columns, gathered, joined, picked, projected, shifted, skewed
from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core._reference import reference_block
from relskew_core.export import custom_ops_library, quantize, save, to_onnx
from relskew_core.export._nodes.functions import all_graphs

BARE, DECODING = "no positions", "decoding"
IN_PLACE = "relskew `ort`, in place"
CHUNK = BLOCK = 128
CHUNKED = f"relskew `ort`, chunks of {CHUNK}"  # the graph for CPUs
GATHER = "gather of the products, as DeBERTa in transformers"
EXAMPLE = 64  # the length of the example for torch's exporter

Relative = Callable[[Tensor, Tensor, Span], Tensor]
"""The relative logits of queries, with a table and its span: the textbooks differ in these."""


def music_transformer(q: Tensor, table: Tensor, span: Span) -> Tensor:
    return skewed(q @ table[:, table.shape[1] - q.shape[2] :].transpose(-2, -1))  # a slice of ``E_r``


def transformer_xl(q: Tensor, table: Tensor, span: Span) -> Tensor:
    length, middle = q.shape[2], table.shape[1] // 2
    return shifted(q @ table[:, middle - length + 1 : middle + length].transpose(-2, -1))


def by_pair(select: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Relative:
    """Select for all pairs: rows of the table (Shaw et al. 2018, section 3.3), or products with all rows (DeBERTa)."""
    return lambda q, table, span: select(q, table, columns(q.shape[2], q.shape[2], span.left, span.rows))


class Textbook(nn.Module):
    """Projections, heads and attention. Its state dict is a block's mapping of weights."""

    mask: Tensor

    def __init__(self, relative: Relative, spec: BlockSpec, weights: dict[str, Any], longest: int) -> None:
        super().__init__()
        self.spec, self.relative = spec, relative
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            width, source = weights[f"{name}.weight"].shape
            self.add_module(name, nn.Linear(source, width, bias=spec.bias))
        self.rel_k = nn.Parameter(torch.empty(spec.table_shape))
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)), persistent=False)
        self.load_state_dict({key: torch.as_tensor(weight) for key, weight in weights.items()})

    def forward(self, x: Tensor) -> Any:
        length, spec = x.shape[1], self.spec
        q, k, v = projected(self, x, spec.num_heads)
        logits = (torch.matmul(q, k.transpose(-2, -1)) + self.relative(q, self.rel_k, spec.span)) / spec.head_dim**0.5
        return joined(self, attended(logits, v, self.mask[:length, :length] == 0 if spec.causal else None))


class Form(NamedTuple):
    """A block, and the textbook versions of it by label, if there are any."""

    title: str
    spec: BlockSpec
    textbooks: Mapping[str, Relative]


def forms(longest: int, width: int = 512, heads: int = 8) -> dict[str, Form]:
    """Return the blocks, whose tables, if limited, are for inputs up to ``longest``."""
    causal = BlockSpec(width, heads, Span.causal(longest), causal=True)
    full = BlockSpec(width, heads, Span.full(longest))
    clip = BlockSpec(width, heads, Span.clipped(16), shared_table=True)
    blocks = BlockSpec(width, heads, Span.causal(2 * BLOCK), causal=True, block_size=BLOCK)
    selected: dict[str, Relative] = {GATHER: by_pair(picked)}
    return {
        "causal": Form("Causal", causal, {"Music Transformer, pad–reshape–slice": music_transformer} | selected),
        "full": Form("Full", full, {"pad–reshape–slice, both directions": transformer_xl} | selected),
        "clip": Form("Clipped at 16", clip, {"Shaw, gather of all pairs": by_pair(gathered)}),
        "blocks": Form(f"Blocks of {BLOCK}, each with the one before", blocks, {}),
        DECODING: Form("One token, with a cache", causal, {}),
    }


def from_torch(model: Textbook, example: int, *, dynamo: bool) -> onnx.ModelProto:
    """Export a module with dynamic batch and length, following torch's documentation."""
    x, stream, axes = (torch.zeros(2, example, model.spec.embed_dim),), io.BytesIO(), {0: "batch", 1: "length"}
    if dynamo:
        vary = {"x": dict.fromkeys(axes, torch.export.Dim.DYNAMIC)}
        program = torch.onnx.export(model, x, dynamo=True, opset_version=23, dynamic_shapes=vary, verbose=False)
        assert program is not None
        return program.model_proto
    options: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": axes, "y": axes}}
    # torch's annotations only list file names; this exporter documents streams.
    torch.onnx.export(model, x, stream, dynamo=False, opset_version=18, **options)  # type: ignore[arg-type]
    return onnx.load_from_string(stream.getvalue())


def without_positions(spec: BlockSpec, weights: Mapping[str, Any], **options: Any) -> onnx.ModelProto:
    """Return the block's graph without relative terms: projections and a bare attention operator."""
    model = to_onnx(spec, weights, chunk_size=None, **options)
    (attention,) = (node for node in model.graph.node if node.op_type == "Attention")
    attention.input[3] = ""  # the mask that is added
    while not attention.input[-1]:
        del attention.input[-1]
    inputs, outputs = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    return onnx.utils.Extractor(model).extract_model(inputs, outputs)


def open_session(
    content: bytes | str, operator: bool = False, threads: int = 1, provider: str = "CPUExecutionProvider", **more: Any
) -> onnxruntime.InferenceSession:
    """Load a graph or a file of one, with the operator library if requested, and other options of sessions."""
    options = onnxruntime.SessionOptions()
    for name, value in {"intra_op_num_threads": threads, "log_severity_level": 4, **more}.items():
        setattr(options, name, value)
    if operator:
        options.register_custom_ops_library(str(custom_ops_library()))
    return onnxruntime.InferenceSession(content, options, providers=[provider])


def bound(
    session: onnxruntime.InferenceSession, given: Mapping[str, Any], in_place: bool, wanted: str, device: str = "cpu"
) -> Call:
    """Return a call with all inputs bound; ``in_place``, each present is written into the buffer of its past."""
    binding, names = session.io_binding(), [output.name for output in session.get_outputs()]
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x, device, 0) for name, x in given.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in names:
        pasts = (values.get(name.replace("present", past)) for past in ("past", "past_key_values"))
        if (past := next(filter(None, pasts), None)) is not None and in_place:
            binding.bind_ortvalue_output(name, past)
        else:
            binding.bind_output(name, device, 0)

    def call() -> Any:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()[names.index(wanted)]

    return call


FORMS = ("causal", "full", "clip", "blocks", DECODING)
LENGTHS = (1, 7, 64, 512, 1024, 2048)
CACHE = 4096  # the length of caches in place, and the reach of the table; the last past fills it
PASTS = (128, 1024, 2048, CACHE - 1)
TARGETS = {"causal": 1.1, "full": 1.5, "clip": 1.55}
DECODING_TARGET = 1.6
"""The most time of a call at L = 1024, or of a token in place: multiples of the block without positions."""


@functools.lru_cache(maxsize=1)
def form_of(name: str, width: int, reach: int) -> tuple[Form, dict[str, Any], dict[str, partial[onnx.ModelProto]]]:
    """Return a block, its weights, and functions that make each graph, by label."""
    form = forms(reach, width, max(2, width // 64))[name]
    weights: dict[str, Any] = dict(init_weights(form.spec, seed=0))
    relskew = partial(to_onnx, form.spec, weights)
    bare = partial(without_positions, replace(form.spec, block_size=None), weights)
    if name == DECODING:
        grows, in_place = partial(relskew, past=True), partial(relskew, past=True, in_place=True)
        made = {BARE: partial(bare, past=True), "relskew `ort`, a cache that grows": grows, IN_PLACE: in_place}
        return form, weights, made
    made = {BARE: bare, "relskew `ort`": partial(relskew, chunk_size=None)}
    made |= {CHUNKED: partial(relskew, chunk_size=CHUNK)} if name != "blocks" else {}
    made["relskew `portable`"] = partial(relskew, profile="portable")
    for (label, relative), dynamo in itertools.product(form.textbooks.items(), (True, False)):
        textbook = Textbook(relative, form.spec, weights, reach).eval()
        exporter = f"torch{'' if dynamo else ', dynamo=False'}: {label}"
        made[exporter] = partial(from_torch, textbook, min(EXAMPLE, reach // 2), dynamo=dynamo)
    return form, weights, made


@functools.lru_cache(maxsize=16)
def exported(name: str, width: int, reach: int, label: str) -> tuple[bytes, Case]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporters warn about what the rows show
        model = form_of(name, width, reach)[2][label]()
        content = model.SerializeToString()
    seconds = time.perf_counter() - began
    nodes = sum(len(graph.node) for graph in all_graphs(model.graph))
    return content, {"nodes": nodes, "file_bytes": len(content), "export_seconds": seconds}


class Export(Benchmark):
    """Forms of a block at several lengths, and one token after pasts of several lengths."""

    page = "graphs.md"
    tolerance = 1e-4
    seconds = 2.0
    pairs = True
    fallible = True

    def cases(self) -> Iterator[Case]:
        for form in FORMS:
            reach, lengths = (CACHE, PASTS) if form == DECODING else (LENGTHS[-1], LENGTHS)
            ends = (reach + 1,) if form in ("causal", "full") else ()
            yield from ({"form": form, "length": n, "width": 512, "reach": reach} for n in (*lengths, *ends))

    def contenders(self, case: Case) -> Iterable[str]:
        return form_of(case["form"], case["width"], case["reach"])[2]

    def prepare(self, case: Case, contender: str) -> Call:
        content, _ = exported(case["form"], case["width"], case["reach"], contender)
        session, (x, caches, _) = open_session(content), drawn(*case.values())
        if case["form"] == DECODING:
            in_place, pasts = any(one.name == "past_lengths" for one in session.get_inputs()), caches
            if not in_place:
                pasts = [np.ascontiguousarray(cache[:, :, : case["length"]]) for cache in caches]
            given = {"x": x, "past_key": pasts[0], "past_value": pasts[1]}
            given |= {"past_lengths": np.array([case["length"]])} if in_place else {}
            run = bound(session, given, in_place, "y")
            return lambda: run().numpy()
        name = session.get_inputs()[0].name
        return lambda: session.run(None, {name: x})[0]

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return exported(case["form"], case["width"], case["reach"], contender)[1]

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        """Compare graphs with positions with the block itself, within the table's reach."""
        expected = drawn(*case.values())[2]
        return None if contender.startswith(BARE) or expected is None else distance(result, expected)

    def measures_of(self, case: Case) -> set[str]:
        """Only try an input that is longer than the table: only an error is right."""
        return set() if _ends(case) else {"time"}

    def texts(self, record: Record) -> dict[str, str]:
        by_form = {form: [row for row in record.rows if row.case["form"] == form] for form in FORMS}
        tables = [f"### {form_of(form, 64, 64)[0].title}\n\n{table(rows)}" for form, rows in by_form.items() if rows]
        lines = verdicts(line for form, rows in by_form.items() for line in targets(form, rows))
        return {"": "\n\n".join([record.where, lines, *tables])}


@functools.lru_cache(maxsize=1)
def drawn(form: str, length: int, width: int, reach: int) -> tuple[Any, Any, Any]:
    """Draw the input, caches for a past, and the expected outputs; past the table's end no output is right."""
    spec, weights = form_of(form, width, reach)[0].spec, form_of(form, width, reach)[1]
    draw = np.random.default_rng(length)
    x = draw.standard_normal((1, 1 if form == DECODING else length, width)).astype(np.float32)
    if form != DECODING:
        longer = _ends({"form": form, "length": length, "reach": reach})
        return x, None, None if longer else np.asarray(attention_block(x, weights, spec))
    caches = draw.standard_normal((2, 1, spec.num_kv_heads, reach, spec.head_dim)).astype(np.float32)
    y, _ = attention_block(x, weights, spec, past=(caches[0][:, :, :length], caches[1][:, :, :length]))
    return x, caches, np.asarray(y)


def _ends(case: Case) -> bool:
    return case["form"] in ("causal", "full") and case["length"] > case["reach"]


def targets(form: str, rows: Sequence[Row]) -> Iterator[tuple[str, str, str, bool]]:
    """Compare the graph for CPUs with the promises at L = 1024, with the textbook, and for decoding in place."""
    of = {(row.contender, row.case["length"]): row.ratio for row in rows if row.ratio is not None}
    most = TARGETS.get(form, DECODING_TARGET)
    if found := [ratio for (label, _), ratio in of.items() if label == IN_PLACE]:
        yield "decoding in place, every past", f"≤ {most}×", f"{max(found):.2f}×", max(found) <= most
    own = {length: ratio for (label, length), ratio in of.items() if label == CHUNKED}
    if form in TARGETS and 1024 in own:
        yield f"{form}, L = 1024", f"≤ {most}×", f"{own[1024]:.2f}×", own[1024] <= most
    if own:
        others = [(n, own.get(n, 0.0) / ratio) for (label, n), ratio in of.items() if label.startswith("torch")]
        slower = ", ".join(f"{length} ({ratio:.2f}×)" for length, ratio in others if ratio > 1)
        yield f"{form}, the textbook is faster", "nowhere", f"at L = {slower}" if slower else "nowhere", not slower


def table(rows: Sequence[Row]) -> str:
    """Return sizes, times and multiples of a form's graphs, and the reason if one fails."""

    def cells() -> Iterator[tuple[str, str, str]]:
        for row in sorted(rows, key=lambda row: row.case["length"]):
            label, length, facts, ends = row.contender, row.case["length"], row.facts, _ends(row.case)
            if facts:
                size, made = f"{facts['file_bytes'] / 2**20:.1f} MiB", as_time(facts["export_seconds"])
                yield from ((label, "nodes", str(facts["nodes"])), (label, "file", size), (label, "export", made))
            column = f"past = {length}" if row.case["form"] == DECODING else f"L = {length}{', past the table' * ends}"
            if row.skipped is not None:
                yield label, column, "wrong" if row.skipped.startswith("wrong") else "fails"
            elif ends:
                yield label, column, "–" if label.startswith(BARE) else "gives numbers"
            else:
                ratio = f" ({row.ratio:.2f}×)" if label != BARE and row.ratio is not None else ""
                yield label, column, f"{as_time(row.cpu or 0.0)}{ratio}"

    within = (row for row in rows if not _ends(row.case))
    return "\n\n".join([pivot(cells()), *left_out(within, lambda row: f"{row.contender}, {row.case['length']}")])


ARMS = {"usual": {}, "no memory-efficient kernel": {"ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION": "1"}}
REPORT_KERNEL = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}
CHUNKS = "relskew `ort`, in chunks"
GRAPHS: dict[str, dict[str, Any]] = {  # by Slice or by Gather
    BARE: {}, "relskew `ort`": {"chunk_size": None}, "relskew `portable`": {"profile": "portable"}, CHUNKS: {},
}  # fmt: skip


class GPUGraphs(Benchmark):
    """Blocks on CUDA: times with bound tensors, the device of each node, and the kernel of fused attention.

    The memory-efficient kernel is also forbidden, which shows what it is worth. A session chooses its kernels from
    the environment of the process, so every measurement runs in a separate one.
    """

    page = "development/gpu.md"
    fallible = True
    measures = frozenset[str]()

    def cases(self) -> Iterator[Case]:
        every = (("causal", "full"), ("float16", "float32"), (512, 1024, 2048, 4096), ARMS)
        for form, dtype, length, arm in itertools.product(*every):
            case = {"form": form, "dtype": dtype, "length": length, "kernels": arm}
            yield case | {"provider": "CUDAExecutionProvider", "rounds": 30}

    def contenders(self, case: Case) -> Iterable[str]:
        chunks = case["kernels"] == "usual" and case["length"] == 1024
        return [name for name in GRAPHS if name != CHUNKS or chunks]

    def prepare(self, case: Case, contender: str) -> Call:
        def call() -> Case:
            found, printed = self.apart("gpu_graphs", case, contender, **ARMS[case["kernels"]], **REPORT_KERNEL)
            kernel = re.search(r"SdpaKernel=(\w+)", printed)
            return found | {"kernel": kernel[1] if kernel else None}

        return call

    def answer(self, case: Case, contender: str) -> Case:
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        dtype, length, provider = case["dtype"], case["length"], case["provider"]
        spec = forms(length)[case["form"]].spec
        weights = init_weights(spec, seed=0, dtype=dtype)
        make = without_positions if contender == BARE else to_onnx
        model = make(spec, weights, **GRAPHS[contender]).SerializeToString()
        device = "cuda" if provider.startswith("CUDA") else "cpu"
        x = np.random.default_rng(0).standard_normal((1, length, spec.embed_dim)).astype(dtype)

        def opened(**settings: Any) -> tuple[Any, Call]:
            # errors alone are printed, which are what remains of a process that fails
            session = open_session(model, threads=0, provider=provider, log_severity_level=3, **settings)
            if (found := session.get_providers())[0] != provider:
                raise SystemExit(f"onnxruntime {onnxruntime.__version__} has no {provider} here: {found}")
            return session, bound(session, {"x": x}, False, "y", device)

        _, call = opened()
        finite = bool(np.isfinite(call().numpy()).all())
        seconds = median(timeit.repeat(call, number=1, repeat=case["rounds"]))
        with TemporaryDirectory() as folder:  # in a second session: a profile costs time at every node
            session, call = opened(enable_profiling=True, profile_file_prefix=f"{folder}/profile")
            call()
            events = json.loads(Path(session.end_profiling()).read_text())
        ran = Counter(event["args"]["provider"] for event in events if event.get("args", {}).get("provider"))
        return {"seconds": seconds, "placement": dict(ran), "finite": finite}

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return result

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.rows:
            case, facts = row.case, row.facts
            nodes = [f"{n} {name.removesuffix('ExecutionProvider')}" for name, n in facts.get("placement", {}).items()]
            placed = ", ".join([*nodes, *filter(None, [facts.get("kernel")])])
            text = "failed" if row.skipped else f"{facts['seconds'] * 1e3:.3g} ms ({placed})"
            yield f"{case['form']} {case['dtype']} {case['length']}: {row.contender}", case["kernels"], text


LARGE = 6.0  # the factor of inputs for logits in the tens
PROFILES = ("ort", "portable")
KINDS = ("float32", "float16", "weights-8", "weights-4", "dynamic", "static")
CALL, LOGITS, TOKEN = "a call", "large logits", "one token"


class Quantise(Benchmark):
    """A causal block of every kind: two sequences of 256, the same with large logits, and a token after 1000 others."""

    page = "quantisation.md"
    names = KINDS
    seconds = 2.0

    def cases(self) -> Iterator[Case]:
        for profile, form in itertools.product(PROFILES, (CALL, LOGITS, TOKEN)):
            yield {"profile": profile, "form": form, "width": 512, "rows": 2048}

    def measures_of(self, case: Case) -> set[str]:
        """Large logits do not affect time."""
        return set() if case["form"] == LOGITS else {"time"}

    def prepare(self, case: Case, contender: str) -> Call:
        session, feeds = open_session(made(*case.values(), contender)), block(*list(case.values())[1:])[2]
        half = session.get_inputs()[0].type == "tensor(float16)"

        def run(given: dict[str, np.ndarray]) -> np.ndarray:
            return np.asarray(session.run(["y"], given)[0])

        given = {name: x.astype(np.float16) if half else x for name, x in feeds.items()}
        if case["form"] != TOKEN:
            y, middle, changed = run(given), given["x"].shape[1] // 2, given["x"].copy()
            changed[:, middle:] = changed[:, middle:][:, ::-1]
            leak = float(np.max(np.abs(y - run({"x": changed}))[:, :middle]))
            if leak > 0:
                raise ValueError(f"{contender}, {case}: keys that are hidden change the output by {leak:.1e}")
        return lambda: run(given)

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        return distance(result, block(*list(case.values())[1:])[3])

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return {"file_bytes": len(made(*case.values(), contender))}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            line, profile, form = f"`{row.contender}`", row.case["profile"], row.case["form"]
            if (profile, form) == (PROFILES[0], CALL):
                yield line, "size", f"{row.facts['file_bytes'] / 2**20:.2f} MiB"
            yield line, f"`{profile}`, error: {form}", f"{row.error:.0e}"
            if row.cpu is not None:
                yield line, f"`{profile}`, time: {form}", f"{as_time(row.cpu)} ({row.ratio:.2f}×)"

    def order(self, cell: tuple[str, str, str]) -> Any:
        return "time" in cell[1], "portable" in cell[1]


@functools.lru_cache(maxsize=2)
def block(form: str, width: int, rows: int) -> tuple[BlockSpec, dict[str, Any], dict[str, Any], Any]:
    """Return a block, its weights, inputs, and the outputs in float64."""
    spec, draw = BlockSpec(width, width // 64, Span.causal(rows), causal=True), np.random.default_rng(0)
    weights = {key: np.asarray(x) for key, x in init_weights(spec, seed=0).items()}
    if form == TOKEN:
        sizes = [(1, spec.num_kv_heads, min(rows - 1, 1000), 64)] * 2 + [(1, 1, width)]
    else:
        sizes = [(2, min(rows, 256), width)]
    *past, x = (draw.standard_normal(size).astype(np.float32) for size in sizes)
    x = np.float32(LARGE) * x if form == LOGITS else x
    feeds = {"x": x, **dict(zip(("past_key", "past_value"), past, strict=False))}
    return spec, weights, feeds, reference_block(spec, weights, x, past=(past[0], past[1]) if past else None).out


@functools.lru_cache(maxsize=len(KINDS))
def made(profile: Any, form: str, width: int, rows: int, kind: Any) -> bytes:
    spec, weights, feeds, _ = block(form, width, rows)
    options: dict[str, Any] = {"profile": profile, "past": form == TOKEN}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "block.onnx"
        if kind.startswith("float"):
            return save(to_onnx(spec, weights, dtype=kind, **options), path).read_bytes()
        inputs = [feeds] if kind == "static" else None
        return quantize(to_onnx(spec, weights, **options), path, kind, inputs=inputs).read_bytes()

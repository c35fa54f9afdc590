"""The compared graphs: relskew, the textbook's through torch's exporter, and the block without positions."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.runner import Call
from benchmarks.textbook import attended, columns, gathered, picked, shifted, skewed
from relskew_core import BlockSpec, Span
from relskew_core.export import custom_ops_library, to_onnx

BARE = "no positions"
IN_PLACE = "relskew `ort`, in place"
CHUNK = BLOCK = 128
CHUNKED = f"relskew `ort`, chunks of {CHUNK}"  # the graph for CPUs
GATHER = "gather of the products, as DeBERTa in transformers"
PASTS = ("past", "past_key_values")  # in the names of caches
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

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
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
        batch, length, _ = x.shape
        heads, width = self.spec.num_heads, self.spec.head_dim

        def split(projection: Any) -> Tensor:
            return projection(x).reshape(batch, length, heads, width).transpose(1, 2)

        q, k, v = split(self.q_proj), split(self.k_proj), split(self.v_proj)
        logits = (torch.matmul(q, k.transpose(-2, -1)) + self.relative(q, self.rel_k, self.spec.span)) / width**0.5
        out = attended(logits, v, self.mask[:length, :length] == 0 if self.spec.causal else None)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, heads * width))


@dataclass(frozen=True, slots=True)
class Form:
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
    return {
        "causal": Form(
            "Causal", causal, {"Music Transformer, pad–reshape–slice": music_transformer, GATHER: by_pair(picked)}
        ),
        "full": Form("Full", full, {"pad–reshape–slice, both directions": transformer_xl, GATHER: by_pair(picked)}),
        "clip": Form("Clipped at 16", clip, {"Shaw, gather of all pairs": by_pair(gathered)}),
        "blocks": Form(f"Blocks of {BLOCK}, each with the one before", blocks, {}),
    }


def contenders(form: Form, weights: Mapping[str, Any], longest: int) -> dict[str, Callable[[], bytes]]:
    """Return, by label, functions that make each graph as the bytes of its file."""
    relskew = partial(as_bytes, to_onnx, form.spec, weights)
    bare = partial(as_bytes, without_positions, replace(form.spec, block_size=None), weights)
    made = {BARE: bare, "relskew `ort`": partial(relskew, chunk_size=None)}
    if form.spec.block_size is None:
        made[CHUNKED] = partial(relskew, chunk_size=CHUNK)
    made["relskew `portable`"] = partial(relskew, profile="portable")
    for label, relative in form.textbooks.items():
        for name, dynamo in (("torch", True), ("torch, dynamo=False", False)):
            textbook = Textbook(relative, form.spec, dict(weights), longest).eval()
            made[f"{name}: {label}"] = partial(from_torch, textbook, min(EXAMPLE, longest // 2), dynamo=dynamo)
    return made


def decoders(spec: BlockSpec, weights: Mapping[str, Any]) -> dict[str, Callable[[], bytes]]:
    """Return the same for each graph with a cache: growing, or in place."""
    relskew = partial(as_bytes, to_onnx, spec, weights, past=True)
    bare = partial(as_bytes, without_positions, spec, weights, past=True)
    return {BARE: bare, "relskew `ort`, a cache that grows": relskew, IN_PLACE: partial(relskew, in_place=True)}


def as_bytes(
    make: Callable[..., onnx.ModelProto], spec: BlockSpec, weights: Mapping[str, Any], **options: Any
) -> bytes:
    return make(spec, weights, **options).SerializeToString()


def from_torch(model: Textbook, example: int, *, dynamo: bool) -> bytes:
    """Export a module with dynamic batch and length, following torch's documentation."""
    x = torch.zeros(2, example, model.spec.embed_dim)
    if dynamo:
        vary = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
        program = torch.onnx.export(model, (x,), dynamo=True, opset_version=23, dynamic_shapes=vary, verbose=False)
        assert program is not None
        return program.model_proto.SerializeToString()
    stream = io.BytesIO()
    axes = {"x": {0: "batch", 1: "length"}, "y": {0: "batch", 1: "length"}}
    options: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": axes}
    # torch's annotations only list file names; this exporter documents streams.
    torch.onnx.export(model, (x,), stream, dynamo=False, opset_version=18, **options)  # type: ignore[arg-type]
    return stream.getvalue()


def without_positions(spec: BlockSpec, weights: Mapping[str, Any], **options: Any) -> onnx.ModelProto:
    """Return the block's graph without relative terms: projections and a bare attention operator."""
    model = to_onnx(spec, weights, chunk_size=None, **options)
    (attention,) = (node for node in model.graph.node if node.op_type == "Attention")
    attention.input[3] = ""  # the mask that is added
    while not attention.input[-1]:
        del attention.input[-1]
    made = {output: node for node in model.graph.node for output in node.output}
    needed, used = [value.name for value in model.graph.output], set[str]()
    while needed:
        name = needed.pop()
        if name not in used:
            used.add(name)
            needed += made[name].input if name in made else ()
    nodes = [node for node in model.graph.node if not used.isdisjoint(node.output)]
    stored = [tensor for tensor in model.graph.initializer if tensor.name in used]
    inputs = [value for value in model.graph.input if value.name in used]
    graph = onnx.helper.make_graph(nodes, "no_positions", inputs, model.graph.output, initializer=stored)
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def open_session(content: bytes, operator: bool = False, threads: int = 1) -> onnxruntime.InferenceSession:
    """Load a graph, with the operator library if requested."""
    settings = onnxruntime.SessionOptions()
    if operator:
        settings.register_custom_ops_library(str(custom_ops_library()))
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 4
    return onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])


def bound(session: onnxruntime.InferenceSession, given: Mapping[str, Any], in_place: bool, wanted: str) -> Call:
    """Return a call with all inputs bound; ``in_place``, each present is written into the buffer of its past."""
    binding, names = session.io_binding(), [output.name for output in session.get_outputs()]
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x) for name, x in given.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in names:
        pasts = [each for each in (name.replace("present", past) for past in PASTS) if each in values]
        if in_place and pasts:
            binding.bind_ortvalue_output(name, values[pasts[0]])
        else:
            binding.bind_output(name)

    def call() -> Any:
        session.run_with_iobinding(binding)
        return binding.get_outputs()[names.index(wanted)].numpy()

    return call

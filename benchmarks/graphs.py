"""The compared graphs: relskew, the textbook's through torch's exporter, and the block without positions."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from benchmarks.textbook import attended, columns, gathered, picked, shifted, skewed
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx

BARE = "no positions"
IN_PLACE = "relskew `ort`, in place"
CHUNK = 128
CHUNKED = f"relskew `ort`, chunks of {CHUNK}"
"""The graph for CPUs."""
BLOCK = 128
GATHER = "gather of the products, as DeBERTa in transformers"
EXAMPLE = 64
"""The length of the example for torch's exporter."""


Relative = Callable[[Tensor, Tensor, Span], Tensor]
"""The relative logits of queries, with a table and its span: the textbooks differ in these."""


def music_transformer(q: Tensor, table: Tensor, span: Span) -> Tensor:
    """A slice of ``E_r``, pad, reshape, slice (Huang et al. 2018, section 3.4.1)."""
    return skewed(q @ table[:, table.shape[1] - q.shape[2] :].transpose(-2, -1))


def shift(q: Tensor, table: Tensor, span: Span) -> Tensor:
    """Transformer-XL's shift over a table of both directions."""
    length, middle = q.shape[2], table.shape[1] // 2
    return shifted(q @ table[:, middle - length + 1 : middle + length].transpose(-2, -1))


def shaw(q: Tensor, table: Tensor, span: Span) -> Tensor:
    """The gathered rows of all pairs, ``(length, length, D)`` (Shaw et al. 2018, section 3.3)."""
    return gathered(q, table, columns(q.shape[2], q.shape[2], span.left, span.rows))


def deberta(q: Tensor, table: Tensor, span: Span) -> Tensor:
    """Products with all rows, of which each pair selects one, as in DeBERTa's ``disentangled_attention_bias``."""
    return picked(q, table, columns(q.shape[2], q.shape[2], span.left, span.rows))


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

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, width = self.spec.num_heads, self.spec.head_dim

        def split(projection: nn.Module) -> Tensor:
            projected: Tensor = projection(x)
            return projected.reshape(batch, length, heads, width).transpose(1, 2)

        q, k, v = split(self.q_proj), split(self.k_proj), split(self.v_proj)
        logits = (torch.matmul(q, k.transpose(-2, -1)) + self.relative(q, self.rel_k, self.spec.span)) / width**0.5
        out = attended(logits, v, self.mask[:length, :length] == 0 if self.spec.causal else None)
        y: Tensor = self.out_proj(out.transpose(1, 2).reshape(batch, length, heads * width))
        return y


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
        "causal": Form("Causal", causal, {"Music Transformer, pad–reshape–slice": music_transformer, GATHER: deberta}),
        "full": Form("Full", full, {"pad–reshape–slice, both directions": shift, GATHER: deberta}),
        "clip": Form("Clipped at 16", clip, {"Shaw, gather of all pairs": shaw}),
        "blocks": Form(f"Blocks of {BLOCK}, each with the one before", blocks, {}),
    }


def contenders(form: Form, weights: Mapping[str, Any], longest: int) -> dict[str, Callable[[], bytes]]:
    """Return, by label, functions that make each graph as the bytes of its file."""
    relskew = partial(whole_bytes, form.spec, weights)

    def textbook(relative: Relative, dynamo: bool) -> Callable[[], bytes]:
        example = min(EXAMPLE, longest // 2)
        return lambda: from_torch(Textbook(relative, form.spec, dict(weights), longest), example, dynamo=dynamo)

    made = {BARE: bare_bytes(replace(form.spec, block_size=None), weights), "relskew `ort`": relskew(chunk_size=None)}
    if form.spec.block_size is None:
        made[CHUNKED] = relskew(chunk_size=CHUNK)
    made["relskew `portable`"] = relskew(profile="portable")
    for label, relative in form.textbooks.items():
        made[f"torch: {label}"] = textbook(relative, dynamo=True)
        made[f"torch, dynamo=False: {label}"] = textbook(relative, dynamo=False)
    return made


def decoders(spec: BlockSpec, weights: Mapping[str, Any]) -> dict[str, Callable[[], bytes]]:
    """Return, by label, functions that make each graph with a cache: growing, or in place."""
    relskew = partial(whole_bytes, spec, weights, past=True)
    return {
        BARE: bare_bytes(spec, weights, past=True),
        "relskew `ort`, a cache that grows": relskew(),
        IN_PLACE: relskew(in_place=True),
    }


def whole_bytes(spec: BlockSpec, weights: Mapping[str, Any], **options: Any) -> Callable[[], bytes]:
    """Return a function that makes the file of a block."""
    return lambda: to_onnx(spec, weights, **options).SerializeToString()


def bare_bytes(spec: BlockSpec, weights: Mapping[str, Any], **options: Any) -> Callable[[], bytes]:
    """Return a function that makes the file of a block without positions."""
    return lambda: without_positions(spec, weights, **options).SerializeToString()


def from_torch(model: Textbook, example: int, *, dynamo: bool) -> bytes:
    """Export a module with dynamic batch and length, following torch's documentation."""
    x = torch.zeros(2, example, model.spec.embed_dim)
    model = model.eval()
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
    needed: list[str] = [value.name for value in model.graph.output]
    kept = set()
    while needed:
        name = needed.pop()
        if name in made and made[name].name not in kept:
            kept.add(made[name].name)
            needed += made[name].input
    nodes = [node for node in model.graph.node if node.name in kept]
    used = {name for node in nodes for name in node.input}
    stored = [tensor for tensor in model.graph.initializer if tensor.name in used]
    inputs = [value for value in model.graph.input if value.name in used]
    graph = onnx.helper.make_graph(nodes, "no_positions", inputs, model.graph.output, initializer=stored)
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)

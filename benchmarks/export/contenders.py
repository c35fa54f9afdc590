"""The graphs that are compared: ours, the textbook's through torch's exporter, and the block without positions."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from benchmarks.export.textbook import MusicTransformer, Shaw, Shift, Textbook
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx

BARE = "no positions"
CHUNK = 128
CHUNKED = f"relskew `ort`, chunks of {CHUNK}"
"""The graph for CPUs."""
EXAMPLE = 64
"""Length of the input that torch's exporter is shown."""


@dataclass(frozen=True, slots=True)
class Form:
    """A block, and who writes it how in a textbook."""

    title: str
    spec: BlockSpec
    textbook: Callable[..., Textbook]
    textbook_label: str


def forms(longest: int, width: int = 512, heads: int = 8) -> dict[str, Form]:
    """Return the blocks, with tables for inputs up to ``longest`` where they end."""
    causal = BlockSpec(width, heads, Span.causal(longest), causal=True)
    full = BlockSpec(width, heads, Span.full(longest))
    clip = BlockSpec(width, heads, Span.clipped(16), shared_table=True)
    return {
        "causal": Form("Causal", causal, MusicTransformer, "Music Transformer, pad–reshape–slice"),
        "full": Form("Full", full, Shift, "pad–reshape–slice, both directions"),
        "clip": Form("Clipped at 16", clip, Shaw, "Shaw, gather of all pairs"),
    }


def contenders(form: Form, weights: Mapping[str, Any], longest: int) -> dict[str, Callable[[], bytes]]:
    """Return by label what makes each graph, as the bytes of its file."""

    def ours(**options: Any) -> Callable[[], bytes]:
        return lambda: to_onnx(form.spec, weights, **options).SerializeToString()

    def textbook(dynamo: bool) -> Callable[[], bytes]:
        example = min(EXAMPLE, longest // 2)
        return lambda: from_torch(form.textbook(form.spec, dict(weights), longest), example, dynamo=dynamo)

    return {
        BARE: lambda: without_positions(form.spec, weights).SerializeToString(),
        "relskew `ort`": ours(),
        CHUNKED: ours(chunk_size=CHUNK),
        "relskew `portable`": ours(profile="portable"),
        f"torch: {form.textbook_label}": textbook(dynamo=True),
        f"torch, dynamo=False: {form.textbook_label}": textbook(dynamo=False),
    }


def from_torch(model: Textbook, example: int, *, dynamo: bool) -> bytes:
    """Export a module with dynamic batch and length, as its documentation says."""
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
    # torch's annotations know of files named by strings alone; streams are documented for this exporter.
    torch.onnx.export(model, (x,), stream, dynamo=False, opset_version=18, **options)  # type: ignore[arg-type]
    return stream.getvalue()


def without_positions(spec: BlockSpec, weights: Mapping[str, Any]) -> onnx.ModelProto:
    """Return the block's ``ort`` graph with everything relative taken out: projections and a bare ``Attention``."""
    causal = spec.causal
    model = to_onnx(spec, weights)
    (attention,) = (node for node in model.graph.node if node.op_type == "Attention")
    del attention.input[3:]
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
    graph = onnx.helper.make_graph(nodes, "no_positions", model.graph.input, model.graph.output, initializer=stored)
    assert causal == any(attribute.name == "is_causal" and attribute.i for attribute in attention.attribute)
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)

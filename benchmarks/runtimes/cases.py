"""Small blocks of every form as graphs, with inputs and what must come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core.export import to_onnx

FULL, CAUSAL = Span.full(9), Span.causal(9)

FORMS: dict[str, tuple[BlockSpec, dict[str, Any]]] = {
    "full": (BlockSpec(8, 2, FULL), {}),
    "causal": (BlockSpec(8, 2, CAUSAL, causal=True), {}),
    "cache": (BlockSpec(8, 2, CAUSAL, causal=True), {"past": True}),
    "clip": (BlockSpec(8, 2, Span.clipped(3)), {}),
    "values": (BlockSpec(8, 2, FULL, rel_values=True), {}),
    "bias": (BlockSpec(8, 2, FULL, rel_keys=False, rel_bias=True), {}),
    "cross": (BlockSpec(8, 2, FULL, cross=True), {}),
    "grouped": (BlockSpec(8, 4, CAUSAL, causal=True, num_kv_heads=2), {}),
    "mask": (BlockSpec(8, 2, FULL), {"mask": True}),
    "blocks": (BlockSpec(8, 2, Span.causal(6), causal=True, block_size=3), {}),
    "sinks": (BlockSpec(8, 2, CAUSAL, causal=True, sinks=True), {}),
    "chunks": (BlockSpec(8, 2, CAUSAL, causal=True), {"chunk_size": 2}),
}
LENGTHS = (1, 5, 9)


@dataclass(frozen=True, slots=True)
class Case:
    """A form in a profile: its graph, and inputs with their outputs at some lengths."""

    name: str
    model: onnx.ModelProto
    calls: list[tuple[dict[str, np.ndarray], list[np.ndarray]]]

    def save(self, folder: Path) -> None:
        """Write the graph and the calls for a process that has neither onnx nor this library."""
        (folder / f"{self.name}.onnx").write_bytes(self.model.SerializeToString())
        arrays: dict[str, Any] = {}
        for index, (inputs, outputs) in enumerate(self.calls):
            arrays |= {f"{index}/in/{name}": x for name, x in inputs.items()}
            arrays |= {f"{index}/out/{place}": x for place, x in enumerate(outputs)}
        np.savez(folder / f"{self.name}.npz", **arrays)


def cases(profile: str, opset: int | None = None) -> Iterator[Case]:
    """Make every form in a profile."""
    for name, (spec, options) in FORMS.items():
        weights = {key: np.asarray(x) for key, x in init_weights(spec, seed=1).items()}
        model = to_onnx(spec, weights, profile=profile, opset=opset, **options)
        yield Case(name, model, [_call(spec, weights, options, length) for length in LENGTHS])


def _call(
    spec: BlockSpec, weights: dict[str, np.ndarray], options: dict[str, Any], length: int
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    generator = np.random.default_rng(length)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    feeds: dict[str, np.ndarray] = {"x": normal(2, length, 8)}
    more: dict[str, Any] = {}
    if spec.cross:
        feeds["memory"] = more["memory"] = normal(2, 10 - length, 8)
    if "mask" in options:
        feeds["mask"] = more["mask"] = np.tri(length, k=-1, dtype=bool)[None, None]  # the first query sees nothing
    if "past" in options:
        past = tuple(normal(2, spec.num_kv_heads, 9 - length, spec.head_dim) for _ in "kv")
        more["past"] = past
        feeds |= dict(zip(("past_key", "past_value"), past, strict=True))
    result: Any = attention_block(feeds["x"], weights, spec, **more)
    return feeds, [result[0], *result[1]] if "past" in options else [result]

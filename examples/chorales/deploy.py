"""The decoder as an ONNX graph, and music that goes on there without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from examples.chorales.model import Decoder
from examples.chorales.sample import Choice
from relskew_core.export import save, torch_translation_table


def export(model: Decoder, path: Path) -> Path:
    """Write ``model(tokens, past) -> (logits, past)``, with a batch, a length and a past of any size."""
    spec = model.attentions[0].spec
    past = [[torch.zeros(2, spec.num_kv_heads, 5, spec.head_dim) for _ in range(2)] for _ in model.layers]
    dynamic = torch.export.Dim.DYNAMIC
    names = [f"{layer}.{kind}" for layer in range(len(past)) for kind in ("key", "value")]
    program = torch.onnx.export(
        model.eval(),
        (torch.zeros(2, 3, dtype=torch.int64), past),
        dynamo=True,
        opset_version=23,
        custom_translation_table=torch_translation_table(23),
        dynamic_shapes=({0: dynamic, 1: dynamic}, [[{0: dynamic, 2: dynamic}] * 2 for _ in past]),
        input_names=["input_ids", *(f"past_key_values.{name}" for name in names)],
        output_names=["logits", *(f"present.{name}" for name in names)],
        verbose=False,
    )
    assert program is not None
    return save(program.model_proto, path, overwrite=True)


def go_on(path: Path, prompt: Sequence[int], n: int, choose: Choice) -> list[int]:
    """Return ``n`` tokens after the prompt, in onnxruntime alone."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    first, *caches = session.get_inputs()
    past = [np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in caches]
    tokens = list(prompt)
    new: list[int] = []
    while len(new) < n:
        feeds = {first.name: np.asarray([tokens]), **dict(zip((one.name for one in caches), past, strict=True))}
        logits, *past = session.run(None, feeds)
        tokens = [choose(logits[0, -1])]
        new += tokens
    return new

"""Whole models of transformers with drop-ins, in one call: what varies in the originals varies in their graphs."""

from typing import Any

import onnx
import pytest
import torch
from peers.common import peer
from peers.families import FAMILIES
from torch import Tensor, nn

from onnx_sessions import shapes
from relskew_core.export import torch_to_onnx
from relskew_core.huggingface import replace_attention


@pytest.mark.parametrize(("name", "returned"), [("WavLM", []), ("Parakeet", ["output_attention_mask"])])
def test_encoders(name: str, returned: list[str]) -> None:
    """A warning, of what the graph fixes, would be an error here. Parakeet returns its mask under the input's name."""
    family = FAMILIES[name]
    given = {key: x.float() if x.is_floating_point() else x for key, x in family.given(30).items()}
    graph = torch_to_onnx(replace_attention(family.make().float()), given, tolerance=1e-3).graph
    assert all(isinstance(size, str) for shape in shapes(graph.input).values() for size in shape[:2])
    assert {shape[0] for shape in shapes(graph.input).values()} == {"batch"}
    onnx.checker.check_graph(graph, onnx.checker.DEFAULT_CONTEXT)
    assert [value.name for value in graph.output][1:] == returned


class Step(nn.Module):
    """A step of T5's decoder, with both of its caches as tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, memory: Tensor, past: list[tuple[Tensor, ...]]) -> tuple[Tensor, list[Tensor]]:
        dynamic = peer("transformers.DynamicCache")
        cache = peer("transformers.EncoderDecoderCache")(dynamic(), dynamic())
        for layer, (keys, values, *of_memory) in enumerate(past):
            cache.self_attention_cache.update(keys, values, layer)
            cache.cross_attention_cache.update(*of_memory, layer)
            cache.is_updated[layer] = True
        results = self.model(
            decoder_input_ids=ids, encoder_outputs=(memory,), past_key_values=cache, use_cache=True, return_dict=True
        )
        return results.logits, [layer.keys for layer in results.past_key_values.self_attention_cache.layers]


def test_the_past_of_t5() -> None:
    def heads(length: int) -> Tensor:
        return torch.randn(2, 3, length, 8)

    model = replace_attention(FAMILIES["T5 sdpa"].make().float())
    past = [(heads(5), heads(5), heads(7), heads(7)) for _ in range(2)]
    graph = torch_to_onnx(Step(model), (torch.randint(0, 50, (2, 3)), torch.randn(2, 7, 24), past)).graph
    sizes = shapes(graph.input)
    assert sizes["ids"] == ["batch", "ids_length"]
    assert {tuple(sizes[f"past_{layer}_{kind}"]) for layer in (0, 1) for kind in (0, 1)} == {
        ("batch", 3, "past_0_0_length", 8)
    }

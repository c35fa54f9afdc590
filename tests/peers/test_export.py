"""Whole models of transformers exported with our translations: the operator's nodes, what varies, and memory."""

from typing import Any

import onnx
import pytest
import torch
from peers.common import check, hf
from peers.families import FAMILIES
from peers.family import tokens
from peers.test_families_numbers import both
from torch import Tensor, nn

from onnx_sessions import grown, opened, shapes
from relskew_core.export import torch_to_onnx
from relskew_core.huggingface import register_attention, replace_attention

HEADS = 12


def test_t5_in_one_call() -> None:
    """The encoder–decoder as it is, with its own arguments by name: every length and the results' names follow."""
    theirs, ours = (model.float() for model in both(FAMILIES["T5"]))

    def arguments(batch: int, length: int, decoded: int) -> dict[str, Tensor]:
        given = {**tokens(length), "decoder_input_ids": tokens(decoded)["input_ids"]}
        return {name: x[:batch] for name, x in given.items()}

    made = torch_to_onnx(ours, {**arguments(2, 7, 6), "use_cache": False})
    assert [value.name for value in made.graph.output] == ["logits", "encoder_last_hidden_state"]
    assert 'name: "decoder.block.0.layer.1.EncDecAttention/short/attention"' in str(made.graph)  # in a branch
    session = opened(made)
    for sizes in [(1, 1, 1), (1, 2, 9), (2, 40, 30), (2, 5, 1)]:
        given = arguments(*sizes)
        found, want = session.run(None, {name: x.numpy() for name, x in given.items()}), theirs(**given)
        check(map(torch.from_numpy, found), [want.logits, want.encoder_last_hidden_state], 1e-5)


@pytest.mark.parametrize("name", ["T5", "BERT with ALiBi"])
def test_memory(name: str) -> None:
    """At 4096 tokens less than a tenth of one tensor of logits, of which the original's graph has at least one."""

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = encoder(name)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]

    session = opened(torch_to_onnx(Encoder(), tokens(7), check=False))
    given = {key: x[:1].numpy() for key, x in tokens(4096).items()}
    found = grown(lambda: session.run(None, given))
    if found is None:
        pytest.skip("only Linux counts the peak of one call")
    assert found < HEADS * 4096**2 * 4 / 10


def encoder(name: str) -> Any:
    """Return a model of one layer with ``HEADS`` narrow heads."""
    shared: dict[str, Any] = {"vocab_size": 50}
    if name == "T5":
        config = hf("T5Config")(
            **shared, d_model=48, d_kv=4, d_ff=32, num_layers=1, num_heads=HEADS, attn_implementation="sdpa"
        )
        return replace_attention(hf("T5EncoderModel")(config))
    config = hf("BertConfig")(
        **shared, hidden_size=48, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=32,
        max_position_embeddings=4096, attn_implementation=register_attention("ALiBi of this test"),
    )  # fmt: skip
    return hf("BertModel")(config, add_pooling_layer=False)


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
    """A step of a decoder that gets the caches of its layers as tensors in lists."""

    def forward(self, ids: Tensor, past: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        q = ids[:, None, :, None].float().expand(-1, 3, -1, 8)
        return [nn.functional.scaled_dot_product_attention(q, keys, values) for keys, values in past]


def test_pasts_in_lists_have_names_and_lengths() -> None:
    past = [(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)) for _ in range(2)]
    sizes = shapes(torch_to_onnx(Step(), (torch.randint(0, 50, (2, 3)), past)).graph.input)
    assert sizes["ids"] == ["batch", "ids_length"]
    for layer, kind in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert sizes[f"past_{layer}_{kind}"] == ["batch", 3, f"past_{layer}_0_length", 8]

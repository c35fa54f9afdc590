"""Whole models of transformers exported with our translations: the operator's nodes, any length."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peers.common import check, peer
from peers.test_drop_in import t5, tokens

from onnx_sessions import grown, opened
from relskew_core.export import torch_to_onnx
from relskew_core.huggingface import register_attention, replace_attention

HEADS = 12


def test_t5_in_one_call(tmp_path: Path) -> None:
    """The encoder–decoder as it is, with its own arguments by name: every length and the results' names follow."""
    theirs = t5("eager").float()
    ours = replace_attention(copy.deepcopy(theirs))

    def arguments(batch: int, length: int, decoded: int) -> dict[str, torch.Tensor]:
        ids, mask = tokens(batch, length, 50)
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(batch, decoded, 50)[0]}

    graph = torch_to_onnx(ours, {**arguments(2, 7, 6), "use_cache": False}, tmp_path / "t5.onnx").graph
    assert [value.name for value in graph.output] == ["logits", "encoder_last_hidden_state"]
    assert 'name: "decoder.block.0.layer.1.EncDecAttention/short/attention"' in str(graph)  # in a branch
    session = opened(tmp_path / "t5.onnx")
    for shape in [(1, 1, 1), (1, 2, 9), (3, 40, 30), (2, 5, 1)]:
        given = arguments(*shape)
        logits, memory = session.run(None, {name: x.numpy() for name, x in given.items()})
        want = theirs(**given)
        check(torch.from_numpy(logits), want.logits, 1e-5)
        check(torch.from_numpy(memory), want.encoder_last_hidden_state, 1e-5)


@pytest.mark.parametrize("name", ["T5", "BERT with ALiBi"])
def test_memory(name: str) -> None:
    """At 4096 tokens less than a tenth of one tensor of logits, of which the original's graph has at least one."""

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = encoder(name)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]

    ids, mask = tokens(2, 7, 50)
    made = torch_to_onnx(Encoder(), {"input_ids": ids, "attention_mask": mask}, check=False)
    session = opened(made)
    given = dict(zip(("input_ids", "attention_mask"), (x.numpy() for x in tokens(1, 4096, 50)), strict=True))
    found = grown(lambda: session.run(None, given))
    if found is None:
        pytest.skip("only Linux counts the peak of one call")
    assert found < HEADS * 4096**2 * 4 / 10


def encoder(name: str) -> Any:
    """Return a model of one layer with ``HEADS`` narrow heads."""
    shared: dict[str, Any] = {"vocab_size": 50}
    if name == "T5":
        config = peer("transformers.T5Config")(
            **shared, d_model=48, d_kv=4, d_ff=32, num_layers=1, num_heads=HEADS, attn_implementation="sdpa"
        )
        return replace_attention(peer("transformers.T5EncoderModel")(config))
    config = peer("transformers.BertConfig")(
        **shared, hidden_size=48, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=32,
        max_position_embeddings=4096, attn_implementation=register_attention("ALiBi of this test"),
    )  # fmt: skip
    return peer("transformers.BertModel")(config, add_pooling_layer=False)

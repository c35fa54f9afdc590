"""T5 and its heirs as three graphs with caches: the tokens of transformers, step by step."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from peers.common import peer, randn
from peers.families import FAMILIES
from peers.family import built

from relskew_core.export import encoder_decoder_to_onnx, generate
from relskew_core.huggingface import replace_attention

MADLAD = built(
    "T5ForConditionalGeneration", "T5Config", "sdpa", d_model=20, d_kv=8, num_heads=3, num_layers=1, d_ff=32,
    num_decoder_layers=1, vocab_size=50, dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=12,
)  # fmt: skip
"""Heads that together are wider than the model."""

MODELS = {name: FAMILIES[name].make for name in ("T5", "MT5", "UMT5", "Pop2Piano")} | {"MADLAD": MADLAD}
OFTEN = ("UMT5", "MADLAD")
"""A bias in each layer, and heads of another width; the others differ in what their encoders read."""

STEPS = 40


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in MODELS]
)
@torch.no_grad()
def test_generate_gives_the_greedy_tokens_of_the_model(name: str, tmp_path: Path) -> None:
    model: Any = MODELS[name]().float()
    folder = encoder_decoder_to_onnx(replace_attention(model), tmp_path / "made")
    mask = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]])
    source: Any = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(3))
    if name == "Pop2Piano":
        source = randn(2, 7, 24).float()
    memory = peer("transformers.modeling_outputs.BaseModelOutput")(
        last_hidden_state=model.get_encoder()(
            **{"inputs_embeds" if name == "Pop2Piano" else "input_ids": source}, attention_mask=mask
        )[0]
    )
    tokens = torch.zeros((2, 1), dtype=torch.int64)
    for _ in range(STEPS):  # without a cache
        logits = model(encoder_outputs=memory, attention_mask=mask, decoder_input_ids=tokens, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    assert np.array_equal(generate(folder, source.numpy(), STEPS, mask=mask.numpy()), tokens[:, 1:].numpy())
    names = {file.name: [value.name for value in onnx.load(file).graph.input] for file in folder.glob("*.onnx")}
    assert names["encoder_model.onnx"][1:] == ["attention_mask"]
    assert names["decoder_model.onnx"] == ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    assert names["decoder_with_past_model.onnx"][:6] == [
        "encoder_attention_mask", "input_ids",
        *(f"past_key_values.0.{of}.{kind}" for of in ("decoder", "encoder") for kind in ("key", "value")),
    ]  # fmt: skip

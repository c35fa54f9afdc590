"""Decoders of transformers and T5 exported in one call: the tokens of the model without a cache."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from peers.common import randn
from peers.families import FAMILIES
from peers.family import built

from onnx_sessions import opened
from relskew_core.export import decoder_to_onnx, encoder_decoder_to_onnx, generate
from relskew_core.huggingface import register_attention, replace_attention


def llama(layers: int) -> Any:
    return built(
        "LlamaForCausalLM", hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip


XLNET = built("XLNetLMHeadModel", vocab_size=50, d_model=24, n_layer=1, n_head=3, d_inner=32)
GPT2 = built(
    "GPT2LMHeadModel", n_embd=24, n_layer=2, n_head=3, vocab_size=50, n_positions=64,
    add_cross_attention=True,
)  # fmt: skip
MODELS = {"Llama": llama(2), "GPT-2": GPT2, **{name: FAMILIES[name].make for name in ("MPT", "Bloom", "Falcon")}}
OPTIONS: dict[str, dict[str, Any]] = {"Llama": {"dtype": "float32"}, "MPT": {"in_place": True}}
STEPS = 40


def greedy(model: Any, name: str, tokens: torch.Tensor, **given: Any) -> Any:
    """Return tokens, and those that a model adds to them without a cache."""
    for _ in range(STEPS):
        logits = model(**{name: tokens}, use_cache=False, **given).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_greedy_tokens_of_the_model(name: str, tmp_path: Path) -> None:
    model: Any = MODELS[name]().float()
    for x in model.parameters():  # so that the tokens differ
        torch.nn.init.normal_(x, std=0.3, generator=torch.Generator().manual_seed(x.numel()))
    if name == "Llama":  # with rotary positions; trained in another dtype, and partly compiled by torch
        model.set_attn_implementation(register_attention("test_decoders"))
        model.bfloat16().model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
    elif name in FAMILIES:
        replace_attention(model)
    given, memory = dict(OPTIONS.get(name, {})), torch.randn(2, 9, 24)
    attended: dict[str, Any] = {"encoder_hidden_states": memory} if name == "GPT-2" else {}
    if attended:
        given["memory"] = memory[:, :5]
    path = decoder_to_onnx(model, tmp_path / "decoder.onnx", **given)
    model.float()
    prompt = torch.tensor([[1, 2, 3], [7, 8, 9]])
    tokens = greedy(model, "input_ids", prompt, **attended)
    assert len(np.unique(tokens)) > 6
    made = generate(path, prompt.numpy(), STEPS, memory=memory.numpy() if attended else None)
    assert np.array_equal(made, tokens[:, 3:])
    stored = [tensor.name for tensor in onnx.load(path).graph.initializer]
    known = {key.replace("_orig_mod.", "") for key in model.state_dict()}
    assert known & set(stored)  # by the names in the state dict
    assert not any("_orig_mod" in name for name in stored)


def test_frequencies_are_not_rounded(tmp_path: Path) -> None:
    """Far from the beginning half precision would turn queries and keys by other angles."""
    model = llama(1)().float()
    path = decoder_to_onnx(model, tmp_path / "decoder.onnx", dtype="float16", check=False)
    wanted = model.model.rotary_emb.inv_freq.numpy()
    kept = [numpy_helper.to_array(tensor).ravel() for tensor in onnx.load(path).graph.initializer]
    assert any(np.array_equal(x, wanted) for x in kept)


@pytest.mark.parametrize(("make", "said"), [
    (XLNET, "`model` must fill a DynamicCache .* got XLNetLMHeadModel, which leaves"),
    (FAMILIES["T5 sdpa"].make, "`model` must be a decoder, got the encoder–decoder T5For"),
])  # fmt: skip
def test_models_without_a_dynamic_cache_are_refused(make: Any, said: str, tmp_path: Path) -> None:
    model = make()
    with pytest.raises(TypeError, match=said):
        decoder_to_onnx(model, tmp_path / "decoder.onnx")
    assert not list(tmp_path.iterdir())


def test_mpt_in_half_precision_far_from_the_end(tmp_path: Path) -> None:
    """Its bias by key is more than a hundred there, of which half precision has every eighth."""
    options: dict[str, Any] = {"d_model": 16, "n_heads": 8, "n_layers": 1, "vocab_size": 50, "max_seq_len": 512}
    model = built("MptForCausalLM", **options)().half()
    tokens = torch.randint(50, (1, 300), generator=torch.Generator().manual_seed(1))
    wanted = copy.deepcopy(model).double()(tokens).logits.numpy()
    path = decoder_to_onnx(replace_attention(model), tmp_path / "decoder.onnx", check=False)
    past = dict.fromkeys((f"past_key_values.0.{name}" for name in ("key", "value")), np.zeros((1, 8, 0, 2), np.float16))
    logits, *_ = opened(path).run(None, {"input_ids": tokens.numpy(), **past})
    assert np.linalg.norm(logits - wanted) < 2e-3 * np.linalg.norm(wanted)


MADLAD = built(
    "T5ForConditionalGeneration", "sdpa", d_model=20, d_kv=8, num_heads=3, num_layers=1, d_ff=32,
    num_decoder_layers=1, vocab_size=50, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=12,
)  # fmt: skip
"""Heads that together are wider than the model."""

OF_T5 = {name: FAMILIES[name].make for name in ("T5", "MT5", "UMT5", "Pop2Piano")} | {"MADLAD": MADLAD}
OFTEN = ("UMT5", "MADLAD")
"""A bias in each layer, and heads of another width; the others differ in what their encoders read."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in OF_T5]
)
def test_three_graphs_give_the_greedy_tokens_of_the_model(name: str, tmp_path: Path) -> None:
    model: Any = OF_T5[name]().float()
    folder = encoder_decoder_to_onnx(replace_attention(model), tmp_path / "made")
    mask = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]])
    source: Any = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(3))
    if name == "Pop2Piano":
        source = randn(2, 7, 24).float()
    given = {"inputs_embeds" if name == "Pop2Piano" else "input_ids": source, "attention_mask": mask}
    memory = model.get_encoder()(**given)
    start = torch.zeros((2, 1), dtype=torch.int64)
    tokens = greedy(model, "decoder_input_ids", start, encoder_outputs=memory, attention_mask=mask)
    assert np.array_equal(generate(folder, source.numpy(), STEPS, mask=mask.numpy()), tokens[:, 1:])
    names = {file.name: [value.name for value in onnx.load(file).graph.input] for file in folder.glob("*.onnx")}
    assert names["encoder_model.onnx"][1:] == ["attention_mask"]
    assert names["decoder_model.onnx"] == ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    assert names["decoder_with_past_model.onnx"][:6] == [
        "encoder_attention_mask", "input_ids",
        *(f"past_key_values.0.{of}.{kind}" for of in ("decoder", "encoder") for kind in ("key", "value")),
    ]  # fmt: skip

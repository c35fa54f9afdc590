"""Decoders of transformers as they are, in one call: the tokens of the model without a cache."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from peers.families import FAMILIES
from peers.family import built

from onnx_sessions import opened
from relskew_core.export import decoder_to_onnx, generate
from relskew_core.huggingface import register_attention, replace_attention


def llama(layers: int) -> Any:
    return built(
        "LlamaForCausalLM", "LlamaConfig", hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip


XLNET = built("XLNetLMHeadModel", "XLNetConfig", vocab_size=50, d_model=24, n_layer=1, n_head=3, d_inner=32)
GPT2 = built(
    "GPT2LMHeadModel", "GPT2Config", n_embd=24, n_layer=2, n_head=3, vocab_size=50, n_positions=64,
    add_cross_attention=True,
)  # fmt: skip
MODELS = {"Llama": llama(2), "GPT-2": GPT2, **{name: FAMILIES[name].make for name in ("MPT", "Bloom", "Falcon")}}
OPTIONS: dict[str, dict[str, Any]] = {"Llama": {"dtype": "float32"}, "MPT": {"in_place": True}}
STEPS = 40


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
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
    tokens = prompt
    for _ in range(STEPS):
        logits = model(input_ids=tokens, use_cache=False, **attended).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    assert len(tokens.unique()) > 6
    made = generate(path, prompt.numpy(), STEPS, memory=memory.numpy() if attended else None)
    assert np.array_equal(made, tokens[:, 3:].numpy())
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


@torch.no_grad()
def test_mpt_in_half_precision_far_from_the_end(tmp_path: Path) -> None:
    """Its bias by key is more than a hundred there, of which half precision has every eighth."""
    options: dict[str, Any] = {"d_model": 16, "n_heads": 8, "n_layers": 1, "vocab_size": 50, "max_seq_len": 512}
    model = built("MptForCausalLM", "MptConfig", **options)().half()
    tokens = torch.randint(50, (1, 300), generator=torch.Generator().manual_seed(1))
    wanted = copy.deepcopy(model).double()(tokens).logits.numpy()
    path = decoder_to_onnx(replace_attention(model), tmp_path / "decoder.onnx", check=False)
    past = dict.fromkeys((f"past_key_values.0.{name}" for name in ("key", "value")), np.zeros((1, 8, 0, 2), np.float16))
    logits, *_ = opened(path).run(None, {"input_ids": tokens.numpy(), **past})
    assert np.linalg.norm(logits - wanted) < 2e-3 * np.linalg.norm(wanted)

"""Speech models with random weights against the same numbers here."""

import copy
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
from peers.common import (
    additive,
    alone,
    check,
    definitions,
    hf,
    join,
    made,
    padded,
    page,
    randn,
    randomised,
    run,
    split,
)
from peers.families import FAMILIES

from relskew_core import BlockSpec, Span, attention_block, conventions, relative_attention, sinusoidal_table
from relskew_core.huggingface import replace_attention
from relskew_core.layers.torch import ConformerAttention


def test_vits(length: int) -> None:
    theirs = made("vits.VitsAttention", "VitsConfig", window_size=4)
    spec, weights = conventions.load_vits(theirs.state_dict(), num_heads=3)
    x, mask = padded(length)
    want, _ = theirs(x, attention_mask=additive(mask).expand(2, 1, length, length))
    check(attention_block(x, weights, spec, mask=mask), want)


def test_wav2vec2_bert_relative_key(length: int) -> None:
    theirs = made(
        "wav2vec2_bert.Wav2Vec2BertSelfAttention", "Wav2Vec2BertConfig", position_embeddings_type="relative_key",
        left_max_position_embeddings=6, right_max_position_embeddings=2,
    )  # fmt: skip
    spec, weights = conventions.load_wav2vec2_bert(theirs.state_dict(), num_heads=3, left=6, right=2)
    x, mask = padded(length)
    want, _ = theirs(x, attention_mask=additive(mask))
    check(attention_block(x, weights, spec, mask=mask), want)


def conformer(theirs: Any, x: torch.Tensor, rel_k: torch.Tensor, span: Span, **options: Any) -> torch.Tensor:
    """Transformer-XL's attention in a Conformer: a bias for contents, a bias for positions."""
    q, k, v = (split(linear(x), 3) for linear in (theirs.linear_q, theirs.linear_k, theirs.linear_v))
    u, p = theirs.pos_bias_u[:, None, :], theirs.pos_bias_v[:, None, :]
    out: Any = relative_attention(q + u, k, v, rel_k, span, rel_q=q + p, **options)
    return theirs.linear_out(join(out))


@pytest.mark.parametrize("name", ["Wav2Vec2-Conformer", "Wav2Vec2-BERT relative", "FastSpeech2-Conformer", "Parakeet"])
def test_conformer_weights(name: str) -> None:
    """The attention of a layer of each model, and the module here that reads it."""
    model = FAMILIES[name].make()
    theirs = next(part for part in model.modules() if hasattr(part, "linear_pos") or hasattr(part, "relative_k_proj"))
    weights = conventions.load_conformer(theirs.state_dict(), num_heads=3)
    ours = ConformerAttention(BlockSpec(24, 3, Span.full(60), bias="q_proj.bias" in weights), dtype=torch.float64)
    ours.load_state_dict(weights)
    x = randn(2, 17, 24)
    rows = sinusoidal_table(Span.full(17), 24, xp=torch, dtype=torch.float64, order="interleaved")[None]
    given = {"Parakeet": {"position_embeddings": rows.expand(2, -1, -1)}, "FastSpeech2-Conformer": {"pos_emb": rows}}
    want, *_ = theirs(x, **given.get(name, {"relative_position_embeddings": rows}))
    check(ours(x), want)


def espnet() -> tuple[Any, Any]:
    """Return an attention, and a function of the input and a mask of keys that calls it."""
    attention = alone("espnet.nets.pytorch_backend.transformer.attention.RelPositionMultiHeadedAttention")(3, 24, 0.0)
    file, unused = "nets/pytorch_backend/transformer/embedding.py", {"_pre_hook": None}
    encoding = definitions("espnet", file, "RelPositionalEncoding", **unused)(24, 0.0, max_len=5)
    return attention, lambda x, mask: attention(x, x, x, encoding(x)[1], mask)


def nemo() -> tuple[Any, Any]:
    module = "nemo.collections.asr.parts.submodules.multi_head_attention"
    attention = alone(f"{module}.RelPositionMultiHeadAttention")(3, 24, 0.0, None, None)
    encoding = alone(f"{module}.RelPositionalEncoding")(24, 0.0)
    encoding.extend_pe(50, "cpu", torch.float64)
    return attention, lambda x, mask: attention(x, x, x, ~mask, encoding(x)[1])


def fairseq() -> tuple[Any, Any]:
    attention = alone("fairseq.modules.espnet_multihead_attention.RelPositionMultiHeadedAttention")(24, 3, 0.0)
    encoding = alone("fairseq.modules.positional_encoding.RelPositionalEncoding")(5, 24)

    def call(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        steps: torch.Tensor = x.transpose(0, 1)
        given = steps, steps, steps, encoding(steps)
        return attention(*given, key_padding_mask=~mask[:, 0])[0].transpose(0, 1)

    return attention, call


def chunkformer() -> tuple[Any, Any]:
    attention = alone("chunkformer.modules.attention.ChunkAttentionWithRelativeRightContext")(3, 24, 0.0)
    encoding = alone("chunkformer.modules.embedding.RelPositionalEncodingWithRightContext")(24, 0.0, 50)
    return attention, lambda x, mask: attention(x, x, x, mask, encoding(x)[1].double())[0]


@pytest.mark.parametrize("package", [espnet, nemo, fairseq, chunkformer])
def test_conformers_of_other_packages(package: Any, length: int) -> None:
    """Weights that ``load_conformer`` reads, sinusoids that are made here, and the call of the page."""
    theirs, call = package()
    randomised(theirs)
    x, mask = padded(length)
    want = call(x, mask[:, 0])
    ours = ConformerAttention(BlockSpec(24, 3, Span.full(60)), dtype=torch.float64)
    ours.load_state_dict(conventions.load_conformer(theirs.state_dict(), num_heads=3))
    check(ours(x, mask=mask), want, 1e-6)  # their sinusoids are float32
    span = Span.full(60)  # for any reach: there is no buffer to extend, and all lengths share the projection
    sinusoids = sinusoidal_table(span, 24, xp=torch, dtype=torch.float64, order="interleaved")
    check(conformer(theirs, x, split(theirs.linear_pos(sinusoids), 3), span, mask=mask), want, 1e-6)


def test_zipformer(length: int) -> None:
    """Queries for the positions, no scale, and one set of weights for the values of two modules."""
    given: dict[str, Any] = {"ScaledFloat": float, "FloatLike": float, "ScheduledFloat": lambda *_: 0.0}
    given |= {"softmax": torch.softmax, "Identity": torch.nn.Identity, "_whitening_schedule": lambda *_, **__: None}
    given |= dict.fromkeys(["Whiten", "Balancer", "Dropout2"], lambda *_, **__: torch.nn.Identity())
    given["ScaledLinear"] = lambda n, m, bias, initial_scale: torch.nn.Linear(n, m, bias)
    encoding, weights, attention = definitions(
        "zipformer", "modules/zipformer.py", "CompactRelPositionalEncoding", "RelPositionMultiheadAttentionWeights",
        "SelfAttention", **given,
    )  # fmt: skip
    theirs = randomised(weights(24, 16, 3, 8, 4))
    first, second = (randomised(attention(24, 3, 5), seed=seed) for seed in (2, 3))
    x, mask = randn(length, 2, 24), padded(length)[1]
    positions = encoding(16, 0.0)(x)
    shares = theirs(x, positions, key_padding_mask=~mask[:, 0, 0])
    q, k, p = (split(y.transpose(0, 1), 3) for y in theirs.in_proj(x).split([24, 24, 12], dim=-1))
    v = torch.cat([split(module.in_proj(x).transpose(0, 1), 3) for module in (first, second)], dim=-1)
    table = split(theirs.linear_pos(positions[0]), 3)
    out: Any = relative_attention(q, k, v, table, rel_q=p, scale=1.0, rel_scale=1.0, mask=mask)
    for module, part in zip((first, second), out.split(5, dim=-1), strict=True):
        check(module.out_proj(join(part)).transpose(0, 1), module(x, shares))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("package", ["Coqui TTS", "Piper", "MeloTTS"])
def test_vits_of_its_authors(package: str, shared: bool, length: int) -> None:
    if package == "Coqui TTS":
        theirs = alone("TTS.tts.layers.glow_tts.transformer.RelativePositionMultiHeadAttention")(24, 24, 3, 4, shared)
    else:
        attention = {"Piper": "piper.train.vits.attentions", "MeloTTS": "melo.attentions"}[package]
        theirs = alone(f"{attention}.MultiHeadAttention")(24, 24, 3, window_size=4, heads_share=shared)
    randomised(theirs)
    spec, weights = conventions.load_vits(theirs.state_dict(), num_heads=3)
    x, mask = padded(length)
    want = theirs(x.mT, x.mT, mask.expand(2, 1, length, length)).mT
    check(attention_block(x, weights, spec, mask=mask), want)


@pytest.mark.parametrize("package", ["Coqui TTS", "Piper"])
def test_text_encoders_of_voices(package: str, tmp_path: Path) -> None:
    """From the state of a whole voice, and from a file of ONNX with these names."""
    path = {"Coqui TTS": "TTS.tts.layers.vits.networks", "Piper": "piper.train.vits.models"}[package]
    theirs = randomised(alone(f"{path}.TextEncoder")(11, 10, 24, 32, 3, 2, 3, 0.1))
    state = {f"enc_p.{key}": x for key, x in theirs.state_dict().items()} | {"dec.weight": torch.zeros(1)}
    tensors = [onnx.numpy_helper.from_array(x.numpy(), key) for key, x in state.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "", [], [], tensors)), tmp_path / "voice.onnx")
    ids, lengths = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(1)), torch.tensor([9, 6])
    mask = padded(9)[1][:, 0, 0]
    for given in (state, tmp_path / "voice.onnx"):
        config, weights = conventions.load_vits_encoder(given)
        encoder = hf("vits.VitsTextEncoder")(hf("VitsConfig")(**config)).double()
        encoder.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
        got = encoder.eval()(ids, padding_mask=mask[..., None].double(), attention_mask=mask, return_dict=False)
        for part, want in zip(got, theirs(ids, lengths)[:3], strict=True):
            check(part.mT, want)


def test_a_text_encoder_with_speakers() -> None:
    """MeloTTS adds them between two layers, for which transformers has no place."""
    encoder = alone("melo.attentions.Encoder")(24, 32, 3, 3, 3, 0.1, gin_channels=8)
    state = {f"enc_p.encoder.{key}": x for key, x in encoder.state_dict().items()}
    state |= {"enc_p.emb.weight": torch.zeros(11, 24), "enc_p.tone_emb.weight": torch.zeros(4, 24)}
    state |= {"enc_p.proj.weight": torch.zeros(20, 24, 1), "enc_p.proj.bias": torch.zeros(20)}
    left = ", ".join(f"enc_p.{name}" for name in ("encoder.spk_emb_linear.bias", "encoder.spk_emb_linear.weight",
                                                  "tone_emb.weight"))  # fmt: skip
    with pytest.raises(ValueError, match=f"got {left}; docs/piper.md"):
        conventions.load_vits_encoder(state)
    assert conventions.load_vits(state, num_heads=3, prefix="enc_p.encoder.attn_layers.2.")[0].rel_values


def test_an_encoder_of_melotts() -> None:
    """Its modules, with the attention of the page about voices."""
    alone("melo.attentions.Encoder")
    modules = {name: sys.modules[f"melo.{name}"] for name in ("attentions", "commons")}
    kind = definitions("melo", "models.py", "TextEncoder", **modules)
    theirs = randomised(kind(11, 10, 24, 32, 3, 3, 3, 0.1, gin_channels=8, num_languages=2, num_tones=4))
    names = run(page("piper.md")[-1])
    model = names["replace_layers"](copy.deepcopy(theirs))
    assert sum(isinstance(part, names["Attention"]) for part in model.modules()) == 3
    generator = torch.Generator().manual_seed(1)
    phonemes, tones, languages = (torch.randint(count, (2, 30), generator=generator) for count in (11, 4, 2))
    inputs = (torch.tensor([30, 12]), tones, languages, randn(2, 1024, 30), randn(2, 768, 30))
    speaker = randn(2, 8, 1)
    check(model(phonemes, *inputs, g=speaker), theirs(phonemes, *inputs, g=speaker))


@pytest.mark.parametrize(("chunk", "left", "right"), [(12, 13, 0), (4, 4, 3), (4, 9, 2)])
def test_gemma_4(chunk: int, left: int, right: int) -> None:
    """A window that is shorter than the table on both sides; with short chunks, the farthest keys have no rows."""
    model = made(
        "gemma4.Gemma4AudioModel", "Gemma4AudioConfig", num_hidden_layers=2, subsampling_conv_channels=[16, 4],
        output_proj_dims=24, attention_chunk_size=chunk, attention_context_left=left, attention_context_right=right,
    ).float()  # fmt: skip
    heard = torch.arange(200) < torch.tensor([[200], [80]])  # no frame sees another one at the end
    sounds = randn(2, 200, 16).float(), heard
    theirs = model(*sounds)
    seen = theirs.attention_mask
    whole = replace_attention(copy.deepcopy(model))
    for ours, inputs in ((whole, sounds), (whole, sounds[:1]), (copy.deepcopy(whole), sounds)):
        check(ours(*inputs).last_hidden_state[seen], model(*inputs).last_hidden_state[seen], 2e-6)
    replace_attention(model.layers[1])  # a part gets the original's mask, of blocks
    check(model(*sounds).last_hidden_state[seen], theirs.last_hidden_state[seen], 2e-6)


@pytest.mark.parametrize("value_bias", [False, True])
@pytest.mark.parametrize("direction", ["both", "past"])
def test_speechbrain(direction: Literal["both", "past"], value_bias: bool, length: int) -> None:
    """The scale of all heads, and the sines of distances; its later sinusoids are those of other Conformers."""
    encoding, attention = definitions("speechbrain", "nnet/attention.py", "RelPosEncXL", "RelPosMHAXL")
    theirs = randomised(attention(24, 3, vbias=value_bias)).float()  # its softmax is float32
    x, mask = padded(length)
    span = Span.full(length)
    sinusoids = sinusoidal_table(span, 24, xp=torch, dtype=torch.float64, order="interleaved", direction=direction)
    if direction == "both":
        check(sinusoids, encoding(24)(x)[0], 1e-6)
    given = x.float(), x.float(), x.float(), sinusoids[None].float()
    want = theirs(*given, key_padding_mask=~mask[:, 0, 0], return_attn_weights=False)
    theirs.double()
    ours = ConformerAttention(BlockSpec(24, 3, Span.full(60)), direction=direction, dtype=torch.float64)
    weights = conventions.load_conformer(theirs.state_dict(), num_heads=3)
    ours.load_state_dict(weights)
    check(ours(x, mask=mask), want, 1e-6)


def test_speecht5(length: int) -> None:
    theirs = randomised(hf("speecht5.SpeechT5Attention")(embed_dim=24, num_heads=3))
    positions = randomised(hf("speecht5.SpeechT5RelativePositionalEncoding")(8, max_length=5), seed=3)
    x, mask = padded(length)
    want, *_ = theirs(x, attention_mask=additive(mask).expand(2, 1, length, length), position_bias=positions(x))
    rel_k, span = conventions.SPEECHT5.load(positions.pe_k.weight)
    q, k, v = (split(linear(x), 3) for linear in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    check(theirs.out_proj(join(relative_attention(q, k, v, rel_k, span, mask=mask))), want)

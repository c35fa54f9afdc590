"""Speech models with random weights against the same numbers here."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from peers.common import check, definitions, join, padding, peer, randn, randomised, split
from peers.families import FAMILIES

from relskew_core import BlockSpec, Span, attention_block, conventions, relative_attention, sinusoidal_table
from relskew_core.layers.torch import ConformerAttention

LENGTHS = [1, 2, 5, 17, 40]


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("length", LENGTHS)
def test_vits(length: int) -> None:
    config = peer("transformers.VitsConfig")(hidden_size=24, num_attention_heads=3, window_size=4)
    theirs = randomised(peer("transformers.models.vits.modeling_vits.VitsAttention")(config))
    spec, weights = conventions.load_vits(theirs.state_dict(), num_heads=3)
    x, mask = randn(2, length, 24), padding([length, max(1, length - 3)], length)
    want, _ = theirs(x, attention_mask=additive(mask).expand(2, 1, length, length))
    check(attention_block(x, weights, spec, mask=mask), want)


@pytest.mark.parametrize("length", LENGTHS)
def test_wav2vec2_bert_relative_key(length: int) -> None:
    config = peer("transformers.Wav2Vec2BertConfig")(
        hidden_size=24, num_attention_heads=3, position_embeddings_type="relative_key",
        left_max_position_embeddings=6, right_max_position_embeddings=2,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = randomised(
        peer("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention")(config)
    )
    spec, weights = conventions.load_wav2vec2_bert(theirs.state_dict(), num_heads=3, left=6, right=2)
    x, mask = randn(2, length, 24), padding([length, max(1, length - 3)], length)
    want, _ = theirs(x, attention_mask=additive(mask))
    check(attention_block(x, weights, spec, mask=mask), want)


def conformer(theirs: Any, x: torch.Tensor, rel_k: torch.Tensor, span: Span, **options: Any) -> torch.Tensor:
    """Transformer-XL's attention in a Conformer: a bias for contents, a bias for positions."""
    q, k, v = (split(linear(x), 3) for linear in (theirs.linear_q, theirs.linear_k, theirs.linear_v))
    u, p = theirs.pos_bias_u[:, None, :], theirs.pos_bias_v[:, None, :]
    out: Any = relative_attention(q + u, k, v, rel_k, span, rel_q=q + p, **options)
    return theirs.linear_out(join(out))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("model", ["wav2vec2_bert.Wav2Vec2Bert", "wav2vec2_conformer.Wav2Vec2Conformer"])
def test_conformers(model: str, length: int) -> None:
    module, _, name = model.partition(".")
    config = peer(f"transformers.{name}Config")(
        hidden_size=24, num_attention_heads=3, position_embeddings_type="relative", max_source_positions=8
    )
    config._attn_implementation = "eager"
    modeling = f"transformers.models.{module}.modeling_{module}.{name}"
    theirs = randomised(peer(f"{modeling}SelfAttention")(config))
    positions = peer(f"{modeling}RelPositionalEmbedding")(config)
    x, mask = randn(2, length, 24), padding([length, max(1, length - 3)], length)
    want, *_ = theirs(x, attention_mask=additive(mask), relative_position_embeddings=positions(x))
    # Sinusoids for any reach: there is no buffer to extend, and all lengths share the projection.
    span = Span.full(60)
    sinusoids = sinusoidal_table(span, 24, xp=torch, dtype=torch.float64, order="interleaved")
    rel_k, _ = conventions.TRANSFORMER_XL.load(split(theirs.linear_pos(sinusoids), 3))
    check(conformer(theirs, x, rel_k, span, mask=mask), want, 1e-6)


@pytest.mark.parametrize("name", ["Wav2Vec2-Conformer", "Wav2Vec2-BERT relative", "FastSpeech2-Conformer", "Parakeet"])
@torch.no_grad()
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


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("value_bias", [False, True])
@pytest.mark.parametrize("direction", ["both", "past"])
@torch.no_grad()
def test_speechbrain(direction: Literal["both", "past"], value_bias: bool, length: int) -> None:
    """The scale of all heads, and the sines of distances; its later sinusoids are those of other Conformers."""
    encoding, attention = definitions("speechbrain", "nnet/attention.py", "RelPosEncXL", "RelPosMHAXL")
    theirs = randomised(attention(24, 3, vbias=value_bias)).float()  # its softmax is float32
    x, mask = randn(2, length, 24), padding([length, max(1, length - 3)], length)
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
    # The call of the page, with the scale of all heads.
    q, k, v = theirs.in_proj_weight.unflatten(0, (3, 3, 8)).unbind(1)
    q, k, v = (torch.einsum("bte,hde->bhtd", x, part) for part in (q, k, v))
    v = v if theirs.vbias is None else v + theirs.value_bias_weight.view(3, 1, 8)
    u, w = (bias.view(3, 1, 8) for bias in (theirs.pos_bias_u, theirs.pos_bias_v))
    table = split(theirs.linear_pos(sinusoids), 3)
    out: Any = relative_attention(q + u, k, v, table, span, rel_q=q + w, scale=24**-0.5, mask=mask)
    check(theirs.out_proj(join(out)), want, 1e-6)


@pytest.mark.parametrize("length", LENGTHS)
def test_speecht5(length: int) -> None:
    modeling = "transformers.models.speecht5.modeling_speecht5.SpeechT5"
    theirs = randomised(peer(f"{modeling}Attention")(embed_dim=24, num_heads=3))
    positions = randomised(peer(f"{modeling}RelativePositionalEncoding")(8, max_length=5), seed=3)
    x, mask = randn(2, length, 24), padding([length, max(1, length - 3)], length)
    want, *_ = theirs(x, attention_mask=additive(mask).expand(2, 1, length, length), position_bias=positions(x))
    rel_k, span = conventions.SPEECHT5.load(positions.pe_k.weight)
    q, k, v = (split(linear(x), 3) for linear in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    out: Any = relative_attention(q, k, v, rel_k, span, mask=mask)
    check(theirs.out_proj(join(out)), want)


@pytest.mark.parametrize("length", LENGTHS)
def test_wavlm(length: int) -> None:
    """A bias by bucket behind a gate: the gate is a query of width 1, the bias its table."""
    theirs = randomised(peer("transformers.models.wavlm.modeling_wavlm.WavLMAttention")(24, 3, 0.0, 16, 20))
    x, mask = randn(2, length, 24), padding([length, max(1, length - 3)], length)
    want, *_ = theirs(x, attention_mask=mask[:, 0, 0].long())
    heads = split(x, 3)
    a, b = torch.sigmoid(theirs.gru_rel_pos_linear(heads).unflatten(-1, (2, 4)).sum(-1)).chunk(2, dim=-1)
    gate = a * (b * theirs.gru_rel_pos_const - 1) + 2
    rel_bias, span = conventions.T5(bidirectional=True, num_buckets=16, max_distance=20).load(
        theirs.rel_attn_embed.weight
    )
    q, k, v = (split(linear(x), 3) for linear in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    out: Any = relative_attention(q, k, v, rel_bias[..., None], span, rel_q=gate, rel_scale=1.0, mask=mask)
    check(theirs.out_proj(join(out)), want)


@pytest.mark.parametrize("length", [8, 24, 21])
def test_granite_speech(length: int) -> None:
    """Shaw's keys in blocks of eight; the last block may be shorter."""
    config = peer("transformers.models.granite_speech.configuration_granite_speech.GraniteSpeechEncoderConfig")(
        hidden_dim=24, num_heads=3, dim_head=8, context_size=8, max_pos_emb=10, dropout=0.0
    )
    theirs = randomised(
        peer("transformers.models.granite_speech.modeling_granite_speech.GraniteSpeechConformerAttention")(config)
    )
    x, places = randn(2, length, 24), torch.arange(8)
    want = theirs(x, places[:, None] - places + 10)
    rel_k, span = conventions.DISTANCE.load(theirs.rel_pos_emb.weight)
    got = []
    for block in theirs.pre_norm(x).split(8, dim=1):
        k, v = theirs.to_kv(block).chunk(2, dim=-1)
        out: Any = relative_attention(split(theirs.to_q(block), 3), split(k, 3), split(v, 3), rel_k, span)
        got.append(theirs.to_out(join(out)))
    check(torch.cat(got, dim=1), want)

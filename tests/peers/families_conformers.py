"""Encoders of ESPnet, fairseq, NeMo and SpeechBrain, by their own code."""

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from peers.common import alone, definitions, padding, peer, randn, randomised
from peers.family import Family, Given, in_float32

Tensor = torch.Tensor

SPEECHBRAIN = "speechbrain.lobes.models.transformer.Conformer"
NEMO = "nemo.collections.asr.parts.submodules"


class Encoder(torch.nn.Module):
    """An encoder, and a function that calls it on frames and their mask, and returns frames."""

    def __init__(self, encoder: Any, call: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.call = randomised(encoder), call

    def forward(self, frames: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones(frames.shape[:2], dtype=torch.bool, device=frames.device)
        return self.call(self.encoder, frames, attention_mask)


def frames(length: int) -> Given:
    return {"frames": randn(2, length, 24), "attention_mask": padding([length, max(1, length - 2)], length)[:, 0, 0]}


def wide_frames(length: int) -> Given:
    """For heads of width 16, the least of FlexAttention."""
    return {**frames(length), "frames": randn(2, length, 48)}


def espnet(legacy: bool = False, **options: Any) -> Encoder:
    before = "legacy_" if legacy else ""
    return Encoder(peer("espnet.nets.pytorch_backend.conformer.encoder.Encoder")(
        24, attention_dim=24, attention_heads=3, linear_units=16, num_blocks=2, dropout_rate=0.0,
        positional_dropout_rate=0.0, attention_dropout_rate=0.0, input_layer="linear", cnn_module_kernel=3,
        pos_enc_layer_type=f"{before}rel_pos", selfattention_layer_type=f"{before}rel_selfattn", **options,
    ), _call_espnet)  # fmt: skip


def _call_espnet(encoder: Any, x: Tensor, mask: Tensor) -> Tensor:
    return encoder(x, mask[:, None])[0]


def speechbrain(**options: Any) -> Encoder:
    encoder = alone(f"{SPEECHBRAIN}.ConformerEncoder", "torchaudio")(
        2, 24, 16, 3, kernel_size=3, dropout=0.0, **options
    )
    encoder.positions = alone("speechbrain.nnet.attention.RelPosEncXL")(24)
    return Encoder(encoder, _call_speechbrain)


def _call_speechbrain(encoder: Any, x: Tensor, mask: Tensor) -> Tensor:
    return encoder(x, src_key_padding_mask=~mask, pos_embs=encoder.positions(x).to(x.dtype))[0]


class FairseqEncoder(torch.nn.Module):
    """Two layers of fairseq's, as its ``S2TConformerEncoder`` calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = alone("fairseq.modules.positional_encoding.RelPositionalEncoding")(100, 24)
        self.layers = torch.nn.ModuleList(
            _fairseq_layer()(24, 16, 3, 0.0, False, 3, "swish", "espnet", "rel_pos") for _ in "12"
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x, hidden = x.transpose(0, 1), ~mask
        positions = self.positions(x)
        for layer in self.layers:
            x, _ = layer(x, hidden, positions)
        return x.transpose(0, 1)


@functools.cache
def _fairseq_layer() -> Any:
    attention = "fairseq.modules.espnet_multihead_attention"
    given = dict.fromkeys(("ESPNETMultiHeadedAttention", "MultiheadAttention", "RotaryPositionMultiHeadedAttention"))
    *_, layer = definitions(
        "fairseq", "modules/conformer_layer.py", "ConvolutionModule", "FeedForwardModule", "ConformerEncoderLayer",
        LayerNorm=lambda width, export=False: torch.nn.LayerNorm(width),
        get_activation_fn=lambda name: lambda _: torch.nn.SiLU(),
        RelPositionMultiHeadedAttention=alone(f"{attention}.RelPositionMultiHeadedAttention"), **given,
    )  # fmt: skip
    return layer


def fairseq() -> Encoder:
    return Encoder(FairseqEncoder(), _call)


def _call(encoder: Any, x: Tensor, mask: Tensor) -> Tensor:
    return encoder(x, mask)


def nemo(**options: Any) -> Encoder:
    return Encoder(_nemo_conformer()(
        24, 2, 24, n_heads=3, subsampling_factor=1, ff_expansion_factor=1, conv_kernel_size=3, dropout=0.0,
        dropout_pre_encoder=0.0, dropout_emb=0.0, dropout_att=0.0, pos_emb_max_len=100, **options,
    ), _call_nemo)  # fmt: skip


def nemo_transformer(**options: Any) -> Encoder:
    return Encoder(_nemo_transformer()(
        48, 48, 3, 2, subsampling_factor=1, subsampling=None, drop_rate=0.0, ff_expansion=1.0, pos_emb_max_len=100,
        **options,
    ), _call_nemo)  # fmt: skip


def _call_nemo(encoder: Any, x: Tensor, mask: Tensor) -> Tensor:
    return encoder(audio_signal=x, length=mask.sum(-1), bypass_pre_encode=True)[0].mT


class _Quiet:
    """NeMo's mixins, of encoders without adapters and without losses inside them."""

    def is_access_enabled(self, *_: Any) -> bool:
        return False

    is_adapter_available = is_access_enabled


def _mixins(*names: str) -> dict[str, Any]:
    return {name: type(name, (_Quiet,), {}) for name in names}


@functools.cache
def _nemo_conformer() -> Any:
    names = "RelPositionMultiHeadAttention", "RelPositionMultiHeadAttentionLongformer", "MultiHeadAttention"
    given = {name: alone(f"{NEMO}.multi_head_attention.{name}") for name in names}
    given["CausalConv1D"] = alone(f"{NEMO}.causal_convs.CausalConv1D")
    *_, layer = definitions(
        "nemo", "collections/asr/parts/submodules/conformer_modules.py", "ConformerConvolution", "ConformerFeedForward",
        "ConformerLayer", Swish=torch.nn.SiLU,
        activation_registry={"swish": torch.nn.SiLU}, **given, **_mixins("AttentionAdapterModuleMixin", "AccessMixin"),
    )  # fmt: skip
    names = "PositionalEncoding", "RelPositionalEncoding", "LocalAttRelPositionalEncoding"
    given |= {name: alone(f"{NEMO}.multi_head_attention.{name}") for name in names}
    return definitions(
        "nemo", "collections/asr/modules/conformer_encoder.py", "ConformerEncoder", NeuralModule=torch.nn.Module,
        ConformerLayer=layer, ListConfig=list, DictConfig=dict, typecheck=lambda: lambda forward: forward,
        CacheAwareStreamingConfig=SimpleNamespace, compute_stochastic_depth_drop_probs=lambda count, *_: [0.0] * count,
        **given, **_mixins("StreamingEncoder", "Exportable", "AccessMixin"),
    )  # fmt: skip


@functools.cache
def _nemo_transformer() -> Any:
    names = "PositionalEncoding", "RelPositionalEncoding", "RelPositionMultiHeadAttention"
    given = {name: alone(f"{NEMO}.multi_head_attention.{name}") for name in names}
    *_, encoder = definitions(
        "nemo", "collections/asr/modules/transformer_encoder.py", "TransformerEncoderConfig", "_make_padding_mod",
        "_make_causal_mod", "FeedForward", "MultiHeadAttention", "TransformerBlock", "TransformerEncoder",
        experimental=lambda encoder: encoder, _SUPPORTED_ATTENTION_MODES=("full", "causal"),
        _SUPPORTED_SELF_ATTENTION_MODELS=("rel_pos",), FeatureStacking=type(None), **given,
    )  # fmt: skip
    vars(sys.modules[encoder.__module__])["flex_attention"] = _flex_attention
    return encoder


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any) -> Any:
    """Torch's, or what it computes where gradients are required, which it refuses on CPUs."""
    if not q.requires_grad:
        return peer("torch.nn.attention.flex_attention.flex_attention")(
            q, k, v, score_mod=score_mod, block_mask=block_mask
        )
    pair = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[-2])), indexing="ij")
    logits = score_mod(q @ k.mT * q.shape[-1] ** -0.5, *pair)
    return logits.masked_fill(~block_mask.mask_mod(*pair), -torch.inf).softmax(-1) @ v


CONFORMERS: dict[str, Family] = {
    "ESPnet": Family(espnet, frames),
    "ESPnet legacy": Family(functools.partial(espnet, legacy=True), frames),
    "SpeechBrain": Family(in_float32(speechbrain), frames, gate=1e-5),
    "fairseq": Family(fairseq, frames),
    "NeMo": Family(nemo, frames),
    "NeMo chunks": Family(
        functools.partial(nemo, att_context_size=[6, 2], att_context_style="chunked_limited"), frames
    ),
    "NeMo Transformer": Family(functools.partial(nemo_transformer, qk_norm=True, attn_mode="causal"), wide_frames),
}

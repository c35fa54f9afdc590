"""Tiny models of every family with a drop-in: random weights, and what to give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from peers.common import padding, peer, randn, randomised

Tensor = torch.Tensor
Given = dict[str, Any]

SIZES: Given = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
STILL: Given = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "conformer_conv_dropout",
     "layerdrop"), 0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model, what it is given for a length, and how many of its modules are replaced."""

    make: Callable[[], Any]
    given: Callable[[int], Given]
    count: int = 2
    lengths: tuple[int, ...] = (1, 2, 7, 30)
    gate: float = 1e-9
    generates: bool = False
    pads: bool = True  # whether outputs at padding, which are not used, agree as well
    takes_out: bool = (
        False  # whether the original reads the weights of linear layers directly, which may be wrapped or in 8 bits
    )


def tokens(length: int, vocabulary: int = 50) -> Given:
    ids = torch.randint(1, vocabulary, (2, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "attention_mask": padding([length, max(1, length - 2)], length)[:, 0, 0].long()}


def padded_on_the_left(length: int) -> Given:
    return {name: x.flip(1) for name, x in tokens(length).items()}


def pairs(length: int) -> Given:
    return {**tokens(length), "decoder_input_ids": tokens(max(1, length - 3))["input_ids"]}


def sounds(length: int) -> Given:
    mask = tokens(length)["attention_mask"].bool()
    return {"hidden_states": randn(2, length, 24), "attention_mask": mask}


def pictures(length: int) -> Given:
    return {"pixel_values": randn(2, 3, 4 * length, 4 * length)}


def built(path: str, configured: str, implementation: str = "eager", **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = peer(f"transformers.{configured}")(**options)
        config._attn_implementation = implementation
        return randomised(peer(f"transformers.{path}")(config))

    return make


def in_float32(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a model of float32: some cast to it in places, and overflow at padding or refuse."""
    return lambda: make().float()


def text_to_text(name: str, implementation: str = "sdpa", **options: Any) -> Family:
    make = built(
        f"{name}ForConditionalGeneration", f"{name}Config", implementation, d_model=24, d_kv=8, num_heads=3,
        num_layers=2, num_decoder_layers=2, d_ff=32, vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, **options,
    )  # fmt: skip
    # Two in the encoder, and two in the decoder, whose layers have two attentions each.
    return Family(make, pairs, count=6, lengths=(1, 7, 30), generates=True)


def conformer(name: str, kind: str, **options: Any) -> Family:
    module = name.lower().replace("wav2vec2", "wav2vec2_")
    path = f"models.{module}.modeling_{module}.{name}Encoder"
    return Family(
        built(
            path, f"{name}Config", position_embeddings_type=kind, max_source_positions=20, **SIZES, **STILL, **options
        ),
        sounds,
    )


def deberta(name: str, implementation: str = "eager", **options: Any) -> Family:
    return Family(
        built(
            f"{name}Model", f"{name}Config", implementation, vocab_size=50, relative_attention=True, type_vocab_size=0,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES, **options,
        ),
        tokens,
        gate=1e-6,  # their scale is float32
    )  # fmt: skip


def vits() -> Any:
    encoder = built(
        "models.vits.modeling_vits.VitsTextEncoder", "VitsConfig", hidden_size=24, num_attention_heads=3,
        num_hidden_layers=2, ffn_dim=32, vocab_size=50, flow_size=16, **STILL,
    )()  # fmt: skip
    return _Called(encoder, lambda input_ids, attention_mask: {
        "input_ids": input_ids, "attention_mask": attention_mask,
        "padding_mask": attention_mask[..., None].to(next(encoder.parameters()).dtype),
    })  # fmt: skip


def fastspeech2() -> Any:
    config = peer("transformers.FastSpeech2ConformerConfig")(
        hidden_size=24, encoder_num_attention_heads=3, encoder_layers=2, encoder_linear_units=16, vocab_size=50,
        encoder_dropout_rate=0.0, encoder_positional_dropout_rate=0.0, encoder_attention_dropout_rate=0.0,
    )  # fmt: skip
    make = peer("transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer.FastSpeech2ConformerEncoder")
    encoder = randomised(make(config, config.encoder_config, use_encoder_input_layer=True))
    return _Called(encoder, lambda input_ids, attention_mask: {
        "input_tensor": input_ids, "attention_mask": attention_mask[:, None], "return_dict": True,
    })  # fmt: skip


class _Called(torch.nn.Module):
    """A model that is given something else than others."""

    def __init__(self, model: Any, given: Callable[..., Given]) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, **given: Any) -> Any:
        return self.model(**self.given(**given))


def features(length: int) -> Given:
    mask = tokens(4 * length)["attention_mask"].bool()
    return {"input_features": randn(2, 4 * length, 16), "attention_mask": mask}


def with_memory(length: int) -> Given:
    given = tokens(length)
    segments = (torch.arange(length) > length // 2).long().expand(2, length)
    return {**given, "token_type_ids": segments, "mems": [randn(3, 2, 24, seed=layer) for layer in range(2)]}


def two_streams(length: int) -> Given:
    """Predict the last two places, whose tokens are not seen."""
    ids = tokens(length)["input_ids"]
    perm_mask = torch.zeros(2, length, length, dtype=torch.float64)
    perm_mask[:, :, -2:] = 1.0
    target_mapping = torch.zeros(2, min(2, length), length, dtype=torch.float64)
    for row in range(min(2, length)):
        target_mapping[:, row, length - 1 - row] = 1.0
    return {"input_ids": ids, "perm_mask": perm_mask, "target_mapping": target_mapping}


XLNET = built(
    "XLNetModel", "XLNetConfig", d_model=24, n_head=3, n_layer=2, d_inner=16, vocab_size=50, dropout=0.0, mem_len=4
)
INKLING: Given = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 6, "d_rel": 5,
    "rel_extent": 9, "local_layer_ids": [0], "mlp_layer_types": ["dense", "dense"], "intermediate_size": 16,
    "vocab_size": 50, "log_scaling_n_floor": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
SWIN: Given = {
    "image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3], "window_size": 4,
    "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip
BEIT: Given = {
    "image_size": 16, "patch_size": 4, "vocab_size": 50, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0, **SIZES,
}  # fmt: skip
POSITIONAL: Given = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
WEIGHTS: Given = {"attention_probs_dropout_prob": 0.0}

SAM: Given = {
    "image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1], "output_channels": 8,
    "mlp_dim": 16,
    **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
}  # fmt: skip


def whole_pictures(length: int) -> Given:
    """A model of one size of image."""
    return pictures(16)


def seamless(name: str, **options: Any) -> Family:
    module = {"SeamlessM4T": "seamless_m4t", "SeamlessM4Tv2": "seamless_m4t_v2"}[name]
    still = dict.fromkeys(("speech_encoder_dropout", "speech_encoder_layerdrop"), 0.0)
    return Family(
        built(
            f"models.{module}.modeling_{module}.{name}ConformerEncoder", f"{name}Config", "sdpa", hidden_size=24,
            speech_encoder_attention_heads=3, speech_encoder_layers=2, speech_encoder_intermediate_size=16, **still,
            **options,
        ),
        sounds,
    )  # fmt: skip


def clap() -> Any:
    config = peer("transformers.ClapAudioConfig")(
        spec_size=32, num_mel_bins=8, window_size=4, patch_size=4, patch_stride=[4, 4], patch_embeds_hidden_size=12,
        depths=[2, 2], num_attention_heads=[3, 3], drop_path_rate=0.0, hidden_dropout_prob=0.0, hidden_size=24,
        **WEIGHTS,
    )  # fmt: skip
    return randomised(peer("transformers.models.clap.modeling_clap.ClapAudioEncoder")(config))


def spectrograms(length: int) -> Given:
    return {"input_features": randn(2, 1, 128, 8)}


def speecht5() -> Any:
    config = peer("transformers.SpeechT5Config")(
        hidden_size=24, encoder_layers=2, encoder_attention_heads=3, encoder_ffn_dim=16, encoder_layerdrop=0.0,
        encoder_max_relative_position=6, positional_dropout=0.0, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return randomised(peer("transformers.models.speecht5.modeling_speecht5.SpeechT5Encoder")(config))


def boxes(length: int) -> Tensor:
    corners = torch.randint(0, 50, (2, length, 2), generator=torch.Generator().manual_seed(3))
    return torch.cat([corners, corners + 7], -1)


def documents(length: int) -> Given:
    return {**tokens(length), "bbox": boxes(length), "pixel_values": randn(2, 3, 32, 32)}


def boxed_pairs(length: int) -> Given:
    return {**pairs(length), "bbox": boxes(length) / 64}


def mels(length: int) -> Given:
    mask = tokens(4 * length)["attention_mask"].bool()
    return {"audio_mel": randn(2, 4 * length, 16), "audio_mel_mask": ~mask}


def masked_features(length: int) -> Given:
    return {"hidden_states": randn(2, 4 * length, 16), "mask": padding([4 * length, 2 * length], 4 * length)[:, 0, 0]}


def as_argument(length: int) -> Given:
    return {"x": randn(2, 3, 8 * length, 8 * length)}


def whole_as_argument(length: int) -> Given:
    return as_argument(4)


def timm_swin(module: str, name: str) -> Callable[[], Any]:
    return lambda: randomised(peer(f"timm.models.{module}.{name}")(
        img_size=32, patch_size=2, embed_dim=12, depths=(2, 1), num_heads=(3, 3), window_size=4, num_classes=5,
        drop_path_rate=0.0,
    ))  # fmt: skip


def torchvision_swin(block: str, merging: str) -> Callable[[], Any]:
    module = "torchvision.models.swin_transformer"
    return lambda: randomised(peer(f"{module}.SwinTransformer")(
        patch_size=[2, 2], embed_dim=12, depths=[2, 1], num_heads=[3, 3], window_size=[4, 4], num_classes=5,
        stochastic_depth_prob=0.0, block=peer(f"{module}.{block}"), downsample_layer=peer(f"{module}.{merging}"),
    ))  # fmt: skip


def funnel(**options: Any) -> Family:
    still: Given = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), 0.0)
    make = built(
        "FunnelModel", "FunnelConfig", vocab_size=50, block_sizes=[1, 1, 1], num_decoder_layers=1, d_model=24, n_head=3,
        d_head=8, d_inner=16, **still, **options,
    )  # fmt: skip
    return Family(make, in_segments, 6, lengths=(6, 7, 30), gate=1e-5)


def in_segments(length: int) -> Given:
    """A ``<cls>`` of every segment, then two segments."""
    kinds = (torch.arange(length) > length // 2).long().expand(2, length).clone()
    kinds[:, 0] = 2
    return {**tokens(length), "token_type_ids": kinds}


FAMILIES: dict[str, Family] = {
    "T5": text_to_text("T5", "eager"),
    "T5 sdpa": text_to_text("T5"),
    "MT5": text_to_text("MT5"),
    "UMT5": text_to_text("UMT5"),
    "Pop2Piano": replace(text_to_text("Pop2Piano"), generates=False),  # it needs audio
    "SwitchTransformers": text_to_text(
        "SwitchTransformers", "eager", num_sparse_encoder_layers=0, num_sparse_decoder_layers=0, router_jitter_noise=0.0
    ),
    "LongT5": replace(text_to_text("LongT5", "eager", local_radius=3), count=4),  # its encoder is unchanged
    "VITS": Family(vits, tokens),
    "Wav2Vec2-BERT relative_key": conformer(
        "Wav2Vec2Bert", "relative_key", left_max_position_embeddings=6, right_max_position_embeddings=2
    ),
    "Wav2Vec2-BERT relative": conformer("Wav2Vec2Bert", "relative"),
    "Wav2Vec2-Conformer": conformer("Wav2Vec2Conformer", "relative", **POSITIONAL),
    "WavLM": Family(
        built(
            "models.wavlm.modeling_wavlm.WavLMEncoder", "WavLMConfig", num_buckets=16, max_bucket_distance=20,
            **POSITIONAL, **SIZES, **STILL,
        ),
        sounds, takes_out=True
    ),
    "DeBERTa-v2": deberta("DebertaV2", pos_att_type=["c2p", "p2c"], position_buckets=6, max_relative_positions=16),
    "DeBERTa-v2 c2p": deberta("DebertaV2", pos_att_type=["c2p"], position_buckets=-1, max_relative_positions=16),
    "DeBERTa-v3": deberta(
        "DebertaV2", pos_att_type=["p2c", "c2p"], position_buckets=6, max_relative_positions=16, share_att_key=True,
        norm_rel_ebd="layer_norm", position_biased_input=False,
    ),
    "DeBERTa": deberta("Deberta", pos_att_type=["c2p", "p2c"], max_relative_positions=8),
    "SEW-D": Family(
        built(
            "models.sew_d.modeling_sew_d.SEWDTransformerEncoder", "SEWDConfig", pos_att_type=["c2p", "p2c"],
            position_buckets=6, max_position_embeddings=16, **SIZES, **STILL,
        ),
        sounds, gate=1e-6,
    ),
    "Swin": Family(built("SwinModel", "SwinConfig", **WEIGHTS, **SWIN), pictures, 3, (4, 8), gate=1e-5),
    "Swin sdpa": Family(built("SwinModel", "SwinConfig", "sdpa", **WEIGHTS, **SWIN), pictures, 3, (4, 8)),
    "Swinv2": Family(built("Swinv2Model", "Swinv2Config", **WEIGHTS, **SWIN), pictures, 3, (4, 8)),
    "BEiT": Family(
        built("BeitModel", "BeitConfig", "sdpa", use_relative_position_bias=True, **WEIGHTS, **BEIT),
        pictures, 4, (4, 6),
    ),
    "BEiT shared": Family(
        built(
            "BeitModel", "BeitConfig", "sdpa", use_shared_relative_position_bias=True, use_relative_position_bias=True,
            **WEIGHTS, **BEIT,
        ),
        pictures, 5, (4, 6),
    ),
    "MPT": Family(
        built("MptForCausalLM", "MptConfig", d_model=24, n_heads=3, n_layers=2, vocab_size=50, max_seq_len=64),
        tokens, generates=True, gate=1e-6,
    ),
    "Bloom": Family(
        in_float32(built("BloomForCausalLM", "BloomConfig", hidden_size=24, n_head=3, n_layer=2, vocab_size=50)),
        padded_on_the_left, generates=True, gate=1e-5,
    ),
    "XLNet": Family(XLNET, tokens),
    "XLNet memory": Family(XLNET, with_memory),
    "XLNet two streams": Family(in_float32(XLNET), two_streams, lengths=(2, 7, 30), gate=1e-5),
    "Funnel": funnel(),
    "Funnel factorized": funnel(attention_type="factorized"),
    "Funnel of one kind": funnel(separate_cls=False, pool_q_only=False),
    "FastSpeech2-Conformer": Family(fastspeech2, tokens),
    "MPNet": Family(
        built(
            "MPNetModel", "MPNetConfig", vocab_size=50, max_position_embeddings=900, hidden_dropout_prob=0.0, **WEIGHTS,
            **SIZES,
        ),
        tokens, 3,
    ),
    "SAM": Family(built("SamVisionModel", "SamVisionConfig", **SAM), whole_pictures, 2, (16, 16), gate=1e-6),
    "SAM sdpa": Family(built("SamVisionModel", "SamVisionConfig", "sdpa", **SAM), whole_pictures, 2, (16, 16)),
    "SAM-HQ": Family(built("SamHQVisionModel", "SamHQVisionConfig", "sdpa", **SAM), whole_pictures, 2, (16, 16)),
    "ViTDet": Family(
        built(
            "VitDetModel", "VitDetConfig", use_relative_position_embeddings=True, window_block_indices=[0],
            window_size=3,
            image_size=32, patch_size=4, dropout_prob=0.0, drop_path_rate=0.0, mlp_ratio=2,
            **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        ),
        pictures, 2, (8, 11),
    ),
    "SeamlessM4T": seamless("SeamlessM4T", position_embeddings_type="relative", max_source_positions=200),
    "SeamlessM4T-v2": seamless(
        "SeamlessM4Tv2", position_embeddings_type="relative_key", left_max_position_embeddings=6,
        right_max_position_embeddings=2, speech_encoder_chunk_size=500,
    ),
    "SeamlessM4T-v2 chunks": seamless(
        "SeamlessM4Tv2", position_embeddings_type="relative_key", speech_encoder_chunk_size=5,
        speech_encoder_left_chunk_num=1,
    ),
    "Donut's Swin": Family(built("DonutSwinModel", "DonutSwinConfig", **WEIGHTS, **SWIN), pictures, 3, (4, 8)),
    "MaskFormer's Swin": Family(
        built(
            "models.maskformer.modeling_maskformer_swin.MaskFormerSwinModel", "MaskFormerSwinConfig", **WEIGHTS, **SWIN
        ),
        pictures, 3, (4, 8),
    ),
    "CLAP's Swin": Family(clap, spectrograms, 4, (1, 1)),
    "Swin2SR": Family(
        built("Swin2SRModel", "Swin2SRConfig", **WEIGHTS, **{**SWIN, "patch_size": 1}), pictures, 3, (4, 8)
    ),
    "SpeechT5": Family(speecht5, sounds, 3),
    "Granite Speech": Family(
        built(
            "models.granite_speech.modeling_granite_speech.GraniteSpeechCTCEncoder",
            "models.granite_speech.configuration_granite_speech.GraniteSpeechEncoderConfig", input_dim=24,
            hidden_dim=24, num_layers=2, num_heads=3, dim_head=8, context_size=8, max_pos_emb=10, dropout=0.0,
            output_dim=11,
        ),
        lambda length: {"hidden_states": randn(2, length, 24)},
    ),
    "LayoutLMv3": Family(
        built(
            "LayoutLMv3Model", "LayoutLMv3Config", vocab_size=50, coordinate_size=4, shape_size=4, input_size=32,
            patch_size=8, max_2d_position_embeddings=100, rel_pos_bins=8, max_rel_pos=12, rel_2d_pos_bins=8,
            max_rel_2d_pos=40, hidden_dropout_prob=0.0, **WEIGHTS, **SIZES,
        ),
        documents, 3, takes_out=True),
    "UDOP": Family(
        built(
            "UdopForConditionalGeneration", "UdopConfig", "sdpa", d_model=24, d_kv=8, num_heads=3, num_layers=2,
            num_decoder_layers=2, d_ff=32, vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0,
            max_2d_position_embeddings=100,
        ),
        boxed_pairs, 8, lengths=(2, 7, 30), generates=True,
    ),
    "ProphetNet": Family(
        in_float32(built(
            "ProphetNetForConditionalGeneration", "ProphetNetConfig", hidden_size=24, num_encoder_layers=2,
            num_decoder_layers=2, num_encoder_attention_heads=3, num_decoder_attention_heads=3, encoder_ffn_dim=16,
            decoder_ffn_dim=16, vocab_size=50, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
            num_buckets=8, relative_max_distance=12, max_position_embeddings=64,
        )),
        pairs, lengths=(1, 7, 30), generates=True, gate=1e-4,
    ),
    "Falcon": Family(
        in_float32(built(
            "FalconForCausalLM", "FalconConfig", "sdpa", alibi=True, vocab_size=50, hidden_size=24,
            num_hidden_layers=2, num_attention_heads=3, multi_query=False, hidden_dropout=0.0, attention_dropout=0.0,
        )),
        padded_on_the_left, generates=True, gate=1e-5, pads=False,
    ),
    "Nemotron": Family(
        built(
            "models.nemotron_asr_streaming.modeling_nemotron_asr_streaming.NemotronAsrStreamingEncoder",
            "NemotronAsrStreamingEncoderConfig", "sdpa", num_mel_bins=16, subsampling_factor=2, conv_kernel_size=3,
            subsampling_conv_channels=4, dropout=0.0, dropout_positions=0.0, sliding_window=9,
            default_num_lookahead_tokens=3, **SIZES, **STILL,
        ),
        features,
    ),
    "Gemma 3n": Family(
        built(
            "models.gemma3n.modeling_gemma3n.Gemma3nAudioEncoder", "Gemma3nAudioConfig", hidden_size=24,
            input_feat_size=16, conf_num_attention_heads=3, conf_num_hidden_layers=2, conf_attention_chunk_size=4,
            conf_attention_context_left=5, conf_attention_context_right=0, conf_reduction_factor=1,
            conf_conv_kernel_size=3, sscp_conv_channel_size=[4, 4],
        ),
        mels, gate=1e-5,
    ),
    "Phi-4": Family(
        built(
            "models.phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAudioModel", "Phi4MultimodalAudioConfig",
            "sdpa", hidden_size=24, intermediate_size=16, num_blocks=2, num_attention_heads=3, input_size=16,
            chunk_size=50, left_chunk=1, ext_pw_out_channel=24, depthwise_separable_out_channel=24,
            nemo_conv_channels=24, time_reduction=4, bias_max_distance=6, dropout_rate=0.0,
        ),
        masked_features, 3,
    ),
    "Data2VecVision": Family(
        built(
            "Data2VecVisionModel", "Data2VecVisionConfig", "sdpa", use_relative_position_bias=True, **WEIGHTS, **BEIT
        ),
        pictures, 4, (4, 6),
    ),
    "timm's Swin": Family(timm_swin("swin_transformer", "SwinTransformer"), whole_as_argument, 3, (4, 4)),
    "timm's Swin, version 2": Family(
        timm_swin("swin_transformer_v2", "SwinTransformerV2"), whole_as_argument, 3, (4, 4), gate=1e-6, takes_out=True),
    "torchvision's Swin": Family(
        torchvision_swin("SwinTransformerBlock", "PatchMerging"), as_argument, 3, (4, 7), takes_out=True
    ),
    "torchvision's Swin, version 2": Family(
        torchvision_swin("SwinTransformerBlockV2", "PatchMergingV2"), as_argument, 3, (4, 7), takes_out=True),
    "Parakeet": Family(
        built(
            "ParakeetEncoder", "ParakeetEncoderConfig", "sdpa", num_mel_bins=16, subsampling_factor=2,
            conv_kernel_size=3, subsampling_conv_channels=4, dropout=0.0, dropout_positions=0.0, **SIZES, **STILL,
        ),
        features,
    ),
    "Inkling": Family(
        built(
            "models.inkling.modeling_inkling.InklingForCausalLM",
            "models.inkling.configuration_inkling.InklingTextConfig", "sdpa", **INKLING,
        ),
        padded_on_the_left, generates=True, gate=1e-6, pads=False,
    ),
}  # fmt: skip

"""Tiny models of every family with a drop-in: of text and documents, of speech, of pictures and spectrograms."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peers.common import hf, padding, peer, randn, randomised
from peers.families_conformers import CONFORMERS
from peers.family import LAYERS, SIZES, Family, Given, Tensor, built, in_float32, padded_on_the_left, pairs, tokens

XLNET = built("XLNetModel", d_model=24, n_head=3, n_layer=2, d_inner=16, vocab_size=50, mem_len=4)
INKLING: Given = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 6, "d_rel": 5,
    "rel_extent": 9, "vocab_size": 50, "log_scaling_n_floor": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
INKLING_2: Given = {
    **INKLING, "n_layers_per_attn_res_block": 1, "moe_intermediate_size": 16, "unpadded_vocab_size": 50,
    "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip
OF_T5: Given = {"d_kv": 8, "num_heads": 3, "num_layers": 2, "d_ff": 32, "vocab_size": 50}
DECODED: Given = {"d_model": 24, "num_decoder_layers": 2, "decoder_start_token_id": 0, **OF_T5}
BUCKETS: Given = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}


def text_to_text(name: str, implementation: str = "sdpa", **options: Any) -> Family:
    make = built(f"{name}ForConditionalGeneration", implementation, **DECODED, **BUCKETS, **options)
    # Two in the encoder, and two in the decoder, whose layers have two attentions each.
    return Family(make, pairs, count=6, lengths=(1, 7, 30), generates=True)


def deberta(name: str, **options: Any) -> Family:
    options |= {"vocab_size": 50, "relative_attention": True, "type_vocab_size": 0, **SIZES}
    return Family(built(f"{name}Model", **options), tokens, gate=1e-6)  # their scale is float32


class Kept(torch.nn.Linear):
    """A layer that is not made one in 8 bits."""


def inkling_2(module: str, **options: Any) -> Family:
    name = module.title().replace("_", "")
    make = built(f"{module}.{name}ForCausalLM", "eager", f"{module}.{name}TextConfig", **{**INKLING_2, **options})

    def kept() -> Any:
        model = make().float()
        for part in model.modules():  # the model reads their dtypes, which layers in 8 bits do not have
            if type(part).__name__ == "Inkling2LoopMessageGate":
                part.down_proj.__class__ = Kept
        return model

    count = 2 * options.get("num_hidden_layers", 2)  # the attention and its bias
    return Family(kept, padded_on_the_left, count, generates=True, gate=1e-5, pads=False)


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


def boxes(length: int) -> Tensor:
    corners = torch.randint(0, 50, (2, length, 2), generator=torch.Generator().manual_seed(3))
    return torch.cat([corners, corners + 7], -1)


def documents(length: int) -> Given:
    return {**tokens(length), "bbox": boxes(length), "pixel_values": randn(2, 3, 32, 32)}


def boxed_pairs(length: int) -> Given:
    return {**pairs(length), "bbox": boxes(length) / 64}


def of_a_picture(length: int) -> Given:
    return {**tokens(length), "encoder_hidden_states": randn(2, 5, 24)}


def funnel(**options: Any) -> Family:
    make = built(
        "FunnelModel", vocab_size=50, block_sizes=[1, 1, 1], num_decoder_layers=1, d_model=24, n_head=3, d_head=8,
        d_inner=16, **options,
    )  # fmt: skip
    return Family(make, in_segments, 6, lengths=(6, 7, 30), gate=1e-5)


def in_segments(length: int) -> Given:
    """A ``<cls>`` of every segment, then two segments."""
    kinds = (torch.arange(length) > length // 2).long().expand(2, length).clone()
    kinds[:, 0] = 2
    return {**tokens(length), "token_type_ids": kinds}


TEXT: dict[str, Family] = {
    "T5": text_to_text("T5", "eager"),
    "T5 sdpa": text_to_text("T5"),
    "MT5": text_to_text("MT5"),
    "UMT5": text_to_text("UMT5"),
    "Pop2Piano": replace(text_to_text("Pop2Piano"), generates=False),  # it needs audio
    "Pix2Struct": Family(
        built("Pix2StructTextModel", "sdpa", hidden_size=24, initializer_range=0.02, **OF_T5, **BUCKETS), of_a_picture,
        count=4, lengths=(1, 7, 30),
    ),
    "SwitchTransformers": text_to_text(
        "SwitchTransformers", "eager", num_sparse_encoder_layers=0, num_sparse_decoder_layers=0, router_jitter_noise=0.0
    ),
    "LongT5": replace(text_to_text("LongT5", "eager", local_radius=3), count=4),  # its encoder is unchanged
    "DeBERTa-v2": deberta("DebertaV2", pos_att_type=["c2p", "p2c"], position_buckets=6, max_relative_positions=16),
    "DeBERTa-v2 c2p": deberta("DebertaV2", pos_att_type=["c2p"], position_buckets=-1, max_relative_positions=16),
    "DeBERTa-v3": deberta(
        "DebertaV2", pos_att_type=["p2c", "c2p"], position_buckets=6, max_relative_positions=16, share_att_key=True,
        norm_rel_ebd="layer_norm", position_biased_input=False,
    ),
    "DeBERTa": deberta("Deberta", pos_att_type=["c2p", "p2c"], max_relative_positions=8),
    "MPT": Family(built("MptForCausalLM", d_model=24, n_heads=3, n_layers=2, vocab_size=50, max_seq_len=64), tokens,
                  generates=True, gate=1e-6),
    "Bloom": Family(in_float32(built("BloomForCausalLM", hidden_size=24, n_head=3, n_layer=2, vocab_size=50)),
                    padded_on_the_left, generates=True, gate=1e-5),
    "XLNet": Family(XLNET, tokens),
    "XLNet memory": Family(XLNET, with_memory),
    "XLNet two streams": Family(in_float32(XLNET), two_streams, lengths=(2, 7, 30), gate=1e-5),
    "Funnel": funnel(),
    "Funnel factorized": funnel(attention_type="factorized"),
    # Of three tokens, a pooled text of one token has keys of padding alone.
    "Funnel of one kind": replace(funnel(separate_cls=False, pool_q_only=False), lengths=(3, 6, 7, 30), gate=1e-4),
    "MPNet": Family(built("MPNetModel", vocab_size=50, max_position_embeddings=900, **SIZES), tokens, 3),
    "LayoutLMv3": Family(built(
        "LayoutLMv3Model", vocab_size=50, coordinate_size=4, shape_size=4, input_size=32, patch_size=8,
        max_2d_position_embeddings=100, rel_pos_bins=8, max_rel_pos=12, rel_2d_pos_bins=8, max_rel_2d_pos=40, **SIZES,
    ), documents, 3, takes_out=True),
    "UDOP": Family(built("UdopForConditionalGeneration", "sdpa", max_2d_position_embeddings=100, **DECODED),
                   boxed_pairs, 8, lengths=(2, 7, 30), generates=True),
    "ProphetNet": Family(in_float32(built(
        "ProphetNetForConditionalGeneration", hidden_size=24, num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=3, num_decoder_attention_heads=3, encoder_ffn_dim=16, decoder_ffn_dim=16,
        vocab_size=50, num_buckets=8, relative_max_distance=12, max_position_embeddings=64,
    )), pairs, lengths=(1, 7, 30), generates=True, gate=1e-4),
    "Falcon": Family(in_float32(built(
        "FalconForCausalLM", "sdpa", alibi=True, vocab_size=50, multi_query=False, **LAYERS,
    )), padded_on_the_left, generates=True, gate=1e-5, pads=False),
    "Inkling": Family(built(
        "inkling.InklingForCausalLM", "sdpa", "inkling.InklingTextConfig", local_layer_ids=[0], intermediate_size=16,
        mlp_layer_types=["dense", "dense"], **INKLING,
    ), padded_on_the_left, generates=True, gate=1e-6, pads=False),
    "Inkling 2": inkling_2("inkling2"),
    # The last two layers are passed twice.
    "Inkling 2 Loop": inkling_2(
        "inkling2_loop", num_hidden_layers=3, layer_types=["hybrid_sliding", "hybrid_sliding", "hybrid"],
        loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2, loop_gate_rank=4,
    ),
}  # fmt: skip

POSITIONAL: Given = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SUBSAMPLED: Given = {"num_mel_bins": 16, "subsampling_factor": 2, "conv_kernel_size": 3, "subsampling_conv_channels": 4}


def sounds(length: int) -> Given:
    mask = tokens(length)["attention_mask"].bool()
    return {"hidden_states": randn(2, length, 24), "attention_mask": mask}


def features(length: int, width: int = 16) -> Given:
    mask = tokens(4 * length)["attention_mask"].bool()
    return {"input_features": randn(2, 4 * length, width), "attention_mask": mask}


def mels(length: int) -> Given:
    given = features(length)
    return {"audio_mel": given["input_features"], "audio_mel_mask": ~given["attention_mask"]}


def masked_features(length: int) -> Given:
    return {"hidden_states": randn(2, 4 * length, 16), "mask": padding([4 * length, 2 * length], 4 * length)[:, 0, 0]}


def conformer(name: str, kind: str, **options: Any) -> Family:
    module = name.lower().replace("wav2vec2", "wav2vec2_")
    options |= {"position_embeddings_type": kind, "max_source_positions": 20, **SIZES}
    return Family(built(f"{module}.{name}Encoder", **options), sounds)


def granite(module: str, name: str) -> Family:
    return Family(built(
        f"{module}.{name}CTCEncoder", "eager", f"{module}.{name}EncoderConfig", input_dim=24, hidden_dim=24,
        num_layers=2, num_heads=3, dim_head=8, context_size=8, max_pos_emb=10, output_dim=11,
    ), lambda length: {"hidden_states": randn(2, length, 24)})  # fmt: skip


def granite_5() -> Any:
    encoder = built(
        "granite_speech5.GraniteSpeech5Encoder", "sdpa", vocab_size=11, max_position_embeddings=10, context_size=8,
        subsample_layers=[0], **SIZES,
    )()  # fmt: skip
    encoder.input_linear = torch.nn.LayerNorm(24).double()  # whose dtype the model reads: a layer in 8 bits has none
    return encoder


def vits() -> Any:
    encoder = built("vits.VitsTextEncoder", ffn_dim=32, vocab_size=50, flow_size=16, **LAYERS)()
    return _Called(encoder, lambda input_ids, attention_mask: {
        "input_ids": input_ids, "attention_mask": attention_mask,
        "padding_mask": attention_mask[..., None].to(next(encoder.parameters()).dtype),
    })  # fmt: skip


def fastspeech2() -> Any:
    config = hf("FastSpeech2ConformerConfig")(
        hidden_size=24, encoder_num_attention_heads=3, encoder_layers=2, encoder_linear_units=16, vocab_size=50,
        encoder_dropout_rate=0.0, encoder_positional_dropout_rate=0.0, encoder_attention_dropout_rate=0.0,
    )  # fmt: skip
    make = hf("fastspeech2_conformer.FastSpeech2ConformerEncoder")
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


def seamless(path: str, kind: str, **options: Any) -> Family:
    return Family(built(
        f"{path}ConformerEncoder", "sdpa", hidden_size=24, speech_encoder_attention_heads=3, speech_encoder_layers=2,
        speech_encoder_intermediate_size=16, position_embeddings_type=kind, **options,
    ), sounds)  # fmt: skip


SPEECH: dict[str, Family] = {
    "VITS": Family(vits, tokens),
    "Wav2Vec2-BERT relative_key": conformer(
        "Wav2Vec2Bert", "relative_key", left_max_position_embeddings=6, right_max_position_embeddings=2
    ),
    "Wav2Vec2-BERT relative": conformer("Wav2Vec2Bert", "relative"),
    "Wav2Vec2-Conformer": conformer("Wav2Vec2Conformer", "relative", **POSITIONAL),
    "WavLM": Family(
        built("wavlm.WavLMEncoder", num_buckets=16, max_bucket_distance=20, **POSITIONAL, **SIZES), sounds,
        takes_out=True,
    ),
    "SEW-D": Family(built(
        "sew_d.SEWDTransformerEncoder", pos_att_type=["c2p", "p2c"], position_buckets=6, max_position_embeddings=16,
        **SIZES,
    ), sounds, gate=1e-6),
    "FastSpeech2-Conformer": Family(fastspeech2, tokens),
    "SeamlessM4T": seamless("seamless_m4t.SeamlessM4T", "relative", max_source_positions=200),
    "SeamlessM4T-v2": seamless(
        "seamless_m4t_v2.SeamlessM4Tv2", "relative_key", left_max_position_embeddings=6,
        right_max_position_embeddings=2, speech_encoder_chunk_size=500,
    ),
    "SeamlessM4T-v2 chunks": seamless(
        "seamless_m4t_v2.SeamlessM4Tv2", "relative_key", speech_encoder_chunk_size=5, speech_encoder_left_chunk_num=1,
    ),
    "SpeechT5": Family(built(
        "speecht5.SpeechT5Encoder", hidden_size=24, encoder_layers=2, encoder_attention_heads=3, encoder_ffn_dim=16,
        encoder_max_relative_position=6,
    ), sounds, 3),
    "Granite Speech": granite("granite_speech", "GraniteSpeech"),
    "Granite Speech Plus": granite("granite_speech_plus", "GraniteSpeechPlus"),
    "Granite Speech 5": Family(granite_5, lambda length: features(length, 24), gate=1e-6),
    "Nemotron": Family(built(
        "nemotron_asr_streaming.NemotronAsrStreamingEncoder", "sdpa", sliding_window=9, default_num_lookahead_tokens=3,
        **SUBSAMPLED, **SIZES,
    ), features),
    "Gemma 3n": Family(built(
        "gemma3n.Gemma3nAudioEncoder", hidden_size=24, input_feat_size=16, conf_num_attention_heads=3,
        conf_num_hidden_layers=2, conf_attention_chunk_size=4, conf_attention_context_left=5,
        conf_attention_context_right=2, conf_reduction_factor=1, conf_conv_kernel_size=3, sscp_conv_channel_size=[4, 4],
    ), mels, gate=1e-5),
    "Gemma 4": Family(in_float32(built(
        "gemma4.Gemma4AudioModel", subsampling_conv_channels=[16, 4], conv_kernel_size=3, attention_chunk_size=4,
        attention_context_left=5, output_proj_dims=24, **LAYERS,
    )), features, gate=1e-5),
    "Phi-4": Family(built(
        "phi4_multimodal.Phi4MultimodalAudioModel", "sdpa", hidden_size=24, intermediate_size=16, num_blocks=2,
        num_attention_heads=3, input_size=16, chunk_size=50, left_chunk=1, ext_pw_out_channel=24,
        depthwise_separable_out_channel=24, nemo_conv_channels=24, time_reduction=4, bias_max_distance=6,
    ), masked_features, 3),
    "Parakeet": Family(built("ParakeetEncoder", "sdpa", **SUBSAMPLED, **SIZES), features),
}  # fmt: skip

SWIN: Given = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3],
               "window_size": 4}  # fmt: skip
BEIT: Given = {"image_size": 16, "patch_size": 4, "vocab_size": 50, "use_relative_position_bias": True, **SIZES}
SAM: Given = {
    "image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1], "output_channels": 8,
    "mlp_dim": 16, **LAYERS,
}  # fmt: skip
TIMM: Given = {"img_size": 32, "patch_size": 2, "embed_dim": 12, "depths": (2, 1), "num_heads": (3, 3),
               "window_size": 4, "num_classes": 5, "drop_path_rate": 0.0}  # fmt: skip


def pictures(length: int) -> Given:
    return {"pixel_values": randn(2, 3, 4 * length, 4 * length)}


def whole_pictures(length: int) -> Given:
    """A model of one size of image."""
    return pictures(16)


def prompted_pictures(length: int) -> Given:
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return {name: randn(2, 3, 16, 16, seed=seed) for seed, name in enumerate(names)}


def spectrograms(length: int) -> Given:
    return {"input_features": randn(2, 1, 128, 8)}


def as_argument(length: int) -> Given:
    return {"x": randn(2, 3, 8 * length, 8 * length)}


def whole_as_argument(length: int) -> Given:
    return as_argument(4)


def torchvision_swin(suffix: str) -> Callable[[], Any]:
    module = "torchvision.models.swin_transformer"
    return lambda: built(
        f"{module}.SwinTransformer", None, patch_size=[2, 2], embed_dim=12, depths=[2, 1], num_heads=[3, 3],
        window_size=[4, 4], num_classes=5, stochastic_depth_prob=0.0,
        block=peer(f"{module}.SwinTransformerBlock{suffix}"), downsample_layer=peer(f"{module}.PatchMerging{suffix}"),
    )()  # fmt: skip


def of_windows(make: Any, gate: float = 1e-9) -> Family:
    return Family(make, pictures, 3, (4, 8), gate=gate)


whole = partial(Family, given=whole_pictures, lengths=(16, 16))
VISION: dict[str, Family] = {
    "Swin": of_windows(built("SwinModel", **SWIN), gate=1e-5),
    "Swin sdpa": of_windows(built("SwinModel", "sdpa", **SWIN)),
    "Swinv2": of_windows(built("Swinv2Model", **SWIN)),
    "BEiT": Family(built("BeitModel", "sdpa", **BEIT), pictures, 4, (4, 6)),
    "BEiT shared": Family(
        built("BeitModel", "sdpa", use_shared_relative_position_bias=True, **BEIT), pictures, 5, (4, 6)
    ),
    "SAM": whole(built("SamVisionModel", **SAM), gate=1e-6),
    "SAM sdpa": whole(built("SamVisionModel", "sdpa", **SAM)),
    "SAM-HQ": whole(built("SamHQVisionModel", "sdpa", **SAM)),
    "SegGPT": Family(built(
        "SegGptModel", image_size=(32, 16), patch_size=4, pretrain_image_size=16, mlp_dim=16, merge_index=0,
        intermediate_hidden_state_indices=[1], **LAYERS,
    ), prompted_pictures, 2, (4, 4), gate=1e-6),
    "ViTDet": Family(built(
        "VitDetModel", use_relative_position_embeddings=True, window_block_indices=[0], window_size=3, image_size=32,
        patch_size=4, mlp_ratio=2, **LAYERS,
    ), pictures, 2, (8, 11)),
    "Donut's Swin": of_windows(built("DonutSwinModel", **SWIN)),
    "MaskFormer's Swin": of_windows(built(
        "transformers.models.maskformer.modeling_maskformer_swin.MaskFormerSwinModel", **SWIN,
    )),
    "CLAP's Swin": Family(built(
        "clap.ClapAudioEncoder", None, spec_size=32, num_mel_bins=8, window_size=4, patch_size=4, patch_stride=[4, 4],
        patch_embeds_hidden_size=12, depths=[2, 2], num_attention_heads=[3, 3], hidden_size=24,
    ), spectrograms, 4, (1, 1)),
    "Swin2SR": of_windows(built("Swin2SRModel", **{**SWIN, "patch_size": 1})),
    "Data2VecVision": Family(built("Data2VecVisionModel", "sdpa", **BEIT), pictures, 4, (4, 6)),
    "timm's Swin": Family(
        built("timm.models.swin_transformer.SwinTransformer", None, **TIMM), whole_as_argument, 3, (4, 4)),
    "timm's Swin, version 2": Family(
        built("timm.models.swin_transformer_v2.SwinTransformerV2", None, **TIMM), whole_as_argument, 3, (4, 4),
        gate=1e-6, takes_out=True),
    "torchvision's Swin": Family(torchvision_swin(""), as_argument, 3, (4, 7), takes_out=True),
    "torchvision's Swin, version 2": Family(torchvision_swin("V2"), as_argument, 3, (4, 7), takes_out=True),
}  # fmt: skip

FAMILIES: dict[str, Family] = TEXT | SPEECH | CONFORMERS | VISION

"""Two layers of every family with a drop-in, with the widths of a published base model."""

from __future__ import annotations

import torch

from benchmarks.family_parts import (
    HEADS,
    INKLING,
    INKLING_CONFIG,
    LONGEST,
    PIXELS,
    SIZES,
    SWIN,
    TEXT,
    WIDTH,
    Model,
    as_argument,
    beit,
    boxed,
    built,
    clap,
    conformer,
    deberta,
    decoder,
    documents,
    fastspeech2,
    features,
    gemma3n,
    of_package,
    parakeet,
    phi4,
    pictures,
    prophetnet,
    sam,
    seamless,
    sounds,
    text_to_text,
    tokens,
    torchvision_swin,
    vits,
)

MODELS: dict[str, Model] = {
    "T5": text_to_text("T5"),
    "T5, eager": text_to_text("T5", "eager"),
    "UMT5": text_to_text("UMT5"),
    "SwitchTransformers": text_to_text("SwitchTransformers", "eager", num_sparse_encoder_layers=0),
    "VITS": vits(),
    "Wav2Vec2-BERT, relative_key": conformer("Wav2Vec2Bert", "wav2vec2_bert", "relative_key"),
    "Wav2Vec2-BERT, relative": conformer("Wav2Vec2Bert", "wav2vec2_bert", "relative"),
    "Wav2Vec2-Conformer": conformer("Wav2Vec2Conformer", "wav2vec2_conformer", "relative"),
    "WavLM": Model(built("models.wavlm.modeling_wavlm.WavLMEncoder", "WavLMConfig", None, **SIZES), sounds),
    "DeBERTa-v2": deberta("DebertaV2", position_buckets=256, share_att_key=True, norm_rel_ebd="layer_norm"),
    "DeBERTa": deberta("Deberta"),
    "XLNet": Model(
        built("XLNetModel", "XLNetConfig", None, d_model=WIDTH, n_head=HEADS, n_layer=2, d_inner=1024, vocab_size=100),
        tokens,
    ),
    "Funnel": Model(
        built(
            "FunnelModel", "FunnelConfig", None, d_model=WIDTH, n_head=HEADS, d_head=64, d_inner=1024, vocab_size=100,
            block_sizes=[1, 1, 1], num_decoder_layers=1,
        ),
        tokens,
    ),
    "FastSpeech2-Conformer": fastspeech2(),
    "Parakeet": parakeet(),
    "MPNet": Model(
        built("MPNetModel", "MPNetConfig", None, vocab_size=100, max_position_embeddings=5000, **SIZES), tokens
    ),
    "SeamlessM4T": seamless("SeamlessM4T", "seamless_m4t", "relative"),
    "SeamlessM4T-v2": seamless("SeamlessM4Tv2", "seamless_m4t_v2", "relative_key"),
    "SpeechT5": Model(
        built(
            "models.speecht5.modeling_speecht5.SpeechT5Encoder", "SpeechT5Config", "eager", hidden_size=WIDTH,
            encoder_layers=2, encoder_attention_heads=HEADS, encoder_ffn_dim=1024,
        ),
        sounds,
    ),
    "MPT": decoder(
        "Mpt", "MptConfig", "{}Model", "{}ForCausalLM", None, d_model=WIDTH, n_heads=HEADS, n_layers=2, vocab_size=100,
        max_seq_len=LONGEST,
    ),
    "Bloom": decoder(
        "Bloom", "BloomConfig", "{}Model", "{}ForCausalLM", None, hidden_size=WIDTH, n_head=HEADS, n_layer=2,
        vocab_size=100,
    ),
    "Inkling": decoder(
        "Inkling", INKLING_CONFIG, "models.inkling.modeling_inkling.{}TextModel", "{}ForCausalLM", "sdpa", **INKLING
    ),
    "LongT5's decoder": Model(
        built("LongT5ForConditionalGeneration", "LongT5Config", None, **TEXT),
        lambda n: {**tokens(16), "decoder_input_ids": tokens(n)["input_ids"], "use_cache": False},
        built("LongT5ForConditionalGeneration", "LongT5Config", None, **TEXT),
    ),
    "SEW-D": Model(
        built(
            "models.sew_d.modeling_sew_d.SEWDTransformerEncoder", "SEWDConfig", None, pos_att_type=["c2p", "p2c"],
            position_buckets=256, max_position_embeddings=512, **SIZES,
        ),
        lambda n: {**sounds(n), "attention_mask": torch.ones(1, n, dtype=torch.bool)},
    ),
    "Granite Speech": Model(
        built(
            "models.granite_speech.modeling_granite_speech.GraniteSpeechCTCEncoder",
            "models.granite_speech.configuration_granite_speech.GraniteSpeechEncoderConfig", None, input_dim=WIDTH,
            hidden_dim=WIDTH, num_layers=2, num_heads=HEADS, dim_head=64,
        ),
        sounds,
    ),
    "Nemotron": Model(
        built(
            "models.nemotron_asr_streaming.modeling_nemotron_asr_streaming.NemotronAsrStreamingEncoder",
            "NemotronAsrStreamingEncoderConfig", num_mel_bins=16, subsampling_factor=2, subsampling_conv_channels=4,
            **SIZES,
        ),
        features("input_features", 2),
    ),
    "Gemma 3n's audio": gemma3n(),
    "Phi-4's audio": phi4(),
    "LayoutLMv3": Model(
        built(
            "LayoutLMv3Model", "LayoutLMv3Config", None, vocab_size=100, visual_embed=False, coordinate_size=86,
            shape_size=84, max_position_embeddings=LONGEST + 2, **SIZES,
        ),
        documents,
    ),
    "UDOP's encoder": Model(built("UdopEncoderModel", "UdopConfig", **TEXT), boxed),
    "ProphetNet": prophetnet(),
    "Falcon": decoder(
        "Falcon", "FalconConfig", "{}Model", "{}ForCausalLM", "sdpa", alibi=True, vocab_size=100, hidden_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=HEADS, multi_query=False,
    ),
    "Swin, pixels": Model(built("SwinModel", "SwinConfig", **SWIN), pictures, lengths=PIXELS),
    "Swinv2, pixels": Model(
        built("Swinv2Model", "Swinv2Config", None, image_size=256, window_size=8, **SWIN), pictures,
        lengths=(128, 256, 512, 1024),
    ),
    "Swin2SR, pixels": Model(
        built("Swin2SRModel", "Swin2SRConfig", None, **SWIN), pictures, lengths=(32, 64, 128, 256)
    ),
    "Donut's Swin, pixels": Model(built("DonutSwinModel", "DonutSwinConfig", None, **SWIN), pictures, lengths=PIXELS),
    "MaskFormer's Swin, pixels": Model(
        built("models.maskformer.modeling_maskformer_swin.MaskFormerSwinModel", "MaskFormerSwinConfig", None, **SWIN),
        pictures, lengths=PIXELS,
    ),
    "CLAP's Swin, frames": clap(),
    "timm's Swin, pixels": Model(
        of_package("timm.models.swin_transformer.SwinTransformer", img_size=224, num_classes=5, **SWIN),
        as_argument, lengths=(224,),
    ),
    "timm's Swin, version 2, pixels": Model(
        of_package("timm.models.swin_transformer_v2.SwinTransformerV2", img_size=224, num_classes=5, **SWIN),
        as_argument, lengths=(224,),
    ),
    "torchvision's Swin, pixels": Model(torchvision_swin(7), as_argument, lengths=PIXELS),
    "torchvision's Swin, version 2, pixels": Model(
        torchvision_swin(8, "V2"), as_argument, lengths=(128, 256, 512, 1024)
    ),
    "SAM, pixels": sam("Sam"),
    "SAM-HQ, pixels": sam("SamHQ"),
    "ViTDet, pixels": Model(
        built(
            "VitDetModel", "VitDetConfig", None, hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2,
            mlp_ratio=2, image_size=1024, use_relative_position_embeddings=True, window_block_indices=[0],
            window_size=14,
        ),
        pictures, lengths=(64, 224, 512, 1024),
    ),
    "BEiT, pixels": beit("Beit"),
    "Data2VecVision, pixels": beit("Data2VecVision"),
}  # fmt: skip

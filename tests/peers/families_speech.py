"""Families of speech."""

from collections.abc import Callable
from typing import Any

import torch
from peers.common import hf, padding, randn, randomised
from peers.family import LAYERS, SIZES, Family, Given, built, in_float32, tokens

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
        conf_attention_context_right=0, conf_reduction_factor=1, conf_conv_kernel_size=3, sscp_conv_channel_size=[4, 4],
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

"""Making the models of families, and their inputs for a length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

WIDTH, HEADS = 512, 8
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 1024,
}
TEXT: dict[str, Any] = {
    "d_model": WIDTH, "d_kv": WIDTH // HEADS, "num_heads": HEADS, "num_layers": 2, "num_decoder_layers": 2,
    "d_ff": 1024, "vocab_size": 100, "decoder_start_token_id": 0,
}  # fmt: skip
TOKENS = (64, 256, 1024, 2048)
LONGEST = TOKENS[-1]


@dataclass(frozen=True)
class Model:
    """A function for the model, its inputs for a length, and the model that generates with it."""

    make: Callable[[], Any]
    given: Callable[[int], dict[str, Any]]
    generating: Callable[[], Any] | None = None
    lengths: tuple[int, ...] = TOKENS


def let_torchvision_in() -> None:
    """Let transformers import torchvision, whose CUDA wheel requires operators that a torch for CPUs lacks."""
    if not find_spec("torchvision"):
        return
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def find(path: str) -> Any:
    """Return a class of transformers."""
    let_torchvision_in()
    module, _, name = f"transformers.{path}".rpartition(".")
    return getattr(import_module(module), name)


def built(path: str, configured: str, implementation: str | None = "sdpa", **options: Any) -> Callable[[], Any]:
    """Return a function that makes a model; ``None`` for models with a single implementation of attention."""

    def make() -> Any:
        torch.manual_seed(0)
        config = find(configured)(**options)
        if implementation is not None:
            config._attn_implementation = implementation
        for name in vars(config):
            if "layerdrop" in name:  # a dropped layer takes no time
                setattr(config, name, 0.0)
        return find(path)(config).eval()

    return make


def tokens(length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(1, 100, (1, length), generator=torch.Generator().manual_seed(0))}


def sounds(length: int) -> dict[str, Any]:
    return {"hidden_states": torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0))}


def pictures(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))}


def documents(length: int) -> dict[str, Any]:
    corners = torch.randint(0, 900, (1, length, 2), generator=torch.Generator().manual_seed(0))
    return {**tokens(length), "bbox": torch.cat([corners, corners + 50], -1)}


def boxed(length: int) -> dict[str, Any]:
    return {**documents(length), "bbox": documents(length)["bbox"] / 1000, "attention_mask": torch.ones(1, length)}


def as_argument(size: int) -> dict[str, Any]:
    return {"x": pictures(size)["pixel_values"]}


def features(name: str, factor: int) -> Callable[[int], dict[str, Any]]:
    """Return a function that makes spectra with as many frames as there are positions after subsampling."""
    return lambda n: {name: torch.randn(1, factor * n, 16, generator=torch.Generator().manual_seed(0))}


def text_to_text(name: str, implementation: str = "sdpa", **options: Any) -> Model:
    encoder, both = (
        built(f"{name}{kind}", f"{name}Config", implementation, **TEXT, **options)
        for kind in ("EncoderModel", "ForConditionalGeneration")
    )
    return Model(encoder, tokens, both)


def decoder(name: str, configured: str, base: str, whole: str, implementation: str | None, **options: Any) -> Model:
    return Model(
        built(base.format(name), configured, implementation, **options), tokens,
        built(whole.format(name), configured, implementation, **options),
    )  # fmt: skip


def vits() -> Model:
    make = built(
        "models.vits.modeling_vits.VitsTextEncoder", "VitsConfig", None, hidden_size=192, num_attention_heads=2,
        num_hidden_layers=2, ffn_dim=768, vocab_size=100, flow_size=192,
    )  # fmt: skip
    return Model(
        make,
        lambda n: {**tokens(n), "padding_mask": torch.ones(1, n, 1), "attention_mask": torch.ones(1, n)},
    )


def conformer(name: str, module: str, kind: str) -> Model:
    path = f"models.{module}.modeling_{module}.{name}Encoder"
    return Model(built(path, f"{name}Config", position_embeddings_type=kind, **SIZES), sounds)


def fastspeech2() -> Model:
    def make() -> Any:
        torch.manual_seed(0)
        config = find("FastSpeech2ConformerConfig")(
            hidden_size=WIDTH, encoder_num_attention_heads=HEADS, encoder_layers=2, encoder_linear_units=1024,
            vocab_size=100,
        )  # fmt: skip
        module = "models.fastspeech2_conformer.modeling_fastspeech2_conformer.FastSpeech2ConformerEncoder"
        return find(module)(config, config.encoder_config, use_encoder_input_layer=True).eval()

    return Model(make, lambda n: {"input_tensor": tokens(n)["input_ids"], "return_dict": True})


def parakeet() -> Model:
    make = built(
        "ParakeetEncoder", "ParakeetEncoderConfig", num_mel_bins=16, subsampling_conv_channels=16,
        subsampling_factor=2, **SIZES,
    )  # fmt: skip
    return Model(make, features("input_features", 2))


def deberta(name: str, **options: Any) -> Model:
    return Model(
        built(
            f"{name}Model", f"{name}Config", None, relative_attention=True, pos_att_type=["c2p", "p2c"],
            max_relative_positions=512, max_position_embeddings=LONGEST, position_biased_input=False,
            type_vocab_size=0, vocab_size=100, **SIZES, **options,
        ),
        tokens,
    )  # fmt: skip


def seamless(name: str, module: str, kind: str) -> Model:
    make = built(
        f"models.{module}.modeling_{module}.{name}ConformerEncoder", f"{name}Config", hidden_size=WIDTH,
        speech_encoder_attention_heads=HEADS, speech_encoder_layers=2, speech_encoder_intermediate_size=1024,
        position_embeddings_type=kind,
    )  # fmt: skip
    return Model(make, sounds)


def gemma3n() -> Model:
    given = features("audio_mel", 4)
    make = built(
        "models.gemma3n.modeling_gemma3n.Gemma3nAudioEncoder", "Gemma3nAudioConfig", None, hidden_size=WIDTH,
        input_feat_size=16, conf_num_attention_heads=HEADS, conf_num_hidden_layers=2, sscp_conv_channel_size=[8, 4],
    )  # fmt: skip
    return Model(make, lambda n: {**given(n), "audio_mel_mask": torch.zeros(1, 4 * n, dtype=torch.bool)})


def phi4() -> Model:
    given = features("hidden_states", 4)
    make = built(
        "models.phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAudioModel", "Phi4MultimodalAudioConfig",
        hidden_size=WIDTH, intermediate_size=1024, num_blocks=2, num_attention_heads=HEADS, input_size=16,
        ext_pw_out_channel=WIDTH, depthwise_separable_out_channel=WIDTH, nemo_conv_channels=64, time_reduction=4,
    )  # fmt: skip
    # It cuts inputs longer than 500 positions.
    return Model(make, lambda n: {**given(n), "mask": None}, lengths=(64, 128, 256, 480))


def prophetnet() -> Model:
    make = built(
        "ProphetNetModel", "ProphetNetConfig", None, hidden_size=WIDTH, num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=HEADS, num_decoder_attention_heads=HEADS, encoder_ffn_dim=1024,
        decoder_ffn_dim=1024, vocab_size=100, max_position_embeddings=1100,
    )  # fmt: skip
    given = {**tokens(16), "use_cache": False}
    return Model(make, lambda n: {**given, "decoder_input_ids": tokens(n)["input_ids"]}, lengths=(64, 256, 512, 1024))


def clap() -> Model:
    make = built(
        "models.clap.modeling_clap.ClapAudioEncoder", "ClapAudioConfig", None, depths=[2, 2],
        num_attention_heads=[4, 8], hidden_size=192,
    )  # fmt: skip
    # Spectrograms of all lengths are resized to 1024 frames.
    return Model(make, lambda n: {"input_features": torch.randn(1, 1, n, 64)}, lengths=(1024,))


def of_package(path: str, **options: Any) -> Callable[[], Any]:
    """Return a function that makes a model of timm or torchvision."""

    def make() -> Any:
        let_torchvision_in()
        torch.manual_seed(0)
        module, _, name = path.rpartition(".")
        return getattr(import_module(module), name)(**options).eval()

    return make


def torchvision_swin(size: int, suffix: str = "") -> Callable[[], Any]:
    module = "torchvision.models.swin_transformer"

    def make() -> Any:
        let_torchvision_in()
        parts = import_module(module)
        return of_package(
            f"{module}.SwinTransformer", patch_size=[4, 4], window_size=[size, size], num_classes=5,
            block=getattr(parts, f"SwinTransformerBlock{suffix}"),
            downsample_layer=getattr(parts, f"PatchMerging{suffix}"), **SWIN,
        )()  # fmt: skip

    return make


def sam(name: str) -> Model:
    make = built(
        f"{name}VisionModel", f"{name}VisionConfig", global_attn_indexes=[1], image_size=1024, mlp_dim=1024,
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2,
    )  # fmt: skip
    return Model(make, pictures, lengths=(1024,))


def beit(name: str) -> Model:
    make = built(f"{name}Model", f"{name}Config", image_size=224, use_relative_position_bias=True, **SIZES)
    return Model(make, pictures, lengths=(64, 224, 512, 1024))


INKLING: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "head_dim": 64, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "swa_head_dim": 64,
    "local_layer_ids": [0], "mlp_layer_types": ["dense", "dense"], "intermediate_size": 1024, "vocab_size": 100,
}  # fmt: skip
INKLING_CONFIG = "models.inkling.configuration_inkling.InklingTextConfig"
SWIN: dict[str, Any] = {"embed_dim": 96, "depths": [2, 2], "num_heads": [3, 6]}
PIXELS = (112, 224, 448, 896)

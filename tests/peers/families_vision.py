"""Families of pictures, and of spectrograms that are pictures."""

from collections.abc import Callable
from typing import Any

from peers.common import hf, peer, randn, randomised
from peers.family import SIZES, WEIGHTS, Family, Given, built

SWIN: Given = {
    "image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3], "window_size": 4,
    "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip

BEIT: Given = {
    "image_size": 16, "patch_size": 4, "vocab_size": 50, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0, **SIZES,
}  # fmt: skip

SAM: Given = {
    "image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1], "output_channels": 8,
    "mlp_dim": 16, **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
}  # fmt: skip


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


def clap() -> Any:
    config = hf("ClapAudioConfig")(
        spec_size=32, num_mel_bins=8, window_size=4, patch_size=4, patch_stride=[4, 4], patch_embeds_hidden_size=12,
        depths=[2, 2], num_attention_heads=[3, 3], drop_path_rate=0.0, hidden_dropout_prob=0.0, hidden_size=24,
        **WEIGHTS,
    )  # fmt: skip
    return randomised(hf("clap.ClapAudioEncoder")(config))


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


VISION: dict[str, Family] = {
    "Swin": Family(built("SwinModel", "SwinConfig", **WEIGHTS, **SWIN), pictures, 3, (4, 8), gate=1e-5),
    "Swin sdpa": Family(built("SwinModel", "SwinConfig", "sdpa", **WEIGHTS, **SWIN), pictures, 3, (4, 8)),
    "Swinv2": Family(built("Swinv2Model", "Swinv2Config", **WEIGHTS, **SWIN), pictures, 3, (4, 8)),
    "BEiT": Family(
        built("BeitModel", "BeitConfig", "sdpa", use_relative_position_bias=True, **WEIGHTS, **BEIT),
        pictures, 4, (4, 6),
    ),
    "BEiT shared": Family(built(
        "BeitModel", "BeitConfig", "sdpa", use_shared_relative_position_bias=True, use_relative_position_bias=True,
        **WEIGHTS, **BEIT,
    ), pictures, 5, (4, 6)),
    "SAM": Family(built("SamVisionModel", "SamVisionConfig", **SAM), whole_pictures, 2, (16, 16), gate=1e-6),
    "SAM sdpa": Family(built("SamVisionModel", "SamVisionConfig", "sdpa", **SAM), whole_pictures, 2, (16, 16)),
    "SAM-HQ": Family(built("SamHQVisionModel", "SamHQVisionConfig", "sdpa", **SAM), whole_pictures, 2, (16, 16)),
    "SegGPT": Family(built(
        "SegGptModel", "SegGptConfig", image_size=(32, 16), patch_size=4, pretrain_image_size=16, mlp_dim=16,
        drop_path_rate=0.0, merge_index=0, intermediate_hidden_state_indices=[1],
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
    ), prompted_pictures, 2, (4, 4), gate=1e-6),
    "ViTDet": Family(built(
        "VitDetModel", "VitDetConfig", use_relative_position_embeddings=True, window_block_indices=[0], window_size=3,
        image_size=32, patch_size=4, dropout_prob=0.0, drop_path_rate=0.0, mlp_ratio=2,
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
    ), pictures, 2, (8, 11)),
    "Donut's Swin": Family(built("DonutSwinModel", "DonutSwinConfig", **WEIGHTS, **SWIN), pictures, 3, (4, 8)),
    "MaskFormer's Swin": Family(built(
        "maskformer.MaskFormerSwinModel", "MaskFormerSwinConfig", **WEIGHTS, **SWIN,
    ), pictures, 3, (4, 8)),
    "CLAP's Swin": Family(clap, spectrograms, 4, (1, 1)),
    "Swin2SR": Family(
        built("Swin2SRModel", "Swin2SRConfig", **WEIGHTS, **{**SWIN, "patch_size": 1}), pictures, 3, (4, 8)
    ),
    "Data2VecVision": Family(built(
        "Data2VecVisionModel", "Data2VecVisionConfig", "sdpa", use_relative_position_bias=True, **WEIGHTS, **BEIT,
    ), pictures, 4, (4, 6)),
    "timm's Swin": Family(timm_swin("swin_transformer", "SwinTransformer"), whole_as_argument, 3, (4, 4)),
    "timm's Swin, version 2": Family(
        timm_swin("swin_transformer_v2", "SwinTransformerV2"), whole_as_argument, 3, (4, 4), gate=1e-6, takes_out=True),
    "torchvision's Swin": Family(
        torchvision_swin("SwinTransformerBlock", "PatchMerging"), as_argument, 3, (4, 7), takes_out=True
    ),
    "torchvision's Swin, version 2": Family(
        torchvision_swin("SwinTransformerBlockV2", "PatchMergingV2"), as_argument, 3, (4, 7), takes_out=True),
}  # fmt: skip

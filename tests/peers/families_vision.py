"""Families of pictures, and of spectrograms that are pictures."""

from collections.abc import Callable
from functools import partial
from typing import Any

from peers.common import peer, randn
from peers.family import LAYERS, SIZES, Family, Given, built

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

"""Hugging Face models compared with themselves after replacement: two layers of every family, with published widths.

Random weights, a batch of one, no padding; training has each model's own dropout.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner import Benchmark, Call, Case, Record, as_time
from relskew_core.huggingface import replace_attention

WIDTH, HEADS = 512, 8
SIZES: Case = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 1024}
TEXT: Case = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "num_heads": HEADS, "num_layers": 2, "num_decoder_layers": 2,
              "d_ff": 1024, "vocab_size": 100, "decoder_start_token_id": 0}  # fmt: skip
INKLING: Case = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "head_dim": 64, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "swa_head_dim": 64,
    "local_layer_ids": [0], "mlp_layer_types": ["dense", "dense"], "intermediate_size": 1024, "vocab_size": 100,
}  # fmt: skip
DEBERTA: Case = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 512,
    "max_position_embeddings": 2048, "position_biased_input": False, "type_vocab_size": 0, "vocab_size": 100, **SIZES,
}  # fmt: skip
SEAMLESS: Case = {"hidden_size": WIDTH, "speech_encoder_attention_heads": HEADS, "speech_encoder_layers": 2,
                  "speech_encoder_intermediate_size": 1024}  # fmt: skip
SAM: Case = {"global_attn_indexes": [1], "image_size": 1024, "mlp_dim": 1024, "hidden_size": WIDTH,
             "num_attention_heads": HEADS, "num_hidden_layers": 2}  # fmt: skip
SWIN: Case = {"embed_dim": 96, "depths": [2, 2], "num_heads": [3, 6]}
BEIT: Case = {"image_size": 224, "use_relative_position_bias": True, **SIZES}
TOKENS = (64, 256, 1024, 2048)
PIXELS, LARGER, PATCHES = (112, 224, 448, 896), (128, 256, 512, 1024), (64, 224, 512, 1024)
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
    try:
        import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def find(path: str) -> Any:
    """Return a class by its path; ``t5.T5Stack`` is one of transformers, in the module of that model."""
    let_torchvision_in()
    module, _, name = path.rpartition(".")
    if "." not in module:
        module = f"transformers.models.{module}.modeling_{module}" if module else "transformers"
    return getattr(import_module(module), name)


def built(
    path: str, attention: str | None, configured: str | None = None, *, drops: bool = True, **options: Any
) -> Callable[[], Any]:
    """Return a function that makes a model; ``attention`` is None for models with a single implementation.

    A configuration has the longest beginning of the model's name that has one, unless it is named.
    """

    def make() -> Any:
        torch.manual_seed(0)
        kind = find(path)
        if not kind.__module__.startswith("transformers."):
            return kind(**options).eval()
        module, name = import_module(kind.__module__), find(path if configured is None else configured).__name__
        names = (f"{name[:end].removesuffix('Config')}Config" for end in range(len(name), 0, -1))
        config = next(getattr(module, each) for each in names if hasattr(module, each))(**options)
        if attention is not None:
            config._attn_implementation = attention
        for name, x in vars(config).items():
            if "layerdrop" in name or (not drops and "drop" in name and type(x) is float):
                setattr(config, name, 0.0)  # a dropped layer takes no time
        return kind(config).eval()

    return make


Given = Callable[[int], dict[str, Any]]  # makes the inputs for a length


def drawing(name: str, shape: Callable[[int], tuple[int, ...]]) -> Given:
    return lambda n: {name: torch.randn(shape(n), generator=torch.Generator().manual_seed(0))}


sounds = drawing("hidden_states", lambda n: (1, n, WIDTH))
pictures = drawing("pixel_values", lambda n: (1, 3, n, n))
as_argument = drawing("x", lambda n: (1, 3, n, n))


def tokens(length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(1, 100, (1, length), generator=torch.Generator().manual_seed(0))}


def masked(length: int) -> dict[str, Any]:
    return {"attention_mask": torch.ones(1, length)}


def documents(length: int) -> dict[str, Any]:
    corners = torch.randint(0, 900, (1, length, 2), generator=torch.Generator().manual_seed(0))
    return {**tokens(length), "bbox": torch.cat([corners, corners + 50], -1)}


def features(name: str, factor: int, **more: Callable[[int], Any]) -> Given:
    """Return a function that makes spectra with as many frames as there are positions after subsampling."""
    spectra = drawing(name, lambda n: (1, factor * n, 16))
    return lambda n: {**spectra(n), **{key: make(n) for key, make in more.items()}}


def decoded(n: int) -> dict[str, Any]:
    return {**tokens(16), "use_cache": False, "decoder_input_ids": tokens(n)["input_ids"]}


def family(
    path: str, given: Given = tokens, attention: str | None = None,
    *, generating: str | None = None, configured: str | None = None, lengths: tuple[int, ...] = TOKENS,
    **options: Any,
) -> Model:  # fmt: skip
    generates = None if generating is None else built(generating, attention, path, **options)
    return Model(built(path, attention, configured, **options), given, generates, lengths)


def text_to_text(name: str, attention: str = "sdpa", **options: Any) -> Model:
    options |= {"generating": f"{name}ForConditionalGeneration", **TEXT}
    return family(f"{name}EncoderModel", tokens, attention, **options)


def fastspeech2() -> Any:
    torch.manual_seed(0)
    config = find("FastSpeech2ConformerConfig")(
        hidden_size=WIDTH, encoder_num_attention_heads=HEADS, encoder_layers=2, encoder_linear_units=1024,
        vocab_size=100,
    )  # fmt: skip
    encoder = find("fastspeech2_conformer.FastSpeech2ConformerEncoder")
    return encoder(config, config.encoder_config, use_encoder_input_layer=True).eval()


def torchvision_swin(size: int, suffix: str = "") -> Callable[[], Any]:
    module = "torchvision.models.swin_transformer"
    return lambda: built(
        f"{module}.SwinTransformer", None, patch_size=[4, 4], window_size=[size, size], num_classes=5,
        block=find(f"{module}.SwinTransformerBlock{suffix}"),
        downsample_layer=find(f"{module}.PatchMerging{suffix}"), **SWIN,
    )()  # fmt: skip


RELATIVE: dict[str, Any] = {"position_embeddings_type": "relative"}
BY_KEY: dict[str, Any] = {"position_embeddings_type": "relative_key"}
MODELS: dict[str, Model] = {
    "T5": text_to_text("T5"),
    "T5, eager": text_to_text("T5", "eager"),
    "UMT5": text_to_text("UMT5"),
    "SwitchTransformers": text_to_text("SwitchTransformers", "eager", num_sparse_encoder_layers=0),
    "VITS": family(
        "vits.VitsTextEncoder", lambda n: {**tokens(n), "padding_mask": torch.ones(1, n, 1), **masked(n)},
        hidden_size=192, num_attention_heads=2, num_hidden_layers=2, ffn_dim=768, vocab_size=100, flow_size=192),
    "Wav2Vec2-BERT, relative_key": family("wav2vec2_bert.Wav2Vec2BertEncoder", sounds, "sdpa", **BY_KEY, **SIZES),
    "Wav2Vec2-BERT, relative": family("wav2vec2_bert.Wav2Vec2BertEncoder", sounds, "sdpa", **RELATIVE, **SIZES),
    "Wav2Vec2-Conformer": family("wav2vec2_conformer.Wav2Vec2ConformerEncoder", sounds, "sdpa", **RELATIVE, **SIZES),
    "WavLM": family("wavlm.WavLMEncoder", sounds, **SIZES),
    "DeBERTa-v2": family(
        "DebertaV2Model", position_buckets=256, share_att_key=True, norm_rel_ebd="layer_norm", **DEBERTA),
    "DeBERTa": family("DebertaModel", **DEBERTA),
    "XLNet": family("XLNetModel", d_model=WIDTH, n_head=HEADS, n_layer=2, d_inner=1024, vocab_size=100),
    "Funnel": family(
        "FunnelModel", d_model=WIDTH, n_head=HEADS, d_head=64, d_inner=1024, vocab_size=100, block_sizes=[1, 1, 1],
        num_decoder_layers=1),
    "FastSpeech2-Conformer": Model(
        fastspeech2, lambda n: {"input_tensor": tokens(n)["input_ids"], "return_dict": True}),
    "Parakeet": family(
        "ParakeetEncoder", features("input_features", 2), "sdpa", num_mel_bins=16, subsampling_conv_channels=16,
        subsampling_factor=2, **SIZES),
    "MPNet": family("MPNetModel", vocab_size=100, max_position_embeddings=5000, **SIZES),
    "SeamlessM4T": family("seamless_m4t.SeamlessM4TConformerEncoder", sounds, "sdpa", **RELATIVE, **SEAMLESS),
    "SeamlessM4T-v2": family("seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder", sounds, "sdpa", **BY_KEY, **SEAMLESS),
    "SpeechT5": family(
        "speecht5.SpeechT5Encoder", sounds, "eager", hidden_size=WIDTH, encoder_layers=2,
        encoder_attention_heads=HEADS, encoder_ffn_dim=1024),
    "MPT": family(
        "MptModel", generating="MptForCausalLM", d_model=WIDTH, n_heads=HEADS, n_layers=2, vocab_size=100,
        max_seq_len=LONGEST),
    "Bloom": family(
        "BloomModel", generating="BloomForCausalLM", hidden_size=WIDTH, n_head=HEADS, n_layer=2, vocab_size=100),
    "Inkling": family("inkling.InklingTextModel", tokens, "sdpa", generating="InklingForCausalLM", **INKLING),
    "LongT5's decoder": family(
        "LongT5ForConditionalGeneration", decoded, generating="LongT5ForConditionalGeneration", **TEXT),
    "SEW-D": family(
        "sew_d.SEWDTransformerEncoder", lambda n: {**sounds(n), "attention_mask": torch.ones(1, n, dtype=torch.bool)},
        pos_att_type=["c2p", "p2c"], position_buckets=256, max_position_embeddings=512, **SIZES),
    "Granite Speech": family(
        "granite_speech.GraniteSpeechCTCEncoder", sounds, configured="granite_speech.GraniteSpeechEncoderConfig",
        input_dim=WIDTH, hidden_dim=WIDTH, num_layers=2, num_heads=HEADS, dim_head=64),
    "Nemotron": family(
        "nemotron_asr_streaming.NemotronAsrStreamingEncoder", features("input_features", 2), "sdpa", num_mel_bins=16,
        subsampling_factor=2, subsampling_conv_channels=4, **SIZES),
    "Gemma 3n's audio": family(
        "gemma3n.Gemma3nAudioEncoder",
        features("audio_mel", 4, audio_mel_mask=lambda n: torch.zeros(1, 4 * n, dtype=torch.bool)), hidden_size=WIDTH,
        input_feat_size=16, conf_num_attention_heads=HEADS, conf_num_hidden_layers=2, sscp_conv_channel_size=[8, 4]),
    "Phi-4's audio": family(  # it cuts inputs longer than 500 positions
        "phi4_multimodal.Phi4MultimodalAudioModel", features("hidden_states", 4, mask=lambda n: None), "sdpa",
        hidden_size=WIDTH, intermediate_size=1024, num_blocks=2, num_attention_heads=HEADS, input_size=16,
        ext_pw_out_channel=WIDTH, depthwise_separable_out_channel=WIDTH, nemo_conv_channels=64, time_reduction=4,
        lengths=(64, 128, 256, 480)),
    "LayoutLMv3": family(
        "LayoutLMv3Model", documents, vocab_size=100, visual_embed=False, coordinate_size=86, shape_size=84,
        max_position_embeddings=LONGEST + 2, **SIZES),
    "UDOP's encoder": family(
        "UdopEncoderModel", lambda n: {**tokens(n), "bbox": documents(n)["bbox"] / 1000, **masked(n)}, "sdpa", **TEXT),
    "ProphetNet": family(
        "ProphetNetModel", decoded, hidden_size=WIDTH, num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=HEADS, num_decoder_attention_heads=HEADS, encoder_ffn_dim=1024,
        decoder_ffn_dim=1024, vocab_size=100, max_position_embeddings=1100, lengths=(64, 256, 512, 1024)),
    "Falcon": family(
        "FalconModel", tokens, "sdpa", generating="FalconForCausalLM", alibi=True, vocab_size=100, hidden_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=HEADS, multi_query=False),
    "Swin, pixels": family("SwinModel", pictures, "sdpa", lengths=PIXELS, **SWIN),
    "Swinv2, pixels": family("Swinv2Model", pictures, image_size=256, window_size=8, lengths=LARGER, **SWIN),
    "Swin2SR, pixels": family("Swin2SRModel", pictures, lengths=(32, 64, 128, 256), **SWIN),
    "Donut's Swin, pixels": family("DonutSwinModel", pictures, lengths=PIXELS, **SWIN),
    "MaskFormer's Swin, pixels": family(
        "transformers.models.maskformer.modeling_maskformer_swin.MaskFormerSwinModel", pictures, lengths=PIXELS,
        **SWIN),
    "CLAP's Swin, frames": family(  # spectrograms of all lengths are resized to 1024 frames
        "clap.ClapAudioEncoder", lambda n: {"input_features": torch.randn(1, 1, n, 64)}, depths=[2, 2],
        num_attention_heads=[4, 8], hidden_size=192, lengths=(1024,)),
    "timm's Swin, pixels": family(
        "timm.models.swin_transformer.SwinTransformer", as_argument, img_size=224, num_classes=5, lengths=(224,),
        **SWIN),
    "timm's Swin, version 2, pixels": family(
        "timm.models.swin_transformer_v2.SwinTransformerV2", as_argument, img_size=224, num_classes=5, lengths=(224,),
        **SWIN),
    "torchvision's Swin, pixels": Model(torchvision_swin(7), as_argument, lengths=PIXELS),
    "torchvision's Swin, version 2, pixels": Model(torchvision_swin(8, "V2"), as_argument, lengths=LARGER),
    "SAM, pixels": family("SamVisionModel", pictures, "sdpa", lengths=(1024,), **SAM),
    "SAM-HQ, pixels": family("SamHQVisionModel", pictures, "sdpa", lengths=(1024,), **SAM),
    "ViTDet, pixels": family(
        "VitDetModel", pictures, hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2, mlp_ratio=2,
        image_size=1024, use_relative_position_embeddings=True, window_block_indices=[0], window_size=14,
        lengths=PATCHES),
    "BEiT, pixels": family("BeitModel", pictures, "sdpa", lengths=PATCHES, **BEIT),
    "Data2VecVision, pixels": family("Data2VecVisionModel", pictures, "sdpa", lengths=PATCHES, **BEIT),
}  # fmt: skip

GENERATED = 40
FORWARD, TRAINING, GENERATING = "forward", "training", f"generate {GENERATED}"


@functools.lru_cache(maxsize=1)
def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a model, and the same with its attention replaced."""
    original = make()
    return original, replace_attention(copy.deepcopy(original))


class Families(Benchmark):
    """Every family at four lengths, with a training step at the third, the memory of both, and generation."""

    page = "huggingface.md"
    names = ("original", "replaced")
    none = ""
    seconds = 1.0
    forks = True

    def cases(self) -> Iterator[Case]:
        for name, model in MODELS.items():
            yield from ({"model": name, "task": FORWARD, "length": length} for length in model.lengths)
            yield {"model": name, "task": TRAINING, "length": model.lengths[-2:][0]}
            if model.generating is not None:
                yield {"model": name, "task": GENERATING, "length": GENERATED}

    def prepare(self, case: Case, contender: str) -> Call:
        """Return a model's call; some models modify their inputs."""
        task, of = case["task"], MODELS[case["model"]]
        make = of.generating if task == GENERATING and of.generating is not None else of.make
        model = pair(make)[contender == "replaced"].train(task == TRAINING)
        if task == GENERATING:
            options = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
            return torch.no_grad()(partial(model.generate, **tokens(20), **options))
        given = of.given(case["length"])

        def call() -> Any:
            return model(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()})

        if task == FORWARD:
            return torch.no_grad()(call)  # not in inference mode: BEiT keeps tensors for the next call
        wanted = [x for x in model.parameters() if x.requires_grad]
        return lambda: torch.autograd.grad(_first(call()).float().square().mean(), wanted, allow_unused=True)

    def measures_of(self, case: Case) -> set[str]:
        longest = case["task"] == FORWARD and case["length"] == MODELS[case["model"]].lengths[-1]
        return {"time", "memory"} if longest or case["task"] == TRAINING else {"time"}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            name, task, both = case["model"], case["task"], [rows[each] for each in self.names]
            lengths = MODELS[name].lengths
            line = name if lengths == TOKENS else f"{name}: {', '.join(map(str, lengths))}"
            column = str(TOKENS[lengths.index(case["length"]) - len(lengths)]) if task == FORWARD else task
            yield line, column, f"{both[1].ratio or 0.0:.2f}"
            if "memory" in self.measures_of(case):
                longest = "longest" if task == FORWARD else task
                yield line, f"time, {longest}", " → ".join(as_time(row.cpu or 0.0) for row in both)
                yield line, f"MiB, {longest}", " → ".join(f"{(row.bytes or 0) / 2**20:.0f}" for row in both)

    def order(self, cell: tuple[str, str, str]) -> int:
        columns = (*map(str, TOKENS), TRAINING, GENERATING)
        columns += tuple(f"{what}, {which}" for which in ("longest", TRAINING) for what in ("time", "MiB"))
        return columns.index(cell[1])


def _first(out: Any) -> Tensor:
    """Return the first tensor with a gradient among a model's results."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if isinstance(out, Mapping) else out
    return next(_first(x) for x in values if not isinstance(x, Tensor) or x.requires_grad)

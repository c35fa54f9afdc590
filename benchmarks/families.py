"""Models of transformers beside themselves replaced: two layers of every family, as wide as a published base model's.

Random weights, a batch of one, no padding.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from benchmarks.page import as_time, pivot
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case
from relskew_core.huggingface import replace_attention

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
TOKENS = (64, 256, 1024, 4096)
LONGEST = TOKENS[-1]
GENERATED = 40
GENERATE = f"generate {GENERATED}"


@dataclass(frozen=True)
class Model:
    """How a model is made, what it is given for a length, and the model that generates with it."""

    make: Callable[[], Any]
    given: Callable[[int], dict[str, Any]]
    generating: Callable[[], Any] | None = None
    lengths: tuple[int, ...] = TOKENS


def let_torchvision_in() -> None:
    """Let transformers import torchvision, whose wheel for CUDA asks a torch for CPUs for operators of its own."""
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
    """Return what makes a model; some know no other implementation than their own, ``None``."""

    def make() -> Any:
        torch.manual_seed(0)
        config = find(configured)(**options)
        if implementation is not None:
            config._attn_implementation = implementation
        return find(path)(config).eval()

    return make


def tokens(length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(1, 100, (1, length), generator=torch.Generator().manual_seed(0))}


def sounds(length: int) -> dict[str, Any]:
    return {"hidden_states": torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0))}


def pictures(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))}


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
    return Model(make, lambda n: {"input_features": sounds(2 * n)["hidden_states"][..., :16]})


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


def speecht5() -> Any:
    torch.manual_seed(0)
    config = find("SpeechT5Config")(
        hidden_size=WIDTH, encoder_layers=2, encoder_attention_heads=HEADS, encoder_ffn_dim=1024
    )
    config._attn_implementation = "eager"
    return find("models.speecht5.modeling_speecht5.SpeechT5Encoder")(config).eval()


INKLING: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "head_dim": 64, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "swa_head_dim": 64,
    "local_layer_ids": [0], "mlp_layer_types": ["dense", "dense"], "intermediate_size": 1024, "vocab_size": 100,
}  # fmt: skip
INKLING_CONFIG = "models.inkling.configuration_inkling.InklingTextConfig"
SWIN: dict[str, Any] = {"embed_dim": 96, "depths": [2, 2], "num_heads": [3, 6]}

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
    "FastSpeech2-Conformer": fastspeech2(),
    "Parakeet": parakeet(),
    "MPNet": Model(
        built("MPNetModel", "MPNetConfig", None, vocab_size=100, max_position_embeddings=5000, **SIZES), tokens
    ),
    "SeamlessM4T": seamless("SeamlessM4T", "seamless_m4t", "relative"),
    "SeamlessM4T-v2": seamless("SeamlessM4Tv2", "seamless_m4t_v2", "relative_key"),
    "SpeechT5": Model(speecht5, sounds),
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
    "Swin, pixels": Model(built("SwinModel", "SwinConfig", **SWIN), pictures, lengths=(112, 224, 448, 896)),
    "Swinv2, pixels": Model(
        built("Swinv2Model", "Swinv2Config", None, image_size=256, window_size=8, **SWIN), pictures,
        lengths=(128, 256, 512, 1024),
    ),
    "Donut's Swin, pixels": Model(
        built("DonutSwinModel", "DonutSwinConfig", None, **SWIN), pictures, lengths=(112, 224, 448, 896)
    ),
    "ViTDet, pixels": Model(
        built(
            "VitDetModel", "VitDetConfig", None, hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2,
            mlp_ratio=2, image_size=1024, use_relative_position_embeddings=True, window_block_indices=[0],
            window_size=14,
        ),
        pictures, lengths=(64, 224, 512, 1024),
    ),
    "BEiT, pixels": Model(
        built("BeitModel", "BeitConfig", image_size=224, vocab_size=10, use_relative_position_bias=True, **SIZES),
        pictures, lengths=(64, 224, 512, 1024),
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def pair(name: str, generating: bool) -> tuple[Any, Any]:
    """Return a model and itself replaced."""
    model = MODELS[name]
    theirs = (model.generating if generating and model.generating is not None else model.make)()
    return theirs, replace_attention(copy.deepcopy(theirs))


class Families(Benchmark):
    """Every family at four lengths, memory at the longest, and generating."""

    page = "huggingface.md"
    names = ("theirs", "replaced")
    seconds = 3.0
    small: ClassVar[Case] = {"length": 64}

    def cases(self) -> Iterator[Case]:
        for name, model in MODELS.items():
            yield from ({"model": name, "length": length} for length in model.lengths)
            if model.generating is not None:
                yield {"model": name, "length": GENERATE}

    def prepare(self, case: Case, contender: str) -> Call:
        """Return a model's call; some models write into what they are given."""
        length, generates = case["length"], case["length"] == GENERATE
        model = pair(case["model"], generates)[contender == "replaced"]
        if generates:
            options = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
            return torch.inference_mode()(partial(model.generate, **tokens(20), **options))
        given = MODELS[case["model"]].given(length)

        @torch.inference_mode()
        def call() -> Any:
            return model(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()})

        return call

    def asks(self, case: Case) -> set[str]:
        return {"time", "memory"} if case["length"] == MODELS[case["model"]].lengths[-1] else {"time"}

    def texts(self, record: Record) -> dict[str, str]:
        def cells() -> Iterator[tuple[str, str, str]]:
            for case, rows in record.by_case():
                name, length, both = case["model"], case["length"], [rows[each] for each in self.names]
                lengths = MODELS[name].lengths
                line = f"{name}: {', '.join(map(str, lengths))}" if "pixels" in name else name
                column = length if length == GENERATE else str(TOKENS[lengths.index(length)])
                seconds = [row.cpu or 0.0 for row in both]
                yield line, column, f"{seconds[1] / seconds[0]:.2f}"
                if length == lengths[-1]:
                    yield line, "time, longest", " → ".join(map(as_time, seconds))
                    peaks = [row.bytes for row in both if row.bytes is not None]
                    yield line, "memory, longest", " → ".join(f"{peak / 2**20:.0f} MiB" for peak in peaks)

        columns = (*map(str, TOKENS), GENERATE, "time, longest", "memory, longest")
        ordered = sorted(cells(), key=lambda cell: columns.index(cell[1]))
        return {"": f"{record.where}\n\n{pivot(ordered, none='')}"}

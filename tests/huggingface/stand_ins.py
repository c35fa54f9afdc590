"""Modules with the names and parameters of transformers' attention, without its code: what drop-ins take over."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from relskew_core.huggingface._attend import DropIn

HEADS, D, E, LENGTH = 2, 4, 8, 9
QKV = ("q_proj", "k_proj", "v_proj")
Tensor = torch.Tensor


def module(kind: str, *linears: str, **attributes: Any) -> Any:
    """Return a module of a class of that name with linear layers from and to the width, and other attributes."""
    made = globals().setdefault(kind, type(kind, (nn.Module,), {}))()  # where pickle looks it up
    for name in linears:
        setattr(made, name, nn.Linear(E, E))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made.double()


def numbers(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (2, LENGTH, E), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rows(items: int = 1) -> Tensor:
    return x(items, 2 * LENGTH - 1, E)


def additive() -> Tensor:
    mask = torch.zeros(2, 1, 1, LENGTH, dtype=torch.float64)
    mask[1, ..., -2:] = -1e30
    return mask


def boolean() -> Tensor:
    return (additive() == 0).expand(2, 1, LENGTH, LENGTH)


class Cache:
    """What a cache of transformers is to an attention."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def get_seq_length(self, layer: int) -> Any:
        return self.keys.shape[-2]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, count: int, layer: int) -> tuple[int, int]:
        return self.keys.shape[-2] + count, 0

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)


def conformer(kind: str, positions: str = "relative") -> Any:
    return module(
        kind, "linear_q", "linear_k", "linear_v", "linear_out", "linear_pos", num_heads=HEADS, dropout=nn.Dropout(0.25),
        pos_bias_u=numbers(HEADS, D), pos_bias_v=numbers(HEADS, D), position_embeddings_type=positions,
        distance_embedding=nn.Embedding(6, D), left_max_position_embeddings=3, right_max_position_embeddings=2,
    )  # fmt: skip


def parakeet(kind: str = "ParakeetEncoderAttention") -> Any:
    return module(
        kind, *QKV, "o_proj", "relative_k_proj", head_dim=D, attention_dropout=0.25,
        bias_u=numbers(HEADS, D), bias_v=numbers(HEADS, D), layer_idx=0,
    )  # fmt: skip


def wavlm() -> Any:
    return module(
        "WavLMAttention", *QKV, "out_proj", num_heads=HEADS, dropout=0.25, num_buckets=8,
        max_distance=5, rel_attn_embed=nn.Embedding(8, HEADS), gru_rel_pos_linear=nn.Linear(D, 8),
        gru_rel_pos_const=numbers(1, HEADS, 1, 1),
    )  # fmt: skip


def t5(kind: str = "T5Attention", **attributes: Any) -> Any:
    given: dict[str, Any] = {
        "dropout": 0.25, "layer_idx": 0, "is_decoder": False, "is_causal": False, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 5, "has_relative_attention_bias": True, **attributes,
    }  # fmt: skip
    return module(kind, "q", "k", "v", "o", n_heads=HEADS, relative_attention_bias=nn.Embedding(8, HEADS), **given)


def vits(dropout: float = 0.25) -> Any:
    return module(
        "VitsAttention", *QKV, "out_proj", num_heads=HEADS, dropout=dropout, window_size=2,
        emb_rel_k=numbers(1, 5, D), emb_rel_v=numbers(1, 5, D),
    )  # fmt: skip


def attentions(model: Any) -> list[Any]:
    """Return the modules whose classes a drop-in replaces."""
    return [part for part in model.modules() if type(part).__name__ in DropIn.known]


def is_replaced(part: Any) -> bool:
    return isinstance(part, DropIn)


def deberta(version: int) -> Any:
    shared = {
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "num_attention_heads": HEADS,
        "max_relative_positions": 7, "pos_dropout": nn.Dropout(0.0), "dropout": nn.Dropout(0.25),
    }  # fmt: skip
    if version == 1:
        return module(
            "DisentangledSelfAttention", "pos_proj", "pos_q_proj", talking_head=False,
            in_proj=nn.Linear(E, 3 * E, bias=False), q_bias=numbers(E), v_bias=numbers(E), **shared,
        )  # fmt: skip
    return module(
        "DisentangledSelfAttention", "query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj",
        position_buckets=4 if version == 2 else -1, share_att_key=version == 3, **shared,
    )  # fmt: skip


class Convolution(nn.Module):
    """A convolution of one place."""

    def forward(self, states: Tensor, cache: Any = None, conv_mask: Tensor | None = None) -> Tensor:
        return states


class InklingRelativeLogits(nn.Module):
    """Profiles by distance, which ``forward`` mixes for each query."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = numbers(D, 3)

    def forward(self, states: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, None] - keys).expand(*states.shape[:1], states.shape[2], -1, -1)
        profiles = (states @ self.proj).transpose(1, 2).gather(-1, distance.clamp(0, 2))
        return profiles.masked_fill((distance < 0) | (distance > 2), 0.0)


def inkling(*, sliding: bool) -> Any:
    config = SimpleNamespace(log_scaling_n_floor=4, log_scaling_alpha=0.1)
    return module(
        "InklingAttention", *QKV, "o_proj", "r_proj", head_dim=D, num_heads=HEADS,
        num_key_value_heads=HEADS, attention_dropout=0.25, scaling=1 / D, is_sliding=sliding, sliding_window=4,
        rel_extent=3, layer_idx=0, config=config, k_sconv=Convolution(), v_sconv=Convolution(), q_norm=nn.LayerNorm(D),
        k_norm=nn.LayerNorm(D), rel_logits_proj=InklingRelativeLogits(),
    )  # fmt: skip


class _Called(nn.Linear):
    """A projection into heads, or out of them, that gets more than its input."""

    def forward(self, *given: Any, **named: Any) -> Tensor:
        out, others = super().forward(given[0]), given[1:]
        return out if others and others[0].ndim == 3 else out.unflatten(-1, (HEADS, D)).transpose(1, 2)


class _Norm(nn.LayerNorm):
    def forward(self, *given: Any) -> Tensor:
        return super().forward(given[0])


def inkling_2(*, window: int | None) -> Any:
    bias = module("Inkling2RelativePositionBias", "linear", norm=_Norm(D), proj=numbers(D, 3), num_heads=HEADS)
    parts = {name: _Called(E, E) for name in (*QKV, "o_proj")}
    return module(
        "Inkling2SlidingAttention", num_heads=HEADS, scaling=0.5, sliding_window=window, attention_dropout=0.25,
        layer_idx=0, relative_position_bias=bias, sink_proj=nn.Linear(E, HEADS), **parts,
    )  # fmt: skip


class MPNetEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relative_attention_bias = nn.Embedding(32, HEADS)
        self.layer = module(
            "MPNetSelfAttention", "q", "k", "v", "o", num_attention_heads=HEADS, dropout=nn.Dropout(0.25)
        )

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.layer(states, mask, self.compute_position_bias(states))[0]  # type: ignore[operator]
        return out


def sam(kind: str) -> Any:
    return module(
        kind, "proj", qkv=nn.Linear(E, 3 * E), num_attention_heads=HEADS, num_heads=HEADS, dropout=0.25,
        use_rel_pos=True, use_relative_position_embeddings=True, rel_pos_h=numbers(5, D), rel_pos_w=numbers(3, D),
    )  # fmt: skip


def windows(kind: str, **bias: Any) -> Any:
    return module(
        kind, "proj", qkv=nn.Linear(E, 3 * E), num_heads=HEADS, window_size=[3, 3], shift_size=[1, 0], dropout=0.0,
        attn_drop=nn.Dropout(0.25), proj_drop=nn.Dropout(0.0), attention_dropout=0.25, **bias,
    )  # fmt: skip


def cosines() -> dict[str, Any]:
    coordinates = torch.randn(1, 5, 5, 2, dtype=torch.float64)
    return {"cpb_mlp": nn.Linear(2, HEADS), "logit_scale": numbers(HEADS, 1, 1), "relative_coords_table": coordinates}


def in_all_columns(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.to(dtype)[..., None] * torch.ones(E, dtype=dtype)


def beit() -> Any:
    table = module("BeitRelativePositionBias", window_size=(2, 2), relative_position_bias_table=numbers(12, HEADS))
    attention = module("BeitAttention", *QKV, "o_proj", num_attention_heads=HEADS, attention_dropout=0.0)
    return module("BeitLayer", attention=attention, bias=table, shared=table)


def call_beit(layer: Any) -> Tensor:
    """Two biases and a mask, in both orders; the table is for 2 × 2 cells, and there are 2 × 4."""
    bias = layer.bias((2, 4)) + (layer.shared((2, 4)) + additive())
    out: Tensor = layer.attention(x(), attention_mask=bias)[0]
    return out


def call_xlnet(ours: Any) -> Tensor:
    """Two streams, a memory of two places, segments and a mask."""
    kinds = (torch.arange(LENGTH)[:, None] + torch.arange(LENGTH + 2)) % 2
    segments = torch.eye(2, dtype=torch.float64)[kinds][:, :, None].expand(-1, -1, 2, -1)
    hidden = torch.zeros(LENGTH, LENGTH + 2, 2, 1, dtype=torch.float64)
    hidden[:, 5] = 1
    contents, queries = ours(
        x(LENGTH, 2, E), x(3, 2, E), hidden, None, x(2 * LENGTH + 2, 1, E).expand(-1, 2, -1), segments,
        mems=x(2, 2, E), target_mapping=torch.eye(LENGTH, dtype=torch.float64)[:3, :, None].expand(-1, -1, 2),
    )  # fmt: skip
    return torch.cat([contents, queries])


def call_inkling_2(ours: Any, mask: Tensor | None) -> Tensor:
    out: Tensor = ours(x(), attention_mask=mask, relative_distance=None, position_ids=torch.arange(LENGTH))[0]
    return out


ALIBI = torch.arange(LENGTH, dtype=torch.float64).expand(2 * HEADS, 1, LENGTH) * -0.1
STAND_INS: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "wav2vec2": (partial(conformer, "Wav2Vec2ConformerSelfAttention"), lambda ours: ours(x(), additive(), rows())[0]),
    "seamless": (partial(conformer, "SeamlessM4TConformerSelfAttention"),
                 lambda ours: ours(x(), additive(), rows())[0]),
    "rows of each item": (partial(conformer, "Wav2Vec2BertSelfAttention"),
                          lambda ours: ours(x(), additive(), rows(2))[0]),
    "relative_key": (partial(conformer, "Wav2Vec2BertSelfAttention", "relative_key"),
                     lambda ours: ours(x(), additive())[0]),
    "fastspeech2": (partial(conformer, "FastSpeech2ConformerAttention"),
                    lambda ours: ours(x(), boolean()[:, 0, :1].long(), rows())[0]),
    "parakeet": (parakeet, lambda ours: ours(x(), rows().expand(2, -1, -1), boolean())[0]),
    "wavlm": (wavlm, lambda ours: ours(x(), boolean()[:, 0, 0].long())[0]),
    "wavlm's second layer": (wavlm, lambda ours: ours(x(), None, ours(x())[2])[0]),
    "umt5": (lambda: t5("UMT5Attention"), lambda ours: ours(x(), attention_mask=additive())[0]),
    "deberta": (lambda: deberta(1), lambda ours: ours(x(), boolean(), rel_embeddings=x(14, E))[0]),
    "deberta-v2": (lambda: deberta(2), lambda ours: ours(x(), boolean(), rel_embeddings=x(8, E))[0]),
    "deberta-v3": (lambda: deberta(3), lambda ours: ours(x(), None, query_states=2 * x(), rel_embeddings=x(14, E))[0]),
    "mpt": (lambda: module(
        "MptAttention", "out_proj", Wqkv=nn.Linear(E, 3 * E), n_heads=HEADS, attn_dropout_p=0.25, clip_qkv=2.0,
        softmax_scale=0.5, layer_idx=0,
    ), lambda ours: ours(x(), ALIBI[:HEADS], attention_mask=~boolean())[0]),
    "bloom": (lambda: module(
        "BloomAttention", "dense", query_key_value=nn.Linear(E, 3 * E), num_heads=HEADS, inv_norm_factor=0.5,
        hidden_dropout=0.0, attention_dropout=nn.Dropout(0.25), layer_idx=0,
    ), lambda ours: ours(x(), x(), ALIBI, additive())[0]),
    "xlnet": (lambda: module(
        "XLNetRelativeAttention", n_head=HEADS, scale=0.5, seg_embed=numbers(2, HEADS, D), dropout=nn.Dropout(0.25),
        layer_norm=nn.LayerNorm(E), **{name: numbers(E, HEADS, D) for name in "qkvor"},
        **{f"r_{name}_bias": numbers(HEADS, D) for name in "rsw"},
    ), call_xlnet),
    "inkling": (lambda: inkling(sliding=False), lambda ours: ours(x(), additive())[0]),
    "inkling in a window": (lambda: inkling(sliding=True), lambda ours: ours(x(), None)[0]),
    "inkling 2": (lambda: inkling_2(window=None), lambda ours: call_inkling_2(ours, additive())),
    "inkling 2 in a window": (lambda: inkling_2(window=4), lambda ours: call_inkling_2(ours, None)),
    "beit": (beit, call_beit),
    "mpnet": (lambda: nn.ModuleDict({"encoder": MPNetEncoder().double()}), lambda ours: ours.encoder(x(), additive())),
    "sam": (lambda: sam("SamVisionAttention"), lambda ours: ours(x(2, 3, 4, E))[0]),
    "vitdet": (lambda: sam("VitDetAttention"), lambda ours: ours(x(2, 3, 4, E))[0]),
    "a table of its own": (lambda: module(
        "DonutSwinSelfAttention", "query", "key", "value", num_attention_heads=HEADS, window_size=(3, 3),
        dropout=nn.Dropout(0.25), relative_position_bias_table=numbers(25, HEADS),
    ), lambda ours: ours(x(4, LENGTH, E), x(2, LENGTH, LENGTH))[0]),
    "windows": (lambda: windows("WindowAttention", relative_position_bias_table=numbers(25, HEADS)),
                lambda ours: ours(x(4, LENGTH, E), x(2, LENGTH, LENGTH))),
    "shifted windows": (lambda: windows("ShiftedWindowAttentionV2", **cosines()), lambda ours: ours(x(2, 5, 7, E))),
    "gemma": (lambda: module(
        "Gemma3nAudioAttention", *QKV, num_heads=HEADS, max_past_horizon=3,
        max_future_horizon=1, per_dim_scale=numbers(D), q_scale=0.5, attention_logits_soft_cap=5.0,
        relative_position_embedding=module("Positions", "pos_proj", _get_timing_signal_1d_pos=in_all_columns),
    ), lambda ours: ours(x(), ~boolean()[:, 0, 0]).flatten(-2)),
    "gemma 4": (lambda: module(
        "Gemma4AudioAttention", *QKV, "post", "relative_k_proj", num_heads=HEADS, max_past_horizon=3,
        max_future_horizon=2, per_dim_scale=numbers(D), q_scale=0.5, k_scale=2.0, attention_logits_soft_cap=5.0,
    ), lambda ours: ours(x(), x(1, 5, E), boolean()[:, :, :1])[0]),
    "prophet": (lambda: module(
        "ProphetNetNgramSelfAttention", "query_proj", "key_proj", "value_proj", "out_proj", num_attn_heads=HEADS,
        attention_dropout=0.25, dropout=0.0, ngram=2, num_buckets=8, relative_max_distance=5,
        relative_pos_embeddings=nn.Linear(E, 8 * HEADS), layer_idx=0,
    ), lambda ours: ours(x(2, 3 * LENGTH, E))[0]),
    "speecht5": (lambda: module(
        "SpeechT5EncoderLayer",
        attention=module("SpeechT5Attention", *QKV, "out_proj", num_heads=HEADS, dropout=0.25, is_decoder=False),
        positions=module("SpeechT5RelativePositionalEncoding", max_length=3, pe_k=nn.Embedding(6, D)),
    ), lambda ours: ours.attention(x(), additive(), ours.positions(x()))[0]),
    "granite": (lambda: module(
        "GraniteSpeechConformerAttention", "to_q", "to_out", to_kv=nn.Linear(E, 2 * E), num_heads=HEADS, max_pos_emb=5,
        context_size=4, pre_norm=nn.LayerNorm(E), rel_pos_emb=nn.Embedding(11, D), dropout=nn.Dropout(0.25),
    ), lambda ours: ours(x(), None)),
    "granite 5": (lambda: module(
        "GraniteSpeech5EncoderAttention", *QKV, "o_proj", attention_dropout=0.25, context_size=4,
        rel_pos_emb=nn.Embedding(11, D), config=SimpleNamespace(num_attention_heads=HEADS, max_position_embeddings=5),
    ), lambda ours: ours(x(), None, boolean()[:, 0, 0])[0]),
    "pix2struct": (lambda: module(
        "Pix2StructTextAttention", "query", "key", "value", "output", n_heads=HEADS, dropout=0.25, layer_idx=0,
        is_causal=True, relative_attention_num_buckets=8, relative_attention_max_distance=5,
        has_relative_attention_bias=True, relative_attention_bias=nn.Embedding(8, HEADS),
    ), lambda ours: ours(x(), additive())[0]),
    "seggpt": (lambda: sam("SegGptAttention"), lambda ours: ours(x(2, 3, 4, E))[0]),
}  # fmt: skip

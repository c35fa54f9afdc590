"""Families of text and of documents."""

from dataclasses import replace
from typing import Any

import torch
from peers.common import randn
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

"""Text models with random weights against the same numbers here."""

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peers.common import additive, alone, check, definitions, hf, join, made, padded, peer, randn, randomised, split
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention, softplus

from relskew_core import (
    Span,
    alibi_bias,
    attention_block,
    conventions,
    deberta_buckets,
    merge_attention,
    relative_attention,
    sinusoidal_table,
    t5_buckets,
    toeplitz,
)
from relskew_core.huggingface import replace_attention


def test_t5_encoder(length: int) -> None:
    theirs = made(
        "t5.T5Attention", "T5Config", True, d_model=24, d_kv=4, num_heads=3, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, is_decoder=False, dropout_rate=0.0,
    )  # fmt: skip
    x, mask = padded(length)
    want, *_ = theirs(x, mask=additive(mask))
    spec, weights = conventions.load_t5(
        theirs.state_dict(), num_heads=3, bidirectional=True, num_buckets=8, max_distance=12
    )
    check(attention_block(x, weights, spec, mask=mask), want)


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12), (16, 64), (32, 256), (320, 800), (64, 100)])
def test_t5_buckets(buckets: int, furthest: int, bidirectional: bool) -> None:
    span = Span(3 * furthest, 3 * furthest)
    theirs = hf("t5.T5Attention")._relative_position_bucket(
        torch.arange(-span.left, span.right + 1),
        bidirectional=bidirectional, num_buckets=buckets, max_distance=furthest,
    )  # fmt: skip
    ours = t5_buckets(span, num_buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
    assert theirs.tolist() == list(ours)


@pytest.mark.parametrize("causal", [True, False])
def test_x_transformers_t5_bias(causal: bool) -> None:
    theirs = peer("x_transformers.x_transformers.RelativePositionBias")(
        scale=4.0, causal=causal, num_buckets=16, max_distance=20, heads=3
    )
    convention = conventions.T5(bidirectional=not causal, num_buckets=16, max_distance=20)
    for n, m in [(1, 1), (1, 9), (5, 30), (40, 40)]:
        rel_bias, span = convention.load(theirs.relative_attention_bias.weight)
        got = toeplitz(rel_bias * 4.0, span, n_queries=n, n_keys=m, offset=m - n)
        check(got, theirs(n, m), 1e-6)
        q, k, v = (randn(3, length, 8, seed=length) for length in (n, m, m))
        out: Any = relative_attention(q, k, v, None, span, rel_bias=rel_bias.double() * 4.0, offset=m - n)
        check(out, scaled_dot_product_attention(q, k, v, theirs(n, m).double()), 1e-6)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12])
def test_x_transformers_alibi(heads: int) -> None:
    theirs = peer("x_transformers.x_transformers.AlibiPositionalBias")(heads=heads)
    ours = toeplitz(alibi_bias(heads, Span(12, 8), xp=torch), Span(12, 8), n_queries=9, n_keys=9)
    check(ours, theirs(9, 9)[:heads].reshape(heads, 9, 9), 1e-6)


def test_x_transformers_bank() -> None:
    """Inkling's curves by distance, a column for each, mixed by weights of each query; nothing beyond the last."""
    bank = peer("x_transformers.x_transformers.RelativeProjPositionalBias")
    theirs = randomised(bank(24, 3, num_distance_basis=5, max_dist=7))
    for n, m in [(1, 1), (9, 9), (5, 12)]:
        x, future = randn(2, n, 24), torch.ones(n, m).bool().triu(m - n + 1)
        q, k, v = (randn(2, 3, length, 8, seed=length) for length in (n, m, m))
        want = scaled_dot_product_attention(q, k, v, theirs(x, m).masked_fill(future, -torch.inf))
        table, span = conventions.INKLING.load(theirs.distance_bank.mT)
        weights = theirs.to_distance_weights(x)
        out: Any = relative_attention(q, k, v, table, span, rel_q=weights, rel_scale=1.0, causal=True, offset=m - n)
        check(out, want)


@torch.enable_grad()
def test_forgetting() -> None:
    """The sum of the gates' logarithms from key to query, by a mask of keys alone, and the gradients of the gates."""
    theirs = randomised(peer("x_transformers.x_transformers.DataDependentAlibi")(24, 3, bias_init=1.0))
    x, future = randn(2, 40, 24), torch.ones(40, 40).bool().triu(1)
    q, k, v, d_out = (randn(2, 3, 40, 8, seed=seed) for seed in range(4))
    want = scaled_dot_product_attention(q, k, v, theirs(x).masked_fill(future, -torch.inf))
    gates = theirs.to_forget_gates(x).cumsum(-1)
    out: Any = relative_attention(q, k, v, mask=-gates[..., None, :], causal=True)
    check(out, want)
    parameters = list(theirs.parameters())
    gradients, expected = (torch.autograd.grad(y, parameters, d_out) for y in (out, want))
    check(gradients, expected)


@pytest.mark.parametrize("package", ["x_transformers", "PoPE_pytorch"])
def test_pope(package: str) -> None:
    """Magnitudes by softplus and angles by position, as queries and keys of twice the width."""
    q, k, v = (randn(2, 3, 17, 8, seed=seed) for seed in range(3))
    frequencies = 1e4 ** -(torch.arange(8, dtype=torch.float64) / 8)
    if package == "x_transformers":
        embedding = peer("x_transformers.x_transformers.PolarEmbedding")
        turn = peer("x_transformers.x_transformers.apply_polar_pos_emb")
        theirs = randomised(embedding(8, 3))
        theirs.inv_freq.copy_(frequencies)
        angles, bias = theirs(torch.arange(17))
        turned, shift = [turn(q, angles).double(), turn(k, angles + bias).double()], theirs.learned_bias
    else:
        theirs = randomised(alone("PoPE_pytorch.pope.PoPE")(8, heads=3))
        theirs.inv_freqs.copy_(frequencies)
        turned, shift = theirs.apply_pope_to_qk(theirs(17), q, k), theirs.bias[:, None]
    want = scaled_dot_product_attention(turned[0], turned[1], v, is_causal=True, scale=8**-0.5)
    angles = torch.arange(17.0, dtype=torch.float64)[:, None] * frequencies
    ours = [
        torch.cat([softplus(x) * wave(angles + of_keys) for wave in (torch.cos, torch.sin)], dim=-1)
        for x, of_keys in ((q, torch.zeros_like(shift)), (k, shift.clamp(-2 * torch.pi, 0)))
    ]
    out: Any = relative_attention(ours[0], ours[1], v, scale=8**-0.5, causal=True)
    check(out, want, 1e-6)  # x-transformers' magnitudes are float32


def test_moirai() -> None:
    """One number for keys of the same variate and one for the others: distances 0, and all the rest."""
    theirs = randomised(alone("uni2ts.module.position.attn_bias.BinaryAttentionBias")(24, 3, 3))
    variates = torch.tensor([0, 0, 3, 3, 3, 1, 0, 7, 7])
    q, k, v = (randn(2, 3, 9, 8, seed=seed) for seed in range(3))
    ids = variates.expand(2, 1, 1, 9)
    want = scaled_dot_product_attention(q, k, v, theirs(q[:, :, None], k[:, :, None], ids, ids)[:, :, 0])
    other, same = theirs.emb.weight
    numbers = torch.stack([other, same, other], dim=-1)
    out: Any = relative_attention(q, k, v, None, Span.clipped(1), rel_bias=numbers, positions=(variates, variates))
    check(out, want)


def test_longformer() -> None:
    """A key that all queries see, and a window of the others; the query of the global token has its own projections."""
    options: dict[str, Any] = {"attention_window": [4], "num_hidden_layers": 1, "attention_probs_dropout_prob": 0.0}
    theirs = made("longformer.LongformerSelfAttention", "LongformerConfig", 0, **options)
    x, first = randn(2, 12, 24), torch.arange(12).expand(2, 12) == 0
    want, *_ = theirs(x, 1e4 * first.double(), torch.zeros_like(first), first, is_global_attn=True)
    q, k, v = (split(linear(x), 3) for linear in (theirs.query, theirs.key, theirs.value))
    shared = relative_attention(q, k[:, :, :1], v[:, :, :1], return_lse=True)
    near = relative_attention(q, k[:, :, 1:], v[:, :, 1:], window=(2, 2), offset=-1, return_lse=True)
    out, _ = merge_attention(*zip(shared, near, strict=True))
    q, k, v = (split(linear(x), 3) for linear in (theirs.query_global, theirs.key_global, theirs.value_global))
    of_first: Any = relative_attention(q, k, v)
    check(join(torch.cat([of_first[:, :, :1], out[:, :, 1:]], dim=-2)), want, 1e-6)  # its softmax is float32


def test_bloom_in_half_precision_far_from_the_beginning() -> None:
    """The number of a key fits float16, and would not fit divided by the scale."""
    theirs = made("bloom.BloomAttention", "BloomConfig", 0, hidden_size=256, num_attention_heads=2).half()
    x, alibi = randn(1, 3, 256).half(), torch.tensor([[[7000, 7004, 7008]]]).half().expand(2, -1, -1)
    given = x, torch.zeros_like(x), alibi, torch.full((3, 3), -6e4).triu(1)[None, None].half()
    ours: Any = replace_attention(copy.deepcopy(theirs))
    check(ours(*given)[0].double(), theirs.double()(*(y.double() for y in given))[0], 3e-3)


@pytest.mark.parametrize("heads", [2, 3, 4, 6])
def test_mpt_with_a_cache(heads: int) -> None:
    theirs = made("mpt.MptAttention", "MptConfig", 0, hidden_size=8 * heads, num_attention_heads=heads)
    x, cache = randn(2, 9, 8 * heads), hf("DynamicCache")()
    span = Span.causal(64)
    bias = alibi_bias(heads, span, xp=torch, dtype=torch.float64)
    of_bloom = hf("bloom.build_alibi_tensor")(torch.ones(1, 64), heads, torch.float64)[:, 0]  # by key, not by distance
    check(bias - bias[:, :1], of_bloom, 1e-6)
    for start, stop in itertools.pairwise([0, 5, 6, 9]):
        alibi = hf("mpt.build_mpt_alibi_tensor")(heads, stop)
        future = torch.arange(stop) > torch.arange(start, stop)[:, None]
        want, *_ = theirs(x[:, start:stop], alibi, past_key_values=cache, attention_mask=future)
        q, k, v = (split(y, heads) for y in theirs.Wqkv(x[:, :stop]).chunk(3, dim=-1))
        out: Any = relative_attention(q[:, :, start:], k, v, rel_bias=bias, span=span, causal=True, offset=start)
        check(theirs.out_proj(join(out)), want, 1e-6)


def test_mpt_in_half_precision_far_from_the_end() -> None:
    """The numbers of keys are large there, and those of neighbours differ by less than bfloat16 keeps of them."""
    theirs = made("mpt.MptAttention", "MptConfig", 0, hidden_size=16, num_attention_heads=2).bfloat16()
    ours, exact = replace_attention(copy.deepcopy(theirs)), copy.deepcopy(theirs).double()
    x, far = randn(1, 9, 16).bfloat16(), 2000
    alibi = hf("mpt.build_mpt_alibi_tensor")(2, far)
    future = torch.arange(far) > torch.arange(9)[:, None]

    def outputs(attention: Any, step: int) -> torch.Tensor:
        own = attention.Wqkv.weight.dtype
        cache = hf("StaticCache")(hf("MptConfig")(d_model=16, n_heads=2), max_cache_len=far)
        steps = zip(x.to(own).split(step, 1), future.split(step), strict=True)
        return torch.cat([attention(part, alibi, cache, mask)[0] for part, mask in steps], 1).double()

    wanted = outputs(exact, 9)
    wrong = (outputs(theirs, 9) - wanted).norm()
    for step in (9, 1):
        assert (outputs(ours, step) - wanted).norm() < 1.5 * wrong


@pytest.mark.parametrize(("buckets", "furthest"), [(256, 512), (6, 10), (32, 128), (12, 40)])
def test_deberta_buckets(buckets: int, furthest: int) -> None:
    span = Span(2 * furthest, 2 * furthest)
    theirs = hf("deberta_v2.make_log_bucket_position")(-torch.arange(-span.left, span.right + 1), buckets, furthest)
    ours = deberta_buckets(span, position_buckets=buckets, max_distance=furthest)
    assert (theirs.long() + buckets).clamp(0, 2 * buckets - 1).tolist() == list(ours)


@pytest.mark.parametrize(("buckets", "rows", "furthest"), [(6, 6, 16), (-1, 16, None)])
@pytest.mark.parametrize("kinds", [["c2p"], ["p2c"], ["c2p", "p2c"]], ids="-".join)
def test_deberta_v2(kinds: list[str], buckets: int, rows: int, furthest: int | None, length: int) -> None:
    theirs = made(
        "deberta_v2.DisentangledSelfAttention", "DebertaV2Config", relative_attention=True, pos_att_type=kinds,
        position_buckets=buckets, max_relative_positions=16,
    )  # fmt: skip
    (x, mask), table = padded(length), randn(2 * rows, 24, seed=2)
    want, _ = theirs(x, mask, rel_embeddings=table)
    q, k, v = (split(linear(x), 3) for linear in (theirs.query_proj, theirs.key_proj, theirs.value_proj))
    scale = (8 * (1 + len(kinds))) ** -0.5
    rel_k, key_table, convention = None, None, conventions.DeBERTa(position_buckets=rows, max_distance=furthest)
    if "c2p" in kinds:
        rel_k, span = convention.load(split(theirs.pos_key_proj(table), 3))
    if "p2c" in kinds:
        key_table, span = convention.load(split(theirs.pos_query_proj(table), 3))
    out: Any = relative_attention(q, k, v, rel_k, span, key_table=key_table, mask=mask, scale=scale)
    check(join(out), want, 1e-6)  # its scale is float32


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_bert(kind: str, length: int) -> None:
    """BERT's distances as in transformers until version 4; a query with a cache is the last position."""

    def attend(_: Any, q: Any, k: Any, v: Any, bias: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2), None

    file, given = "models/rnabert/modeling_rnabert.py", {"attention_forward": attend, "EncoderDecoderCache": tuple}
    attention = definitions("multimolecule", file, "RnaBertSelfAttention", **given)
    config = SimpleNamespace(
        hidden_size=24, num_attention_heads=3, attention_dropout=0.0, max_position_embeddings=50, is_decoder=False,
        position_embedding_type=kind, _attn_implementation="eager",
    )  # fmt: skip
    theirs = randomised(attention(config, layer_idx=0))
    x, mask = padded(length)
    q, k, v = (split(linear(x), 3) for linear in (theirs.query, theirs.key, theirs.value))
    table, span = conventions.DISTANCE.load(theirs.distance_embedding.weight)
    options: dict[str, Any] = {"span": span, "key_table": table if "query" in kind else None}
    want, _ = theirs(x, additive(mask))
    check(join(relative_attention(q, k, v, table, mask=mask, **options)), want)
    past = SimpleNamespace(update=lambda *_: (k, v))
    want, _ = theirs(x[:, -1:], None, past)
    check(join(relative_attention(q[:, :, -1:], k, v, table, offset=length - 1, **options)), want)


def test_bros() -> None:
    """A vector for each pair of boxes, which the queries are multiplied by."""
    theirs = made("bros.BrosSelfAttention", "BrosConfig")
    x, pairs = randn(2, 9, 24), randn(9, 9, 2, 8, seed=2)
    want, _ = theirs(x, pairs)
    q, k, v = (split(linear(x), 3) for linear in (theirs.query, theirs.key, theirs.value))
    mask = 8**-0.5 * torch.einsum("bnid,bijd->bnij", q, pairs.permute(2, 0, 1, 3))
    check(join(relative_attention(q, k, v, mask=mask)), want)


@pytest.mark.parametrize("window", [None, 5])
@torch.enable_grad()
def test_gpt_oss(window: int | None) -> None:
    """A sink in each row's softmax, grouped queries and a sliding window; gradients too."""
    theirs = hf("gpt_oss.eager_attention_forward")
    q, k, v, sinks = randn(2, 4, 17, 8), randn(2, 2, 17, 8, seed=2), randn(2, 2, 17, 8, seed=3), randn(4, seed=4)
    given = [x.requires_grad_() for x in (q, k, v, sinks)]
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
    steps = torch.arange(17)
    seen = steps <= steps[:, None]
    if window is not None:
        seen &= steps > steps[:, None] - window
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    want, _ = theirs(module, q, k, v, mask, scaling=0.3)
    sides = None if window is None else (window - 1, None)
    out: Any = relative_attention(q, k, v, sinks=sinks, causal=True, window=sides, scale=0.3)
    check(out.transpose(1, 2), want)
    gradients, expected = (torch.autograd.grad(y.sin().sum(), given) for y in (out, want))
    check(gradients, expected)


def test_opennmt(length: int) -> None:
    """One table for keys and values; with a cache, one token at a time."""
    attention = alone("onmt.modules.multi_headed_attn.MultiHeadedAttention")
    theirs = randomised(attention(3, 24, 0.0, max_relative_positions=4, attn_type="self"))
    table, span = conventions.SHAW.load(theirs.relative_positions_embeddings.weight)
    x, mask = padded(length)
    want, _ = theirs(x, x, x, mask=~mask)
    q, k, v = (split(linear(x), 3) for linear in (theirs.linear_query, theirs.linear_keys, theirs.linear_values))
    out: Any = relative_attention(q, k, v, table, span, rel_v=table, mask=mask)
    check(theirs.final_linear(join(out)), want, 1e-6)  # its softmax is float32
    theirs.layer_cache = True, {"keys": torch.tensor([]), "values": torch.tensor([])}
    order: dict[str, Any] = {"rel_v": table, "causal": True}
    for place, token in enumerate(x.split(1, dim=1)):
        want, _ = theirs(token, token, token, step=place)
        seen = (q[:, :, place : place + 1], k[:, :, : place + 1], v[:, :, : place + 1])
        out = relative_attention(*seen, table, span, **order, offset=place)
        check(theirs.final_linear(join(out)), want, 1e-6)


def test_ctranslate2(tmp_path: Path) -> None:
    """An encoder of one layer whose feed-forward network adds nothing; queries, keys and values are packed."""
    specs = "ctranslate2.specs.transformer_spec"
    encoder = peer(f"{specs}.TransformerEncoderSpec")(1, 3, relative_position=True)
    layer = encoder.layer[0]

    def drawn(*shape: int) -> Any:
        return randn(*shape, seed=sum(shape)).float().numpy() / 2

    for norm in (encoder.layer_norm, layer.self_attention.layer_norm, layer.ffn.layer_norm):
        norm.gamma, norm.beta = np.ones(24, np.float32), np.zeros(24, np.float32)
    packed, last = layer.self_attention.linear
    packed.weight, packed.bias, last.weight, last.bias = given = drawn(72, 24), drawn(72), drawn(24, 24), drawn(24)
    for part, shape in ((layer.ffn.linear_0, (4, 24)), (layer.ffn.linear_1, (24, 4))):
        part.weight, part.bias = np.zeros(shape, np.float32), np.zeros(shape[0], np.float32)
    keys, values = drawn(9, 8), drawn(9, 8)[::-1].copy()
    layer.self_attention.relative_position_keys = keys
    layer.self_attention.relative_position_values = values
    embedded = encoder.embeddings[0].weight = drawn(11, 24)
    encoder.scale_embeddings = False
    spec = peer(f"{specs}.TransformerEncoderModelSpec")(encoder)
    spec.register_vocabulary([str(token) for token in range(11)])
    spec.config.unk_token, spec.config.layer_norm_epsilon = "0", 1e-5
    spec.validate()
    spec.save(str(tmp_path))
    tokens = [1, 4, 2, 7, 3, 9, 5, 5, 8, 1, 2, 6, 10]
    found = peer("ctranslate2.Encoder")(str(tmp_path), compute_type="float32").forward_batch([tokens])
    x = torch.tensor(embedded[tokens]).double()
    weights = [torch.tensor(y).double() for y in given]
    q, k, v = (split(y, 3) for y in linear(layer_norm(x, (24,)), *weights[:2]).chunk(3, -1))
    (rel_k, span), (rel_v, _) = (conventions.SHAW.load(torch.tensor(table).double()) for table in (keys, values))
    out: Any = relative_attention(q, k, v, rel_k, span, rel_v=rel_v)
    y = layer_norm(x + linear(join(out), *weights[2:]), (24,))
    check(y, torch.tensor(np.array(found.last_hidden_state))[0], 1e-6)


def test_fairseq2(length: int) -> None:
    """Shaw's positions with another reach ahead than back, and Transformer-XL's."""
    q, k, v = (randn(2, 3, length, 8, seed=seed) for seed in range(3))
    sdpa, layout = "fairseq2.models.transformer.sdpa", SimpleNamespace(packed=False, padded=False)
    none = alone("fairseq2.models.transformer.attention_bias.IdentityBias")()
    given = [y for x in (q, k) for y in (x.transpose(1, 2), layout)] + [v.transpose(1, 2), None]
    shaw = alone(f"{sdpa}.shaw.ShawRelativePositionSDPA")(24, 3, none, 4, max_rhs_rel_pos=2, use_rel_pos_values=True)
    want, _ = randomised(shaw)(*given)
    (rel_k, span), (rel_v, _) = (
        conventions.SHAW.load(table.weight, left=4) for table in (shaw.rel_k_embed, shaw.rel_v_embed)
    )
    check(relative_attention(q, k, v, rel_k, span, rel_v=rel_v), want.transpose(1, 2), 1e-6)
    encoding = alone(f"{sdpa}.relative.RelativePositionalEncoding")(24, 50)
    theirs = randomised(alone(f"{sdpa}.relative.RelativePositionSDPA")(24, 3, encoding, none))
    want, _ = theirs(*given)
    u, w = (bias[:, None] for bias in (theirs.u_bias, theirs.v_bias))
    sinusoids = sinusoidal_table(Span.full(length), 24, xp=torch, dtype=torch.float64, order="interleaved")
    table = split(theirs.r_proj(sinusoids), 3)
    check(relative_attention(q + u, k, v, table, rel_q=q + w), want.transpose(1, 2), 1e-6)


@pytest.mark.parametrize("memory", [0, 3])
def test_transformer_xl(length: int, memory: int) -> None:
    """Its sinusoids, and its learned variant: a table, a bias of each row that is scaled, and edge rows far away."""
    names = ["PositionalEmbedding", "RelMultiHeadAttn", "RelPartialLearnableMultiHeadAttn", "RelLearnableMultiHeadAttn"]
    encoding, _, partial, learned = definitions(
        "pytorch_transformers", "modeling_transfo_xl.py", *names, LayerNorm=torch.nn.LayerNorm
    )
    x, past, keys = randn(length, 2, 24), randn(memory, 2, 24, seed=2), memory + length
    every, hidden = torch.cat([past, x]), torch.ones(length, keys).bool().triu(memory + 1)[..., None]

    def projected(theirs: Any) -> list[torch.Tensor]:
        heads = theirs.qkv_net(every).transpose(0, 1).chunk(3, dim=-1)
        q, k, v = (split(part, 3) for part in heads)
        return [q[:, :, memory:], k, v]

    def finished(theirs: Any, out: Any) -> torch.Tensor:
        return theirs.layer_norm(x + theirs.o_net(join(out).transpose(0, 1)))

    theirs = randomised(partial(3, 24, 8, 0.0, output_attentions=False))
    positions = encoding(24)(torch.arange(keys - 1, -1, -1.0)).double()
    want, *_ = theirs(x, positions, attn_mask=hidden, mems=past)
    q, k, v = projected(theirs)
    sinusoids = sinusoidal_table(Span.causal(keys), 24, xp=torch, dtype=torch.float64)
    table, span = conventions.TRANSFORMER_XL.load(split(theirs.r_net(sinusoids), 3), left=keys - 1)
    u, w = theirs.r_w_bias[:, None], theirs.r_r_bias[:, None]
    out: Any = relative_attention(q + u, k, v, table, span, rel_q=q + w, causal=True, offset=memory)
    check(finished(theirs, out), want, 1e-6)  # its mask makes the logits float32

    theirs = randomised(learned(3, 24, 8, 0.0, output_attentions=False))
    rows, bias, u = randn(6, 3, 8, seed=3), randn(6, 3, seed=4), randn(3, 8, seed=5)
    want, *_ = theirs(x, rows, u, bias, attn_mask=hidden, mems=past)
    q, k, v = projected(theirs)
    out = relative_attention(
        q + u[:, None], k, v, rows.transpose(0, 1), Span(5, 0, "clip"), rel_q=q, rel_bias=8**-0.5 * bias.mT,
        causal=True, offset=memory,
    )  # fmt: skip
    check(finished(theirs, out), want, 1e-6)


def test_enformer(length: int) -> None:
    features = [f"get_positional_features_{kind}" for kind in ("exponential", "central_mask", "gamma")]
    attention, positions, *_ = definitions(
        "enformer_pytorch", "modeling_enformer.py", "Attention", "get_positional_embed", "relative_shift", "gamma_pdf",
        "exists", *features, rearrange=peer("einops.rearrange"),
    )  # fmt: skip
    theirs = randomised(attention(24, num_rel_pos_features=12, heads=3, dim_key=8, dim_value=8))
    x = randn(2, length, 24)
    q, k, v = (split(linear(x), 3) for linear in (theirs.to_q, theirs.to_k, theirs.to_v))
    table = split(theirs.to_rel_k(positions(length, 12, "cpu", False, dtype=torch.float64)), 3)
    u, w = theirs.rel_content_bias, theirs.rel_pos_bias
    out: Any = relative_attention(q * 8**-0.5 + u, k, v, table, rel_q=q * 8**-0.5 + w, scale=1.0)
    check(theirs.to_out(join(out)), theirs(x))


def test_flex_attention() -> None:
    """A learned number for each head and relative position, and packed documents."""
    module = "torch.nn.attention.flex_attention"
    flex, block_mask = peer(f"{module}.flex_attention"), peer(f"{module}.create_block_mask")
    q, k, v = (randn(2, 3, 17, 8, seed=seed) for seed in range(3))
    numbers, documents = randn(3, 33, seed=4), torch.arange(17) // 4
    mask = block_mask(lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i), None, None, 17, 17, device="cpu")
    packed: dict[str, Any] = {"segments": documents, "causal": True, "span": Span.full(17)}
    for given, options in ((None, {}), (mask, packed)):
        want = flex(q, k, v, score_mod=lambda score, b, h, i, j: score + numbers[h, j - i + 16], block_mask=given)
        check(relative_attention(q, k, v, rel_bias=numbers, **options), want)


def test_pair_bias() -> None:
    """AlphaFold's, which a linear layer makes of each pair, with a gate on the outputs."""
    theirs = randomised(alone("boltz.model.layers.attentionv2.AttentionPairBias")(24, 10, 3))
    (x, mask), pairs = padded(9), randn(2, 9, 9, 10, seed=2)
    want = theirs(x, pairs, mask[:, 0, 0].double(), x)
    q, k, v = (split(linear(x), 3) for linear in (theirs.proj_q, theirs.proj_k, theirs.proj_v))
    bias = theirs.proj_z(pairs).masked_fill(~mask, -torch.inf)
    out: Any = relative_attention(q, k, v, mask=bias)
    check(theirs.proj_o(theirs.proj_g(x).sigmoid() * join(out)), want, 1e-5)  # its logits are float32

"""Text models with random weights against the same numbers here."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peers.common import check, join, padding, peer, randn, randomised, split
from torch.nn.functional import scaled_dot_product_attention

from relskew_core import (
    Span,
    alibi_bias,
    attention_block,
    conventions,
    deberta_buckets,
    relative_attention,
    relative_logits,
    sinusoidal_table,
    t5_buckets,
    toeplitz,
)
from relskew_core.huggingface._alibi import BloomRelativeAttention, MptRelativeAttention

LENGTHS = [1, 2, 5, 17, 40]
T5 = "transformers.models.t5.modeling_t5.T5Attention"


def t5(*, decoder: bool) -> Any:
    config = peer("transformers.T5Config")(
        d_model=24, d_kv=4, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=12,
        is_decoder=decoder, dropout_rate=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


def t5_attention(theirs: Any, x: torch.Tensor, memory: torch.Tensor, **options: Any) -> torch.Tensor:
    """Projections without biases, no scale, a bias by bucket."""
    weights = theirs.state_dict()
    q, k, v = (split(y @ weights[f"{name}.weight"].mT, 3) for y, name in ((x, "q"), (memory, "k"), (memory, "v")))
    out: Any = relative_attention(q, k, v, scale=1.0, **options)
    return join(out) @ weights["o.weight"].mT


@pytest.mark.parametrize("length", LENGTHS)
def test_t5_encoder(length: int) -> None:
    theirs = randomised(peer(T5)(t5(decoder=False), has_relative_attention_bias=True))
    x, mask = randn(2, length, 24), padding([length, max(1, length - 3)], length)
    want, *_ = theirs(x, mask=torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30))
    spec, weights = conventions.load_t5(
        theirs.state_dict(), num_heads=3, bidirectional=True, num_buckets=8, max_distance=12
    )
    check(attention_block(x, weights, spec, mask=mask), want)


def test_t5_decoder_with_a_cache() -> None:
    theirs = randomised(peer(T5)(t5(decoder=True), has_relative_attention_bias=True, layer_idx=0))
    x = randn(2, 20, 24)
    convention = conventions.T5(bidirectional=False, num_buckets=8, max_distance=12)
    rel_bias, span = convention.load(theirs.relative_attention_bias.weight)
    cache = peer("transformers.cache_utils.DynamicCache")()
    for start, stop in itertools.pairwise([0, 7, 8, 9, 20]):
        future = torch.arange(stop) > torch.arange(start, stop)[:, None]
        mask = torch.zeros(1, 1, stop - start, stop, dtype=torch.float64).masked_fill(future, -1e30)
        want, *_ = theirs(x[:, start:stop], mask=mask, past_key_values=cache)
        got = t5_attention(
            theirs, x[:, start:stop], x[:, :stop], rel_bias=rel_bias, span=span, causal=True, offset=start
        )
        check(got, want)


def test_t5_cross_attention_with_a_cache() -> None:
    theirs = randomised(peer(T5)(t5(decoder=True), layer_idx=0))
    x, memory, mask = randn(2, 3, 24), randn(2, 9, 24, seed=2), padding([9, 5], 9)
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)
    caches = peer("transformers.cache_utils.DynamicCache")
    cache = peer("transformers.cache_utils.EncoderDecoderCache")(caches(), caches())
    for _ in range(2):  # the second time, keys and values come from the cache
        want, *_ = theirs(x, mask=additive, key_value_states=memory, past_key_values=cache)
        check(t5_attention(theirs, x, memory, mask=mask), want)


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12), (16, 64), (32, 256), (320, 800), (64, 100)])
def test_t5_buckets(buckets: int, furthest: int, bidirectional: bool) -> None:
    span = Span(3 * furthest, 3 * furthest)
    theirs = peer(T5)._relative_position_bucket(
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


@pytest.mark.parametrize("heads", [2, 3, 4, 6])
def test_bloom(heads: int) -> None:
    config = peer("transformers.BloomConfig")(hidden_size=8 * heads, n_head=heads, hidden_dropout=0.0)
    theirs = randomised(peer("transformers.models.bloom.modeling_bloom.BloomAttention")(config, layer_idx=0))
    x, length = randn(2, 9, 8 * heads), 9
    alibi = peer("transformers.models.bloom.modeling_bloom.build_alibi_tensor")(torch.ones(2, 9), heads, torch.float64)
    future = torch.arange(length) > torch.arange(length)[:, None]
    mask = torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(future, -1e30)
    want, *_ = theirs(x, torch.zeros_like(x), alibi, mask)
    q, k, v = (y.transpose(1, 2) for y in theirs.query_key_value(x).unflatten(-1, (heads, 3, 8)).unbind(-2))
    span = Span.causal(64)
    bias = alibi_bias(heads, span, xp=torch, dtype=torch.float64)
    out: Any = relative_attention(q, k, v, rel_bias=bias, span=span, causal=True)
    check(theirs.dense(join(out)), want, 1e-6)  # Bloom's softmax is float32


@torch.no_grad()
def test_bloom_in_half_precision_far_from_the_beginning() -> None:
    """The number of a key fits float16, and would not fit divided by the scale."""
    config = peer("transformers.BloomConfig")(hidden_size=256, n_head=2, hidden_dropout=0.0)
    theirs = randomised(peer("transformers.models.bloom.modeling_bloom.BloomAttention")(config, layer_idx=0)).half()
    x, alibi = randn(1, 3, 256).half(), torch.tensor([[[7000, 7004, 7008]]]).half().expand(2, -1, -1)
    given = x, torch.zeros_like(x), alibi, torch.full((3, 3), -6e4).triu(1)[None, None].half()
    check(BloomRelativeAttention(theirs)(*given)[0].double(), theirs.double()(*(y.double() for y in given))[0], 3e-3)


@pytest.mark.parametrize("heads", [2, 3, 4, 6])
def test_mpt_with_a_cache(heads: int) -> None:
    config = peer("transformers.MptConfig")(d_model=8 * heads, n_heads=heads)
    modeling = "transformers.models.mpt.modeling_mpt"
    theirs = randomised(peer(f"{modeling}.MptAttention")(config, layer_idx=0))
    x, cache = randn(2, 9, 8 * heads), peer("transformers.cache_utils.DynamicCache")()
    span = Span.causal(64)
    bias = alibi_bias(heads, span, xp=torch, dtype=torch.float64)
    for start, stop in itertools.pairwise([0, 5, 6, 9]):
        alibi = peer(f"{modeling}.build_mpt_alibi_tensor")(heads, stop)
        future = torch.arange(stop) > torch.arange(start, stop)[:, None]
        want, *_ = theirs(x[:, start:stop], alibi, past_key_values=cache, attention_mask=future)
        q, k, v = (split(y, heads) for y in theirs.Wqkv(x[:, :stop]).chunk(3, dim=-1))
        out: Any = relative_attention(q[:, :, start:], k, v, rel_bias=bias, span=span, causal=True, offset=start)
        check(theirs.out_proj(join(out)), want, 1e-6)


@torch.no_grad()
def test_mpt_in_half_precision_far_from_the_end() -> None:
    """The numbers of keys are large there, and those of neighbours differ by less than bfloat16 keeps of them."""
    config = peer("transformers.MptConfig")(d_model=16, n_heads=2)
    modeling = "transformers.models.mpt.modeling_mpt"
    theirs = randomised(peer(f"{modeling}.MptAttention")(config, layer_idx=0)).bfloat16()
    ours, exact = MptRelativeAttention(theirs), copy.deepcopy(theirs).double()
    x, far = randn(1, 9, 16).bfloat16(), 2000
    alibi = peer(f"{modeling}.build_mpt_alibi_tensor")(2, far)
    future = torch.arange(far) > torch.arange(9)[:, None]

    def outputs(attention: Any, step: int) -> torch.Tensor:
        cache, own = (
            peer("transformers.cache_utils.StaticCache")(config, max_cache_len=far),
            attention.Wqkv.weight.dtype,
        )
        steps = zip(x.to(own).split(step, 1), future.split(step), strict=True)
        return torch.cat([attention(part, alibi, cache, mask)[0] for part, mask in steps], 1).double()

    wanted = outputs(exact, 9)
    wrong = (outputs(theirs, 9) - wanted).norm()
    for step in (9, 1):
        assert (outputs(ours, step) - wanted).norm() < 1.5 * wrong


@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_xlnet(length: int, memory: int) -> None:
    """Content and position biases, cached memory, rows for keys plus queries."""
    config = peer("transformers.XLNetConfig")(d_model=24, n_head=3, n_layer=1, d_inner=8, vocab_size=5, dropout=0.0)
    model = peer("transformers.XLNetModel")(config)
    theirs = randomised(model.layer[0].rel_attn)
    h, past = randn(length, 2, 24), randn(memory, 2, 24, seed=2)
    keys = memory + length
    positions = model.relative_positional_encoding(length, keys, bsz=2).double()
    want, *_ = theirs(h, None, None, None, positions, None, mems=past)
    every = torch.cat([past, h])
    q, k, v = (
        torch.einsum("lbe,ehd->bhld", y, weight) for y, weight in ((h, theirs.q), (every, theirs.k), (every, theirs.v))
    )
    span = Span(keys, length - 1)
    sinusoids = sinusoidal_table(span, 24, xp=torch, dtype=torch.float64)
    rel_k, same = conventions.TRANSFORMER_XL.load(torch.einsum("re,ehd->hrd", sinusoids, theirs.r), left=keys)
    assert same == span
    out: Any = relative_attention(
        q + theirs.r_w_bias[:, None], k, v, rel_k, span, rel_q=q + theirs.r_r_bias[:, None], offset=memory
    )
    check(theirs.post_attention(h, torch.einsum("bhld->lbhd", out)), want, 1e-6)


@pytest.mark.parametrize(("buckets", "furthest"), [(256, 512), (6, 10), (32, 128), (12, 40)])
def test_deberta_buckets(buckets: int, furthest: int) -> None:
    span = Span(2 * furthest, 2 * furthest)
    theirs = peer("transformers.models.deberta_v2.modeling_deberta_v2.make_log_bucket_position")(
        -torch.arange(-span.left, span.right + 1), buckets, furthest
    )
    ours = deberta_buckets(span, position_buckets=buckets, max_distance=furthest)
    assert (theirs.long() + buckets).clamp(0, 2 * buckets - 1).tolist() == list(ours)


@pytest.mark.parametrize("kinds", [["c2p"], ["p2c"], ["c2p", "p2c"]], ids="-".join)
@pytest.mark.parametrize("length", LENGTHS)
def test_deberta_v2(kinds: list[str], length: int) -> None:
    config = peer("transformers.DebertaV2Config")(
        hidden_size=24, num_attention_heads=3, relative_attention=True, position_buckets=6,
        max_relative_positions=16, pos_att_type=kinds,
    )  # fmt: skip
    theirs = randomised(peer("transformers.models.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention")(config))
    x, table = randn(2, length, 24), randn(12, 24, seed=2)
    mask = padding([length, max(1, length - 3)], length)
    want, _ = theirs(x, mask, rel_embeddings=table)
    q, k, v = (split(linear(x), 3) for linear in (theirs.query_proj, theirs.key_proj, theirs.value_proj))
    scale = (8 * (1 + len(kinds))) ** -0.5
    rel_k, key_table, convention = None, None, conventions.DeBERTa(position_buckets=6, max_distance=16)
    if "c2p" in kinds:
        rel_k, span = convention.load(split(theirs.pos_key_proj(table), 3))
    if "p2c" in kinds:
        key_table, span = convention.load(split(theirs.pos_query_proj(table), 3))
    out: Any = relative_attention(q, k, v, rel_k, span, key_table=key_table, mask=mask, scale=scale)
    check(join(out), want, 1e-6)  # its scale is float32


@pytest.mark.parametrize("length", LENGTHS)
def test_deberta_v1(length: int) -> None:
    config = peer("transformers.DebertaConfig")(
        hidden_size=24, num_attention_heads=3, relative_attention=True, max_relative_positions=6,
        pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    theirs = randomised(peer("transformers.models.deberta.modeling_deberta.DisentangledSelfAttention")(config))
    x, table = randn(2, length, 24), randn(12, 24, seed=2)
    mask = padding([length, max(1, length - 3)], length)
    places = torch.arange(length)
    want, _ = theirs(x, mask, rel_embeddings=table, relative_pos=(places[:, None] - places)[None])
    q, k, v = split(theirs.in_proj(x), 3).chunk(3, dim=-1)
    q, v = q + split(theirs.q_bias[None, None], 3), v + split(theirs.v_bias[None, None], 3)
    convention = conventions.DeBERTa(position_buckets=6, max_distance=None)
    rel_k, span = convention.load(split(theirs.pos_proj(table), 3))
    key_table, _ = convention.load(split(theirs.pos_q_proj(table), 3))
    scale = (8 * 3) ** -0.5
    out: Any = relative_attention(q, k, v, rel_k, span, key_table=key_table, mask=mask, scale=scale)
    check(join(out), want, 1e-6)  # its scale is float32


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("past", [0, 4])
def test_inkling(length: int, past: int) -> None:
    """Learned relative queries, zero beyond the extent, an offset."""
    theirs = randomised(peer("transformers.models.inkling.modeling_inkling.InklingRelativeLogits")(5, 8))
    states = randn(2, length, 3, 5)
    want = theirs(states, torch.arange(length) + past, torch.arange(length + past))
    table, span = conventions.INKLING.load(theirs.proj.mT)
    got = relative_logits(states.transpose(1, 2), table, span, n_keys=length + past, offset=past, causal=True)
    check(got, want)


@pytest.mark.parametrize("window", [None, 5])
def test_gpt_oss(window: int | None) -> None:
    """A sink in each row's softmax, grouped queries and a sliding window; gradients too."""
    theirs = peer("transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward")
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
    for ours, other in zip(*(torch.autograd.grad(y.sin().sum(), given) for y in (out, want)), strict=True):
        check(ours, other)

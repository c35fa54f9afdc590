"""What type checkers say of results: mypy and pyright read this file, and nothing runs it."""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import Any, assert_type

import jax
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import relskew_core
from relskew_core import BlockSpec, Span
from relskew_core._block.cache import Growing
from relskew_core.distributed.jax import ring_attention
from relskew_core.distributed.torch import context_parallel_attention, shard_sequence
from relskew_core.layers import equinox, flax, mlx
from relskew_core.layers.torch import FixedCache, MultiheadAttention, RelativeMultiheadAttention, SlidingCache
from relskew_core.papers import huang_attention


def functions(q: Tensor, x: jax.Array, a: NDArray[np.float32], asked: bool) -> None:
    """Arrays come out as they go in."""
    span = Span.causal(8)
    assert_type(relskew_core.relative_attention(q, q, q, q, span, causal=True), Tensor)
    assert_type(relskew_core.relative_attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(relskew_core.relative_attention(q, q, q, return_lse=asked), Tensor | tuple[Tensor, Tensor])
    assert_type(relskew_core.relative_attention(x, x, x, impl="native"), jax.Array)
    assert_type(relskew_core.relative_attention(a, a, a, a), NDArray[np.float32])
    assert_type(relskew_core.relative_attention_2d(q, q, q, q, q, q_grid=(2, 2), k_grid=(2, 2)), Tensor)
    assert_type(relskew_core.relative_attention_vjp(q, q, q, q).v, Tensor)
    assert_type(relskew_core.attention_weights(q, q), Tensor)
    assert_type(relskew_core.merge_attention([x], [x]), tuple[jax.Array, jax.Array])
    assert_type(relskew_core.relative_logits(q, q, n_keys=3, side="key"), Tensor)
    assert_type(relskew_core.relative_values(a, a), NDArray[np.float32])
    assert_type(relskew_core.resize_table(x, 3, method="cubic"), jax.Array)
    assert_type(relskew_core.skew(relskew_core.unskew(q)), Tensor)
    assert_type(relskew_core.alibi_bias(4, span, like=q), Tensor)
    assert_type(relskew_core.proximal_bias(span, xp=np), Any)
    assert_type(relskew_core.toeplitz(q, span, n_queries=2, n_keys=2), Tensor | Any)
    assert_type(relskew_core.t5_buckets(span, num_buckets=8, max_distance=9, bidirectional=False), tuple[int, ...])
    assert_type(huang_attention(q, q, q, q), Tensor)
    assert_type(ring_attention(x, x, x, axis_name="i"), jax.Array)
    assert_type(context_parallel_attention(q, q, q, group=None, return_lse=True), tuple[Tensor, Tensor])
    assert_type(shard_sequence(q, None), Tensor)


def blocks(q: Tensor, spec: BlockSpec, weights: dict[str, Tensor]) -> None:
    """A block returns its cache if it was given one."""
    assert_type(relskew_core.attention_block(q, weights, spec), Tensor)
    assert_type(relskew_core.attention_block(q, weights, spec, past=(q, q)), tuple[Tensor, tuple[Tensor, Tensor]])


def modules(q: Tensor, spec: BlockSpec) -> None:
    """So do the modules of torch, which itself says that calls return anything."""
    module = RelativeMultiheadAttention(spec, impl="portable")
    assert_type(module(q, mask=q), Tensor)
    assert_type(module(q, past=module.empty_cache(1)), tuple[Tensor, Growing])
    assert_type(module(q, past=module.empty_cache(1, length=8)), tuple[Tensor, FixedCache])
    assert_type(module(q, past=module.empty_cache(1, keep=8), segments=q), tuple[Tensor, SlidingCache])
    assert_type(MultiheadAttention(8, 2, Span.full(8))(q, q, q), tuple[Tensor, Tensor | Any])


def modules_of_jax(
    x: jax.Array,
    one: flax.RelativeMultiheadAttention,
    two: equinox.RelativeMultiheadAttention,
    three: mlx.RelativeMultiheadAttention,
) -> None:
    """And those of the other frameworks."""
    assert_type(one(x, deterministic=True), jax.Array)
    assert_type(one(x, past=one.empty_cache(1)), tuple[jax.Array, Growing])
    assert_type(two(x, inference=True), jax.Array)
    assert_type(three(x), jax.Array)


def mistakes(q: Tensor, spec: BlockSpec) -> None:
    """What is misspelt is an error before it runs: the comments are errors where nothing is to be ignored."""
    relskew_core.relative_attention(q, q, q, impl="natve")  # type: ignore[call-overload]
    relskew_core.relative_logits(q, q, side="keys")  # type: ignore[arg-type]
    RelativeMultiheadAttention(spec)(q, masks=q)  # type: ignore[call-overload]
    RelativeMultiheadAttention(spec, impl="fast")  # type: ignore[arg-type]

"""The contenders: each one plain function of the same inputs, written as people write it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from threadpoolctl import ThreadpoolController
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.inputs import Inputs, Shape, visible
from relskew_core import relative_attention, relative_attention_vjp


def plain(x: Inputs) -> Any:
    """Attention without relative positions: torch's SDPA, the floor."""
    return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=x.shape.causal)


def huang(x: Inputs) -> Any:
    """Pad, reshape, slice (Huang et al. 2018, section 3.4), as in the ports of Music Transformer."""
    length = x.shape.length
    relative = F.pad(x.q @ x.table.mT, (1, 0))
    relative = relative.reshape(*relative.shape[:2], length + 1, length)[:, :, 1:]
    logits = (x.q @ x.k.mT + relative) / x.shape.dim**0.5
    logits = logits.masked_fill(_future(length), -torch.inf)
    return logits.softmax(-1) @ x.v


def shaw(x: Inputs) -> Any:
    """Gather a table row for every pair of positions (Shaw et al. 2018, equation 5)."""
    rows = x.table[_columns(x.shape)]
    logits = (x.q @ x.k.mT + torch.einsum("bhid,ijd->bhij", x.q, rows)) / x.shape.dim**0.5
    if x.shape.causal:
        logits = logits.masked_fill(_future(x.shape.length), -torch.inf)
    return logits.softmax(-1) @ x.v


def sdpa_bias(x: Inputs) -> Any:
    """SDPA with the relative logits materialised as its bias, by pad, reshape and slice."""
    length, causal = x.shape.length, x.shape.causal
    if causal:
        bias = F.pad(x.q @ x.table.mT, (1, 0))
        bias = bias.reshape(*bias.shape[:2], length + 1, length)[:, :, 1:]
    else:
        bias = F.pad(x.q @ x.table.mT, (0, 1)).flatten(2)
        bias = F.pad(bias, (0, length - 1)).reshape(*bias.shape[:2], length + 1, 2 * length - 1)
        bias = bias[:, :, :length, length - 1 :]
    bias = bias / x.shape.dim**0.5
    if causal:
        bias = bias.masked_fill(_future(length), -torch.inf)
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias)


def flex(x: Inputs) -> Any:
    """Compiled FlexAttention: a score modification that reads the captured product ``q·tableᵀ``."""
    return _flex(x, _compiled_flex())


def flex_eager(x: Inputs) -> Any:
    """The same uncompiled: slow, and the check that the score modification is right where nothing compiles."""
    return _flex(x, flex_attention)


def huang_local(x: Inputs) -> Any:
    """Local blocks with both skews (Huang et al. 2018, section 3.5), block by block in one batch."""
    n = x.shape.block_size or 0
    q, k, v = (y.reshape(1, x.shape.heads, -1, n, x.shape.dim) for y in (x.q, x.k, x.v))
    k, v = (torch.cat([F.pad(y, (0, 0, 0, 0, 1, 0))[..., :-1, :, :], y], -2) for y in (k, v))
    product = F.pad(q @ x.table.mT, (0, 1)).flatten(-2)
    relative = product[..., n - 1 : n - 1 + n * 2 * n].reshape(*q.shape[:-1], 2 * n)  # each row one column further left
    logits = (q @ k.mT + relative) / x.shape.dim**0.5
    i, j = torch.arange(n)[:, None], torch.arange(2 * n)
    hidden = (j > i + n).expand(q.shape[-3], n, 2 * n).clone()
    hidden[0] |= j < n
    return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).flatten(-3, -2)


def sdpa_local(x: Inputs) -> Any:
    """SDPA over all keys with the relative logits and the mask of local attention materialised as its bias."""
    hidden = ~torch.from_numpy(_visible(x.shape))
    columns = _columns(x.shape).expand(1, x.shape.heads, -1, -1)
    bias = torch.gather(x.q @ x.table.mT, -1, columns) / x.shape.dim**0.5
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias.masked_fill(hidden, -torch.inf))


def toeplitz_bias(x: Inputs) -> Any:
    """SDPA with a number for every relative position gathered into an ``H × L × L`` bias, as T5 does."""
    bias = x.table[:, _columns(x.shape)]
    if x.shape.causal:
        bias = bias.masked_fill(_future(x.shape.length), -torch.inf)
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias[None])


def x_transformers(x: Inputs) -> Any:
    """x-transformers' T5 bias and its attention on SDPA; as many buckets as keep every position apart."""
    bias, attend = _x_transformers(x.shape.length, x.shape.heads)
    with torch.no_grad():
        bias.relative_attention_bias.weight[: x.shape.length] = x.table.mT.flip(0)
        out, _ = attend(x.q, x.k, x.v, attn_bias=bias(x.shape.length, x.shape.length))
    return out


def ours(x: Inputs) -> Any:
    """``relative_attention``, by the path that it chooses itself."""
    return _ours(x, "auto")


def ours_portable(x: Inputs) -> Any:
    """``relative_attention``, by the one code for every library."""
    return _ours(x, "portable")


def products(x: Inputs) -> Any:
    """The three products of causal relative attention and nothing else: NumPy's floor.

    In chunks of 128 queries that see their own past only, a head a thread, into scratch that is allocated once.
    The result means nothing.
    """
    length, chunk = x.shape.length, 128
    out = np.empty_like(x.q)

    def head(h: int) -> None:
        q, k, v = x.q[0, h], x.k[0, h].T, x.v[0, h]
        content, relative = np.empty(chunk * length, q.dtype), np.empty(chunk * length, q.dtype)
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            n = stop - start
            weights = content[: n * stop].reshape(n, stop)
            np.matmul(q[start:stop], k[:, :stop], out=weights)
            np.matmul(q[start:stop], x.table.T[:, length - stop :], out=relative[: n * stop].reshape(n, stop))
            np.matmul(weights, v[:stop], out=out[0, h, start:stop])

    with _controller().limit(limits=1, user_api="blas"):
        list(_pool().map(head, range(x.shape.heads)))
    return out


def dense_products(x: Inputs) -> Any:
    """The same three products over all keys at once, as ``q @ k.T`` in NumPy does them. The result means nothing."""
    relative = x.q @ x.table.T
    weights = x.q @ x.k.swapaxes(-1, -2)
    return relative[..., :1], weights @ x.v


def _flex(x: Inputs, attention: Callable[..., Any]) -> Any:
    length = x.shape.length
    product = x.q @ x.table.mT / x.shape.dim**0.5

    def add(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + product[b, h, i, torch.clamp(j - i, max=0) + length - 1]

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
    return attention(x.q, x.k, x.v, score_mod=add, block_mask=mask)


def torch_gradients(function: Callable[[Inputs], Any], x: Inputs) -> tuple[Any, ...]:
    """Run a contender forward and backward: gradients of ``q, k, v`` and, where it is used, of the table."""
    return torch.autograd.grad(function(x), [x.q, x.k, x.v, x.table], x.d_out, allow_unused=True)


def numpy_gradients(function: Callable[[Inputs], Any], x: Inputs) -> tuple[Any, ...]:
    """The same where the array library has no gradients: the output, then ``relative_attention_vjp``."""
    impl = "portable" if function is ours_portable else "auto"
    out = _ours(x, impl)
    table = {"rel_bias" if x.shape.bias else "rel_k": x.table}
    options = {**x.shape.options(), **table, "span": x.shape.span, "impl": impl}
    gradients = relative_attention_vjp(x.d_out, x.q, x.k, x.v, out=out, **options)
    return gradients.q, gradients.k, gradients.v, gradients.rel_bias if x.shape.bias else gradients.rel_k


def _ours(x: Inputs, impl: str) -> Any:
    table = {"rel_bias" if x.shape.bias else "rel_k": x.table}
    return relative_attention(x.q, x.k, x.v, span=x.shape.span, impl=impl, **x.shape.options(), **table)


def _future(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def _columns(shape: Shape) -> torch.Tensor:
    position = torch.arange(shape.length)
    return (position[None, :] - position[:, None] + shape.span.left).clamp(0, shape.span.rows - 1)


def _visible(shape: Shape) -> np.ndarray:
    i = np.arange(shape.length)
    return visible(shape, i, i[None, :] - i[:, None])


@functools.cache
def _x_transformers(length: int, heads: int) -> tuple[Any, Any]:
    module = importlib.import_module("x_transformers.x_transformers")
    bias = module.RelativePositionBias(1.0, causal=True, num_buckets=2 * length, max_distance=4 * length, heads=heads)
    return bias, module.Attend(causal=True, flash=True, heads=heads)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads())

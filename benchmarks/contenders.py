"""A problem, its result in float64, and the contenders for calls: one function of the same inputs each."""

from __future__ import annotations

import functools
import importlib.util
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.runner import distance
from benchmarks.textbook import attended, columns, future, gathered, picked, shifted, skewed
from relskew_core import Span, backends, paged_attention, relative_attention, relative_attention_vjp

CLIP = 64  # the reach of the clipped table on both sides


@dataclass(frozen=True, slots=True)
class Shape:
    """Queries and keys, and a table for every position that occurs."""

    length: int
    batch: int = 1
    heads: int = 8
    dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = True
    block_size: int | None = None  # Music Transformer's local blocks
    window: int | None = None  # keys that a query sees, itself included
    std: float = 1.0  # standard deviation of the logits
    bias: bool = False  # one number per head and relative position instead of a row
    by_head: bool = False  # a table for each head
    queries: int | None = None  # the last ones alone, after a cache

    @property
    def first(self) -> int:
        """The position of the first query."""
        return 0 if self.queries is None else self.length - self.queries

    @property
    def span(self) -> Span:
        """The visible relative positions."""
        if self.block_size is not None:
            return Span.causal(2 * self.block_size)
        if self.window is not None:
            return Span.causal(self.window)
        return Span.causal(self.length) if self.causal else Span.full(self.length)

    def options(self) -> dict[str, Any]:
        if self.block_size is not None:
            return {"block_size": self.block_size}
        return {"causal": self.causal, "window": self.window and (self.window - 1, 0), "offset": self.first or None}


class Inputs(NamedTuple):
    """The arrays of one problem, in one library."""

    shape: Shape
    q: Any  # (B, H, L, D)
    k: Any
    v: Any
    table: Any  # (R, D), (H, R, D) by head, or (H, R) with shape.bias
    clipped: Any  # the same, reaching CLIP
    d_out: Any

    def to_torch(self, *, gradients: bool = False) -> Inputs:
        """Return tensors, sharing memory if possible; leaves of a graph if ``gradients``."""
        to = {"device": self.shape.device, "dtype": getattr(torch, self.shape.dtype)}
        arrays = [torch.from_numpy(x).to(**to) for x in self[1:]]
        q, k, v, table, clipped = (x.requires_grad_(gradients) for x in arrays[:-1])
        return Inputs(self.shape, q, k, v, table, clipped, arrays[-1])


@functools.lru_cache(maxsize=1)
def make_inputs(shape: Shape) -> Inputs:
    """Draw NumPy arrays, without zeros: the logits' variance is ``std ** 2``, half of it from the table."""
    rng = np.random.default_rng(0)

    def draw(*sizes: int, std: float = 1.0) -> np.ndarray:
        return rng.standard_normal(sizes, dtype=np.float32) * np.float32(std)

    def table(rows: int) -> np.ndarray:
        lead = (shape.heads,) * (shape.by_head or shape.bias)
        return draw(*lead, rows) if shape.bias else draw(*lead, rows, shape.dim, std=0.5**0.5)

    lead, lengths = (shape.batch, shape.heads), (shape.length - shape.first, *[shape.length] * 2)
    q, k, v, d_out = (draw(*lead, length, shape.dim, std=std) for length, std in
                      zip((*lengths, lengths[0]), (shape.std, 0.5**0.5, 1.0, 1.0), strict=True))  # fmt: skip
    return Inputs(shape, q, k, v, table(shape.span.rows), table(2 * CLIP + 1), d_out)


class Expected(NamedTuple):
    """Results of some queries of every head of the first item, spread over the sequence: cheap at every length."""

    rows: Tensor
    out: Tensor
    d_q: Tensor

    def error(self, result: Any, *, gradient: bool) -> float:
        """Return the relative L2 error of an output, or of a gradient of the queries."""
        x = torch.as_tensor(result.detach() if isinstance(result, Tensor) else np.asarray(result))
        return distance(x[0][:, self.rows], self.d_q if gradient else self.out)


@functools.lru_cache(maxsize=3)
def reference(shape: Shape, kind: str, count: int = 16) -> Expected:
    """Attend by the plain formula in float64, with the table, the ``"clipped"`` one, or ``"plain"`` without one."""
    x = make_inputs(shape).to_torch()
    rows = torch.linspace(shape.first, shape.length - 1, min(count, shape.length), device=x.q.device).long().unique()
    k, v = x.k[0].double(), x.v[0].double()
    table, left = (x.clipped, CLIP) if kind == "clipped" else (x.table, shape.span.left)
    outs, d_qs, scale = list[Tensor](), list[Tensor](), shape.dim**-0.5
    for i in rows.tolist():  # one query at a time, because its table rows are as large as the keys
        r = torch.arange(shape.length, device=rows.device) - i
        columns = (r + left).clamp(0, table.shape[-1 if shape.bias else -2] - 1)
        q, d_out = (y[0, :, i - shape.first].double() for y in (x.q.detach(), x.d_out))
        q.requires_grad_()
        keys = k if kind == "plain" or shape.bias else k + table.double()[..., columns, :]
        logits = (keys @ q[..., None])[..., 0] * scale
        if shape.bias and kind != "plain":
            logits = logits + table.double()[:, columns]
        weights = logits.masked_fill(~visible(shape, i, r), -math.inf).softmax(-1)
        outs.append((weights[:, None] @ v)[:, 0])
        d_qs += torch.autograd.grad(outs[-1], q, d_out)
    return Expected(rows - shape.first, torch.stack(outs, 1).detach(), torch.stack(d_qs, 1))


def visible(shape: Shape, i: Any, r: Tensor) -> Tensor:
    """Return the relative positions ``r`` that queries at ``i`` see."""
    if shape.block_size is not None:
        return (r <= 0) & (r >= -(i % shape.block_size + shape.block_size))
    seen = r <= 0 if shape.causal else torch.ones_like(r, dtype=torch.bool)
    return seen if shape.window is None else seen & (r > -shape.window)


def plain(x: Inputs) -> Any:
    """Attention without relative positions: torch's SDPA, the lower bound."""
    return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=x.shape.causal and not x.shape.first)


def huang(x: Inputs) -> Any:
    """Everything of size L × L materialised, by pad, reshape and slice, as in ports of Music Transformer."""
    return attended((x.q @ x.k.mT + _relative(x)) / x.shape.dim**0.5, x.v, _hidden(x))


def shaw(x: Inputs) -> Any:
    """A table row gathered for every pair of positions."""
    return attended((x.q @ x.k.mT + gathered(x.q, x.table, _columns(x.shape))) / x.shape.dim**0.5, x.v, _hidden(x))


def sdpa_local(x: Inputs) -> Any:
    """SDPA over all keys with the relative logits and the mask of local attention materialised as its bias."""
    i = torch.arange(x.shape.length)
    hidden = ~visible(x.shape, i[:, None], i[None, :] - i[:, None])
    return _biased(x, picked(x.q, x.table, _columns(x.shape)) / x.shape.dim**0.5, hidden)


def sdpa_skewed(x: Inputs) -> Any:
    return _biased(x, _relative(x) / x.shape.dim**0.5, _hidden(x))


def sdpa_gathered(x: Inputs) -> Any:
    """H × L × L numbers, as in T5."""
    return _biased(x, x.table[:, _columns(x.shape)][None], _hidden(x))


def huang_local(x: Inputs) -> Any:
    """Local blocks with both skews (Huang et al. 2018, section 3.5), block by block in one batch."""
    n = x.shape.block_size or 0
    q, k, v = (y.reshape(1, x.shape.heads, -1, n, x.shape.dim) for y in (x.q, x.k, x.v))
    k, v = (torch.cat([F.pad(y, (0, 0, 0, 0, 1, 0))[..., :-1, :, :], y], -2) for y in (k, v))
    product = F.pad(q @ x.table.mT, (0, 1)).flatten(-2)
    relative = product[..., n - 1 : n - 1 + n * 2 * n].reshape(*q.shape[:-1], 2 * n)  # each row one column further left
    i, j = torch.arange(n)[:, None], torch.arange(2 * n)
    hidden = (j > i + n).expand(q.shape[-3], n, 2 * n).clone()
    hidden[0] |= j < n
    return attended((q @ k.mT + relative) / x.shape.dim**0.5, v, hidden).flatten(-3, -2)


def x_transformers(x: Inputs) -> Any:
    """x-transformers' T5 bias and its attention on SDPA; as many buckets as keep every position apart."""
    bias, attend = _x_transformers(x.shape.length, x.shape.heads)
    with torch.no_grad():
        bias.relative_attention_bias.weight[: x.shape.length] = x.table.mT.flip(0)
        return attend(x.q, x.k, x.v, attn_bias=bias(x.shape.length, x.shape.length))[0]


def flex(x: Inputs) -> Any:
    """Compiled FlexAttention: a score modification reads the product of queries and table."""
    product, left, last = x.q @ x.table.mT * x.shape.dim**-0.5, x.shape.span.left, x.shape.span.rows - 1

    def add(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + product[b, h, i, (j - i + left).clamp(0, last)]

    mask = _causal_blocks(x.shape.length, str(x.q.device)) if x.shape.causal else None
    return _compiled_flex(x.shape)(x.q, x.k, x.v, score_mod=add, block_mask=mask)


def relskew(x: Inputs, impl: Any = "auto", **other: Any) -> Any:
    """``relative_attention`` with the path that it chooses; on a GPU only with the fused kernels."""
    impl = "native" if x.shape.device == "cuda" and impl == "auto" else impl
    given = other or {"rel_bias" if x.shape.bias else "rel_k": x.table, "span": x.shape.span}
    return relative_attention(x.q, x.k, x.v, impl=impl, **x.shape.options(), **given)


portable = partial(relskew, impl="portable")


@functools.lru_cache(maxsize=1)
def in_pages(k: Tensor, v: Tensor, size: int = 16) -> tuple[Tensor, ...]:
    """Return keys and values in pages, those of each item in turn, their numbers, and the lengths of the items."""
    batch, _, length, _ = k.shape
    pools = (x.transpose(1, 2).unflatten(1, (-1, size)).flatten(0, 1).contiguous() for x in (k, v))
    places = torch.arange(batch * length // size, device=k.device, dtype=torch.int32).view(batch, -1)
    return *pools, places, torch.full((batch,), length, device=k.device, dtype=torch.int32)


def paged(x: Inputs) -> Any:
    """``paged_attention`` of the fused kernels, with pages that are laid out before."""
    k, v, places, lengths = in_pages(x.k, x.v)
    return paged_attention(x.q, k, v, x.table, x.shape.span, page_table=places, lengths=lengths, impl="native")


@dataclass(frozen=True, slots=True)
class Contender:
    """A row of the tables."""

    label: str
    function: Callable[[Inputs], Any]
    kind: Any = "full"  # the reference that it is compared with: "full", "clipped" or "plain"
    library: str = "torch"
    missing: str | None = None  # the reason why it cannot run here


def prepare(contender: Contender, shape: Shape, *, backward: bool = False) -> Callable[[], Any]:
    """Return the measured call, which returns the output, or with ``backward`` the gradients after a forward pass."""
    function, x = contender.function, make_inputs(shape)
    if contender.library == "numpy":
        return partial(_numpy_gradients, function, x) if backward else partial(function, x)
    x = x.to_torch(gradients=backward)
    return (lambda: gradients(function(x), x)) if backward else torch.no_grad()(partial(function, x))


def gradients(out: Any, x: Inputs, **options: Any) -> tuple[Any, ...]:
    """Return the gradients of ``q, k, v`` and of the tables in use."""
    return torch.autograd.grad(out, x[1:6], x.d_out, allow_unused=True, **options)


def _numpy_gradients(function: Callable[[Inputs], Any], x: Inputs) -> tuple[Any, ...]:
    options = {"rel_bias" if x.shape.bias else "rel_k": x.table, "impl": "portable" if function is portable else "auto"}
    options |= {"out": function(x), "span": x.shape.span, **x.shape.options()}
    return tuple(y for y in relative_attention_vjp(x.d_out, x.q, x.k, x.v, **options) if y is not None)


def _relative(x: Inputs) -> Any:
    return (skewed if x.shape.causal else shifted)(x.q @ x.table.mT)


def _hidden(x: Inputs) -> Any:
    return future(x.shape.length, x.q.device) if x.shape.causal else None


def _biased(x: Inputs, bias: Any, hidden: Any) -> Any:
    bias = bias if hidden is None else bias.masked_fill(hidden, -torch.inf)
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias)


def _columns(shape: Shape) -> torch.Tensor:
    return columns(shape.length, shape.length, shape.span.left, shape.span.rows)


@functools.cache
def _x_transformers(length: int, heads: int) -> tuple[Any, Any]:
    module: Any = importlib.import_module("x_transformers.x_transformers")
    options = {"num_buckets": 2 * length, "max_distance": 4 * length, "causal": True, "heads": heads}
    return module.RelativePositionBias(1.0, **options), module.Attend(causal=True, flash=True, heads=heads)


@functools.lru_cache(maxsize=1)
def _compiled_flex(shape: Shape) -> Any:
    if shape.device != "cpu":
        torch.compiler.reset()  # after several recompilations for other shapes it would stay eager
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=1)
def _causal_blocks(length: int, device: str) -> Any:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)


def _native(library: str) -> str | None:
    return None if "native" in backends.available().get(library, []) else f"no native path for {library} here"


COMPILER = None if shutil.which("g++") or shutil.which("clang++") else "torch.compile needs a C++ compiler"
X_TRANSFORMERS = None if importlib.util.find_spec("x_transformers") else "x-transformers is not installed"

CONTENDERS = {
    "plain": Contender("plain SDPA, no relative positions", plain, "plain"),
    "sdpa-flash": Contender("SDPA, flash", sdpa_kernel([SDPBackend.FLASH_ATTENTION])(plain), "plain"),
    "sdpa-cudnn": Contender("SDPA, cuDNN", sdpa_kernel([SDPBackend.CUDNN_ATTENTION])(plain), "plain"),
    "huang": Contender("pad–reshape–slice (Huang)", huang),
    "huang-local": Contender("local blocks (Huang)", huang_local),
    "sdpa-bias": Contender("SDPA with a skewed bias", sdpa_skewed),
    "sdpa-local": Contender("SDPA with a local bias", sdpa_local),
    "shaw": Contender("gather (Shaw)", shaw),
    "flex": Contender("compiled FlexAttention", flex, missing=COMPILER),
    "toeplitz-bias": Contender("SDPA with a gathered bias", sdpa_gathered),
    "x-transformers": Contender("x-transformers", x_transformers, missing=X_TRANSFORMERS),
    "torch-portable": Contender("relskew on torch, portable", portable),
    "torch": Contender("relskew on torch", relskew, missing=_native("torch")),
    "torch-clipped": Contender("relskew on torch, a clipped table",
                               lambda x: relskew(x, rel_k=x.clipped, span=Span.clipped(CLIP)), "clipped"),
    "torch-plain": Contender("relskew on torch, no relative positions", partial(relskew, rel_k=None), "plain"),
    "torch-paged": Contender("relskew on torch, in pages", paged),
    "numpy-portable": Contender("relskew on NumPy, portable", portable, library="numpy"),
    "numpy": Contender("relskew on NumPy", relskew, library="numpy", missing=_native("numpy")),
}  # fmt: skip

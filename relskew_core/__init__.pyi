# Written by tests/support/stubs.py from the signatures that the functions have.

from collections.abc import Mapping, Sequence
from types import Spans
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload
from relskew_core import backends as backends, conventions as conventions, distributed as distributed, draw as draw, export as export, huggingface as huggingface, layers as layers, papers as papers
from relskew_core._array.typing import Array
from relskew_core._block.spec import BlockSpec, BlockSpec as BlockSpec
from relskew_core._positions.span import Span, Span as Span

__all__ = [
    "BlockSpec",
    "Span",
    "alibi_bias",
    "attention_block",
    "attention_weights",
    "deberta_buckets",
    "init_weights",
    "merge_attention",
    "proximal_bias",
    "relative_attention",
    "relative_attention_2d",
    "relative_attention_nd",
    "relative_attention_vjp",
    "relative_logits",
    "relative_logits_2d",
    "relative_logits_nd",
    "relative_values",
    "resize_table",
    "sinusoidal_table",
    "skew",
    "t5_buckets",
    "toeplitz",
    "toeplitz_2d",
    "toeplitz_nd",
    "unskew",
]

__version__: str

A = TypeVar("A")

class _Gradients(NamedTuple, Generic[A]):
    q: A
    k: A
    v: A
    rel_k: A | Any
    rel_v: A | Any
    rel_bias: A | Any
    rel_q: A | Any
    mask: A | Any
    key_table: A | Any
    sinks: A | Any
    scale: A | Any
    rel_scale: A | Any

def alibi_bias(n_heads: int, span: Span, *, xp: Any = None, like: Array | None = None, dtype: Any = None) -> Array: ...
@overload
def attention_block(
    x: A,
    weights: Mapping[str, Array],
    spec: BlockSpec,
    *,
    memory: Array | None = None,
    past: None = None,
    mask: Array | None = None,
) -> A: ...
@overload
def attention_block(
    x: A,
    weights: Mapping[str, Array],
    spec: BlockSpec,
    *,
    memory: Array | None = None,
    past: tuple[Array, Array],
    mask: Array | None = None,
) -> tuple[A, tuple[A, A]]: ...
def attention_weights(
    q: A,
    k: Array,
    rel_k: Array | None = None,
    span: Span | None = None,
    *,
    rel_bias: Array | None = None,
    rel_q: Array | None = None,
    key_table: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: Array | None = None,
    segments: Array | tuple[Array, Array] | None = None,
    sinks: Array | None = None,
    offset: int | Sequence[int] | Array | None = None,
    positions: tuple[Array, Array] | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> A: ...
def deberta_buckets(span: Span, *, position_buckets: int, max_distance: int | None) -> tuple[int, ...]: ...
def init_weights(spec: BlockSpec, *, seed: int | Array, xp: Any = None, dtype: Any = None) -> dict[str, Array]: ...
def merge_attention(outs: Sequence[A], lses: Sequence[Array]) -> tuple[A, A]: ...
def proximal_bias(span: Span, *, xp: Any = None, like: Array | None = None, dtype: Any = None) -> Array: ...
@overload
def relative_attention(
    q: A,
    k: Array,
    v: Array,
    rel_k: Array | None = None,
    span: Span | None = None,
    *,
    rel_v: Array | None = None,
    rel_bias: Array | None = None,
    rel_q: Array | None = None,
    key_table: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: Array | None = None,
    segments: Array | tuple[Array, Array] | None = None,
    sinks: Array | None = None,
    offset: int | Sequence[int] | Array | None = None,
    positions: tuple[Array, Array] | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    chunk_size: int | None = None,
    impl: Literal["auto", "portable", "native"] = "auto",
    return_lse: Literal[False] = False,
) -> A: ...
@overload
def relative_attention(
    q: A,
    k: Array,
    v: Array,
    rel_k: Array | None = None,
    span: Span | None = None,
    *,
    rel_v: Array | None = None,
    rel_bias: Array | None = None,
    rel_q: Array | None = None,
    key_table: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: Array | None = None,
    segments: Array | tuple[Array, Array] | None = None,
    sinks: Array | None = None,
    offset: int | Sequence[int] | Array | None = None,
    positions: tuple[Array, Array] | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    chunk_size: int | None = None,
    impl: Literal["auto", "portable", "native"] = "auto",
    return_lse: Literal[True],
) -> tuple[A, A]: ...
@overload
def relative_attention(
    q: A,
    k: Array,
    v: Array,
    rel_k: Array | None = None,
    span: Span | None = None,
    *,
    rel_v: Array | None = None,
    rel_bias: Array | None = None,
    rel_q: Array | None = None,
    key_table: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: Array | None = None,
    segments: Array | tuple[Array, Array] | None = None,
    sinks: Array | None = None,
    offset: int | Sequence[int] | Array | None = None,
    positions: tuple[Array, Array] | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    chunk_size: int | None = None,
    impl: Literal["auto", "portable", "native"] = "auto",
    return_lse: bool,
) -> A | tuple[A, A]: ...
@overload
def relative_attention_2d(
    q: A,
    k: Array,
    v: Array,
    table_h: Array | None = None,
    table_w: Array | None = None,
    *,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    span_h: Span | None = None,
    span_w: Span | None = None,
    rel_bias: Array | None = None,
    prefix: tuple[int, int] = (0, 0),
    prefix_bias: Array | None = None,
    offset: tuple[int, int] | None = None,
    q_step: tuple[int, int] = (1, 1),
    k_step: tuple[int, int] = (1, 1),
    window: tuple[tuple[int | None, int | None], tuple[int | None, int | None]] | None = None,
    neighborhood: tuple[int, int] | None = None,
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: Literal[False] = False,
) -> A: ...
@overload
def relative_attention_2d(
    q: A,
    k: Array,
    v: Array,
    table_h: Array | None = None,
    table_w: Array | None = None,
    *,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    span_h: Span | None = None,
    span_w: Span | None = None,
    rel_bias: Array | None = None,
    prefix: tuple[int, int] = (0, 0),
    prefix_bias: Array | None = None,
    offset: tuple[int, int] | None = None,
    q_step: tuple[int, int] = (1, 1),
    k_step: tuple[int, int] = (1, 1),
    window: tuple[tuple[int | None, int | None], tuple[int | None, int | None]] | None = None,
    neighborhood: tuple[int, int] | None = None,
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: Literal[True],
) -> tuple[A, A]: ...
@overload
def relative_attention_2d(
    q: A,
    k: Array,
    v: Array,
    table_h: Array | None = None,
    table_w: Array | None = None,
    *,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    span_h: Span | None = None,
    span_w: Span | None = None,
    rel_bias: Array | None = None,
    prefix: tuple[int, int] = (0, 0),
    prefix_bias: Array | None = None,
    offset: tuple[int, int] | None = None,
    q_step: tuple[int, int] = (1, 1),
    k_step: tuple[int, int] = (1, 1),
    window: tuple[tuple[int | None, int | None], tuple[int | None, int | None]] | None = None,
    neighborhood: tuple[int, int] | None = None,
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: bool,
) -> A | tuple[A, A]: ...
@overload
def relative_attention_nd(
    q: A,
    k: Array,
    v: Array,
    tables: Sequence[Array | None] | None = None,
    *,
    q_grid: Sequence[int],
    k_grid: Sequence[int],
    spans: Sequence[Span | None] | None = None,
    rel_bias: Array | None = None,
    prefix: tuple[int, int] = (0, 0),
    prefix_bias: Array | None = None,
    offset: Sequence[int] | None = None,
    q_step: Sequence[int] | None = None,
    k_step: Sequence[int] | None = None,
    window: Sequence[tuple[int | None, int | None]] | None = None,
    neighborhood: Sequence[int] | None = None,
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: Literal[False] = False,
) -> A: ...
@overload
def relative_attention_nd(
    q: A,
    k: Array,
    v: Array,
    tables: Sequence[Array | None] | None = None,
    *,
    q_grid: Sequence[int],
    k_grid: Sequence[int],
    spans: Sequence[Span | None] | None = None,
    rel_bias: Array | None = None,
    prefix: tuple[int, int] = (0, 0),
    prefix_bias: Array | None = None,
    offset: Sequence[int] | None = None,
    q_step: Sequence[int] | None = None,
    k_step: Sequence[int] | None = None,
    window: Sequence[tuple[int | None, int | None]] | None = None,
    neighborhood: Sequence[int] | None = None,
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: Literal[True],
) -> tuple[A, A]: ...
@overload
def relative_attention_nd(
    q: A,
    k: Array,
    v: Array,
    tables: Sequence[Array | None] | None = None,
    *,
    q_grid: Sequence[int],
    k_grid: Sequence[int],
    spans: Sequence[Span | None] | None = None,
    rel_bias: Array | None = None,
    prefix: tuple[int, int] = (0, 0),
    prefix_bias: Array | None = None,
    offset: Sequence[int] | None = None,
    q_step: Sequence[int] | None = None,
    k_step: Sequence[int] | None = None,
    window: Sequence[tuple[int | None, int | None]] | None = None,
    neighborhood: Sequence[int] | None = None,
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: bool,
) -> A | tuple[A, A]: ...
def relative_attention_vjp(
    d_out: A,
    q: Array,
    k: Array,
    v: Array,
    rel_k: Array | None = None,
    span: Span | None = None,
    *,
    rel_v: Array | None = None,
    rel_bias: Array | None = None,
    rel_q: Array | None = None,
    key_table: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: Array | None = None,
    segments: Array | tuple[Array, Array] | None = None,
    sinks: Array | None = None,
    offset: int | Sequence[int] | Array | None = None,
    positions: tuple[Array, Array] | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    chunk_size: int | None = None,
    impl: Literal["auto", "portable", "native"] = "auto",
    out: Array | None = None,
    lse: Array | None = None,
    d_lse: Array | None = None,
) -> _Gradients[A]: ...
def relative_logits(
    q: A,
    table: Array,
    span: Span | None = None,
    *,
    n_keys: int | None = None,
    n_queries: int | None = None,
    offset: int | Sequence[int] | Array | None = None,
    causal: bool = False,
    side: Literal["query", "key"] = "query",
    positions: tuple[Array, Array] | None = None,
) -> A: ...
def relative_logits_2d(
    q: A,
    table_h: Array,
    table_w: Array,
    *,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    span_h: Span | None = None,
    span_w: Span | None = None,
    offset: tuple[int, int] | None = None,
    q_step: tuple[int, int] = (1, 1),
    k_step: tuple[int, int] = (1, 1),
) -> A: ...
def relative_logits_nd(
    q: A,
    tables: Sequence[Array | None],
    *,
    q_grid: Sequence[int],
    k_grid: Sequence[int],
    spans: Spans = None,
    offset: Sequence[int] | None = None,
    q_step: Sequence[int] | None = None,
    k_step: Sequence[int] | None = None,
) -> A: ...
def relative_values(
    weights: A,
    table: Array,
    span: Span | None = None,
    *,
    offset: int | Sequence[int] | Array | None = None,
    causal: bool = False,
) -> A: ...
def resize_table(
    table: A,
    rows: int,
    *,
    method: Literal["linear", "cubic"] = "linear",
    align_corners: bool = False,
    axis: int = -2,
) -> A: ...
def sinusoidal_table(
    span: Span,
    dim: int,
    *,
    xp: Any,
    dtype: Any = None,
    order: Literal["halves", "interleaved"] = "halves",
    direction: Literal["past", "future"] = "past",
    base: float = 10000.0,
) -> Array: ...
def skew(x: A) -> A: ...
def t5_buckets(span: Span, *, num_buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, ...]: ...
def toeplitz(
    bias: A,
    span: Span | None = None,
    *,
    n_queries: int,
    n_keys: int,
    offset: int | None = None,
    causal: bool = False,
) -> A | Any: ...
def toeplitz_2d(
    bias: A,
    span_h: Span | None = None,
    span_w: Span | None = None,
    *,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    offset: tuple[int, int] | None = None,
) -> A | Any: ...
def toeplitz_nd(
    bias: A,
    spans: Spans = None,
    *,
    q_grid: Sequence[int],
    k_grid: Sequence[int],
    offset: Sequence[int] | None = None,
) -> A | Any: ...
def unskew(s: A) -> A: ...

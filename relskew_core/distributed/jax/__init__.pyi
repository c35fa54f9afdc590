# Written by tests/support/stubs.py from the signatures that the functions have.

from collections.abc import Sequence
from typing import Literal, TypeVar, overload
from relskew_core._array.typing import Array
from relskew_core._positions.span import Span

__all__ = [
    "ring_attention",
]

A = TypeVar("A")

@overload
def ring_attention(
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
    offset: int | Sequence[int] | Array | None = None,
    positions: tuple[Array, Array] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: Array | None = None,
    segments: Array | tuple[Array, Array] | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    chunk_size: int | None = None,
    impl: Literal["auto", "portable", "native"] = "auto",
    axis_name: str,
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous",
    return_lse: Literal[False] = False,
) -> A: ...
@overload
def ring_attention(
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
    offset: int | Sequence[int] | Array | None = None,
    positions: tuple[Array, Array] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: Array | None = None,
    segments: Array | tuple[Array, Array] | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    chunk_size: int | None = None,
    impl: Literal["auto", "portable", "native"] = "auto",
    axis_name: str,
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous",
    return_lse: Literal[True],
) -> tuple[A, A]: ...
@overload
def ring_attention(
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
    offset: int | Sequence[int] | Array | None = None,
    positions: tuple[Array, Array] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    mask: Array | None = None,
    segments: Array | tuple[Array, Array] | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    chunk_size: int | None = None,
    impl: Literal["auto", "portable", "native"] = "auto",
    axis_name: str,
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous",
    return_lse: bool,
) -> A | tuple[A, A]: ...

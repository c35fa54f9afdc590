# Written by tests/support/stubs.py from the signatures that the functions have.

from collections.abc import Sequence
from torch import Tensor
from typing import Any, Literal, overload
from relskew_core._array.typing import Array
from relskew_core._positions.span import Span
from relskew_core.distributed.torch._style import ContextParallel as ContextParallel

__all__ = [
    "ContextParallel",
    "context_parallel_attention",
    "register_sharding",
    "shard_sequence",
    "unshard_sequence",
]

@overload
def context_parallel_attention(
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
    group: Any,
    method: Literal["ring", "gather", "heads"] = "ring",
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous",
    return_lse: Literal[False] = False,
    check: bool = True,
) -> Tensor: ...
@overload
def context_parallel_attention(
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
    group: Any,
    method: Literal["ring", "gather", "heads"] = "ring",
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous",
    return_lse: Literal[True],
    check: bool = True,
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
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
    group: Any,
    method: Literal["ring", "gather", "heads"] = "ring",
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous",
    return_lse: bool,
    check: bool = True,
) -> Tensor | tuple[Tensor, Tensor]: ...
def register_sharding() -> None: ...
def shard_sequence(
    x: Tensor,
    group: Any,
    *,
    axis: int = -2,
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous",
) -> Tensor: ...
def unshard_sequence(
    x: Tensor,
    group: Any,
    *,
    axis: int = -2,
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous",
) -> Tensor: ...

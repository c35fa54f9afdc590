# Written by tests/support/stubs.py from the signatures that the functions have.

from typing import Any, Literal, TypeVar
from relskew_core._array.typing import Array

__all__ = [
    "clipped_distances",
    "clipped_lookup",
    "diagonal_attention",
    "diagonal_logits",
    "diagonal_skew",
    "huang_attention",
    "huang_local_attention",
    "huang_logits",
    "huang_mask",
    "huang_skew",
    "huang_skew_local",
    "shaw_attention",
    "shaw_logits",
    "shaw_values",
]

A = TypeVar("A")

def clipped_distances(
    n_queries: int,
    n_keys: int,
    k: int,
    *,
    xp: Any,
    offset: int | None = None,
    device: Any = None,
) -> Array: ...
def clipped_lookup(table: A, n_queries: int, n_keys: int, *, offset: int | None = None) -> A: ...
def diagonal_attention(q: A, k: Array, v: Array, rel_k: Array) -> A: ...
def diagonal_logits(q: A, rel_k: Array, *, n_keys: int | None = None) -> A: ...
def diagonal_skew(x: A, n_keys: int | None = None) -> A: ...
def huang_attention(q: A, k: Array, v: Array, rel_k: Array) -> A: ...
def huang_local_attention(q: A, k: Array, v: Array, rel_k: Array, *, block_size: int) -> A: ...
def huang_logits(q: A, rel_k: Array) -> A: ...
def huang_mask(x: A) -> A: ...
def huang_skew(x: A) -> A: ...
def huang_skew_local(x: A) -> A: ...
def shaw_attention(
    q: A,
    k: Array,
    v: Array,
    rel_k: Array,
    rel_v: Array | None = None,
    *,
    form: Literal["gather", "split"] = "gather",
    offset: int | None = None,
) -> A: ...
def shaw_logits(
    q: A,
    k: Array,
    rel_k: Array,
    *,
    form: Literal["gather", "split"] = "gather",
    offset: int | None = None,
) -> A: ...
def shaw_values(
    weights: A,
    v: Array,
    rel_v: Array,
    *,
    form: Literal["gather", "split"] = "gather",
    offset: int | None = None,
) -> A: ...

"""A call of every public function in torch at any length, and a value of each of their parameters."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import arange

import relskew_core
from relskew_core import BlockSpec, Span, init_weights

Given = dict[str, Any]
Made = Callable[[int], Given]

CLIP = Span.clipped(5)
SPEC = BlockSpec(8, 2, CLIP)
WEIGHTS = init_weights(SPEC, seed=0, xp=torch)
CAUSAL = BlockSpec(8, 2, Span.causal(99), causal=True)
CROSS = BlockSpec(8, 2, CLIP, cross=True)


def randn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rows(n: int) -> Any:
    return randn(3, 2, n, 4)


def always(given: Given) -> Made:
    return lambda n: given


def of_arrays(*names: str) -> Made:
    return lambda n: {name: rows(n) for name in names}


def of_results(n: int) -> Given:
    out, lse = relskew_core.relative_attention(*[rows(n)] * 3, return_lse=True)
    return {"out": out, "lse": lse}


def with_prefix(n: int) -> Given:
    return {**{name: rows(5 * n + 1) for name in "qkv"}, "prefix": (1, 1)}


def by_axes(of_two: Made, of_any: Made) -> dict[str, Made]:
    return {"_2d": of_two, "_nd": of_any}


def of_grids(n: int) -> Given:
    return {"q_grid": (n, 5), "k_grid": (n, 5)}


TABLES = by_axes(lambda n: {"table_h": randn(11, 4), "table_w": randn(11, 4), "span_h": CLIP, "span_w": CLIP},
                 lambda n: {"tables": (randn(11, 4), randn(11, 4)), "spans": (CLIP, CLIP)})  # fmt: skip
LOGITS = {axes: (lambda n, made=made: {"q": rows(5 * n), **of_grids(n), **made(n)}) for axes, made in TABLES.items()}
BIAS = by_axes(lambda n: {"bias": randn(2, 11, 11), "span_h": CLIP, "span_w": CLIP, **of_grids(n)},
               lambda n: {"bias": randn(2, 11, 11), "spans": (CLIP, CLIP), **of_grids(n)})  # fmt: skip

REQUIRED: dict[str, Made] = {
    "alibi_bias": lambda n: {"n_heads": 2, "span": Span.causal(n), "like": randn(1)},
    "attention_block": lambda n: {"x": randn(3, n, 8), "weights": WEIGHTS, "spec": SPEC},
    "attention_weights": of_arrays(*"qk"),
    "deberta_buckets": lambda n: {"span": CLIP, "position_buckets": 6, "max_distance": 10},
    "merge_attention": lambda n: {"outs": [randn(n, 4), randn(n, 4)], "lses": [randn(n), randn(n)]},
    "paged_attention": lambda n: {
        "q": rows(n), "k_pages": randn(40, 4, 2, 4), "v_pages": randn(40, 4, 2, 4),
        "page_table": arange(36).reshape(3, 12), "lengths": torch.tensor([n, n + 1, n + 2]),
    },
    "proximal_bias": lambda n: {"span": Span.full(n), "like": randn(1)},
    "relative_attention": of_arrays(*"qkv"),
    "relative_attention_2d": lambda n: {**{name: rows(5 * n) for name in "qkv"}, **of_grids(n)},
    "relative_attention_nd": lambda n: {**{name: rows(5 * n) for name in "qkv"}, **of_grids(n)},
    "relative_attention_vjp": of_arrays("d_out", *"qkv"),
    "relative_logits": lambda n: {"q": rows(n), "table": randn(11, 4), "span": CLIP, "n_keys": n},
    "relative_logits_2d": LOGITS["_2d"],
    "relative_logits_nd": LOGITS["_nd"],
    "relative_values": lambda n: {"weights": randn(3, 2, n, n), "table": randn(11, 4), "span": CLIP},
    "resize_table": lambda n: {"table": randn(n, 4), "rows": 2 * n + 1},
    "sinusoidal_table": lambda n: {"span": Span.full(n), "dim": 4, "xp": torch},
    "skew": lambda n: {"x": randn(3, n, 2 * n - 1)},
    "t5_buckets": lambda n: {"span": CLIP, "num_buckets": 8, "max_distance": 5, "bidirectional": True},
    "toeplitz": lambda n: {"bias": randn(2, 11), "span": CLIP, "n_queries": n, "n_keys": n},
    "toeplitz_2d": BIAS["_2d"],
    "toeplitz_nd": BIAS["_nd"],
    "unskew": lambda n: {"s": randn(3, n, n)},
}  # fmt: skip
"""A call of each function, with what it needs."""

NOT_COMPILED = {"init_weights"}  # functions that models call when they are made, and not in a program

OF_ANY_LENGTH: Given = {
    "align_corners": True, "axis": 0, "base": 100.0, "block_size": 4, "causal": True, "chunk_size": 12,
    "direction": "future", "dtype": torch.float64, "impl": "native", "method": "cubic", "neighborhood": (3, 2),
    "order": "interleaved", "return_lse": True, "softcap": 3.0, "window": (3, 1),
}  # fmt: skip
OPTIONS: dict[str, Made] = {
    **{name: always({name: x}) for name, x in OF_ANY_LENGTH.items()},
    "blocks_before": lambda n: {"block_size": 4, "blocks_before": 2},
    "d_lse": lambda n: {"d_lse": randn(3, 2, n)},
    "dropout": lambda n: {"dropout": 0.3, "seed": 4},
    "k_step": lambda n: {"q_step": (2, 1), "k_step": (2, 1)},
    "key_table": lambda n: {"key_table": randn(11, 4), "span": CLIP},
    "lse": of_results,
    "mask": lambda n: {"mask": randn(n, n) > -1},
    "offset": lambda n: {"offset": n},
    "out": of_results,
    "positions": lambda n: {"positions": (arange(n).flip(0), arange(n)), "causal": True},
    "prefix": with_prefix,
    "prefix_bias": lambda n: {**with_prefix(n), "prefix_bias": randn(2, 3)},
    "q_step": lambda n: {"q_step": (2, 1), "k_step": (2, 1)},
    "rel_bias": lambda n: {"rel_bias": randn(2, 11), "span": CLIP},
    "rel_k": lambda n: {"rel_k": randn(11, 4), "span": CLIP},
    "rel_q": lambda n: {"rel_q": rows(n), "rel_k": randn(11, 4), "span": CLIP},
    "rel_scale": lambda n: {"rel_scale": randn(2), "rel_k": randn(11, 4), "span": CLIP},
    "rel_v": lambda n: {"rel_v": randn(11, 4), "span": CLIP},
    "scale": lambda n: {"scale": randn(2)},
    "seed": lambda n: {"dropout": 0.3, "seed": torch.tensor(4)},
    "segments": lambda n: {"segments": arange(n) // 6},
    "sinks": lambda n: {"sinks": randn(2)},
    "span": lambda n: {"rel_k": randn(2 * n - 1, 4), "span": Span.full(n)},
    "xp": lambda n: {"like": None, "xp": torch},
}
"""A value of each option, with what it needs."""

OF_GRIDS: dict[str, Made] = {
    "mask": lambda n: {"mask": randn(5 * n, 5 * n) > -1},
    "offset": lambda n: {"offset": (n, 2), "window": ((None, None), (3, None))},
    "rel_bias": lambda n: {"rel_bias": randn(2, 2 * n - 1, 9)},
    "rel_scale": lambda n: {"rel_scale": randn(2), "rel_bias": randn(2, 2 * n - 1, 9)},
    "window": lambda n: {"window": ((1, 2), (None, 1))},
}
SHIFTED: dict[str, Made] = {"offset": lambda n: {"offset": (n, 2)}}
AXES: dict[str, dict[str, Made]] = {
    "_2d": {
        "span_h": lambda n: {**TABLES["_2d"](n), "table_h": randn(2 * n - 1, 4), "span_h": Span.full(n)},
        "span_w": TABLES["_2d"], "table_h": TABLES["_2d"], "table_w": TABLES["_2d"],
    },
    "_nd": {
        "spans": lambda n: {"tables": (randn(2 * n - 1, 4), None), "spans": (Span.full(n), None)},
        "tables": lambda n: {"tables": (randn(2 * n - 1, 4), randn(9, 4))},
    },
}  # fmt: skip
OTHERWISE: dict[str, dict[str, Made]] = {
    "attention_block": {"mask": lambda n: {"mask": randn(n, n) > -1},
                        "memory": lambda n: {"memory": randn(3, n + 7, 8), "spec": CROSS},
                        "past": lambda n: {"past": (rows(n), rows(n)), "spec": CAUSAL,
                                           "weights": init_weights(CAUSAL, seed=0, xp=torch)}},
    "attention_weights": {"chunk_size": lambda n: {"chunk_size": 4}},
    "paged_attention": {"causal": lambda n: {"causal": False}, "impl": lambda n: {"impl": "portable"},
                        "span": OPTIONS["rel_k"]},
    "relative_attention_2d": OF_GRIDS | AXES["_2d"],
    "relative_attention_nd": OF_GRIDS | AXES["_nd"],
    "relative_logits": {"n_queries": lambda n: {"n_keys": None, "n_queries": n + 7, "side": "key", "offset": 0},
                        "positions": lambda n: {"positions": (arange(n).flip(0), arange(n + 7)), "n_keys": None},
                        "side": lambda n: {"n_keys": None, "n_queries": n, "side": "key"},
                        "span": lambda n: {"table": randn(2 * n - 1, 4), "span": Span.full(n)}},
    "relative_logits_2d": SHIFTED,
    "relative_logits_nd": SHIFTED,
    "toeplitz_2d": SHIFTED,
    "toeplitz_nd": SHIFTED,
}  # fmt: skip
"""Options that other functions take in another form."""


def cases() -> list[tuple[str, str]]:
    """List the functions, each with nothing else and with each parameter that its call does not pass already."""
    found = []
    for name, required in REQUIRED.items():
        passed = required(9)
        parameters = inspect.signature(getattr(relskew_core, name)).parameters
        found += [(name, option) for option in ("", *parameters) if option not in passed]
    return found


def arguments(name: str, option: str, n: int) -> Given:
    required = REQUIRED[name](n)
    if not option:
        return required
    return {**required, **(OTHERWISE.get(name, {}).get(option) or OPTIONS[option])(n)}

"""Every bad argument of every public function is refused, in a message that names it."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import array_api_strict
import numpy as np
import pytest

import relskew_core
from relskew_core import BlockSpec, Span, init_weights

H, N, D = 2, 3, 4  # heads, length, width


class Bad:
    """Values of one argument, or of several that do not fit together, that a function must refuse."""

    def __init__(self, name: str, *values: Any, **also: Any) -> None:
        self.name, self.values, self.also = name, values, also


def zeros(*shape: int, dtype: Any = float) -> Any:
    return np.zeros(shape, dtype=dtype)


Q, TABLE, GRID = zeros(H, N, D), zeros(5, D), zeros(H, 6, D)
NOT_ARRAYS = ("text", [[1.0]], 1.0, None, np.ma.zeros((H, N, D)))
STEPS = np.arange(N)
NOT_INTS = (1.5, "1", True)
NOT_COMPARED = array_api_strict.zeros(())  # with strings
SPEC = BlockSpec(4, 2, Span.causal(8), causal=True)
CROSS = BlockSpec(4, 2, Span.clipped(2), cross=True)
WEIGHTS = init_weights(SPEC, seed=0, dtype=np.float64)
CROSS_WEIGHTS = init_weights(CROSS, seed=0, dtype=np.float64)
PAST = zeros(1, H, 2, 2)

SPANS = [
    Bad("span", "full", (2, 2)),
    Bad("offset", *NOT_INTS, [1, 2], zeros(3), zeros(3, dtype=int), 2**62, -(2**70)),
    Bad("causal", 1, "yes", None, np),
]
ATTENTION = [
    Bad("q", *NOT_ARRAYS, zeros(D), zeros(H, N, D, dtype=int), zeros(H, N, D, dtype=complex)),
    Bad("q", zeros(H, N, 0), k=zeros(H, N, 0)),
    Bad("k", *NOT_ARRAYS, zeros(H, N, D + 1), zeros(N, D), zeros(3, N, D), zeros(0, N, D), zeros(1, H, N, D)),
    Bad("k", zeros(H, N, D, dtype=np.float32)),
    Bad("v", *NOT_ARRAYS, zeros(H, N + 1, D), zeros(N, D), zeros(1, N, D), zeros(H, N, D, dtype=np.float16)),
    Bad("rel_k", "text", zeros(D), zeros(1, H, 5, D), zeros(5, D + 1), zeros(3, 5, D), zeros(0, D), zeros(4, D)),
    Bad("rel_k", zeros(3, D), TABLE, span=Span.full(4)),
    Bad("rel_k", zeros(2, 5, D), q=zeros(N, D), k=zeros(N, D), v=zeros(N, D)), Bad("span", None, rel_k=zeros(4, D)),
    Bad("rel_bias", zeros(2, 5), q=zeros(4, N, D)), Bad("rel_bias", zeros(3, 1), rel_k=None, span=Span(0, 0, "clip")),
    Bad("offset", "1", positions=(STEPS, STEPS)),
    Bad("rel_v", "text", zeros(D), zeros(5, D + 1), zeros(3, 5, D), zeros(7, D), zeros(5, D, dtype=np.float32)),
    Bad("rel_bias", "text", zeros(1, H, 5), zeros(3, 5), zeros(7), zeros(5, dtype=int)),
    Bad("rel_q", "text", zeros(H, N + 1, D), zeros(N, D), zeros(H, N, D, dtype=np.float32)),
    Bad("rel_q", zeros(H, N, D), rel_k=None),
    Bad("key_table", "text", zeros(D), zeros(5, D + 1), zeros(3, 5, D), zeros(7, D), zeros(5, D, dtype=np.float32)),
    Bad("rel_k", zeros(5, D), rel_q=zeros(H, N, D + 1)), *SPANS, Bad("window", 3, "3", (1,), (1, 2, 3), {1, 2}),
    Bad("window", (-1, 0), (0, 1.5), (True, None)), Bad("block_size", *NOT_INTS, 0, -1),
    Bad("mask", "text", zeros(H, N, N + 1), zeros(3, N, N), zeros(1, H, N, N), zeros(N, N, dtype=int)),
    Bad("mask", zeros(N, N, dtype=np.float32)), Bad("blocks_before", *NOT_INTS, -1, block_size=2),
    Bad("blocks_before", 1),
    Bad("segments", "text", 3, zeros(N), zeros(N, dtype=bool), zeros(N - 1, dtype=int), zeros(H, N, dtype=int)),
    Bad("segments", (zeros(N, dtype=int),), (zeros(N, dtype=int), zeros(N)), (zeros(N, dtype=int), None)),
    Bad("segments", zeros(N, dtype=int), k=zeros(H, N - 1, D), v=zeros(H, N - 1, D), offset=0),
    Bad("offset", None, k=zeros(H, N - 1, D), v=zeros(H, N - 1, D)),
    Bad("offset", None, k=zeros(H, N - 1, D), v=zeros(H, N - 1, D), rel_k=None, causal=True),
    Bad("offset", None, k=zeros(H, N - 1, D), v=zeros(H, N - 1, D), rel_k=None, window=(1, None)),
    Bad("offset", None, k=zeros(H, N - 1, D), v=zeros(H, N - 1, D), rel_k=None, block_size=2),
    Bad("positions", zeros(N, dtype=int), "text", (np.arange(N),), (np.arange(N), zeros(N)), (np.arange(N + 1),) * 2),
    Bad("rel_k", TABLE, positions=(np.arange(N) * 2, np.arange(N))),
    Bad("offset", 1, [1, 2], positions=(np.arange(N), np.arange(N))),
    Bad("sinks", "text", 1.0, zeros(H + 1), zeros(1, H), zeros(H, dtype=np.float32), zeros(H, dtype=int)),
    Bad("sinks", zeros(N, H), zeros(1, N), zeros(1, H, N), zeros(H, N, dtype=np.float32)),
    Bad("dropout", "1", True, -0.1, 1.0, 2, np.nan, seed=0),
    Bad("seed", None, 1.5, "1", -1, zeros(1, dtype=int), zeros(), dropout=0.5),
    Bad("scale", "1", True, np.inf, np.nan, 10**400, [1.0], zeros(H + 1), zeros(H, dtype=np.float32)),
    Bad("rel_scale", "1", False, -np.inf, np.nan, zeros(H + 1), zeros(H, 1)),
    Bad("softcap", "1", True, 0.0, -1.0, np.nan, np.inf), Bad("chunk_size", *NOT_INTS, 0, -4),
    Bad("impl", "fast", None, 1),
]  # fmt: skip

GRIDS = [
    Bad("q_grid", 6, (2, 2.5), (0, 3)), Bad("k_grid", 6, (6,), (2, 2.5), (0, 3)), Bad("offset", 1, (1,), (0.5, 0)),
]  # fmt: skip
GRIDS_2D = [*GRIDS, Bad("q_grid", (6,)), Bad("span_h", "full"), Bad("span_w", "full")]
GRIDS_ND = [*GRIDS, Bad("q_grid", ()), Bad("spans", "full", ["full", None], [None])]
GRID_STEPS = [
    Bad("offset", None, q_grid=(1, 6)),
    Bad("q_step", 1, (1,), (1, 1.5), (0, 1)),
    Bad("k_step", 1, (1,), (1, 1.5), (0, 1)),
]
GRID_ATTENTION = [
    *GRID_STEPS, Bad("q", *NOT_ARRAYS, zeros(D), zeros(H, 5, D)),
    Bad("k", *NOT_ARRAYS, zeros(H, 5, D), zeros(H, 6, D + 1), zeros(6, D)),
    Bad("v", *NOT_ARRAYS, zeros(H, 5, D), zeros(6, D)), Bad("rel_bias", "text", zeros(5), zeros(3, 3, 5), zeros(4, 5)),
    Bad("prefix", 1, (1,), (-1, 0), (1.5, 0)), Bad("window", 1, (1, 1), ((1, 1),)),
    Bad("window", ((0, 0), (0, 0)), neighborhood=(1, 1)), Bad("neighborhood", 3, (1,), (0, 1), (1, 1.5), (3, 3)),
    Bad("mask", "text", zeros(H, 6, 5), zeros(6, 6, dtype=int)), Bad("scale", "1", np.nan),
    Bad("rel_scale", "1", np.inf), Bad("chunk_size", *NOT_INTS, 0), Bad("return_lse", 1, None),
]  # fmt: skip
GRID_BIASES = [
    Bad("bias", *NOT_ARRAYS, zeros(5), zeros(H, 1, 5), zeros(H, 3, 3), zeros(H, 3, 4)),
    Bad("offset", None, k_grid=(2, 2)),
]

NOT_TABLES = (
    1, "text", [TABLE], ["text", TABLE], [zeros(3, D + 1), TABLE], [zeros(3, 3, D), TABLE], [zeros(4, D), TABLE],
    [zeros(D), TABLE], [zeros(1, D), TABLE],
)  # fmt: skip
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[Bad]]] = {
    "Span": (Span, {"left": 1, "right": 1},
             [Bad("left", *NOT_INTS, -1), Bad("right", *NOT_INTS, None, -1), Bad("beyond", "extend", None, 1)]),
    "Span.causal": (Span.causal, {"n": 3}, [Bad("n", *NOT_INTS, 0), Bad("beyond", "extend", None, 1)]),
    "Span.full": (Span.full, {"n": 3}, [Bad("n", *NOT_INTS, 0), Bad("beyond", "extend", None, 1)]),
    "Span.clipped": (Span.clipped, {"k": 3}, [Bad("k", *NOT_INTS, -1)]),
    "BlockSpec": (BlockSpec, {"embed_dim": 4, "num_heads": 2, "span": Span.full(3)},
                  [Bad("embed_dim", *NOT_INTS, None, 0, 5), Bad("num_heads", *NOT_INTS, None, 0, 3),
                   Bad("span", None, 3, "full"), Bad("num_kv_heads", *NOT_INTS, 0, 3), Bad("head_dim", *NOT_INTS, 0),
                   Bad("causal", 1, None), Bad("cross", 0, None), Bad("cross", True, causal=True, block_size=2),
                   Bad("window", 1, (1, -1), (None,)), Bad("block_size", *NOT_INTS, 0, causal=True),
                   Bad("block_size", 2), Bad("blocks_before", *NOT_INTS, -1, block_size=2), Bad("blocks_before", 1),
                   Bad("cross", True, block_size=2, blocks_before=1), Bad("sinks", 1, None), Bad("shared_table", 1),
                   Bad("rel_values", "no"), Bad("rel_keys", 0, None),
                   Bad("num_buckets", *NOT_INTS, 0, rel_bias="t5", max_distance=8),
                   Bad("max_distance", *NOT_INTS, 0, rel_bias="t5", num_buckets=8),
                   Bad("rel_bias", None, 1, NOT_COMPARED), Bad("bias", None)]),
    "skew": (relskew_core.skew, {"x": zeros(3, 5)}, [Bad("x", *NOT_ARRAYS, zeros(5), zeros(3, 2), zeros(0, 5))]),
    "unskew": (relskew_core.unskew, {"s": zeros(3, 5)}, [Bad("s", *NOT_ARRAYS, zeros(5), zeros(3, 0), zeros(0, 5))]),
    "relative_logits": (
        relskew_core.relative_logits, {"q": Q, "table": TABLE, "n_keys": N},
        [Bad("q", *NOT_ARRAYS, zeros(D), zeros(H, N, D, dtype=int)),
         Bad("table", *NOT_ARRAYS[:-1], zeros(D), zeros(5, D + 1), zeros(3, 5, D), zeros(4, D), zeros(3, D)),
         Bad("table", zeros(5, D, dtype=np.float32), zeros(0, D), zeros(1, H, 5, D)), Bad("n_keys", *NOT_INTS, None, 0),
         Bad("table", TABLE, n_keys=N + 1, offset=0), Bad("offset", None, n_keys=N - 1),
         Bad("offset", None, n_keys=None, n_queries=N + 1, side="key"), Bad("n_queries", N, 0),
         Bad("n_queries", N, positions=(STEPS, STEPS), n_keys=None),
         Bad("n_queries", *NOT_INTS, None, 0, side="key", n_keys=None), Bad("n_keys", N, side="key"),
         Bad("side", "both", None, 1),
         Bad("positions", 3, (STEPS,), "text", (STEPS, zeros(N)), (np.arange(N + 1), STEPS), n_keys=None),
         Bad("positions", (STEPS, zeros(H, N, dtype=int)), n_keys=None), Bad("n_keys", N, positions=(STEPS, STEPS)),
         Bad("offset", 1, [1, 2], positions=(STEPS, STEPS), n_keys=None),
         Bad("table", TABLE, positions=(STEPS, STEPS * 2), n_keys=None), *SPANS],
    ),
    "relative_values": (relskew_core.relative_values, {"weights": zeros(H, N, N), "table": TABLE},
                        [Bad("weights", *NOT_ARRAYS, zeros(N), zeros(H, N, 0), zeros(N, N, dtype=bool)),
                         Bad("offset", None, weights=zeros(H, N, N - 1)),
                         Bad("table", *NOT_ARRAYS[:-1], zeros(D), zeros(3, 5, D), zeros(4, D), zeros(3, D)), *SPANS]),
    "relative_attention": (relskew_core.relative_attention, {"q": Q, "k": Q, "v": Q, "rel_k": TABLE},
                           [*ATTENTION, Bad("return_lse", 1, "yes", None, np.zeros(()))]),
    "attention_weights": (
        relskew_core.attention_weights, {"q": Q, "k": Q, "rel_k": TABLE},
        [bad for bad in ATTENTION if not {bad.name, *bad.also} & {"v", "rel_v", "dropout", "seed", "impl"}],
    ),
    "relative_attention_vjp": (
        relskew_core.relative_attention_vjp, {"d_out": Q, "q": Q, "k": Q, "v": Q, "rel_k": TABLE},
        [*ATTENTION, Bad("d_out", *NOT_ARRAYS, zeros(N, D), zeros(H, N, D + 1), zeros(H, N, D, dtype=np.float32)),
         Bad("out", "text", zeros(N, D), zeros(H, N, D, dtype=np.float32)),
         Bad("lse", "text", zeros(H, N, 1), zeros(H, N, dtype=int)),
         Bad("d_lse", "text", zeros(H, N, 1), zeros(H, N, dtype=int))],
    ),
    "merge_attention": (relskew_core.merge_attention, {"outs": [Q, Q], "lses": [zeros(H, N)] * 2},
                        [Bad("outs", [], [Q], [Q, zeros(H, N, D + 1)], ["text", Q], [zeros(D), zeros(D)],
                             [zeros(H, N, D, dtype=int)] * 2),
                         Bad("outs", None, 1, zeros(), memoryview(Q)), Bad("lses", None, 1, zeros(), memoryview(Q)),
                         Bad("lses", [], [zeros(H, N)], [zeros(H, N), zeros(N)], ["text", zeros(H, N)],
                             [zeros(H, N, dtype=int)] * 2)]),
    "relative_attention_2d": (
        relskew_core.relative_attention_2d,
        {"q": GRID, "k": GRID, "v": GRID, "table_h": zeros(3, D), "table_w": TABLE, "q_grid": (2, 3), "k_grid": (2, 3)},
        [*GRIDS_2D, *GRID_ATTENTION,
         Bad("table_h", "text", None, zeros(3, D + 1), zeros(3, 3, D), zeros(4, D), zeros(D), zeros(1, D)),
         Bad("table_w", "text", None, zeros(5, D + 1), zeros(3, 5, D), zeros(6, D), zeros(D), zeros(3, D)),
         Bad("prefix_bias", "text", zeros(2), zeros(3, 3), prefix=(1, 1), **dict.fromkeys("qkv", zeros(H, 7, D))),
         Bad("q_step", (2, 1), rel_bias=zeros(3, 5), table_h=None, table_w=None),
         Bad("k_step", (1, 2), rel_bias=zeros(3, 5), table_h=None, table_w=None)],
    ),
    "relative_attention_nd": (relskew_core.relative_attention_nd,
                              {"q": GRID, "k": GRID, "v": GRID, "tables": [zeros(3, D), TABLE], "q_grid": (2, 3),
                               "k_grid": (2, 3)},
                              [*GRIDS_ND, *GRID_ATTENTION, Bad("tables", *NOT_TABLES),
                               Bad("prefix_bias", "text", zeros(2), zeros(3, 3)),
                               Bad("q_step", (2, 1), rel_bias=zeros(3, 5), tables=None)]),
    "relative_logits_nd": (relskew_core.relative_logits_nd,
                           {"q": GRID, "tables": [zeros(3, D), TABLE], "q_grid": (2, 3), "k_grid": (2, 3)},
                           [*GRIDS_ND, *GRID_STEPS, Bad("q", *NOT_ARRAYS, zeros(D), zeros(H, 5, D)),
                            Bad("tables", *NOT_TABLES, [None, None])]),
    "toeplitz_nd": (relskew_core.toeplitz_nd, {"bias": zeros(H, 3, 5), "q_grid": (2, 3), "k_grid": (2, 3)},
                    [*GRIDS_ND, *GRID_BIASES]),
    "paged_attention": (relskew_core.paged_attention,
                        {"q": zeros(2, H, N, D), "k_pages": zeros(4, 2, 1, D), "v_pages": zeros(4, 2, 1, D),
                         "rel_k": TABLE, "span": Span.causal(5), "page_table": [[0, 3], [1, -1]], "lengths": [4, 2]},
                        [Bad("q", *NOT_ARRAYS, zeros(H, N, D)),
                         Bad("k_pages", *NOT_ARRAYS, zeros(4, 2, D), zeros(4, 0, 1, D), zeros(4, 2, 3, D),
                             zeros(4, 2, 1, D + 1)),
                         Bad("v_pages", *NOT_ARRAYS, zeros(4, 2, D), zeros(4, 3, 1, D), zeros(3, 2, 1, D)),
                         Bad("rel_k", "text", zeros(4, D), zeros(D)), Bad("span", "full"),
                         Bad("page_table", None, 1, [0, 1], [[0, 3], [1]], [0, [1, 2]], zeros(2, 2)),
                         Bad("lengths", None, 1, [1], [4, 5], [-1, 2], [1.5, 2], zeros(2), zeros(3, dtype=int)),
                         Bad("causal", 1, None), Bad("window", 1, (1,), (-1, 0)), Bad("rel_v", "text", zeros(4, D)),
                         Bad("rel_bias", "text", zeros(4)), Bad("rel_q", "text", zeros(2, H, N, D + 1)),
                         Bad("key_table", "text", zeros(4, D)), Bad("sinks", "text", zeros(3)),
                         Bad("scale", "1", np.nan), Bad("rel_scale", "1", np.inf), Bad("softcap", "1", 0),
                         Bad("chunk_size", *NOT_INTS, 0), Bad("return_lse", 1, None), Bad("impl", "fast", None)]),
    "relative_logits_2d": (relskew_core.relative_logits_2d,
                           {"q": GRID, "table_h": zeros(3, D), "table_w": TABLE, "q_grid": (2, 3), "k_grid": (2, 3)},
                           [*GRIDS_2D, *GRID_STEPS, Bad("q", *NOT_ARRAYS, zeros(D), zeros(H, 5, D)),
                            Bad("table_h", "text", zeros(3, D + 1), zeros(3, 3, D), zeros(4, D), zeros(D), zeros(1, D)),
                            Bad("table_w", "text", zeros(5, D + 1), zeros(3, 5, D), zeros(6, D), zeros(D),
                                zeros(3, D))]),
    "toeplitz": (relskew_core.toeplitz, {"bias": zeros(H, 5), "n_queries": N, "n_keys": N},
                 [Bad("bias", *NOT_ARRAYS, zeros(H, 0), zeros(H, 3)), Bad("n_queries", *NOT_INTS, None, 0),
                  Bad("n_keys", *NOT_INTS, None, 0), Bad("span", "full"), Bad("span", None, bias=zeros(H, 4)),
                  Bad("offset", None, n_keys=N - 1), Bad("offset", *NOT_INTS, [1, 2], zeros(3), zeros(3, dtype=int)),
                  Bad("causal", 1, None)]),
    "toeplitz_2d": (relskew_core.toeplitz_2d, {"bias": zeros(H, 3, 5), "q_grid": (2, 3), "k_grid": (2, 3)},
                    [*GRIDS_2D, *GRID_BIASES]),
    "t5_buckets": (relskew_core.t5_buckets,
                   {"span": Span.full(3), "num_buckets": 8, "max_distance": 16, "bidirectional": True},
                   [Bad("span", None, 3), Bad("num_buckets", *NOT_INTS, None, 0, 2, 3),
                    Bad("max_distance", *NOT_INTS, None, 0, 2), Bad("bidirectional", 1, None)]),
    "deberta_buckets": (relskew_core.deberta_buckets, {"span": Span.full(3), "position_buckets": 8, "max_distance": 16},
                        [Bad("span", None, 3), Bad("position_buckets", *NOT_INTS, None, 0),
                         Bad("position_buckets", 3, max_distance=9), Bad("max_distance", *NOT_INTS, 0, 5)]),
    "alibi_bias": (relskew_core.alibi_bias, {"n_heads": 2, "span": Span.full(3), "xp": np},
                   [Bad("n_heads", *NOT_INTS, None, 0), Bad("span", None, 3), Bad("xp", None, "numpy"),
                    Bad("like", 3, "q", xp=None)]),
    "proximal_bias": (relskew_core.proximal_bias, {"span": Span.full(3), "xp": np},
                      [Bad("span", None, 3), Bad("xp", None, "numpy"), Bad("like", 3, "q", xp=None)]),
    "sinusoidal_table": (relskew_core.sinusoidal_table, {"span": Span.full(3), "dim": 4, "xp": np},
                         [Bad("span", None, 3), Bad("dim", *NOT_INTS, None, 0, 3), Bad("xp", None, "numpy"),
                          Bad("order", "pairs", None), Bad("direction", "neither", None),
                          Bad("base", "1", True, 0.0, np.nan)]),
    "resize_table": (relskew_core.resize_table, {"table": TABLE, "rows": 7},
                     [Bad("table", *NOT_ARRAYS, zeros(5), zeros(0, D), zeros(5, D, dtype=int)),
                      Bad("table", TABLE, axis=2), Bad("rows", *NOT_INTS, None, 0), Bad("method", "nearest", None),
                      Bad("align_corners", 1, None), Bad("axis", *NOT_INTS, None)]),
    "init_weights": (init_weights, {"spec": SPEC, "seed": 0},
                     [Bad("spec", None, {"embed_dim": 4}), Bad("seed", None, *NOT_INTS), Bad("xp", "numpy", 1)]),
    "attention_block": (relskew_core.attention_block, {"x": zeros(1, N, 4), "weights": WEIGHTS, "spec": SPEC},
                        [Bad("x", *NOT_ARRAYS, zeros(4), zeros(1, N, 5), zeros(1, N, 4, dtype=int)),
                         Bad("weights", None, list(WEIGHTS), {}, {**WEIGHTS, "more": TABLE}),
                         Bad("weights", {**WEIGHTS, "rel_k": None}, {**WEIGHTS, "q_proj.bias": zeros(3)}),
                         Bad("weights", {**WEIGHTS, "rel_k": WEIGHTS["rel_k"].astype(np.float32)}),
                         Bad("spec", None, "block"), Bad("memory", zeros(1, N, 4)),
                         Bad("memory", None, zeros(2, N, 4), zeros(1, N, 5), "text", spec=CROSS, weights=CROSS_WEIGHTS),
                         Bad("past", PAST, (PAST,), (PAST, zeros(1, H, 3, 2)), (PAST, None), (PAST, zeros(2, H, 2, 2))),
                         Bad("past", (PAST, PAST.astype(np.float32))),
                         Bad("past", (PAST, PAST), spec=CROSS, weights=CROSS_WEIGHTS, memory=zeros(1, N, 4)),
                         Bad("mask", "text", zeros(N, N + 1), zeros(N, N, dtype=int))]),
}  # fmt: skip
UNCHECKED = {"dtype"}
"""Arguments that are the array library's own to refuse."""


def bad_calls() -> list[Any]:
    found, count = [], Counter[str]()
    for function, (call, arguments, bads) in CALLS.items():
        for bad in bads:
            for value in bad.values:
                case = f"{function}-{bad.name}"
                count[case] += 1
                given = {**arguments, **bad.also, bad.name: value}
                found.append(pytest.param(call, given, bad.name, id=f"{case}-{count[case]}"))
    return found


@pytest.mark.parametrize(("call", "arguments", "name"), bad_calls())
def test_a_bad_argument_is_named(call: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"`{re.escape(name)}(\[.*\])?`") as caught:
        call(**arguments)
    _, got, came = str(caught.value).rpartition(", got ")
    named = {words.partition("[")[0] for words in str(caught.value).split("`")[1::2] if not set(words) & set(".=")}
    assert named <= {*inspect.signature(call).parameters, "q", "span"}
    several = re.fullmatch(r"\d+ and \d+|.*=.*", came)
    assert not got or several or came in {told for value in arguments.values() for told in tellings(value)}


def tellings(value: Any) -> Iterator[str]:
    """Every way in which an error may tell an argument, or an item of it."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    for each in (value, *items):
        kind, text = type(each).__name__, repr(each)
        dtype, shape = (getattr(each, name, None) for name in ("dtype", "shape"))
        yield from (text, str(dtype), str(shape), f"{kind} of dtype {dtype} and shape {shape}")
        short = " ".join(text.split())
        yield f"{kind} {short}" if len(short) <= 60 else f"{kind} {short[:60]}…"
        yield f"{kind} of {len(each)}" if isinstance(each, (dict, list, tuple, set, str)) else kind


@pytest.mark.parametrize("function", list(CALLS))
def test_the_good_call_is_good(function: str) -> None:
    call, arguments, _ = CALLS[function]
    call(**arguments)


def test_a_table_of_one_head_goes_where_there_is_no_heads_axis() -> None:
    q = np.ones((N, D))
    one, none = (relskew_core.relative_attention(q, q, q, table) for table in (np.ones((1, 5, D)), np.ones((5, D))))
    np.testing.assert_array_equal(one, none)


@pytest.mark.parametrize("function", list(CALLS))
def test_every_argument_can_be_bad(function: str) -> None:
    call, _, bads = CALLS[function]
    assert {bad.name for bad in bads} | UNCHECKED >= set(inspect.signature(call).parameters)


def test_every_public_function_is_here() -> None:
    assert {name.partition(".")[0] for name in CALLS} == set(relskew_core.__all__)


OPTIONAL = {  # arrays that fit those of the valid calls
    "rel_v": TABLE, "rel_bias": zeros(5), "rel_q": Q, "key_table": TABLE, "mask": zeros(N, N), "segments": STEPS,
    "sinks": zeros(H), "scale": zeros(H), "rel_scale": zeros(H), "positions": (STEPS, STEPS),
    "out": Q, "lse": zeros(H, N), "d_lse": zeros(H, N), "past": (PAST, PAST),
}  # fmt: skip


def companions() -> list[Any]:
    """Name every array, and every item of a pair, that must be of the library of another argument."""
    found = []
    for function, (call, arguments, _) in CALLS.items():
        own = {name: x for name, x in {**OPTIONAL, **arguments}.items() if name in inspect.signature(call).parameters}
        first = next(iter(arguments))
        for name, x in own.items() if np.shape(arguments[first]) else []:
            if isinstance(x, np.ndarray) and name != first:
                found.append(pytest.param(function, name, None, id=f"{function}-{name}"))
            elif isinstance(x, (tuple, list)) and isinstance(x[0], np.ndarray):
                found += [pytest.param(function, name, place, id=f"{function}-{name}[{place}]") for place in (0, 1)]
    return found


@pytest.mark.parametrize(("function", "name", "place"), companions())
def test_an_array_of_another_library_is_named(function: str, name: str, place: int | None) -> None:
    strict = pytest.importorskip("array_api_strict")
    call, arguments, _ = CALLS[function]
    x = {**OPTIONAL, **arguments}[name]
    other = strict.asarray(x) if place is None else [strict.asarray(y) if at == place else y for at, y in enumerate(x)]
    given = {**arguments, name: other}
    if name == "positions":
        given.pop("n_keys", None)
    with pytest.raises(TypeError, match=r"^`\w+(\[\d\])?` must be of the array library of `\w+(\[\d\])?`") as caught:
        call(**given)
    named = {part.partition("[")[0] for part in str(caught.value).split("`")[1:4:2]}
    assert name in named
    assert named <= {*arguments, name, "q"}


def test_log_sum_exps_of_another_library_than_the_outputs_are_named() -> None:
    strict = pytest.importorskip("array_api_strict")
    with pytest.raises(TypeError, match=r"^`lses\[0\]` must be of the array library of `outs\[0\]`"):
        relskew_core.merge_attention([Q, Q], [strict.asarray(zeros(H, N))] * 2)


def test_an_array_on_another_device_is_named() -> None:
    strict = pytest.importorskip("array_api_strict")
    here, there = strict.asarray(Q), strict.asarray(Q, device=strict.Device("device1"))
    with pytest.raises(ValueError, match=r"^`v` must be on the device of `q`"):
        relskew_core.relative_attention(here, here, there)


def test_a_short_table_says_what_is_needed_and_the_ways_out() -> None:
    with pytest.raises(ValueError, match="`rel_k`") as caught:
        relskew_core.relative_attention(Q, Q, Q, TABLE, Span(1, 3))
    message = str(caught.value)
    assert "-1 … 3" in message
    assert "-2 … 2" in message
    assert "longer table" in message
    assert "beyond='clip'" in message
    assert "causal" not in message
    with pytest.raises(ValueError, match=r"or pass causal=True if no query may see its future$"):
        relskew_core.relative_attention(Q, Q, Q, TABLE[:3], Span(2, 0))
    grid: dict[str, Any] = {"q_grid": (3, 1), "k_grid": (3, 1), "span_h": Span(2, 0), "span_w": Span(0, 0)}
    with pytest.raises(ValueError, match=r"^`table_h` reaches .* a `span_h` with beyond='clip' or beyond='zero'$"):
        # no axis of a grid is causal
        relskew_core.relative_attention_2d(Q, Q, Q, TABLE[:3], TABLE[:1], **grid)


def test_a_table_of_no_rows_is_named() -> None:
    for span in (None, Span(1, 1)):
        with pytest.raises(ValueError, match=r"^`rel_k` must have at least one row, got"):
            relskew_core.relative_attention(Q, Q, Q, TABLE[:0], span)


def test_an_implementation_that_is_not_there_is_no_silent_fallback() -> None:
    strict = pytest.importorskip("array_api_strict")
    x = strict.asarray(Q)
    with pytest.raises(ValueError, match=r"^`impl` is 'native', but .* array_api_strict"):
        relskew_core.relative_attention(x, x, x, impl="native")


LONG: dict[str, tuple[Any, str]] = {
    "nested list": ([[0.0] * 1000] * 3, "list of 3"),
    "list of arrays": ([zeros(200), zeros(200)], "list of 2"),
    "dict": ({"q": zeros(3)}, "dict of 1"),
    "many ints": (tuple(range(10**6)), "tuple of 1000000"),
    "text": ("x" * 10**6, f"str '{'x' * 59}…"),
    "pair": ((1, None), "tuple (1, None)"),
    "four": ([1, 2, 3, "4"], "list [1, 2, 3, '4']"),
    "five": ([1, 2, 3, 4, 5], "list of 5"),
}


@pytest.mark.parametrize("value", LONG)
def test_an_error_repeats_no_long_value(value: str) -> None:
    given, told = LONG[value]
    with pytest.raises(TypeError) as caught:
        relskew_core.relative_attention(given, Q, Q)
    assert str(caught.value) == f"`q` must be an array, got {told}"


def test_an_error_repeats_no_long_choice() -> None:
    with pytest.raises(ValueError, match=f"^`impl` must be one of .*, got '{'x' * 59}…$"):
        relskew_core.relative_attention(Q, Q, Q, impl="x" * 1000)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"^`impl` must be one of .*, got list of 9$"):
        relskew_core.relative_attention(Q, Q, Q, impl=["auto"] * 9)  # type: ignore[call-overload]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_nested_tensors_are_refused_with_the_way_out(layout: str) -> None:
    torch = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.zeros(n, 2, 4) for n in (3, 5)], layout=getattr(torch, layout))
    q, plain = nested.transpose(1, 2), torch.zeros(2, 2, 3, 4)
    for name, arrays in {"q": (q, q, q), "k": (plain, q, q), "v": (plain, plain, q)}.items():
        with pytest.raises(TypeError, match=rf"^`{name}` .* nested tensor of 2 items: .*`mask`.*`unbind\(\)`"):
            relskew_core.relative_attention(*arrays)


def test_advice_names_arguments_that_the_function_has() -> None:
    with pytest.raises(ValueError, match=r"^`table_h` .*or a `span_h` with beyond='clip' or beyond='zero'$"):
        relskew_core.relative_logits_2d(Q, zeros(1, 4), zeros(9, 4), q_grid=(1, 3), k_grid=(3, 1), offset=(0, 0))
    weights = zeros(2, 2, 3, 3)
    with pytest.raises(ValueError, match=r"^`offset` .* leading axes of `weights`, \(2,\), got 3$"):
        relskew_core.relative_values(weights, TABLE, Span(4, 0, "clip"), offset=[1, 2, 3])


def test_a_module_of_arrays_is_no_array() -> None:
    """It has a function called ``shape``."""
    spec = relskew_core.BlockSpec(4, 2, relskew_core.Span.causal(3), causal=True)
    weights = relskew_core.init_weights(spec, seed=0)
    with pytest.raises((ValueError, TypeError), match="`x` must have shape"):
        relskew_core.attention_block(np, weights, spec)
    with pytest.raises((ValueError, TypeError), match=r"`past\[0\]` must be an array, got module"):
        relskew_core.attention_block(np.ones((1, 2, 4), np.float32), weights, spec, past=(np, np))


def test_an_empty_offset_beside_positions_is_named() -> None:
    q, table, positions = np.ones((2, 3)), np.ones((3, 3)), (np.arange(2), np.arange(2))
    with pytest.raises((ValueError, TypeError), match="`offset`"):
        relskew_core.relative_logits(
            q, table, relskew_core.Span.full(2), positions=positions, offset=np.asarray([], dtype=float)
        )


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (2, 3, 0)], ids=str)
def test_weights_of_nothing_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^`weights` must have shape \(\.\.\., queries, keys\), both at least 1, got"):
        relskew_core.relative_values(zeros(*shape), zeros(5, 4))

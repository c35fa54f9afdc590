"""Every bad argument of every public function is refused, in a message that names it."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import array_api_strict
import numpy as np
import pytest
import torch

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
BY_NAME: dict[str, tuple[dict[str, Any], list[Bad]]] = {
    "Span": ({"left": 1, "right": 1},
        [Bad("left", *NOT_INTS, -1), Bad("right", *NOT_INTS, None, -1), Bad("beyond", "extend", None, 1)]),
    "Span.causal": ({"n": 3}, [Bad("n", *NOT_INTS, 0), Bad("beyond", "extend", None, 1)]),
    "Span.full": ({"n": 3}, [Bad("n", *NOT_INTS, 0), Bad("beyond", "extend", None, 1)]),
    "Span.clipped": ({"k": 3}, [Bad("k", *NOT_INTS, -1)]),
    "BlockSpec": ({"embed_dim": 4, "num_heads": 2, "span": Span.full(3)},
        [Bad("embed_dim", *NOT_INTS, None, 0, 5), Bad("num_heads", *NOT_INTS, None, 0, 3), Bad("span", None, 3, "full"),
         Bad("num_kv_heads", *NOT_INTS, 0, 3), Bad("head_dim", *NOT_INTS, 0), Bad("causal", 1, None),
         Bad("cross", 0, None), Bad("cross", True, causal=True, block_size=2), Bad("window", 1, (1, -1), (None,)),
         Bad("block_size", *NOT_INTS, 0, causal=True), Bad("block_size", 2),
         Bad("blocks_before", *NOT_INTS, -1, block_size=2), Bad("blocks_before", 1),
         Bad("cross", True, block_size=2, blocks_before=1), Bad("sinks", 1, None), Bad("shared_table", 1),
         Bad("rel_values", "no"), Bad("rel_keys", 0, None),
         Bad("num_buckets", *NOT_INTS, 0, rel_bias="t5", max_distance=8),
         Bad("max_distance", *NOT_INTS, 0, rel_bias="t5", num_buckets=8), Bad("rel_bias", None, 1, NOT_COMPARED),
         Bad("bias", None)]),
    "skew": ({"x": zeros(3, 5)}, [Bad("x", *NOT_ARRAYS, zeros(5), zeros(3, 2), zeros(0, 5))]),
    "unskew": ({"s": zeros(3, 5)}, [Bad("s", *NOT_ARRAYS, zeros(5), zeros(3, 0), zeros(0, 5))]),
    "relative_logits": ({"q": Q, "table": TABLE, "n_keys": N},
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
         Bad("table", TABLE, positions=(STEPS, STEPS * 2), n_keys=None), *SPANS]),
    "relative_values": ({"weights": zeros(H, N, N), "table": TABLE},
        [Bad("weights", *NOT_ARRAYS, zeros(N), zeros(H, N, 0), zeros(N, N, dtype=bool)),
         Bad("offset", None, weights=zeros(H, N, N - 1)),
         Bad("table", *NOT_ARRAYS[:-1], zeros(D), zeros(3, 5, D), zeros(4, D), zeros(3, D)), *SPANS]),
    "relative_attention": ({"q": Q, "k": Q, "v": Q, "rel_k": TABLE},
        [*ATTENTION, Bad("return_lse", 1, "yes", None, np.zeros(()))]),
    "attention_weights": ({"q": Q, "k": Q, "rel_k": TABLE},
        [bad for bad in ATTENTION if not {bad.name, *bad.also} & {"v", "rel_v", "dropout", "seed", "impl"}]),
    "relative_attention_vjp": ({"d_out": Q, "q": Q, "k": Q, "v": Q, "rel_k": TABLE},
        [*ATTENTION, Bad("d_out", *NOT_ARRAYS, zeros(N, D), zeros(H, N, D + 1), zeros(H, N, D, dtype=np.float32)),
         Bad("out", "text", zeros(N, D), zeros(H, N, D, dtype=np.float32)),
         Bad("lse", "text", zeros(H, N, 1), zeros(H, N, dtype=int)),
         Bad("d_lse", "text", zeros(H, N, 1), zeros(H, N, dtype=int))]),
    "merge_attention": ({"outs": [Q, Q], "lses": [zeros(H, N)] * 2},
        [Bad("outs", [], [Q], [Q, zeros(H, N, D + 1)], ["text", Q], [zeros(D), zeros(D)],
             [zeros(H, N, D, dtype=int)] * 2), Bad("outs", None, 1, zeros(), memoryview(Q)),
         Bad("lses", None, 1, zeros(), memoryview(Q)),
         Bad("lses", [], [zeros(H, N)], [zeros(H, N), zeros(N)], ["text", zeros(H, N)], [zeros(H, N, dtype=int)] * 2)]),
    "relative_attention_2d": ({"q": GRID, "k": GRID, "v": GRID, "table_h": zeros(3, D), "table_w": TABLE,
        "q_grid": (2, 3), "k_grid": (2, 3)},
        [*GRIDS_2D, *GRID_ATTENTION,
         Bad("table_h", "text", None, zeros(3, D + 1), zeros(3, 3, D), zeros(4, D), zeros(D), zeros(1, D)),
         Bad("table_w", "text", None, zeros(5, D + 1), zeros(3, 5, D), zeros(6, D), zeros(D), zeros(3, D)),
         Bad("prefix_bias", "text", zeros(2), zeros(3, 3), prefix=(1, 1), **dict.fromkeys("qkv", zeros(H, 7, D))),
         Bad("q_step", (2, 1), rel_bias=zeros(3, 5), table_h=None, table_w=None),
         Bad("k_step", (1, 2), rel_bias=zeros(3, 5), table_h=None, table_w=None)]),
    "relative_attention_nd": ({"q": GRID, "k": GRID, "v": GRID, "tables": [zeros(3, D), TABLE], "q_grid": (2, 3),
        "k_grid": (2, 3)},
        [*GRIDS_ND, *GRID_ATTENTION, Bad("tables", *NOT_TABLES), Bad("prefix_bias", "text", zeros(2), zeros(3, 3)),
         Bad("q_step", (2, 1), rel_bias=zeros(3, 5), tables=None)]),
    "relative_logits_nd": ({"q": GRID, "tables": [zeros(3, D), TABLE], "q_grid": (2, 3), "k_grid": (2, 3)},
        [*GRIDS_ND, *GRID_STEPS, Bad("q", *NOT_ARRAYS, zeros(D), zeros(H, 5, D)),
         Bad("tables", *NOT_TABLES, [None, None])]),
    "toeplitz_nd": ({"bias": zeros(H, 3, 5), "q_grid": (2, 3), "k_grid": (2, 3)}, [*GRIDS_ND, *GRID_BIASES]),
    "paged_attention": ({"q": zeros(2, H, N, D), "k_pages": zeros(4, 2, 1, D), "v_pages": zeros(4, 2, 1, D),
        "rel_k": TABLE, "span": Span.causal(5), "page_table": [[0, 3], [1, -1]], "lengths": [4, 2]},
        [Bad("q", *NOT_ARRAYS, zeros(H, N, D)),
         Bad("k_pages", *NOT_ARRAYS, zeros(4, 2, D), zeros(4, 0, 1, D), zeros(4, 2, 3, D), zeros(4, 2, 1, D + 1)),
         Bad("v_pages", *NOT_ARRAYS, zeros(4, 2, D), zeros(4, 3, 1, D), zeros(3, 2, 1, D)),
         Bad("rel_k", "text", zeros(4, D), zeros(D)), Bad("span", "full"),
         Bad("page_table", None, 1, [0, 1], [[0, 3], [1]], [0, [1, 2]], zeros(2, 2)),
         Bad("lengths", None, 1, [1], [4, 5], [-1, 2], [1.5, 2], zeros(2), zeros(3, dtype=int)), Bad("causal", 1, None),
         Bad("window", 1, (1,), (-1, 0)), Bad("rel_v", "text", zeros(4, D)), Bad("rel_bias", "text", zeros(4)),
         Bad("rel_q", "text", zeros(2, H, N, D + 1)), Bad("key_table", "text", zeros(4, D)),
         Bad("sinks", "text", zeros(3)), Bad("scale", "1", np.nan), Bad("rel_scale", "1", np.inf),
         Bad("softcap", "1", 0), Bad("chunk_size", *NOT_INTS, 0), Bad("return_lse", 1, None),
         Bad("impl", "fast", None)]),
    "relative_logits_2d": ({"q": GRID, "table_h": zeros(3, D), "table_w": TABLE, "q_grid": (2, 3), "k_grid": (2, 3)},
        [*GRIDS_2D, *GRID_STEPS, Bad("q", *NOT_ARRAYS, zeros(D), zeros(H, 5, D)),
         Bad("table_h", "text", zeros(3, D + 1), zeros(3, 3, D), zeros(4, D), zeros(D), zeros(1, D)),
         Bad("table_w", "text", zeros(5, D + 1), zeros(3, 5, D), zeros(6, D), zeros(D), zeros(3, D))]),
    "toeplitz": ({"bias": zeros(H, 5), "n_queries": N, "n_keys": N},
        [Bad("bias", *NOT_ARRAYS, zeros(H, 0), zeros(H, 3)), Bad("n_queries", *NOT_INTS, None, 0),
         Bad("n_keys", *NOT_INTS, None, 0), Bad("span", "full"), Bad("span", None, bias=zeros(H, 4)),
         Bad("offset", None, n_keys=N - 1), Bad("offset", *NOT_INTS, [1, 2], zeros(3), zeros(3, dtype=int)),
         Bad("causal", 1, None)]),
    "toeplitz_2d": ({"bias": zeros(H, 3, 5), "q_grid": (2, 3), "k_grid": (2, 3)}, [*GRIDS_2D, *GRID_BIASES]),
    "t5_buckets": ({"span": Span.full(3), "num_buckets": 8, "max_distance": 16, "bidirectional": True},
        [Bad("span", None, 3), Bad("num_buckets", *NOT_INTS, None, 0, 2, 3), Bad("max_distance", *NOT_INTS, None, 0, 2),
         Bad("bidirectional", 1, None)]),
    "deberta_buckets": ({"span": Span.full(3), "position_buckets": 8, "max_distance": 16},
        [Bad("span", None, 3), Bad("position_buckets", *NOT_INTS, None, 0), Bad("position_buckets", 3, max_distance=9),
         Bad("max_distance", *NOT_INTS, 0, 5)]),
    "alibi_bias": ({"n_heads": 2, "span": Span.full(3), "xp": np},
        [Bad("n_heads", *NOT_INTS, None, 0), Bad("span", None, 3), Bad("xp", None, "numpy"),
         Bad("like", 3, "q", xp=None)]),
    "proximal_bias": ({"span": Span.full(3), "xp": np},
        [Bad("span", None, 3), Bad("xp", None, "numpy"), Bad("like", 3, "q", xp=None)]),
    "sinusoidal_table": ({"span": Span.full(3), "dim": 4, "xp": np},
        [Bad("span", None, 3), Bad("dim", *NOT_INTS, None, 0, 3), Bad("xp", None, "numpy"), Bad("order", "pairs", None),
         Bad("direction", "neither", None), Bad("base", "1", True, 0.0, np.nan)]),
    "resize_table": ({"table": TABLE, "rows": 7},
        [Bad("table", *NOT_ARRAYS, zeros(5), zeros(0, D), zeros(5, D, dtype=int)), Bad("table", TABLE, axis=2),
         Bad("rows", *NOT_INTS, None, 0), Bad("method", "nearest", None), Bad("align_corners", 1, None),
         Bad("axis", *NOT_INTS, None)]),
    "init_weights": ({"spec": SPEC, "seed": 0},
        [Bad("spec", None, {"embed_dim": 4}), Bad("seed", None, *NOT_INTS), Bad("xp", "numpy", 1)]),
    "attention_block": ({"x": zeros(1, N, 4), "weights": WEIGHTS, "spec": SPEC},
        [Bad("x", *NOT_ARRAYS, zeros(4), zeros(1, N, 5), zeros(1, N, 4, dtype=int)),
         Bad("weights", None, list(WEIGHTS), {}, {**WEIGHTS, "more": TABLE}),
         Bad("weights", {**WEIGHTS, "rel_k": None}, {**WEIGHTS, "q_proj.bias": zeros(3)}),
         Bad("weights", {**WEIGHTS, "rel_k": WEIGHTS["rel_k"].astype(np.float32)}), Bad("spec", None, "block"),
         Bad("memory", zeros(1, N, 4)),
         Bad("memory", None, zeros(2, N, 4), zeros(1, N, 5), "text", spec=CROSS, weights=CROSS_WEIGHTS),
         Bad("past", PAST, (PAST,), (PAST, zeros(1, H, 3, 2)), (PAST, None), (PAST, zeros(2, H, 2, 2))),
         Bad("past", (PAST, PAST.astype(np.float32))),
         Bad("past", (PAST, PAST), spec=CROSS, weights=CROSS_WEIGHTS, memory=zeros(1, N, 4)),
         Bad("mask", "text", zeros(N, N + 1), zeros(N, N, dtype=int))]),
}  # fmt: skip
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[Bad]]] = {
    name: (attrgetter(name)(relskew_core), *call) for name, call in BY_NAME.items()
}
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
    call, arguments, _ = CALLS[function]
    x = {**OPTIONAL, **arguments}[name]
    made = array_api_strict.asarray
    other = made(x) if place is None else [made(y) if at == place else y for at, y in enumerate(x)]
    given = {**arguments, name: other}
    if name == "positions":
        given.pop("n_keys", None)
    with pytest.raises(TypeError, match=r"^`\w+(\[\d\])?` must be of the array library of `\w+(\[\d\])?`") as caught:
        call(**given)
    named = {part.partition("[")[0] for part in str(caught.value).split("`")[1:4:2]}
    assert name in named
    assert named <= {*arguments, name, "q"}


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_nested_tensors_are_refused_with_the_way_out(layout: str) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(n, 2, 4) for n in (3, 5)], layout=getattr(torch, layout))
    q, plain = nested.transpose(1, 2), torch.zeros(2, 2, 3, 4)
    for name, arrays in {"q": (q, q, q), "k": (plain, q, q), "v": (plain, plain, q)}.items():
        with pytest.raises(TypeError, match=rf"^`{name}` .* nested tensor of 2 items: .*`mask`.*`unbind\(\)`"):
            relskew_core.relative_attention(*arrays)


attend: Any = relskew_core.relative_attention
logits_2d, logits, values = relskew_core.relative_logits_2d, relskew_core.relative_logits, relskew_core.relative_values
block: Any = relskew_core.attention_block
paged: Any = relskew_core.paged_attention
STRICT = array_api_strict.asarray(Q)
LINE: dict[str, Any] = {"q_grid": (3, 1), "k_grid": (3, 1), "span_h": Span(2, 0), "span_w": Span(0, 0)}
PLACED: dict[str, Any] = {"positions": (STEPS, STEPS), "offset": np.asarray([], dtype=float)}
ITEMS = zeros(5, H, N, D)
PAGED: dict[str, Any] = {"q": zeros(2, H, N, D), "k_pages": zeros(4, 2, 1, D), "v_pages": zeros(4, 2, 1, D)}
TWO_PAGES: dict[str, Any] = {"page_table": [[0, 3], [1, 2]], "lengths": [4, 3]}
WEIGHTS_OF_NOTHING = r"^`weights` must have shape \(\.\.\., queries, keys\), both at least 1, got"

MESSAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "another library's log-sum-exps": (
        lambda: relskew_core.merge_attention([Q, Q], [array_api_strict.asarray(zeros(H, N))] * 2),
        r"^`lses\[0\]` must be of the array library of `outs\[0\]`"),
    "another device": (
        lambda: attend(STRICT, STRICT, array_api_strict.asarray(Q, device=array_api_strict.Device("device1"))),
        "^`v` must be on the device of `q`"),
    "a short table": (lambda: attend(Q, Q, Q, TABLE, Span(1, 3)),
                      r"^`rel_k` (?!.*causal).*-1 … 3.*-2 … 2.*longer table.*beyond='clip'"),
    "a table of the past": (lambda: attend(Q, Q, Q, TABLE[:3], Span(2, 0)),
                            r"or pass causal=True if no query may see its future$"),
    "a short table of heights": (  # no axis of a grid is causal
        lambda: relskew_core.relative_attention_2d(Q, Q, Q, TABLE[:3], TABLE[:1], **LINE),
        r"^`table_h` reaches .* a `span_h` with beyond='clip' or beyond='zero'$"),
    "a short table of heights in logits": (
        lambda: logits_2d(Q, zeros(1, 4), zeros(9, 4), q_grid=(1, 3), k_grid=(3, 1), offset=(0, 0)),
        r"^`table_h` .*or a `span_h` with beyond='clip' or beyond='zero'$"),
    "no rows": (lambda: attend(Q, Q, Q, TABLE[:0]), r"^`rel_k` must have at least one row, got"),
    "no rows of a span": (lambda: attend(Q, Q, Q, TABLE[:0], Span(1, 1)), r"^`rel_k` must have at least one row, got"),
    "no native path": (lambda: attend(STRICT, STRICT, STRICT, impl="native"),
                       r"^`impl` is 'native', but .* array_api_strict"),
    "a long choice": (lambda: attend(Q, Q, Q, impl="x" * 1000), f"^`impl` must be one of .*, got '{'x' * 59}…$"),
    "a list of choices": (lambda: attend(Q, Q, Q, impl=["auto"] * 9), "^`impl` must be one of .*, got list of 9$"),
    "offsets of other items": (lambda: values(zeros(2, 2, 3, 3), TABLE, Span(4, 0, "clip"), offset=[1, 2, 3]),
                               r"^`offset` .* leading axes of `weights`, \(2,\), got 3$"),
    "a module, which has a function `shape`": (lambda: block(np, WEIGHTS, SPEC), "`x` must have shape"),
    "modules as a cache": (lambda: block(zeros(1, 2, 4), WEIGHTS, SPEC, past=(np, np)),
                           r"`past\[0\]` must be an array, got module"),
    "an empty offset beside positions": (lambda: logits(Q, TABLE, Span.full(3), **PLACED), "`offset`"),
    **{f"weights of shape {shape}": (partial(values, zeros(*shape), zeros(5, 4)), WEIGHTS_OF_NOTHING)
       for shape in ((0, 3), (3, 0), (2, 0, 3), (2, 3, 0))},
    "scales of other heads": (lambda: attend(Q, Q, Q, scale=np.ones(3)),
                              r"`scale` must have shape \(H,\) or none, a number for each of the 2 heads"),
    "one scale of another dtype": (lambda: attend(Q, Q, Q, scale=np.asarray(0.5, "float32")),
                                   r"`scale` must have the dtype of `q`, float64"),
    "one sink": (lambda: attend(Q, Q, Q, sinks=np.asarray(0.5)), r"`sinks` must have shape \(H,\), a number"),
    "few offsets": (lambda: attend(ITEMS, ITEMS, ITEMS, offset=[1, 2]),
                    r"`offset` must be an int, or one for each item .* \(5,\), got 2"),
    "a fraction": (lambda: attend(ITEMS, ITEMS, ITEMS, offset=[1, 2, 3, 4, 5.0]), r"`offset\[4\]` must be an int"),
    "offsets of two axes": (lambda: attend(ITEMS, ITEMS, ITEMS, offset=zeros(5, 1, dtype=int)),
                            "`offset` must be an int, or one for each item"),
    "fractions": (lambda: attend(ITEMS, ITEMS, ITEMS, offset=zeros(5)), "`offset` must be of integers"),
    "another library's offsets": (lambda: attend(ITEMS, ITEMS, ITEMS, offset=array_api_strict.zeros(5)),
                                  "`offset` must be of the array library of `q`"),
    "a short table of items": (lambda: attend(ITEMS, ITEMS, ITEMS, zeros(5, D), Span(2, 2), offset=[3, -2, 0, 5, 3]),
                               "`rel_k` reaches the relative positions -2 … 2, but queries see"),
    "a short table of an array of items": (
        lambda: attend(ITEMS, ITEMS, ITEMS, zeros(5, D), Span(2, 2), offset=np.asarray([3, -2, 0, 5, 3])),
        "`rel_k` reaches the relative positions -2 … 2, but queries see"),
    "blocks past the keys": (
        lambda: attend(ITEMS, ITEMS, ITEMS, offset=[7, 0, 0, 0, 0], block_size=4, impl="native"),
        "no native path .* `block_size` with no `offset` past the keys"),
    "a short table of pages": (
        lambda: paged(**PAGED, **TWO_PAGES, rel_k=zeros(3, D), span=Span.causal(3)),
        "^`rel_k` reaches"),
    "sinks of one item": (lambda: paged(**PAGED, **TWO_PAGES, sinks=zeros(1, H, N)),
                          r"^`sinks` must have shape \(H,\) or \(B, H, Lq\) = \(2, 2, 3\), got"),
    **{f"page {page}": (
        partial(paged, **PAGED, page_table=[[0, 3], [page, 0]], lengths=[4, 3]),
        rf"^`page_table` must have pages 0 … 3 for item 1, got {page}$") for page in (-1, 4)},
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_an_error_says_what_is_wrong(name: str) -> None:
    call, message = MESSAGES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()

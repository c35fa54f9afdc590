"""Other people's tables: row by row what they say, and back unchanged; their state dicts as blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracles
from libraries import Library
from relskew_core import Span, attention_block, conventions, relative_attention, sinusoidal_table

Floats = NDArray[Any]


@dataclass(frozen=True)
class Convention:
    """Whose row belongs to which relative position, as they write it; ``None`` is zero."""

    name: str
    rows: int
    span: Span
    row: Callable[[int], int | None]
    options: dict[str, Any]

    def __str__(self) -> str:
        return self.name + "".join(f", {name}={value}" for name, value in self.options.items())


def clip(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def within(row: int, rows: int) -> int | None:
    return row if 0 <= row < rows else None


CONVENTIONS = [
    Convention("vits", 9, Span(4, 4, "zero"), lambda r: within(r + 4, 9), {}),
    Convention("tensor2tensor", 5, Span(4, 0, "zero"), lambda r: within(r + 4, 5), {"causal": True}),
    Convention("tensor2tensor", 9, Span(4, 4, "zero"), lambda r: within(r + 4, 9), {"causal": False}),
    Convention("shaw", 7, Span(3, 3, "clip"), lambda r: clip(r, -3, 3) + 3, {}),
    Convention("shaw", 7, Span(4, 2, "clip"), lambda r: clip(r, -4, 2) + 4, {"left": 4}),
    Convention("music_transformer", 6, Span(5, 0), lambda r: r + 5, {}),
    Convention("transformer_xl", 9, Span(4, 4), lambda r: r + 4, {}),
    Convention("transformer_xl", 9, Span(8, 0), lambda r: r + 8, {"n_keys": 9}),
    Convention("transformer_xl", 9, Span(6, 2), lambda r: r + 6, {"n_keys": 6}),
    Convention("ukhov", 9, Span(4, 4), lambda r: 4 - r, {}),
    Convention("distance", 9, Span(4, 4), lambda r: -r + 4, {}),
    Convention("speecht5", 8, Span(3, 4, "clip"), lambda r: clip(-r, -4, 3) + 4, {}),
    Convention("inkling", 6, Span(5, 0, "zero"), lambda r: within(-r, 6), {}),
]


@pytest.mark.parametrize("convention", CONVENTIONS, ids=str)
@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "by head"])
def test_rows_are_theirs(library: Library, convention: Convention, heads: tuple[int, ...]) -> None:
    theirs = np.random.default_rng(0).standard_normal((*heads, convention.rows, 3))
    read = getattr(conventions, f"from_{convention.name}")
    ours, span = read(library.asarray(theirs, "float32"), **convention.options)
    assert span == convention.span
    assert isinstance(ours, library.array_type())
    table = library.to_numpy(ours)
    reach = 2 * convention.rows if span.beyond != "error" else 0
    for r in range(-span.left - reach, span.right + reach + 1):
        row, here = convention.row(r), oracles.row_of(r, span)
        assert (row is None) == (here is None)
        if row is not None and here is not None:
            np.testing.assert_array_equal(table[..., here, :], theirs.astype("float32")[..., row, :])
    back = getattr(conventions, f"to_{convention.name}")(ours, span)
    flat = library.to_numpy(back)
    np.testing.assert_array_equal(flat.reshape(theirs.shape), theirs.astype("float32"))


def test_every_conversion_is_listed_here() -> None:
    there = {name.partition("_")[2] for name in conventions.__all__ if not name.startswith("load_")}
    assert there == {convention.name for convention in CONVENTIONS} | {"t5", "deberta", "swin", "beit"}
    assert {f"from_{name}" for name in there} | {f"to_{name}" for name in there} <= set(conventions.__all__)


def test_vits_has_an_axis_for_the_shared_table() -> None:
    ours, span = conventions.from_vits(np.arange(6.0).reshape(1, 3, 2))
    assert ours.shape == (3, 2)
    assert conventions.to_vits(ours, span).shape == (1, 3, 2)


@given(st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_t5_round_trip(furthest: int, heads: int, bidirectional: bool) -> None:
    buckets = 8
    furthest += buckets // 2
    theirs = np.arange(1.0, buckets * heads + 1).reshape(buckets, heads)
    ours, span = conventions.from_t5(theirs, bidirectional=bidirectional, max_distance=furthest)
    back = conventions.to_t5(ours, span, num_buckets=buckets, bidirectional=bidirectional, max_distance=furthest)
    used = np.any(back != 0, axis=1)
    np.testing.assert_array_equal(back[used], theirs[used])
    assert not used[buckets // 2] or not bidirectional  # future at distance 0
    again, _ = conventions.from_t5(back, bidirectional=bidirectional, max_distance=furthest)
    np.testing.assert_array_equal(again, ours)


def test_what_buckets_share_is_written_from_its_nearest_position() -> None:
    span = Span.full(13)
    distances = np.arange(-12.0, 13.0)
    theirs = conventions.to_t5(distances[None], span, num_buckets=8, bidirectional=True, max_distance=12)
    assert theirs[:, 0].tolist() == [0, -1, -2, -5, 0, 1, 2, 5]
    rows = conventions.to_deberta(distances[:, None], span, position_buckets=4, max_distance=12)
    assert rows[:, 0].tolist() == [12, 3, 2, 1, 0, -1, -2, -3]


@pytest.mark.parametrize("furthest", [None, 12, 40])
@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "by head"])
def test_deberta_round_trip(library: Library, furthest: int | None, heads: tuple[int, ...]) -> None:
    theirs = np.random.default_rng(1).standard_normal((*heads, 16, 2))
    ours, span = conventions.from_deberta(library.asarray(theirs, "float64"), max_distance=furthest)
    table = library.to_numpy(ours)
    for r in (-3, -1, 0, 1, 4):
        np.testing.assert_array_equal(table[..., r + span.left, :], theirs[..., 8 - r, :])
    np.testing.assert_array_equal(table[..., -1, :], theirs[..., 0, :])
    np.testing.assert_array_equal(table[..., 0, :], theirs[..., 15, :])
    back = library.to_numpy(conventions.to_deberta(ours, span, position_buckets=8, max_distance=furthest))
    used = np.any(back != 0, axis=(*range(len(heads)), -1))
    np.testing.assert_array_equal(back[..., used, :], theirs[..., used, :])
    again, _ = conventions.from_deberta(back, max_distance=furthest)
    np.testing.assert_array_equal(again, table)
    assert used.all() or furthest is not None


@pytest.mark.parametrize("window", [(2, 3), (1, 1), (4, 4)])
def test_swin_and_beit(library: Library, window: tuple[int, int]) -> None:
    h, w = window
    cells = (2 * h - 1) * (2 * w - 1)
    theirs = np.random.default_rng(2).standard_normal((cells + 3, 2))
    ours, prefix, span_h, span_w = conventions.from_beit(library.asarray(theirs, "float64"), window=window)
    bias = library.to_numpy(ours)
    assert (span_h, span_w) == (Span.full(h), Span.full(w))
    for y in range(1 - h, h):
        for x in range(1 - w, w):
            row = (-y + h - 1) * (2 * w - 1) + (-x + w - 1)
            np.testing.assert_array_equal(bias[:, y + h - 1, x + w - 1], theirs[row])
    np.testing.assert_array_equal(library.to_numpy(prefix).T, theirs[[-2, -3, -1]])
    np.testing.assert_array_equal(library.to_numpy(conventions.to_beit(ours, prefix)), theirs)
    swin, *_ = conventions.from_swin(library.asarray(theirs[:cells], "float64"), window=window)
    np.testing.assert_array_equal(library.to_numpy(swin), bias)
    np.testing.assert_array_equal(library.to_numpy(conventions.to_swin(swin)), theirs[:cells])


ZEROS = np.zeros((4, 2))
WRONG: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("`table` must be an array", "from_vits", ([1.0],), {}),
    ("`table` must have shape (R, D) or (H, R, D)", "from_shaw", (np.zeros(3),), {}),
    ("`table` must have an odd number of rows, 2w + 1", "from_vits", (ZEROS,), {}),
    ("`table` must have an odd number of rows, 2k + 1", "from_shaw", (ZEROS,), {}),
    ("`table` must have an odd number of rows, 2n - 1", "from_ukhov", (ZEROS,), {}),
    ("`table` must have an odd number of rows, 2n - 1", "from_transformer_xl", (ZEROS,), {}),
    ("`table` must have an even number of rows, 2m", "from_speecht5", (ZEROS[:3],), {}),
    ("`causal` must be a bool", "from_tensor2tensor", (ZEROS,), {"causal": 1}),
    ("`left` must be less than the number of rows, 4, got 4", "from_shaw", (ZEROS,), {"left": 4}),
    ("`n_keys` must be at most the number of rows, 4, got 5", "from_transformer_xl", (ZEROS,), {"n_keys": 5}),
    ("`span` must be a Span", "to_shaw", (ZEROS, 4), {}),
    ("`table` must have the 3 rows of", "to_transformer_xl", (ZEROS, Span(1, 1)), {}),
    ("`span` must reach as far ahead as back", "to_vits", (ZEROS, Span(1, 2)), {}),
    ("`span` must reach as far ahead as back", "to_tensor2tensor", (ZEROS, Span(1, 2)), {}),
    ("`span` must reach as far ahead as back", "to_ukhov", (ZEROS, Span(1, 2)), {}),
    ("`span` must end at 0", "to_music_transformer", (ZEROS, Span(1, 2)), {}),
    ("`span` must end at 0", "to_inkling", (ZEROS, Span(1, 2)), {}),
    ("`span` must reach one further ahead than back", "to_speecht5", (ZEROS, Span(2, 1)), {}),
    ("`weight` must have shape (num_buckets, H)", "from_t5", (np.zeros(4),), {"bidirectional": True}),
    ("`rel_bias` must have shape (H, 3)", "to_t5", (ZEROS, Span(1, 1)), {"num_buckets": 8, "bidirectional": True}),
    ("`table` must have shape (2S, D)", "from_deberta", (ZEROS[:3],), {"max_distance": None}),
    (
        "`table` must have the 3 rows of",
        "to_deberta",
        (ZEROS, Span(1, 1)),
        {"max_distance": None, "position_buckets": 2},
    ),
    ("`table` must have shape (9, H)", "from_swin", (ZEROS,), {"window": (2, 2)}),
    ("`window` must be a pair", "from_swin", (ZEROS,), {"window": 2}),
    ("`rel_bias` must have shape (H, 2h - 1, 2w - 1)", "to_swin", (np.zeros((1, 2, 3)),), {}),
    ("`table` must have shape (9 + 3, H)", "from_beit", (ZEROS,), {"window": (2, 2)}),
    ("`prefix_bias` must have shape (1, 3)", "to_beit", (np.zeros((1, 1, 1)), np.zeros((2, 3))), {}),
]


@pytest.mark.parametrize(
    ("words", "name", "arguments", "options"), WRONG, ids=[f"{name}: {words}" for words, name, *_ in WRONG]
)
def test_errors_name_what_does_not_fit(words: str, name: str, arguments: Any, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(conventions, name)(*arguments, **options)
    assert words in str(caught.value)


def test_transformer_xl_is_a_recipe() -> None:
    """Content and position biases, sinusoids of any reach through a projection, a memory: one call."""
    rng = np.random.default_rng(3)
    heads, width, memory, new = 2, 4, 3, 5
    q = rng.standard_normal((1, heads, new, width))
    k, v = (rng.standard_normal((1, heads, memory + new, width)) for _ in range(2))
    u_bias, v_bias = (rng.standard_normal((heads, 1, width)) for _ in range(2))
    projection = rng.standard_normal((6, heads * width))

    def rel_k(span: Span) -> Floats:
        table = sinusoidal_table(span, 6, xp=np, dtype=np.float64) @ projection
        return np.moveaxis(table.reshape(span.rows, heads, width), 1, 0)

    span = Span.causal(memory + new)
    got = relative_attention(
        q + u_bias, k, v, rel_k(span), span, rel_q=q + v_bias, causal=True, offset=memory, chunk_size=2
    )
    want = np.zeros_like(q)
    for head in range(heads):
        for i in range(new):
            logits = []
            for j in range(memory + i + 1):
                distance = memory + i - j
                angles = [distance / 10000 ** (2 * index / 6) for index in range(3)]
                row = (np.concatenate([np.sin(angles), np.cos(angles)]) @ projection)[head * width : (head + 1) * width]
                content = (q[0, head, i] + u_bias[head, 0]) @ k[0, head, j]
                logits.append((content + (q[0, head, i] + v_bias[head, 0]) @ row) / 2)
            weights = np.exp(logits - np.max(logits))
            want[0, head, i] = weights / weights.sum() @ v[0, head, : memory + i + 1]
    assert oracles.relative_error(got, want) < 1e-12
    longer = Span.causal(500)
    again = relative_attention(q + u_bias, k, v, rel_k(longer), longer, rel_q=q + v_bias, causal=True, offset=memory)
    assert oracles.relative_error(again, want) < 1e-12


def state_of(
    names: dict[str, str], *, bias: bool = True, width: int = 8
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Random projections under their names, and the same under ours."""
    rng = np.random.default_rng(4)
    theirs: dict[str, Floats] = {"other.weight": np.zeros(1)}
    ours: dict[str, Floats] = {}
    for our, their in names.items():
        ours[f"{our}.weight"] = theirs[f"layer.{their}.weight"] = rng.standard_normal((width, width))
        if bias:
            ours[f"{our}.bias"] = theirs[f"layer.{their}.bias"] = rng.standard_normal(width)
    return theirs, ours


def equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert set(got) == set(want)
    for key, weight in want.items():
        np.testing.assert_array_equal(got[key], weight)


OURS = ("q_proj", "k_proj", "v_proj", "out_proj")


def test_load_vits() -> None:
    state, ours = state_of({name: name for name in OURS})
    for name in ("rel_k", "rel_v"):
        state[f"layer.emb_{name}"] = np.random.default_rng(5).standard_normal((1, 5, 4))
        ours[name] = state[f"layer.emb_{name}"][0]
    spec, weights = conventions.load_vits(state, num_heads=2, prefix="layer.")
    equal(weights, ours)
    assert spec.span == Span(2, 2, "zero")
    assert spec.shared_table
    assert spec.rel_values
    assert spec.bias
    assert not spec.causal
    y: Any = attention_block(np.zeros((1, 3, 8)), weights, spec)
    assert y.shape == (1, 3, 8)


def test_load_wav2vec2_bert() -> None:
    state, ours = state_of(dict(zip(OURS, ("linear_q", "linear_k", "linear_v", "linear_out"), strict=True)))
    ours["rel_k"] = state["layer.distance_embedding.weight"] = np.random.default_rng(5).standard_normal((8, 4))
    spec, weights = conventions.load_wav2vec2_bert(state, num_heads=2, left=5, prefix="layer.")
    equal(weights, ours)
    assert (spec.span, spec.shared_table, spec.rel_values) == (Span(5, 2, "clip"), True, False)


@pytest.mark.parametrize("kind", ["causal", "unmasked", "clipped"])
def test_load_tensor2tensor(kind: str) -> None:
    rng = np.random.default_rng(6)
    names = dict(zip(OURS, ("q", "k", "v", "output_transform"), strict=True))
    ours = {f"{our}.weight": rng.standard_normal((8, 8)) for our in names}
    variables = {f"a/multihead_attention/{their}/kernel": ours[f"{our}.weight"].T for our, their in names.items()}
    variables["b/multihead_attention/q/kernel"] = np.zeros((8, 8))
    scope = "a/multihead_attention/dot_product_self_attention_relative_v2/"
    ours["rel_k"], ours["rel_v"] = rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 5, 4))
    suffixes = ("key_relative_embeddings", "value_relative_embeddings")
    if kind == "clipped":
        ours["rel_k"], ours["rel_v"] = ours["rel_k"][0], ours["rel_v"][0]
        suffixes = ("relative_positions_keys/embeddings", "relative_positions_values/embeddings")
    if kind == "causal":
        del ours["rel_v"]
    for name, suffix in zip(("rel_k", "rel_v"), suffixes, strict=True):
        if name in ours:
            variables[scope + suffix] = ours[name]
    spec, weights = conventions.load_tensor2tensor(
        variables, num_heads=2, causal=kind == "causal", prefix="a/multihead_attention/"
    )
    equal(weights, ours)
    spans = {"causal": Span(4, 0, "zero"), "unmasked": Span(2, 2, "zero"), "clipped": Span(2, 2, "clip")}
    assert (spec.span, spec.causal, spec.bias) == (spans[kind], kind == "causal", False)
    assert spec.shared_table == (kind == "clipped")
    local, _ = conventions.load_tensor2tensor(
        variables, num_heads=2, causal=True, block_size=3, prefix="a/multihead_attention/"
    )
    assert local.block_size == 3


@pytest.mark.parametrize("port", ["gwinndr", "jason9693", "spectraldoy"])
def test_load_music_transformer(port: str) -> None:
    rng = np.random.default_rng(7)
    names = ("Wq", "Wk", "Wv", "fc") if port == "jason9693" else ("wq", "wk", "wv", "wo")
    state, ours = state_of(dict(zip(OURS, names, strict=True)))
    ours["rel_k"] = rng.standard_normal((6, 4))
    span = Span.causal(6)
    if port == "gwinndr":
        packed = ("q_proj", "k_proj", "v_proj")
        state = {
            "layer.in_proj_weight": np.concatenate([ours[f"{name}.weight"] for name in packed]),
            "layer.in_proj_bias": np.concatenate([ours[f"{name}.bias"] for name in packed]),
            "layer.out_proj.weight": ours["out_proj.weight"],
            "layer.out_proj.bias": ours["out_proj.bias"],
            "layer.Er": ours["rel_k"],
        }
    elif port == "jason9693":
        state["layer.E"] = ours["rel_k"]
    else:
        state["layer.E.weight"] = rng.standard_normal((6, 8))
        ours["rel_k"] = np.stack(np.split(state["layer.E.weight"], 2, axis=1))
        span = Span(5, 0, "clip")
        for name in ("wq", "wk", "wv"):  # it may have a bias in its output only
            del state[f"layer.{name}.bias"]
        ours |= {f"{name}.bias": np.zeros(8) for name in OURS[:3]}
    spec, weights = conventions.load_music_transformer(state, num_heads=2, prefix="layer.")
    equal(weights, ours)
    assert (spec.span, spec.causal, spec.shared_table) == (span, True, port != "spectraldoy")


def test_load_t5() -> None:
    state, ours = state_of(dict(zip(OURS, "qkvo", strict=True)), bias=False)
    table = np.random.default_rng(8).standard_normal((8, 2))
    state["first.relative_attention_bias.weight"] = table
    weights, span = conventions.load_t5(
        state, bidirectional=True, max_distance=16, prefix="layer.", bias_prefix="first."
    )
    rel_bias = weights.pop("rel_bias")
    equal(weights, ours)
    want, want_span = conventions.from_t5(table, bidirectional=True, max_distance=16)
    assert span == want_span
    np.testing.assert_array_equal(rel_bias, want)


def test_loading_names_what_is_missing() -> None:
    state, _ = state_of({name: name for name in OURS})
    with pytest.raises(ValueError, match=r"`state` must have 'layer.emb_rel_k'; its keys there are layer.k_proj.bias,"):
        conventions.load_vits(state, num_heads=2, prefix="layer.")
    with pytest.raises(ValueError, match=r"`state` must have 'q_proj.weight'; its keys there are .*layer"):
        conventions.load_vits(state, num_heads=2)
    with pytest.raises(TypeError, match="`state` must be a mapping"):
        conventions.load_wav2vec2_bert([], num_heads=2)  # type: ignore[arg-type]
    state["layer.emb_rel_k"] = state["layer.emb_rel_v"] = np.zeros((1, 5, 3))
    with pytest.raises(ValueError, match=r"`weights\['rel_k'\]` must have shape \(5, 4\), got \(5, 3\)"):
        conventions.load_vits(state, num_heads=2, prefix="layer.")
    with pytest.raises(ValueError, match="`num_heads` must divide the width of the queries, 8, got 3"):
        conventions.load_vits(state, num_heads=3, prefix="layer.")
    variables = {f"{name}/kernel": np.zeros((8, 8)) for name in ("q", "k", "v", "output_transform")}
    with pytest.raises(ValueError, match="`variables` must have relative_positions_keys/embeddings or"):
        conventions.load_tensor2tensor(variables, num_heads=2, causal=True)
    variables |= {f"{scope}/key_relative_embeddings": np.zeros((5, 4)) for scope in "ab"}
    with pytest.raises(ValueError, match="`prefix` must single out one attention, got '' with a/key"):
        conventions.load_tensor2tensor(variables, num_heads=2, causal=True)
    names = dict(zip(OURS, ("wq", "wk", "wv", "wo"), strict=True))
    state, _ = state_of(names)
    state["layer.E.weight"] = np.zeros((3, 9))
    with pytest.raises(ValueError, match="`num_heads` must divide the width of the table, got 2"):
        conventions.load_music_transformer(state, num_heads=2, prefix="layer.")

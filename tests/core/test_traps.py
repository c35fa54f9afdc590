"""Calls that would run and be wrong: they are rejected with a suggestion; the right ones pass."""

import importlib
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import oracles
import relskew_core as relskew
from libraries import LIBRARIES, Library
from relskew_core import BlockSpec, Span, conventions, export, relative_attention, relative_attention_2d, toeplitz
from relskew_core.layers.torch import MultiheadAttention, RelativeMultiheadAttention

toeplitz_2d: Any = relskew.toeplitz_2d
RNG = np.random.default_rng(0)
H, N, D = 4, 6, 8
Q, K, V = RNG.standard_normal((3, 2, H, N, D))
TABLE = RNG.standard_normal((N, D))
ONE = Q[..., :1, :]

SHORT = [row for row in LIBRARIES if row.name in ("numpy", "torch, CPU", "JAX")]
NEEDED = "`offset` must be given where there are {} queries and {} keys: 0 if queries begin .*, Lk - Lq = {} when"


def needs_offset(queries: int, keys: int) -> Any:
    return pytest.raises(ValueError, match=NEEDED.format(queries, keys, keys - queries))


@pytest.mark.parametrize("row", SHORT, ids=str)
@pytest.mark.parametrize("options", [
    {"causal": True}, {"window": (3, None)}, {"block_size": 2}, {"span": Span.clipped(2)},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_a_step_of_decoding_says_where_its_query_is(row: Library, options: dict[str, Any]) -> None:
    """Also where a call like it has been remembered, of other numbers of keys."""
    table: dict[str, Any] = {"rel_k": RNG.standard_normal((5, D))} if "span" in options else {}
    one, k, v = (row.asarray(x, "float32") for x in (ONE, K, V))
    more: dict[str, Any] = {name: row.asarray(x, "float32") for name, x in table.items()}
    for _ in range(3):
        relative_attention(one, k[..., :1, :], v[..., :1, :], **more, **options)  # there is no other place for it
        right = relative_attention(one, k, v, **more, **options, offset=N - 1)
        with needs_offset(1, N):
            relative_attention(one, k, v, **more, **options)
    expected = oracles.relative_attention(ONE, K, V, **table, **options, offset=N - 1).out
    np.testing.assert_allclose(row.to_numpy(right), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("row", SHORT, ids=str)
@pytest.mark.parametrize("options", [{}, {"mask": True}, {"window": (None, None)}], ids=str)
def test_nothing_needs_to_be_said_where_nothing_depends_on_it(row: Library, options: dict[str, Any]) -> None:
    q, k, v = (row.asarray(x, "float32") for x in (ONE, K, V))
    given = {**options, "mask": row.asarray(np.arange(N) > 1)} if "mask" in options else options
    for _ in range(3):
        found = relative_attention(q, k, v, **given)
    expected = oracles.relative_attention(ONE, K, V, mask=np.arange(N) > 1 if "mask" in options else None).out
    np.testing.assert_allclose(row.to_numpy(found), expected, rtol=0, atol=1e-5)


def test_every_function_with_an_offset_asks_for_it() -> None:
    few, weights = Q[..., :4, :], RNG.standard_normal((H, 4, N))
    calls: list[Callable[[], Any]] = [
        lambda: relative_attention(few, K, V, TABLE, causal=True),
        lambda: relskew.attention_weights(few, K, TABLE, Span.causal(N)),
        lambda: relskew.relative_attention_vjp(few, few, K, V, TABLE, causal=True),
        lambda: relskew.relative_logits(few, TABLE, n_keys=N, causal=True),
        lambda: relskew.relative_logits(K, TABLE, n_queries=4, side="key", causal=True),
        lambda: relskew.relative_values(weights, TABLE, causal=True),
        lambda: toeplitz(TABLE[:, 0], n_queries=4, n_keys=N, causal=True),
    ]
    for call in calls:
        with needs_offset(4, N):
            call()


def test_grids_that_differ_say_where_the_queries_begin() -> None:
    tables: Any = RNG.standard_normal((2, 9, D))
    grids: dict[str, Any] = {"q_grid": (2, 2), "k_grid": (2, 3)}
    few = Q[..., :4, :]
    calls: list[Callable[..., Any]] = [
        lambda **given: relskew.relative_logits_2d(few, tables[0], tables[1], **grids, **given),
        lambda **given: toeplitz_2d(tables[0, :, :7], **grids, **given),
        lambda **given: relative_attention_2d(few, K, V, tables[0], tables[1], **grids, **given),
        lambda **given: relative_attention_2d(few, K, V, rel_bias=tables[0, :, :7], **grids, **given),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^`offset` must be given where the grids differ: \(0, 0\) if both begin"):
            call()
        assert np.isfinite(call(offset=(0, 0))).all()
    # the same extent, counted in steps
    sparse, dense = {"grid": (2, 2), "step": (2, 2)}, {"grid": (4, 4), "step": (1, 1)}
    x = RNG.standard_normal((16, D))
    for ours, theirs in ((dense, sparse), (sparse, dense)):
        pooled: dict[str, Any] = {f"q_{name}": sizes for name, sizes in ours.items()}
        pooled |= {f"k_{name}": sizes for name, sizes in theirs.items()}
        q, k = (x[: math.prod(each["grid"])] for each in (ours, theirs))
        np.testing.assert_array_equal(
            relskew.relative_logits_2d(q, *tables, **pooled),
            relskew.relative_logits_2d(q, *tables, **pooled, offset=(0, 0)),
        )
        np.testing.assert_array_equal(relative_attention_2d(q, k, k, *tables, **pooled),
                                      relative_attention_2d(q, k, k, *tables, **pooled, offset=(0, 0)))  # fmt: skip
    np.testing.assert_allclose(relative_attention_2d(few, K, V, **grids), relative_attention(few, K, V), atol=1e-14)


@pytest.mark.parametrize("beyond", ["error", "clip", "zero"])
def test_a_spec_says_what_of_the_future_is_meant(beyond: Any) -> None:
    span = Span.causal(8, beyond)
    ways_out = re.escape(f"say causal=True, or give a span that reaches the future, such as Span(7, 7, {beyond!r})")
    unclear: list[dict[str, Any]] = [{}, {"window": (3, None)}, {"block_size": 2, "blocks_before": 1}]
    for options in unclear:
        with pytest.raises(ValueError, match=f"^`span` .* {ways_out}$"):
            BlockSpec(8, 2, span, **options)
    clear: list[dict[str, Any]] = [{"causal": True}, {"cross": True}, {"window": (3, 0)}, {"window": (None, 2)}]
    for options in clear:
        assert BlockSpec(8, 2, span, **options).span == span
    assert BlockSpec(8, 2, Span.clipped(0)).span.rows == 1  # one row for past and future


@pytest.mark.parametrize(
    ("rows", "options"), [(N, {"causal": True}), (2 * N - 1, {}), (N, {"window": (None, 0)})], ids=str
)
@pytest.mark.parametrize("name", ["rel_k", "rel_v", "rel_bias", "key_table"])
def test_lengths_where_heads_belong_are_refused_by_a_table_that_fits_them(
    name: str, rows: int, options: dict[str, Any]
) -> None:
    q, k, v = (x.swapaxes(-2, -3) for x in (Q, K, V))
    table: dict[str, Any] = {name: RNG.standard_normal((rows, *(() if name == "rel_bias" else (D,))))}
    match = rf"^`{name}` has {rows} rows, which fit axis -3 of `q`, \(2, 6, 4, 8\), .* q\.swapaxes\(-2, -3\)"
    with pytest.raises(ValueError, match=match):
        relative_attention(q, k, v, **table, **options)
    span = Span.causal(N) if options else Span.full(N)
    right = relative_attention(Q, K, V, **table, **options)
    expected = oracles.relative_attention(Q, K, V, **table, **options, span=span).out
    np.testing.assert_allclose(right, expected, rtol=0, atol=1e-12)
    # A table may reach further than the keys if there is a span.
    far: Any = relative_attention(q, k, v, **table, **options, span=span)
    assert far.shape == q.shape


def test_a_table_that_fits_lengths_as_it_fits_heads_is_taken() -> None:
    """Heads are as many as positions, or as keys: nothing is known to be wrong."""
    x, table = RNG.standard_normal((4, 4, D)), RNG.standard_normal((7, D))
    for n, m in ((4, 3), (2, 4)):
        found = relative_attention(x[:, :n], x[:, :m], x[:, :m], table, offset=0)
        expected = oracles.relative_attention(x[:, :n], x[:, :m], x[:, :m], table, span=Span.full(4)).out
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    for width in (1, 9):
        q = RNG.standard_normal((9, 3, width))
        with pytest.raises(ValueError, match=r"^`rel_k` has 17 rows, which fit axis -3 of `q`"):
            relative_attention(q, q, q, RNG.standard_normal((17, width)))


@pytest.mark.parametrize(("n", "m", "told"), [(4, 0, False), (4, 1, True), (4, 2, True), (5, 2, False), (4, 3, False)])
def test_heads_that_do_not_divide_look_changed_over_where_lengths_do(n: int, m: int, told: bool) -> None:
    q, k = np.zeros((5, n, 3)), np.zeros((2, m, 3))
    with pytest.raises(ValueError, match=r"^`k` must have a number of heads that divides the 5 heads of `q`") as caught:
        relative_attention(q, k, k)
    assert ("did you mean" in str(caught.value)) == told


def test_a_full_table_of_a_causal_call_has_a_span() -> None:
    table = RNG.standard_normal((2 * N - 1, D))
    match = r"^`span` must be given for `{}`: its 11 rows are those of Span\.full\(6\) .* Span\.causal\(11\)$"
    for offset, q in ((0, Q), (N - 1, ONE), (N - 1, ONE)):
        with pytest.raises(ValueError, match=match.format("rel_k")):
            relative_attention(q, K, V, table, causal=True, offset=offset)
        relative_attention(q, K[..., :-1, :], V[..., :-1, :], table, causal=True, offset=0)  # there is no other reading
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("table", lambda: relskew.relative_logits(Q, table, n_keys=N, causal=True)),
        ("table", lambda: relskew.relative_values(Q @ K.swapaxes(-2, -1), table, causal=True)),
        ("table", lambda: relskew.relative_values(ONE @ K.swapaxes(-2, -1), table, causal=True, offset=N - 1)),
        ("bias", lambda: toeplitz(table[:, 0], n_queries=N, n_keys=N, causal=True)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=match.format(name)):
            call()
    for span in (Span.full(N), Span.causal(2 * N - 1)):
        found = relative_attention(Q, K, V, table, span, causal=True)
        expected = oracles.relative_attention(Q, K, V, table, span=span, causal=True).out
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    one: Any = relative_attention(ONE, ONE, ONE, TABLE[:1], causal=True)  # with one row both readings agree
    assert one.shape == ONE.shape


NAMES = {
    "alibi_slopes": "`rel_bias`", "attention_mask": "`mask`", "attn_mask": "`mask`", "bias": "`rel_bias`",
    "causl": "`causal`", "dropout_p": "`dropout`", "enable_gqa": "need not be", "is_causal": "`causal`",
    "logits_soft_cap": "`softcap`", "need_weights": "`attention_weights`", "offsets": "`offset`", "query": "`q`",
    "softmax_scale": "`scale`", "table": "`rel_k`", "window_size": "`window`",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_argument_is_answered_with_the_name_here(name: str) -> None:
    for function in (relative_attention, relskew.relative_attention_vjp):
        given: dict[str, Any] = {name: 1} | ({"d_out": Q} if function is relskew.relative_attention_vjp else {})
        for _ in range(2):
            match = rf"^{function.__name__}\(\) has no argument `{name}`.*{NAMES[name]}"
            with pytest.raises(TypeError, match=match):
                function(q=Q, k=K, v=V, **given)


@pytest.mark.parametrize(("span", "hint"),
                         [(8, r", such as Span\.causal\(8\), Span\.full\(8\) or Span\.clipped\(8\), got int 8"),
                          ((-3, 0), r", such as Span\(3, 0\), got tuple \(-3, 0\)"), (True, ", got bool True"),
                          (memoryview(bytes(4)).cast("B", [2, 2]), ", got memoryview .*"),
                          ("causal", ", got str 'causal'"), ((1, 2, 3), r", got tuple \(1, 2, 3\)")])  # fmt: skip
def test_what_is_no_span_is_answered_with_the_span_that_is_meant(span: Any, hint: str) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: BlockSpec(8, 2, span, causal=True),
        lambda: relative_attention(Q, K, V, TABLE, span, causal=True),
        lambda: toeplitz(TABLE[:, 0], span, n_queries=N, n_keys=N),
    )
    for call in calls:
        with pytest.raises(TypeError, match=rf"^`span` must be a Span( or None)?{hint}$"):
            call()


@pytest.mark.parametrize(("function", "name", "hint"),
                         [("generate", "eos_token_id", "is called `stop` here"),
                          ("generate", "max_new_tokens", "is called `n` here"),
                          ("torch_to_onnx", "dynamic_axes", "is called `vary` here"),
                          ("decoder_to_onnx", "opset_version", "is called `opset` here"),
                          ("encoder_decoder_to_onnx", "in_place", "`decoder_to_onnx` have it"),
                          ("generate", "operator", "an argument of the functions that export"),
                          ("quantize", "profile", "`to_onnx` has it")])  # fmt: skip
def test_exports_explain_unknown_arguments(function: str, name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^{function}\(\) has no argument `{name}`: .*{hint}"):
        getattr(export, function)(**{name: 1})


@pytest.mark.parametrize(("library", "words"),
                         [("torch", r"torch: torch\.as_tensor\(rel_k\)"), ("jax.numpy", r"JAX: jnp\.asarray\(rel_k\)"),
                          ("mlx.core", r"MLX: mx\.asarray\(rel_k\)")])  # fmt: skip
def test_an_array_of_another_library_is_answered_with_how_to_make_one(library: str, words: str) -> None:
    xp = pytest.importorskip(library)
    q, k, v = (xp.asarray(x, dtype=xp.float32) for x in (Q, K, V))
    with pytest.raises(TypeError, match=f"^`rel_k` must be of the array library of `q`, {words}, got ndarray of"):
        relative_attention(q, k, v, TABLE)


def test_parts_of_the_package_are_there_by_name() -> None:
    """Without their import, and without any array library until they are asked for."""
    code = """
import sys, relskew_core
assert not {"numpy", "torch", "jax", "onnx"} & sys.modules.keys()
for name in ("papers", "conventions", "draw", "layers", "distributed", "backends"):
    assert getattr(relskew_core, name).__name__ == f"relskew_core.{name}"
assert relskew_core.export.to_onnx
assert not hasattr(relskew_core, "exports")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("part", "missing"), [("torch", "torch"), ("jax", "jax")])
def test_parts_of_many_devices_name_their_extra(part: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"relskew_core.distributed.{part}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    words = rf'^relskew_core\.distributed\.{part} needs {missing}: pip install "(relskew-core|\.)\[{missing}\]"'
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(f"relskew_core.distributed.{part}")


def test_the_default_library_is_named_for_every_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r'pip install "(relskew-core|\.)\[numpy\]"'):
        relskew.backends.default_library()


@pytest.mark.parametrize("beyond", ["error", "clip", "zero"])
def test_short_names_of_spans_take_what_lies_beyond(beyond: Any) -> None:
    assert Span.causal(3, beyond) == Span(2, 0, beyond)
    assert Span.causal(3, beyond=beyond) == Span(2, 0, beyond)
    assert Span.full(3, beyond=beyond) == Span(2, 2, beyond)
    assert Span.full(3, beyond) == Span(2, 2, beyond)


@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_a_subclass_is_a_span(impl: Any) -> None:
    class Named(Span):
        """A span of a user."""

    rng = np.random.default_rng(0)
    x, table = rng.standard_normal((6, 4)), rng.standard_normal((11, 4))
    expected = relative_attention(x, x, x, table, Span.full(6), impl=impl)
    np.testing.assert_array_equal(relative_attention(x, x, x, table, Named(5, 5), impl=impl), expected)


attend: Any = relative_attention
grid: Any = relative_attention_2d
made: dict[str, Any] = {"matrix": toeplitz, "spec": BlockSpec, "span": Span, "t5": conventions.T5}
SWAPPED, OTHERS, MORE = (x.swapaxes(-2, -3) for x in (Q, K, V))
OVER = r"\(\.\.\., heads, length, width\) here: did you mean q\.swapaxes\(-2, -3\)"
SWIN, BIAS = r" must .* conventions\.Swin\(window=\(7, 7\)\)\.load", "`rel_bias` must have"
WIDE: dict[str, Any] = {"q_grid": (7, 7), "k_grid": (7, 7)}
IMAGES, TOKENS = np.zeros((3, 1, 4, 49, 8)), torch.zeros(1, H, N, D)
BLOCK = RelativeMultiheadAttention(BlockSpec(16, 4, Span.clipped(3)))
of_torch: Any = MultiheadAttention

ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "swapped heads": (lambda: attend(SWAPPED, OTHERS[:, :4, :2], MORE[:, :4, :2]), OVER),  # Lq / Lk is no integer
    "swapped, table": (lambda: attend(SWAPPED, OTHERS, MORE, np.ones((H, 11, D))), OVER),
    "swapped, bias": (lambda: attend(SWAPPED, OTHERS, MORE, rel_bias=np.ones((H, 11))), OVER),
    "swapped, sinks": (lambda: attend(SWAPPED, OTHERS, MORE, sinks=np.zeros(H)), OVER),
    "swapped, mask": (lambda: attend(SWAPPED, OTHERS, MORE, mask=np.ones((N, N), dtype=bool)), OVER),
    "swapped, segments": (lambda: attend(SWAPPED, OTHERS, MORE, segments=np.zeros((2, N), dtype=int)), OVER),
    "swapped, segments of one item": (
        lambda: attend(SWAPPED[0], OTHERS[0], MORE[0], segments=np.zeros(N, dtype=int)), OVER),
    "unlike any name": (lambda: attend(Q, K, V, xyz=1), r"^relative_attention\(\) has no argument `xyz`$"),
    "unlike any name of a bias": (lambda: made["matrix"](TABLE[:, 0], n_queries=N, n_keys=N, xyz=1),
                                  r"^toeplitz\(\) has no argument `xyz`$"),
    "another name of a bias": (lambda: made["matrix"](TABLE[:, 0], n_queries=N, n_keys=N, is_causal=True),
                               r"^toeplitz\(\) has no argument `is_causal`: it is called `causal` here$"),
    "another name of a spec": (lambda: made["spec"](8, 2, Span.full(3), is_causal=True),
                               r"^BlockSpec\(\) has no argument `is_causal`: it is called `causal` here$"),
    "segments": (lambda: attend(Q, K, V, segments=[0] * N), "an integer array, or a pair of integer arrays"),
    "positions": (lambda: attend(Q, K, V, positions=[np.arange(N)] * 3), r"^`positions` must be a pair of integer"),
    "padding": (lambda: attend(Q, K, V, mask=np.ones((2, N), bool)), r"is mask\[\.\.\., None, None, :\], got"),
    "mask by item": (lambda: attend(Q, K, V, mask=np.ones((2, N, N), bool)),
                     r"one per item, query and key is mask\[\.\.\., None, :, :\], got"),
    "Swin's table": (lambda: toeplitz_2d(np.zeros((169, 4)), **WIDE), "`bias`" + SWIN),
    "Swin's wide table": (lambda: toeplitz_2d(np.zeros((169, 12)), **WIDE), "`bias`" + SWIN),
    "Swin's table in a call": (lambda: grid(*IMAGES, rel_bias=np.zeros((169, 4)), **WIDE), "`rel_bias`" + SWIN),
    "grid": (lambda: grid(*IMAGES, q_grid=(7, 8), k_grid=(7, 7)),
             r"`q` must have 56 positions on axis -2, 7 · 8 of its grid and 0 of its prefix, got"),
    "spec": (lambda: made["spec"](64, 4), r"^BlockSpec\(\) needs `span`, such as Span\.causal\(256\)"),
    "Span": (lambda: made["span"](256), r"^Span\(\) needs `right`: Span\.causal\(n\), Span\.full\(n\) and"),
    "T5": (lambda: made["t5"](), r"^T5\(\) needs `bidirectional`, True in an encoder"),
    "bias": (lambda: made["matrix"](TABLE[:, 0]), r"^toeplitz\(\) needs `n_queries`$"),
    "T5's table": (lambda: attend(Q, K, V, rel_bias=np.zeros((32, H))), rf"{BIAS} H = 4 .* conventions\.T5\("),
    "slopes": (lambda: attend(Q, K, V, rel_bias=np.zeros(H)), r"a bias by `relskew_core\.alibi_bias`"),
    "causal slopes": (lambda: attend(Q, K, V, rel_bias=np.zeros(H), causal=True), r"by `relskew_core\.alibi_bias`"),
    "bias by pair": (lambda: attend(Q, K, V, rel_bias=np.zeros((H, N, N))), rf"{BIAS} shape .* an additive `mask=`"),
    "mask of tokens": (lambda: attend(Q, K, V, attention_mask=1), r"`mask` here, .*=attention_mask == 0$"),
    "embedding": (lambda: attend(TOKENS, TOKENS, TOKENS, torch.nn.Embedding(11, D)),
                  r"^`rel_k` must be an array, such as its `weight`, got Embedding"),
    "module": (lambda: vars(export)["to_onnx"](BLOCK),
               r"^to_onnx\(\) needs `weights`, .* module\.spec, module\.state_dict\(\)$"),
    "module and weights": (lambda: vars(export)["to_onnx"](BLOCK, BLOCK.state_dict()),
                           r"^`spec` must be a BlockSpec, such as its `spec`, got Relative"),
    "torch's module": (lambda: of_torch(16, 4), r"^MultiheadAttention\(\) needs `span`, such as"),
    "registered": (lambda: relskew.huggingface.register_attention("t5"),
                   r"^`rel_bias` must be given where `name` is not ALiBi's, .*, got 't5'$"),
}  # fmt: skip
"""Calls, type checkers refuse most of them too, and what the error says to write instead."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_error_says_what_to_write_instead(name: str) -> None:
    call, words = ANSWERS[name]
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_torchs_module_is_answered_with_what_reads_it(strict: bool) -> None:
    state = torch.nn.Sequential(torch.nn.MultiheadAttention(16, 4)).state_dict()
    with pytest.raises(RuntimeError, match=r"read by `from_multihead`$"):
        torch.nn.Sequential(BLOCK).load_state_dict(state, strict=strict)


@pytest.mark.parametrize("name", ["torch", "equinox", "flax", "mlx"])
def test_modules_refuse_no_cache_and_warn_of_padding_that_hides_all_keys(name: str) -> None:
    layers = pytest.importorskip(f"relskew_core.layers.{name}")
    spec, module = BlockSpec(8, 2, Span.causal(N), causal=True), layers.RelativeMultiheadAttention
    made: Any = module(spec) if name == "torch" else module.from_weights(relskew.init_weights(spec, seed=0), spec)
    x = made.xp.ones((2, 3, 8), dtype=made.xp.float32)
    assert made(x).shape == (2, 3, 8)
    no_cache = r"^`past` must be a cache, such as `empty_cache` makes, or be left out, got None$"
    with pytest.raises(TypeError, match=no_cache):  # so that none unpacks a batch
        made(x, past=None)
    tokens = made.xp.asarray([[True, True, True], [True, True, False]])
    with pytest.warns(UserWarning, match=r"^`key_padding_mask` hides every key of an item, .* pass ~mask") as caught:
        made(x, key_padding_mask=tokens)
    assert caught[0].filename == __file__
    made(x, key_padding_mask=~tokens if name != "mlx" else tokens == False)  # noqa: E712  # warnings are errors


def test_torchs_own_padding_that_hides_all_keys_warns() -> None:
    made, x = MultiheadAttention(8, 2, Span.clipped(2), batch_first=True), torch.ones(2, 3, 8)
    hidden = torch.ones(2, 3, dtype=torch.bool)
    with pytest.warns(UserWarning, match=r"^`key_padding_mask` hides every key of an item"):
        made(x, x, x, key_padding_mask=hidden)
    made(x, x, x, key_padding_mask=~hidden)

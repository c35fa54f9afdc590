"""JAX's loops: the results and gradients of the dense formula, memory, compile time, and programs for any batch."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dense
import oracles
import relskew_core as relskew
import strategies
from libraries import of_name
from relskew_core import Span, relative_attention, relative_attention_vjp
from relskew_core._kernel.call import Arguments, Options
from relskew_core._kernel.chunk import documents_of
from relskew_core._kernel.problem import problem
from relskew_core._positions.visibility import Visibility
from relskew_core.backends import _compiled

jax = pytest.importorskip("jax")
jnp = jax.numpy
plans = pytest.importorskip("relskew_core.backends._jax.loops")
passes = pytest.importorskip("relskew_core.backends._jax.passes")


@pytest.fixture(autouse=True, scope="module")
def _loops() -> Iterator[None]:
    """Go by the loops in float32, too, where there are compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compiled, "kernels", None)
        yield


def on_jax(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: dense.each(jnp.asarray, x) for name, x in arrays.items()}


def run(function: Any, *arguments: Any) -> Any:
    return jax.jit(function)(*arguments)


def close(actual: Any, expected: Any, tolerance: float, name: str) -> None:
    size = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)))
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=tolerance * size, err_msg=name)


@pytest.mark.parametrize("chunks", ["some", "one"])
@settings(max_examples=8, deadline=None)  # each example is compiled; `make fuzz` tries thousands
@given(call=strategies.calls(), seed=strategies.seeds)
def test_any_call_and_its_gradient_with_respect_to_output_and_log_sum_exp(
    chunks: str, call: strategies.Call, seed: int
) -> None:
    options = call.options if chunks == "some" else {**call.options, "chunk_size": None}  # one chunk is no loop
    portable = relative_attention(**call.arrays, **options, return_lse=True, impl="portable")
    rng = np.random.default_rng(seed)
    cotangents = rng.standard_normal(portable[0].shape), rng.standard_normal(portable[1].shape)
    cotangents[1][~np.isfinite(portable[1])] = 0.0  # queries that see nothing
    floating = {name: x for name, x in call.arrays.items() if x.dtype != bool}
    mask = {name: jnp.asarray(x) for name, x in call.arrays.items() if x.dtype == bool}

    def both(arrays: dict[str, Any]) -> Any:
        results, pull = jax.vjp(lambda x: relative_attention(**x, **mask, **options, return_lse=True), arrays)
        return results, pull(tuple(jnp.asarray(x) for x in cotangents))[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "TURNS", 2)  # several loops even for few queries
        results, gradients = run(both, on_jax(floating))
    for name, actual, expected in zip(("out", "lse"), results, portable, strict=True):
        close(actual, expected, 1e-12, name)

    plain = {name: option for name, option in options.items() if name != "chunk_size"}
    expected = dense.differentiated(partial(oracles.attention, **plain), call.arrays, *cotangents)[2]
    for name, gradient in expected.items():
        close(gradients[name], gradient, 1e-10, name)


def agrees(case: dense.Case, *, known: Any = (), traced: Any = (), given: Any = (), **more: Any) -> None:
    """Check both passes: some labels in the closure of a program, options among its arguments, results given back."""
    whole, d_out = {**case.call(), **more}, jnp.asarray(case.d_out())
    arrays = on_jax(case.arrays()) | {name: jnp.asarray(whole[name]) for name in traced}
    options = {name: x for name, x in whole.items() if name not in traced} | {name: arrays.pop(name) for name in known}

    def both(arrays: Any) -> Any:
        attend = partial(relative_attention, **options, return_lse=True, impl="native")
        results = dict(zip(("out", "lse"), attend(**arrays), strict=True))
        if known or traced:
            return results, jax.vjp(lambda x: attend(**x)[0], arrays)[1](d_out)[0]
        kept = {name: results[name] for name in given}
        return results, relative_attention_vjp(d_out, **arrays, **options, **kept, impl="native")._asdict()

    results, gradients = run(both, arrays)
    expected = relative_attention(**case.arrays(), **whole, return_lse=True, impl="portable")
    for name, x in zip(("out", "lse"), expected, strict=True):
        close(results[name], x, 1e-12, name)
    pulled = relative_attention_vjp(case.d_out(), **case.arrays(), **whole, impl="portable")
    for name in dense.floating(case.arrays()):
        close(gradients[name], getattr(pulled, name), 1e-10, name)


EVERY_OPTION = (
    "packed documents, for all items", "documents in any order", "documents, the table meets keys",
    "positions, zero beyond, in a window", "positions in blocks, the table meets keys", "positions without tables",
    "consecutive positions", "dropout of documents with sinks", "additive with holes mask of shape (2, 7, 7)",
)  # fmt: skip


@pytest.mark.parametrize("more_chunks", [False, True], ids=["", "others"])
@pytest.mark.parametrize("case", [case for name in EVERY_OPTION for case in dense.CASES if case.name == name], ids=str)
def test_every_option_in_loops_equals_the_portable_code(case: dense.Case, more_chunks: bool) -> None:
    place = EVERY_OPTION.index(case.name)
    given = ((), ("out",), ("out", "lse"))[(place + more_chunks) % 3]
    agrees(case, given=given, chunk_size=(1, 100)[place % 2] if more_chunks else 3)


KNOWN = [
    dense.Case("in order", n=40, m=40, tables="rel_k rel_v rel_bias key_table", span=Span.full(40),
               labels={"segments": [i // 5 for i in range(40)]}, options={"causal": True, "chunk_size": 6}),
    dense.Case("others for keys, of which some have no query", n=21, m=64, span=Span.clipped(3), tables="rel_k rel_v",
               labels={"segments": ([7, 7, *range(6, -13, -1)], [i // 4 for i in range(64)])},
               options={"offset": 5, "chunk_size": 4}),
    dense.Case("at positions", n=32, m=32, span=Span.clipped(3), tables="rel_k rel_v key_table",
               labels={"segments": [i // 4 for i in range(32)], "positions": (list(range(64, 0, -2)), list(range(32)))},
               options={"chunk_size": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "keys"), [*zip(KNOWN, (16, 32, 4), strict=True)], ids=str)
def test_keys_of_other_documents_are_left_out_where_segments_are_known(case: dense.Case, keys: int) -> None:
    arrays = on_jax(case.arrays())
    call = problem(Arguments(**arrays, **case.call()))
    size = case.options["chunk_size"]
    ranges = plans.Ranges.of(call.options, size, documents_of(call.given))
    assert [loop.m for loop in plans.LoopPlan.of(call.options, size, ranges).loops] == [keys]
    agrees(case, known=case.labels)


def test_documents_that_leave_out_little_go_by_the_pattern() -> None:
    case = dense.Case("one long", n=40, m=40, tables="", labels={"segments": [i // 30 for i in range(40)]})
    call = problem(Arguments(**on_jax(case.arrays())))
    assert plans.Ranges.of(call.options, 8, documents_of(call.given)) is None


@pytest.mark.parametrize("tables", ["", "rel_k rel_v rel_bias key_table"], ids=["no tables", "tables"])
def test_offsets_by_item_may_be_traced(tables: str) -> None:
    """Includes gradients of the tables, whose rows are selected by unknown values."""
    agrees(dense.Case("ragged", n=5, m=9, span=Span(4, 1, "clip"), tables=tables,
                      options={"causal": True, "dropout": 0.3, "seed": 2, "chunk_size": 2, "offset": [4, -1]}),
           traced=["offset"])  # fmt: skip


def test_positions_that_are_not_known_give_nan_where_a_table_should_have_reached() -> None:
    case = dense.Case("unreached", span=Span(3, 3), tables="rel_k rel_v", options={"window": (5, None)})
    stands = jnp.asarray([0, 1, 2, 3, 4, 5, 20]), jnp.arange(7)

    def attend(arrays: Any, stands: Any) -> Any:
        return relative_attention(**arrays, **case.call(), positions=stands, chunk_size=2, impl="native")

    with pytest.raises(ValueError, match="`rel_k` reaches the relative positions -3 … 3, but queries see"):
        attend(on_jax(case.arrays()), stands)
    out = np.asarray(run(attend, on_jax(case.arrays()), stands))
    # The third query sees four keys ahead and the last one none: hidden keys need no row.
    missing: Any = np.isnan(out).all(axis=-1)
    assert missing[0, 0].tolist() == [True, True, True, False, True, True, False]
    assert not out[..., 6, :].any()


@pytest.mark.parametrize("new", [True, False], ids=["new", "old"])
def test_a_key_of_jax_drops_the_same_in_both_passes(new: bool) -> None:
    key = jax.random.key(7) if new else jax.random.PRNGKey(7)
    case = dense.Case("drawn", options={"dropout": 0.4, "chunk_size": 3})

    def pull(arrays: Any, key: Any, impl: Any) -> Any:
        def total(arrays: Any) -> Any:
            return jnp.sum(jnp.sin(relative_attention(**arrays, **case.call(), seed=key, impl=impl)))

        return jax.value_and_grad(total)(arrays)

    native, portable = (run(partial(pull, impl=impl), on_jax(case.arrays()), key) for impl in ("native", "portable"))
    jax.tree.map(lambda x, y: close(x, np.asarray(y), 1e-10, "gradients"), native, portable)


@settings(max_examples=300, deadline=None)
@given(n=st.integers(0, 40), m=st.integers(0, 40), size=st.integers(1, 12),
       pattern=st.fixed_dictionaries({"offset": st.integers(-50, 50), "causal": st.booleans(),
                                      "window": st.none() | st.tuples(*[st.none() | st.integers(0, 12)] * 2),
                                      "block_size": st.none() | st.integers(1, 9)}))  # fmt: skip
def test_plans_have_everything_that_is_seen_once_and_at_one_place(
    n: int, m: int, size: int, pattern: dict[str, Any]
) -> None:
    causal = pattern["causal"] or pattern["block_size"] is not None
    left, right = pattern["window"] or (None, None)
    visibility = Visibility(n, m, pattern["offset"], left, 0 if causal else right, pattern["block_size"])
    plan = plans.LoopPlan.of(Options(Span(0, 0, "zero"), visibility, 1.0, 1.0), size)
    assert len(plan.loops) <= plans.LOOPS
    found = []
    for loop in plan.loops:
        assert loop.n <= size
        assert len(loop.places.start) >= plans.TURNS or len(plan.loops) == 1
        for start, fresh, first, seen_first, seen_end in zip(*loop.places, strict=True):
            assert 0 <= start <= n - loop.n
            assert 0 <= first <= m - loop.m
            assert loop.overlap or start == fresh
            assert loop.unseen or (seen_first, seen_end) == (first, first + loop.m)
            low = first - start - visibility.offset - loop.spare
            assert plan.low <= low <= low + loop.width - 1 <= plan.high
            for i in range(fresh, start + loop.n):
                for j in range(m):
                    if oracles.sees(i, j, **pattern):
                        found.append((i, j))
                        assert first <= seen_first <= j < seen_end <= first + loop.m
                        assert low <= j - i - visibility.offset < low + loop.width
    seen = [(i, j) for i in range(n) for j in range(m) if oracles.sees(i, j, **pattern)]
    assert sorted(found) == seen


def test_a_triangle_is_cut_into_a_few_loops_and_a_band_is_not() -> None:
    def loops(**pattern: Any) -> list[Any]:
        options = Options(Span(0, 0, "zero"), Visibility(256, 256, **pattern), 1.0, 1.0)
        return list(plans.LoopPlan.of(options, 8).loops)

    assert [loop.m for loop in loops()] == [256]
    assert [loop.m for loop in loops(left=15, right=0)] == [8 + 15]
    assert [loop.m for loop in loops(right=0)] == [40, 80, 128, 168, 208, 256]


def shapes(length: int, function: Any) -> list[Any]:
    rows, table = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, 2, length, 16), (2, length, 16)))
    labels = [jax.ShapeDtypeStruct((length,), "int32")] if function is other_gradients else []
    return [rows, rows, rows, table, *labels]


def gradient(q: Any, k: Any, v: Any, rel_k: Any) -> Any:
    def total(q: Any, k: Any, v: Any, rel_k: Any) -> Any:
        return jnp.sum(jnp.square(relative_attention(q, k, v, rel_k, causal=True, chunk_size=64)))

    return jax.grad(total, argnums=(0, 1, 2, 3))(q, k, v, rel_k)


def pushed(q: Any, k: Any, v: Any, rel_k: Any) -> Any:

    attend = jax.jit(partial(relative_attention, causal=True, chunk_size=64))
    return jax.jvp(attend, (q, k, v, rel_k), (q, k, v, rel_k))


def other_gradients(q: Any, k: Any, v: Any, rel_k: Any, labels: Any) -> Any:
    """The gradients of calls with all options, one after the other in one program."""
    table = rel_k[:, :65]
    given: dict[str, Any] = {"span": Span.clipped(32), "rel_k": table, "key_table": table, "dropout": 0.1, "seed": 1}
    calls: list[dict[str, Any]] = [{"segments": labels}, {"positions": (labels, labels)}, {"offset": labels[:1]}]

    def total(q: Any, k: Any, v: Any) -> Any:
        return sum(jnp.sum(relative_attention(q, k, v, **call, **given, chunk_size=64)) for call in calls)

    return jax.grad(total, argnums=(0, 1, 2))(q, k, v)


@pytest.mark.no_cover
@pytest.mark.parametrize("function", [gradient, pushed, other_gradients])
def test_memory_grows_with_the_length_and_not_with_its_square(function: Any) -> None:
    def scratch(length: int) -> int:
        compiled = jax.jit(function).lower(*shapes(length, function)).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    shorter, longer = scratch(512), scratch(1024)
    assert longer < 2.6 * shorter
    assert longer < 4 * 2 * 1024 * 1024  # one array of 1024 × 1024 for each of the two heads


@pytest.mark.parametrize("function", [gradient, other_gradients])
def test_the_program_does_not_grow_with_the_length(function: Any) -> None:
    def equations(jaxpr: Any) -> int:
        inner = (getattr(value, "jaxpr", None) for equation in jaxpr.eqns for value in equation.params.values())
        return len(jaxpr.eqns) + sum(equations(x) for x in inner if hasattr(x, "eqns"))

    def size(length: int) -> int:
        return equations(jax.make_jaxpr(function)(*shapes(length, function)).jaxpr)

    assert size(2048) == size(8192) > 100


def test_other_labels_and_offsets_are_compiled_once() -> None:
    q, table = decoding()
    for case in ("segments", "offset", "seed"):
        before = passes.attention._cache_size()
        for values in ([0, 0, 1, 1, 1], [0, 1, 1, 2, 2], [3, 3, 3, 3, 3]):
            known = {"segments": jnp.asarray(values), "offset": jnp.asarray(values[1:3]), "seed": values[0]}
            options: dict[str, Any] = {"dropout": 0.1, "seed": 0, case: known[case], "causal": True}
            relative_attention(q, q, q, table, **options)
        assert passes.attention._cache_size() == before + 1, case


def test_a_bias_that_a_mask_hides_everywhere_may_be_anything() -> None:
    case = dense.Case("poisoned bias", n=5, m=5, span=Span.full(5), tables="rel_bias")
    arrays, steps = case.arrays(), np.arange(5)
    mask = jnp.asarray(steps[None, :] - steps[:, None] != -2)
    poisoned = {**arrays, "rel_bias": np.where(np.arange(9) == 2, np.nan, arrays["rel_bias"])}

    def pulled(given: dict[str, Any]) -> Any:
        _, pull = jax.vjp(lambda x: relative_attention(**x, span=case.span, mask=mask, softcap=3.0), on_jax(given))
        return pull(jnp.asarray(case.d_out()))[0]

    found, expected = pulled(poisoned), pulled(arrays)
    for name, gradient in expected.items():
        close(found[name], np.asarray(gradient), 1e-12, name)


def test_negligible_weights_are_zeros() -> None:
    q, k, v = jnp.ones((1, 1)), jnp.asarray([[0.0], [-75.0]]), jnp.asarray([[1.0], [1e30]])
    out: Any = relative_attention(q, k, v)
    assert float(out[0, 0]) == 1.0


@pytest.mark.parametrize(
    ("options", "loops"), [({}, False), ({"chunk_size": 32}, False), ({"chunk_size": 31}, True)], ids=str
)
def test_one_chunk_is_no_loop(options: dict[str, Any], loops: bool) -> None:
    x = jax.ShapeDtypeStruct((2, 32, 4), jnp.float32)
    program = jax.jit(lambda q, k, v: relative_attention(q, k, v, causal=True, **options)).trace(x, x, x).jaxpr
    assert ("scan" in str(program)) == loops


@pytest.mark.parametrize(("case", "hidden"), [
    (dense.Case("later", n=12, m=12, span=Span.causal(12), options={"causal": True, "chunk_size": 2}), slice(10, 12)),
    (dense.Case("strangers", n=9, m=9, span=Span.clipped(2), tables="rel_k rel_v", options={"chunk_size": 3},
                labels={"segments": [0, 0, 0, 1, 1, 1, 0, 0, 0]}), slice(3, 6)),
], ids=lambda x: str(x) if isinstance(x, dense.Case) else "")  # fmt: skip
def test_values_that_no_query_of_the_chunk_sees_may_be_anything(case: dense.Case, hidden: slice) -> None:
    arrays = case.arrays()
    for name in ("k", "v"):
        arrays[name][..., hidden, :] = np.nan
    out: Any = run(lambda x: relative_attention(**x, **case.call(), impl="native"), on_jax(arrays))
    expected: Any = relative_attention(**case.arrays(), **case.call())
    close(np.delete(out, hidden, -2), np.delete(expected, hidden, -2), 1e-12, "out")
    assert np.isnan(out[..., hidden, :]).all()


def test_a_program_that_computes_logits_twice_has_no_nan_in_its_gradients() -> None:
    """With heads of width 1, XLA computes the logits again for the gradient, and rounds some of them otherwise."""
    random = np.random.default_rng(10)
    with jax.enable_x64(False):
        given = [jnp.asarray(random.standard_normal((1, 2, 8, 1)), "float32") for _ in "qkv"]
        table = jnp.asarray(random.standard_normal((71, 1)), "float32")

        def loss(q: Any, k: Any, v: Any, table: Any) -> Any:
            return jnp.sin(relative_attention(q, k, v, table, Span(34, 36), impl="portable")).sum()

        pull = jax.grad(loss, argnums=(0, 1, 2, 3))
        for one, other in zip(jax.jit(pull)(*given, table), pull(*given, table), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "gate"), [("float32", 2e-6), ("float16", 3e-3), ("bfloat16", 2e-2)])
def test_gradients_keep_the_dtype_and_sum_in_single(dtype: str, gate: float) -> None:
    case = dense.Case("half", n=40, m=40, span=Span.causal(40), tables="rel_k rel_v", d=8)
    options: dict[str, Any] = {"span": case.span, "causal": True}
    with jax.enable_x64(False):
        arrays = {name: jnp.asarray(x, dtype=dtype) for name, x in case.arrays().items()}
        d_out = jnp.asarray(case.d_out(), dtype=dtype)
        gradients = run(
            jax.grad(lambda x: jnp.sum(relative_attention(**x, **options, chunk_size=8, impl="native") * d_out)), arrays
        )
    assert all(gradients[name].dtype == x.dtype for name, x in arrays.items())
    wide = {name: np.asarray(x).astype("float64") for name, x in arrays.items()}
    for name, expected in dense.vjp(np.asarray(d_out).astype("float64"), wide, options).items():
        error = np.linalg.norm(np.asarray(gradients[name]).astype("float64") - expected) / np.linalg.norm(expected)
        assert error < gate, name


@pytest.mark.parametrize("traced", [False, True], ids=["plain", "offset, segments and seed by device"])
def test_a_call_may_stand_in_shard_map(traced: bool) -> None:
    """Whose arrays have types that say which of them differ from device to device; the tables here do not."""
    case = dense.Case("sharded", lead=(), span=Span.clipped(3), tables="rel_k rel_v", options={"chunk_size": 3})
    arrays = on_jax(case.arrays())
    tables = {name: arrays.pop(name) for name in case.tables.split()}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
    over, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()

    def pull(arrays: Any, tables: Any, impl: Any) -> Any:
        def attend(arrays: Any, tables: Any) -> Any:
            place = jax.lax.axis_index("x")
            own = {"offset": place, "segments": jnp.arange(7) // (place + 3), "dropout": 0.3, "seed": place}
            return relative_attention(**arrays, **tables, **case.call(), **(own if traced else {}), impl=impl)

        sharded = jax.shard_map(attend, mesh=mesh, in_specs=(over, whole), out_specs=over)
        return jax.grad(lambda *x: jnp.sum(jnp.sin(sharded(*x))), argnums=(0, 1))(arrays, tables)

    native, portable = (run(partial(pull, impl=impl), arrays, tables) for impl in ("native", "portable"))
    jax.tree.map(lambda x, y: close(x, np.asarray(y), 1e-10, "gradients"), native, portable)


def decoding() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((2, 3, 5, 4))), jnp.asarray(rng.standard_normal((30, 4)))


def test_numbers_of_python_that_are_arrays_take_the_dtype_of_the_queries() -> None:
    q = jnp.linspace(-2, 2, 24, dtype=jnp.bfloat16).reshape(2, 4, 3)
    past, given = jnp.where(jnp.tri(4), 0.0, -jnp.inf), {"scale": jnp.asarray(0.5), "sinks": jnp.full(2, 0.25)}
    out, (d_scale, d_sinks) = jax.value_and_grad(
        lambda two: relative_attention(q, q, q, mask=past, scale=two[0], sinks=two[1]).sum(), 0
    )((given["scale"], given["sinks"]))
    expected = relative_attention(q, q, q, causal=True, scale=0.5, sinks=jnp.full(2, 0.25, q.dtype)).sum()
    assert out.dtype == q.dtype
    assert out == expected
    assert d_scale.dtype == given["scale"].dtype
    assert d_sinks.shape == (2,)
    relative_attention(q, q, q, mask=past)  # is not remembered for arrays of that dtype
    for wrong in (past.astype(past.dtype), jnp.where(jnp.tri(4), 1, 0)):
        with pytest.raises(TypeError, match="`mask` must be boolean"):
            relative_attention(q, q, q, mask=wrong)


def test_an_offset_may_be_traced_or_an_array_that_jit_closes_over() -> None:
    """A cache of one length in ``lax.scan`` is how JAX decodes."""
    q, table = decoding()

    def attend(x: Any, offset: Any) -> Any:
        return relative_attention(x, q, q, table, causal=True, offset=offset)

    def step(carry: None, position: Any) -> tuple[None, Any]:
        return carry, attend(jax.lax.dynamic_slice_in_dim(q, position, 1, axis=2), position)

    tokens = jax.jit(lambda: jax.lax.scan(step, None, jnp.arange(5))[1])()
    close(jnp.concatenate(list(tokens), axis=2), attend(q, 0), 1e-12, "decoded")
    for offset in (3, [1, 3]):
        known, few = jnp.asarray(offset), q[..., :2, :]
        close(jax.jit(lambda x, known=known: attend(x, known))(few), attend(few, offset), 1e-12, "jit")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wider", [-1, 0, 2])
def test_queries_may_stand_further_away_than_32_bits_count(causal: bool, wider: int) -> None:
    case = dense.Case("far", span=Span(1, 1, "clip"), options={"chunk_size": 2, "causal": causal})
    far = 2**31 + 5
    expected = relative_attention(**case.arrays(), **case.call(), offset=far, window=(far + wider, None))
    with jax.enable_x64(False):
        arrays = on_jax(case.arrays("float32"))
        found = relative_attention(**arrays, **case.call(), offset=far, window=(far + wider, None), impl="native")
    close(found, np.asarray(expected), 1e-5, "out")


def test_blocks_that_32_bits_do_not_count_are_refused() -> None:
    case = dense.Case("far", span=Span(1, 1, "clip"), options={"block_size": 4, "blocks_before": 2**29})
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"`offset` must leave positions in 32 bits"):
        relative_attention(**on_jax(case.arrays("float32")), **case.call(), offset=2**31, impl="native")
    relative_attention(**on_jax(case.arrays()), **case.call(), offset=2**31, impl="native")


@pytest.mark.parametrize("row", ["JAX", "jax.jit"])
def test_far_documents_of_which_nobody_sees_a_key_are_zeros(row: str) -> None:
    library = of_name(row)
    q, table = library.asarray(np.ones((1, 2, 40, 4)), "float32"), library.asarray(np.ones((5, 4)), "float32")
    packed = library.asarray(np.repeat(np.arange(4), 10))
    options: Any = {"segments": packed, "span": Span(2, 2, "clip"), "window": (30, None), "return_lse": True}
    with jax.enable_x64(False):
        out, lse = library.call(relative_attention, {"q": q, "k": q, "v": q, "rel_k": table}, offset=2**40, **options)
    assert not np.any(out)
    assert np.all(np.asarray(lse) == -np.inf)


GRID: dict[str, Any] = {"q_grid": (2, 2), "k_grid": (2, 2)}
OF_CALLS = {"causal": True, "return_lse": True, "window": (1, 0), "block_size": 2, "chunk_size": 3, "softcap": 2.0}
TRACED: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    **{name: (relative_attention, [(4, 2)] * 3, {name: x}) for name, x in OF_CALLS.items()},
    **{f"causal, {name}": (relative_attention, [(4, 2)] * 4, {"causal": True, name: x})
       for name, x in OF_CALLS.items() if name != "causal"},
    "2d": (relskew.relative_attention_2d, [(2, 4, 3)] * 3, {**GRID, "window": ((1, 0), (None, 1)), "return_lse": True}),
    "nd": (relskew.relative_attention_nd, [*[(2, 4, 3)] * 3, [(3, 3), (3, 3)]],
           {**GRID, "offset": (0, 0), "chunk_size": 2}),
    "logits": (relskew.relative_logits, [(2, 4, 3), (4, 3)], {"n_keys": 4, "causal": True}),
    "logits nd": (relskew.relative_logits_nd, [(2, 4, 3), [(3, 3), (3, 3)]], {**GRID, "k_step": (1, 1)}),
    "values": (relskew.relative_values, [(2, 4, 4), (4, 3)], {"causal": True}),
    "toeplitz": (relskew.toeplitz, [(2, 4)], {"n_queries": 4, "n_keys": 4, "causal": True}),
    "pages": (relskew.paged_attention, [(1, 2, 4, 3), (4, 1, 2, 3), (4, 1, 2, 3)], {"causal": True, "window": (1, 0)}),
}  # fmt: skip
"""Functions, the shapes of their arrays, and what a program must not trace."""


@pytest.mark.parametrize("name", TRACED)
def test_every_function_names_all_that_jit_must_not_trace(name: str) -> None:
    function, shapes, constants = TRACED[name]
    arrays = [[jnp.ones(each) for each in shape] if isinstance(shape, list) else jnp.ones(shape) for shape in shapes]
    more = {"page_table": jnp.arange(4)[None], "lengths": jnp.asarray([4])} if name == "pages" else {}
    names = ", ".join(f"`{each}`" for each in constants)
    listed = re.escape(f"static_argnames={tuple(constants)!r})")
    with pytest.raises(TypeError, match=rf"^{names} must be (a )?Python values?, got .*{listed}"):
        jax.jit(function)(*arrays, **more, **constants)
    found = jax.jit(function, static_argnames=tuple(constants))(*arrays, **more, **constants)
    jax.tree.map(lambda x, y: close(x, np.asarray(y), 1e-6, name), found, function(*arrays, **more, **constants))


TABLE = {"rel_k": (2, 9, 4), "rel_v": (9, 4), "rel_bias": (2, 9), "key_table": (2, 9, 4)}
BATCHED = {"q": (2, 6, 4), "k": (1, 7, 4), "v": (1, 7, 4), "mask": (1, 6, 7)}


def drawn(items: int) -> dict[str, Any]:
    rng = np.random.default_rng(items)
    shapes = {**{name: (items, *shape) for name, shape in BATCHED.items()}, **TABLE}
    arrays = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return arrays | {"offset": jnp.arange(items), "seed": jnp.asarray(3)}


def symbolic(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the types of arrays whose batch is a symbol."""
    (batch,) = jax.export.symbolic_shape("batch")
    return {
        name: jax.ShapeDtypeStruct((batch, *x.shape[1:]) if name in (*BATCHED, "offset") else x.shape, x.dtype)
        for name, x in arrays.items()
    }


def attend(given: dict[str, Any], impl: Any = "native") -> Any:
    return relative_attention(**given, span=Span(6, 2, "clip"), causal=True, dropout=0.2, return_lse=True, impl=impl)


def pull(given: dict[str, Any]) -> Any:
    floating = {name: x for name, x in given.items() if x.dtype == jnp.float64}
    return jax.grad(lambda x: jnp.sin(attend({**given, **x})[0]).sum())(floating)


@pytest.mark.parametrize("impl", ["native", "portable", "gradient"])
def test_one_program_for_any_batch(impl: Any) -> None:
    """With a table for every place, offsets by item, a mask, and dropout."""

    def function(given: dict[str, Any]) -> Any:
        return pull(given) if impl == "gradient" else attend(given, impl)

    exported = jax.export.export(jax.jit(function))(symbolic(drawn(2)))
    loaded = jax.export.deserialize(exported.serialize())
    for items in (1, 3):
        found, expected = loaded.call(drawn(items)), jax.jit(function)(drawn(items))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), found, expected)


@pytest.mark.parametrize(
    ("name", "place"), [("q", 1), ("q", 2), ("k", 2), ("v", 3), ("rel_k", 1), ("rel_bias", 0), ("mask", 3)], ids=str
)
def test_other_sizes_must_be_numbers(name: str, place: int) -> None:
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in drawn(2).items()}
    shape = list(given[name].shape)
    shape[place] = jax.export.symbolic_shape("n")[0]
    given[name] = jax.ShapeDtypeStruct(shape, given[name].dtype)
    with pytest.raises(ValueError, match=f"`{name}` must have numbers for its heads, length and width, .* got .*n"):
        jax.export.export(jax.jit(attend))(given)

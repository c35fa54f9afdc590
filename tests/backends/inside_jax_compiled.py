"""JAX on CPUs by the compiled kernels: jitted, mapped, split and differentiated they equal the portable code."""

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from layers.test_jax_shards import run

import dense
import kernels_built
import oracles
from compiled_cases import CASES, close, narrow
from libraries import needs_kernels
from relskew_core import Span, relative_attention, relative_attention_2d, relative_attention_vjp
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends import _compiled

jax = pytest.importorskip("jax")
jnp = jax.numpy
transforms = pytest.importorskip("jax_transforms")

compiled = pytest.importorskip("relskew_core.backends._jax.compiled")
foreign = pytest.importorskip("relskew_core.backends._jax.foreign")

pytestmark = needs_kernels

attention: Any = relative_attention
attention_vjp: Any = relative_attention_vjp


def must_reach(case: dense.Case) -> bool:
    """Whether a table has to reach positions that JAX may not know."""
    return "positions" in case.labels and case.tables != "" and (case.span is None or case.span.beyond == "error")


KNOWN = [case for case in CASES if not must_reach(case)]
SERVED = [case for case in KNOWN if case.mask in (None, "boolean")]
LEARNED = [case for case in KNOWN if case.mask not in (None, "boolean")][::6]
"""With masks that may have gradients, which the kernels do not give."""


def on_jax(arrays: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    return {name: jax.tree.map(jnp.asarray, narrow(x, dtype)) for name, x in arrays.items()}


def apart(arrays: dict[str, Any], dtype: str = "float32") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays that have gradients, and the others."""
    given = on_jax(arrays, dtype)
    floating = {
        name: x for name, x in given.items() if not isinstance(x, tuple) and jnp.isdtype(x.dtype, "real floating")
    }
    return floating, {name: x for name, x in given.items() if name not in floating}


def calls_of(function: Any, *arguments: Any, platform: str = "cpu") -> int:
    """Return how often a compiled function calls the kernels."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text().count("@relskew_")


def counted(function: Any, *arguments: Any) -> tuple[Any, int]:
    """Return the results of a compiled function, and how often it calls the kernels."""
    lowered = jax.jit(function).lower(*arguments)
    return lowered.compile()(*arguments), lowered.as_text().count("@relskew_")


COMPILED: list[str] = []
"""What was compiled so far."""

jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if event.endswith("backend_compile_duration") else None
)


def agree(found: Any, expected: Any) -> None:
    jax.tree.map(lambda x, y: close(np.asarray(x), np.asarray(y)), found, expected)


@pytest.mark.parametrize(("case", "way", "dtype"), [
    *((case, "jit", "float32") for case in (*SERVED, *LEARNED)),
    *((case, "eager", "float32") for case in (*SERVED[::6], *LEARNED[:1])),
    *((case, way, "float64") for case in (*SERVED[::5], *LEARNED[:1]) for way in ("jit", "eager") if not case.labels),
], ids=str)  # fmt: skip
def test_results_and_gradients_equal_those_of_the_portable_code(case: dense.Case, way: str, dtype: str) -> None:
    arrays, d_out = case.arrays(), case.d_out()
    out, lse = attention(**arrays, **case.call(), return_lse=True, impl="portable")
    d_lse = np.where(np.isfinite(lse), np.random.default_rng(1).standard_normal(lse.shape), 0.0)

    def both(given: Any, others: Any, cotangents: Any) -> Any:
        attend = partial(attention, **others, **case.call(), return_lse=True)
        results, pull = jax.vjp(lambda x: attend(**x), given)
        return results, pull(cotangents)[0]

    with jax.enable_x64(way == "jit" or not case.labels):  # integers have 32 bits unless it is enabled
        arguments = *apart(arrays, dtype), (jnp.asarray(narrow(d_out, dtype)), jnp.asarray(narrow(d_lse, dtype)))
        results, calls = counted(both, *arguments)
        (found, sums), gradients = results if way == "jit" else both(*arguments)
    assert found.dtype == sums.dtype == dtype
    close(np.asarray(found), out)
    close(np.asarray(sums), lse)
    expected = attention_vjp(d_out, **arrays, **case.call(), out=out, lse=lse, d_lse=d_lse, impl="portable")
    for name, x in gradients.items():
        close(np.asarray(x), getattr(expected, name), name)
    assert calls == (1 if case in LEARNED else 2)


@pytest.mark.parametrize("given", ["", "out lse d_lse", "lse", "out"], ids="given {}".format)
@pytest.mark.parametrize("way", ["jit", "eager"])
def test_relative_attention_vjp_equals_the_portable_code(given: str, way: str) -> None:
    case = dense.Case("pulled", n=9, m=11, d=8, span=Span(5, 6, "clip"), tables="rel_k rel_v rel_bias", mask="boolean",
                      kv_heads=1, options={"softcap": 4.0, "offset": 2})  # fmt: skip
    arrays, options = case.arrays(), case.call()
    out, lse = attention(**arrays, **options, return_lse=True, impl="portable")
    # as if an equal share of the weights were elsewhere
    results = {"out": out, "lse": lse + np.log(2), "d_lse": np.ones_like(lse)}
    more = {name: results[name] for name in given.split()}

    def pull(d_out: Any, arrays: Any, more: Any) -> Any:
        return attention_vjp(d_out, **arrays, **options, **more)

    arguments = jnp.asarray(narrow(case.d_out())), on_jax(arrays), on_jax(more)
    found = (jax.jit(pull) if way == "jit" else pull)(*arguments)
    expected = attention_vjp(case.d_out(), **arrays, **options, **more, impl="portable")
    agree({n: x for n, x in found._asdict().items() if x is not None},
          {n: x for n, x in expected._asdict().items() if x is not None})  # fmt: skip
    assert calls_of(pull, *arguments) == (1 if "lse" in given and "out" in given else 2)


MAPPED = dense.Case("mapped", n=5, m=6, lead=(2,), heads=4, kv_heads=2, d=8, dv=4, span=Span(3, 2, "clip"),
                    tables="rel_k rel_v rel_bias key_table", rel_q_width=8, mask="boolean", mask_shape=(2, 1, 5, 6),
                    options={"softcap": 4.0})  # fmt: skip
SHARED = dense.Case("shared", n=5, m=6, lead=(2,), d=8, span=Span(3, 2, "clip"), tables="rel_k rel_v rel_bias",
                    own_tables=False, options={"dropout": 0.4, "seed": 7})  # fmt: skip
BARE = dense.Case("bare", n=5, m=6, lead=(), d=8, tables="", mask="boolean", mask_shape=(6,),
                  options={"dropout": 0.4, "seed": 7})  # fmt: skip


def stacked(case: dense.Case, names: str, size: int) -> dict[str, Any]:
    """Return the arrays of a case, some of them with a new axis in front, along which they differ."""
    rng, arrays = np.random.default_rng(0), case.arrays()
    for name in set(names.split()) & set(arrays):
        new = rng.standard_normal((size, *arrays[name].shape))
        arrays[name] = new > -0.5 if arrays[name].dtype == bool else new
    return arrays


def along(given: dict[str, Any], names: str) -> dict[str, int | None]:
    """Return the axes along which a call is mapped: the first ones of some arrays."""
    return {name: 0 if name in names.split() else None for name in given}


def at(given: dict[str, Any], names: str, i: int) -> dict[str, Any]:
    return {name: x[i] if name in names.split() else x for name, x in given.items()}


def pulled(case: dense.Case, given: dict[str, Any], seed: Any) -> Any:
    """Return a call's results, and the gradients of a number made of them."""
    floating, others = apart(given)
    options = {**case.call(), "seed": seed} if "seed" in case.options else case.call()

    def total(x: Any) -> Any:
        out, lse = attention(**x, **others, **options, return_lse=True)
        lse = jnp.where(lse == -jnp.inf, 0.0, lse)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)

    return jax.value_and_grad(total, has_aux=True)(floating)


SINGLE: dict[str, Any] = {}
"""Calls that are not mapped, each compiled once for all tests."""


def in_chunks(case: dense.Case, **changes: Any) -> dense.Case:
    return replace(case, options={**case.options, "chunk_size": 2}, **changes)


@pytest.mark.parametrize(("case", "names", "calls"), [
    *((case, names, 2) for case in (MAPPED, SHARED, BARE)
      for names in ("q k v rel_q mask", "q", "k v", "mask", "rel_k", "rel_v rel_bias key_table", "seed",
                    "q rel_k mask seed")
      if {*names.split()} & {*case.arrays(), *case.options}),
    (in_chunks(MAPPED), "q k v mask", 0), (in_chunks(MAPPED, mask="additive with holes"), "q k v rel_q", 0),
    (in_chunks(SHARED), "seed", 0),
], ids=str)  # fmt: skip
def test_vmap_is_a_loop_over_calls(case: dense.Case, names: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if calls == 0:
        monkeypatch.setattr(_compiled, "kernels", None)
    given = on_jax(stacked(case, names, 3))
    seed: Any = jnp.arange(3) if "seed" in names else 7
    mapped = jax.vmap(partial(pulled, case), in_axes=(along(given, names), 0 if "seed" in names else None))
    found, called = counted(mapped, given, seed)
    assert called == calls
    each = SINGLE.setdefault(f"{case.name} {case.mask} {calls}", jax.jit(partial(pulled, case)))
    for i in range(3):
        own = each(at(given, names, i), seed[i] if "seed" in names else seed)
        agree(jax.tree.map(lambda x, i=i: x[i], found), own)


@pytest.mark.parametrize("loops", [False, True], ids=["", "loops"])
@pytest.mark.parametrize("name", ["segments", "positions"])
@pytest.mark.parametrize("each", [True, False], ids=["each its own", "shared"])
@pytest.mark.parametrize("by_item", [True, False], ids=["by item", "of all items"])
def test_vmap_of_labels(name: str, each: bool, by_item: bool, loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if loops:
        monkeypatch.setattr(_compiled, "kernels", None)
    names = "q v rel_k" if each != by_item else "q v"
    rng = np.random.default_rng(0)
    case = dense.Case("labels", n=5, m=6, lead=(2,), d=8, span=Span(2, 1, "clip"), tables="rel_k rel_v")
    shape = (3,) * each + (2,) * by_item
    with jax.enable_x64(False):
        given = on_jax(stacked(case, names, 3))
        labels = tuple(jnp.asarray(rng.integers(0, 3, (*shape, length))) for length in (5, 6))

        def call(given: Any, labels: Any) -> Any:
            return pulled(case, {**given, name: labels}, None)

        mapped = jax.vmap(call, in_axes=(along(given, names), 0 if each else None))
        found, calls = counted(mapped, given, labels)
        assert calls == (0 if loops else 2)
        for i in range(3):
            own = jax.jit(call)(at(given, names, i), tuple(x[i] for x in labels) if each else labels)
            agree(jax.tree.map(lambda x, i=i: x[i], found), own)


@pytest.mark.parametrize(("outer", "inner"), [("rel_k", "q mask"), ("q k v rel_q", "rel_bias seed"), ("v", "rel_v")])
@pytest.mark.parametrize("case", [MAPPED, SHARED], ids=str)
def test_vmap_of_vmap(case: dense.Case, outer: str, inner: str) -> None:
    given = on_jax(stacked(case, inner, 2) | {n: x for n, x in stacked(case, outer, 3).items() if n in outer.split()})
    seed: Any = jnp.arange(2) if "seed" in inner else 7
    mapped = jax.vmap(partial(pulled, case), in_axes=(along(given, inner), 0 if "seed" in inner else None))
    found, calls = counted(jax.vmap(mapped, in_axes=(along(given, outer), None)), given, seed)
    assert calls == 2
    each = SINGLE.setdefault(f"{case.name} {case.mask} 2", jax.jit(partial(pulled, case)))
    for i, j in np.ndindex(3, 2):
        expected = each(at(at(given, outer, i), inner, j), seed[j] if "seed" in inner else seed)
        agree(jax.tree.map(lambda x, i=i, j=j: x[i, j], found), expected)


def pulled_twice(function: Any, q: Any, rel_k: Any) -> Any:
    """The gradient of the function of gradients, at results that it is given."""
    out, lse = function(q, rel_k)

    def slope(q: Any, rel_k: Any, out: Any, lse: Any) -> Any:
        gradients = attention_vjp(jnp.cos(q), q, q, q, rel_k, Span.causal(4), causal=True, out=out, lse=lse,
                                           impl=function.keywords["impl"])  # fmt: skip
        return sum(jnp.sin(x).sum() for x in gradients[:4])

    return jax.grad(slope, argnums=(0, 1, 2, 3))(q, rel_k, out, lse)


@pytest.mark.parametrize(("transformed", "way"), [
    *((each, "jit") for each in (*transforms.TRANSFORMS, pulled_twice)),
    *((each, "eager") for each in (transforms.pushed, transforms.twice)),
    *((each, "loops") for each in transforms.TRANSFORMS),
], ids=lambda x: getattr(x, "__name__", x))  # fmt: skip
def test_every_transformation_goes_through(transformed: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    q, rel_k = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 2, 4, 8), (4, 8)))
    if way == "loops":
        monkeypatch.setattr(_compiled, "kernels", None)

    def attend(q: Any, rel_k: Any, impl: str) -> Any:
        options: dict[str, Any] = {"causal": True, "return_lse": True, "impl": impl, "chunk_size": 2}
        return attention(q, q, q, rel_k, Span.causal(4), **options)

    made = [partial(transformed, partial(attend, impl=impl)) for impl in ("auto", "portable")]
    found = (made[0] if way == "eager" else jax.jit(made[0]))(q, rel_k)
    agree(found, jax.jit(made[1])(q, rel_k))


def test_the_backward_pass_takes_the_sums_of_the_forward_pass() -> None:
    x = jax.ShapeDtypeStruct((1, 2, 200, 8), jnp.float32)
    gradient = jax.grad(lambda *x: attention(*x, causal=True).sum(), argnums=(0, 1, 2))
    assert calls_of(gradient, x, x, x) == 2  # and no third call to compute them again


@pytest.mark.parametrize("items", [1, 3])
def test_threads_of_xla_share_a_call(items: int) -> None:
    """Several parts of one call, and concurrent calls of several threads, which do not wait for each other."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((items, 4, 300, 32)).astype(np.float32) for _ in range(3)]
    table = rng.standard_normal((300, 32)).astype(np.float32)
    options: dict[str, Any] = {"span": Span.causal(300), "causal": True}
    expected = [attention(*arrays, table, **options),
                *attention_vjp(arrays[0], *arrays, table, **options)[:4]]  # fmt: skip

    def both(q: Any, k: Any, v: Any, table: Any) -> Any:
        out, pull = jax.vjp(partial(attention, **options), q, k, v, table)
        mapped = jax.vmap(partial(attention, **options), in_axes=(0, 0, 0, None))(q, k, v, table)
        return out, *pull(q), mapped

    step, given = jax.jit(both), [jnp.asarray(x) for x in (*arrays, table)]
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: jax.block_until_ready(step(*given)), range(8))]
    for own in found:
        agree(own, (*expected, expected[0]))
        jax.tree.map(np.testing.assert_array_equal, own, found[0])  # identical at every run


def test_eager_calls_compile_nothing() -> None:
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((40, 8)), jnp.float32)
    attention(table, table, table)  # array_api_compat compiles a function for the first array
    for keys in (9, 10):
        q, k, v = (jnp.asarray(rng.standard_normal((2, 2, n, 8)), jnp.float32) for n in (1, keys, keys))
        before = len(COMPILED)
        out = attention(q, k, v, table, Span.causal(40), causal=True, offset=keys - 1)
        both = attention(k, k, v, table, Span.causal(40), causal=True, return_lse=True)
        gradients = attention_vjp(k, k, k, v, table, Span.causal(40), causal=True)
        _, pull = jax.vjp(partial(attention, span=Span.causal(40), causal=True), k, k, v, table)
        assert len(COMPILED) == before
        pull(k)
        given = [np.asarray(x) for x in (q, k, v, table)]
        options: dict[str, Any] = {"span": Span.causal(40), "causal": True}
        agree(out, attention(*given, **options, offset=keys - 1))
        agree(both, attention(given[1], *given[1:], **options, return_lse=True))
        agree(gradients[:4], attention_vjp(given[1], given[1], *given[1:], **options)[:4])
    before = len(COMPILED)
    jax.jit(lambda x: x + 1)(1)
    assert len(COMPILED) > before  # otherwise the check would not notice anything


@pytest.mark.parametrize("first", ["jit", "eager"])
@pytest.mark.parametrize("form", ["no heads", "one bias", "grid", "windows"])
def test_arrays_that_jit_closes_over(form: str, first: str) -> None:
    """Arrays made from them in the closure are tracers."""
    rng = np.random.default_rng(0)
    q, table, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in [(441, 4), (41, 4), (881,)])
    heads = q[None, None]
    calls: dict[str, Callable[[], Any]] = {
        "no heads": lambda: relative_attention(q, q, q, table, Span(20, 20, "clip")),
        "one bias": lambda: relative_attention(heads, heads, heads, rel_bias=bias),
        "grid": lambda: relative_attention_2d(q, q, q, table, table, q_grid=(21, 21), k_grid=(21, 21)),
        "windows": lambda: relative_attention_2d(
            q[None, :9], q[None, :9], q[None, :9], rel_bias=bias[:35].reshape(7, 5), q_grid=(3, 3), k_grid=(3, 3)
        ),
    }
    call = calls[form]
    expected = call() if first == "eager" else None
    found = jax.jit(lambda factor: factor * call())(1.0)
    assert oracles.relative_error(found, call() if expected is None else expected) < 1e-5


@pytest.mark.parametrize("committed", [False, True])
def test_eager_results_are_as_committed_as_what_they_are_made_of(committed: bool) -> None:
    q = jnp.ones((1, 2, 5, 8), jnp.float32)
    q = jax.device_put(q, jax.devices()[0]) if committed else q
    out: Any = attention(q, q, q, causal=True)
    assert isinstance(out, jax.Array)
    assert out.committed == committed
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("n", [1, 5])
def test_debug_nans_raises_for_nan(n: int) -> None:
    q = jnp.full((1, 1, n, 8), jnp.nan, jnp.float32)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        attention(q, q, q)


def test_without_jit_every_step_is_there_to_see() -> None:
    case = dense.Case("plain", n=2, m=2, span=Span.causal(2), lead=(2,), options={"causal": True})
    given = on_jax(case.arrays())
    axes = {name: 0 if name in "qkv" else None for name in given}
    with jax.disable_jit():
        mapped = jax.vmap(lambda x: attention(**x, **case.call()), in_axes=(axes,))(given)
    agree(mapped, attention(**case.arrays(), **case.call()))


@pytest.mark.parametrize("n", [20, 200])
def test_what_is_lowered_for_elsewhere_calls_no_kernels(n: int) -> None:
    """For a GPU, and for others to load: they may have none."""
    x = jax.ShapeDtypeStruct((1, 2, n, 8), jnp.float32)
    attend = jax.jit(partial(attention, causal=True))
    gradient = jax.jit(jax.grad(lambda *x: attend(*x).sum()))
    mapped = jax.jit(jax.vmap(attend, in_axes=(0, 0, None)))
    saved = jax.export.export(jax.jit(gradient))(x, x, x).serialize()
    given = [jnp.asarray(np.random.default_rng(i).standard_normal((1, 2, n, 8)), jnp.float32) for i in range(3)]
    agree(jax.export.deserialize(saved).call(*given), gradient(*given))
    mapped_shapes = (x, x, jax.ShapeDtypeStruct((2, n, 8), jnp.float32))
    for function, shapes in ((attend, (x, x, x)), (gradient, (x, x, x)), (mapped, mapped_shapes)):
        assert calls_of(function, *shapes) > 0
        assert calls_of(function, *shapes, platform="cuda") == 0


@pytest.mark.parametrize("what", ["symbol", "traced offset"])
def test_calls_that_kernels_do_not_support_go_elsewhere(what: str) -> None:
    (batch,) = jax.export.symbolic_shape("batch") if what == "symbol" else (2,)
    x = jax.ShapeDtypeStruct((batch, 2, 9, 8), jnp.float32)
    offset = jax.ShapeDtypeStruct((), jnp.int32)

    def attend(q: Any, offset: Any) -> Any:
        return attention(q, q, q, causal=True, offset=offset if what == "traced offset" else 0)

    assert "relative_attention[" not in str(jax.jit(attend).trace(x, offset).jaxpr)


def test_calls_that_cannot_be_read_are_refused() -> None:
    x, real = jnp.ones((1, 1, 4, 8), jnp.float32), np.ones(4, np.float64)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    attention(x, x, x)  # from here on, XLA has the functions
    given = problem(Arguments(x, x, x))
    numbers = _compiled.call.numbers(given.operands(), given.options)
    there = [name in ("q", "k", "v") for name in (*_compiled.ARRAYS, *_compiled.INTEGERS)]
    whole = np.asarray([*(numbers[name] for name in _compiled.call.WHOLE), 1, 1, *there, 1, 0, 0], np.int64)
    smaller = whole.copy()
    smaller[_compiled.call.WHOLE.index("queries")] = 3

    def call(*given: Any, **numbers: Any) -> Any:
        return jax.block_until_ready(jax.jit(lambda: jax.ffi.ffi_call("relskew_attend", [like])(*given, **numbers))())

    call(x, x, x, whole=whole, real=real)
    others: list[Any] = [
        ((x, x, x), {"whole": whole[:-1], "real": real}), ((x, x, x), {"whole": whole, "real": real[:3]}),
        ((x, x), {"whole": whole, "real": real}), ((x, x, x[0]), {"whole": whole, "real": real}),
        ((x, x, x), {"real": real}), ((x, x, x), {"whole": whole, "real": real.astype(np.float32)}),
        ((x, x, x.astype(np.float16)), {"whole": whole, "real": real}),
        ((x, x, x), {"whole": whole.astype(np.int32), "real": real}), ((x, x, x), {"whole": smaller, "real": real}),
        ((x, x, x.astype(jnp.int32)), {"whole": whole, "real": real}),
    ]  # fmt: skip
    why = "the call has (no numbers|the wrong (number of numbers|arrays))|an array has the wrong type|a different size"
    for arrays, named in others:
        with pytest.raises(jax.errors.JaxRuntimeError, match=why):
            call(*arrays, **named)


SAME = {
    "Extension Extension_Base": "size=struct_size type next",
    "Version Api_Version": "size=struct_size extensions=extension_start major=major_version minor=minor_version",
    "Metadata": "size=struct_size version=api_version traits state_type=state_type_id",
    "MetadataWanted Metadata_Extension": "base=extension_base metadata",
    "Buffer": "size=struct_size extensions=extension_start dtype data axes=rank sizes=dims",
    "Buffers Args": "size=struct_size extensions=extension_start count=size types at=args",
    "Buffers Rets": "size=struct_size extensions=extension_start count=size types at=rets",
    "Text ByteSpan": "at=ptr length=len",
    "Numbers Array": "dtype count=size data",
    "Attributes Attrs": "size=struct_size extensions=extension_start count=size types names values=attrs",
    "Frame CallFrame": "size=struct_size extensions=extension_start offers=api context=ctx stage arguments=args "
                       "results=rets attributes=attrs",
    "NewError Error_Create_Args": "size=struct_size extensions=extension_start message code=errc",
    "OldError Error_Destroy_Args": "size=struct_size extensions=extension_start error",
    "PoolTask ThreadPool_Schedule_Args": "size=struct_size extensions=extension_start context=ctx run=task of=data",
    "Threads ThreadPool_NumThreads_Args": "size=struct_size extensions=extension_start context=ctx count=num_threads",
    "Offers Api": "size=struct_size extensions=extension_start version=api_version own=internal_api "
                  "make_error=XLA_FFI_Error_Create error_message=XLA_FFI_Error_GetMessage "
                  "destroy_error=XLA_FFI_Error_Destroy schedule=XLA_FFI_ThreadPool_Schedule "
                  "count_threads=XLA_FFI_ThreadPool_NumThreads",
}  # fmt: skip

RENAMED = {
    "XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension",
    "XLA_FFI_Error_GetMessage": "XLA_FFI_Error_GetDetails",
}
"""Names that version 0.4 of the interface, which came with JAX 0.11, changed."""

GROWS = ("Frame", "Offers")
"""Structs that XLA makes, which may have more at their ends."""

VALUES = {
    "BOOL": "DataType_PRED", "INT32": "DataType_S32", "INT64": "DataType_S64", "FLOAT32": "DataType_F32",
    "FLOAT64": "DataType_F64", "MetadataWanted::TYPE": "Extension_Metadata", "Numbers::TYPE": "AttrType_ARRAY",
    "NewError::INVALID_ARGUMENT": "Error_Code_INVALID_ARGUMENT", "MAJOR_VERSION": "API_MAJOR",
    "NewError::RESOURCE_EXHAUSTED": "Error_Code_RESOURCE_EXHAUSTED",
}  # fmt: skip


@pytest.mark.skipif(kernels_built.COMPILER is None, reason="no compiler is here")
def test_the_interface_is_laid_out_as_xla_has_it() -> None:
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla.hpp"', "#if XLA_FFI_API_MINOR >= 4"]
    lines += [*(f"#define {old} {new}" for old, new in RENAMED.items()), "#endif"]
    for names, fields in SAME.items():
        ours, theirs = f"xla::{names.split()[0]}", f"XLA_FFI_{names.split()[-1]}"
        if names.split()[0] not in GROWS:
            lines.append(f"static_assert(sizeof({ours}) == sizeof({theirs}));")
        for field in fields.split():
            own, its = field.split("=")[0], field.split("=")[-1]
            lines.append(f"static_assert(offsetof({ours}, {own}) == offsetof({theirs}, {its}));")
            lines.append(f"static_assert(sizeof({ours}::{own}) == sizeof({theirs}::{its}));")
    lines += [f"static_assert(int(xla::{ours}) == int(XLA_FFI_{theirs}));" for ours, theirs in VALUES.items()]
    lines += ["static_assert(xla::MINOR_VERSION <= XLA_FFI_API_MINOR);"]
    flags = ["-std=c++17", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", f"-I{kernels_built.SOURCE}", "-x", "c++", "-"]
    command = [str(kernels_built.COMPILER), *flags]
    ended = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


SPLIT = """
def step(function):
    return jax.jit(lambda *x: jax.vjp(function, *x)[1](x[0]))

def check_calls(function, mesh, given, calls):
    with jax.set_mesh(mesh):
        assert step(function).lower(*given).as_text().count("@relskew_") == calls
        check(step(function)(*given), step(forward)(*arrays))

axes = [("x",)] * 3 + [()]
specs = tuple(PartitionSpec(*each) for each in axes)
for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    given = split(arrays, mesh, *axes)
    check_calls(forward, mesh, given, 0)  # the compiler splits what it knows
    assert len(forward(*given).sharding.device_set) == 2
check_calls(jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=specs[0]), mesh, arrays, 2)
mesh = jax.make_mesh((2, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
check_calls(jax.shard_map(forward, in_specs=specs, out_specs=specs[0], axis_names={"x"}), mesh, arrays, 0)
second = [jax.device_put(x, jax.devices()[1]) for x in arrays]
assert forward(*second).devices() == jax.jit(forward)(*second).devices() == {jax.devices()[1]}
"""


def test_split_arrays_stay_with_the_loops_but_in_shard_map() -> None:
    run(SPLIT)


@pytest.mark.parametrize("why", ["not compiled", "refused by XLA"])
def test_calls_without_kernels_run_the_loops(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("the handler's API version is incompatible with the framework's")

    if why == "not compiled":
        monkeypatch.setattr(_compiled, "kernels", None)
    else:
        monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
        monkeypatch.setattr(compiled, "is_registered", cache(foreign.is_registered.__wrapped__))
    x = jax.ShapeDtypeStruct((1, 2, 500, 8), jnp.float32)
    for impl in ("auto", "native"):
        attend = partial(attention, causal=True, impl=impl)
        program = str(jax.jit(attend).trace(x, x, x).jaxpr)
        assert "relative_attention[" not in program
        assert "scan" in program

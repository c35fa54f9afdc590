"""MLX: gradients and transformations of calls, memory that keeps the promise, programs, and what has no value yet."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import dense
from libraries import of_name
from relskew_core import Span, relative_attention, relative_attention_vjp
from relskew_core.backends import available

mx: Any = pytest.importorskip("mlx.core")

ROW = of_name("MLX")
GATE = 1e-10


def attend(q: Any, **options: Any) -> Any:
    table = mx.reshape(mx.arange(-80, 80, dtype=q.dtype), (40, 4)) / 40
    return relative_attention(q, q, q, table, causal=True, **{"chunk_size": 16, **options})


def queries(lengths: int = 40) -> Any:
    return ROW.asarray(np.random.default_rng(0).standard_normal((2, 3, lengths, 4)))


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(ROW.to_numpy(actual), ROW.to_numpy(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("how", ["auto", "auto, compiled", "portable"])
@pytest.mark.parametrize("case", dense.CASES[::2], ids=str)
def test_gradients_by_the_library_are_those_of_the_dense_formula(case: dense.Case, how: str) -> None:
    impl: Any
    impl, _, compiled = how.partition(", ")
    floating = dense.floating(case.arrays())
    given = {name: dense.each(ROW.asarray, x) for name, x in case.arrays().items()}
    others = {name: x for name, x in given.items() if name not in floating}

    def loss(learned: dict[str, Any]) -> Any:
        return mx.sum(relative_attention(**learned, **others, **case.call(), impl=impl) * ROW.asarray(case.d_out()))

    gradient = mx.compile(mx.grad(loss)) if compiled else mx.grad(loss)
    found = gradient({name: given[name] for name in floating})
    for name, expected in dense.vjp(case.d_out(), case.arrays(), case.call()).items():
        size = max(1.0, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(ROW.to_numpy(found[name]), expected, rtol=0, atol=GATE * size, err_msg=name)


def test_the_log_sum_exp_has_a_gradient_too() -> None:
    q = queries()
    _, found = mx.vjp(lambda q: attend(q, return_lse=True), [q], [q, q[..., 0]])
    table = mx.reshape(mx.arange(-80, 80, dtype=q.dtype), (40, 4)) / 40
    expected = relative_attention_vjp(q, q, q, q, table, causal=True, d_lse=q[..., 0])
    close(found[0], expected.q + expected.k + expected.v)
    value, gradient = mx.value_and_grad(lambda q: mx.sum(attend(q) * q))(q)
    close(value, mx.sum(attend(q) * q))
    direct = mx.vjp(attend, [q], [q])[1][0]
    close(gradient, direct + attend(q))


@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_calls_are_mapped_pushed_forward_and_differentiated_twice(impl: Any) -> None:
    q = queries()
    step = ROW.asarray(np.random.default_rng(1).standard_normal(q.shape))

    def gradient(q: Any) -> Any:
        return mx.grad(lambda q: mx.sum(attend(q, impl=impl) ** 2))(q)

    functions: tuple[Callable[..., Any], ...] = (partial(attend, impl=impl), gradient)
    for function in functions:
        close(mx.vmap(function)(q), function(q))
        close(mx.compile(mx.vmap(function))(q), function(q))
        change = (function(q + 1e-5 * step) - function(q - 1e-5 * step)) / 2e-5
        close(mx.jvp(function, [q], [step])[1][0], change, 1e-7)
    twice = mx.grad(lambda q: mx.sum(gradient(q) * step))(q)
    close(twice, (gradient(q + 1e-5 * step) - gradient(q - 1e-5 * step)) / 2e-5, 1e-7)


def test_offsets_may_be_unknown() -> None:
    q, table = queries(), mx.ones((5, 4), mx.float64)

    def decoded(offset: Any, q: Any) -> Any:
        span = Span.causal(5, "clip")
        return relative_attention(q[..., 30:, :], q, q, table, span, causal=True, offset=offset)

    offsets = mx.array([30, 11])
    expected = decoded([30, 11], q)
    close(decoded(offsets, q), expected)
    close(mx.compile(decoded)(offsets, q), expected)
    close(mx.vmap(decoded)(offsets, q), expected)
    close(mx.compile(decoded)(mx.array(30), q[:1]), expected[:1])


def test_segments_are_looked_at_where_they_have_values() -> None:
    """What no query sees is never multiplied, not even a key that is no number; a program cannot know."""
    q, documents = queries(), mx.arange(40) // 10
    whole = attend(q, segments=documents, chunk_size=10)
    far = mx.where(mx.arange(40)[:, None] < 30, q, mx.nan)
    close(attend(far, segments=documents, chunk_size=10)[..., :30, :], whole[..., :30, :])
    close(mx.compile(lambda segments: attend(q, segments=segments))(documents), whole)


def test_a_program_without_python(tmp_path: Any) -> None:
    q = mx.astype(queries(), mx.float32)
    name = str(tmp_path / "attention.mlxfn")
    mx.export_function(name, lambda q: attend(q, impl="portable"), q)
    close(mx.import_function(name)(q)[0], attend(q), 1e-6)


@pytest.mark.parametrize("how", ["forward", "compiled", "vjp", "gradient", "compiled gradient"])
def test_memory_grows_with_the_length(how: str) -> None:
    """Twice the length takes twice the memory instead of four times, because chunks run one after the other."""

    def loss(q: Any, table: Any) -> Any:
        return mx.sum(relative_attention(q, q, q, table, causal=True, chunk_size=64))

    calls: dict[str, Callable[..., Any]] = {
        "forward": loss,
        "compiled": mx.compile(loss),
        "vjp": lambda q, table: relative_attention_vjp(q, q, q, q, table, causal=True, chunk_size=64).rel_k,
        "gradient": mx.grad(loss, argnums=(0, 1)),
        "compiled gradient": mx.compile(mx.grad(loss, argnums=(0, 1))),
    }
    peaks = []
    for n in (1024, 2048):
        q, table = mx.ones((1, 4, n, 8)), mx.ones((n, 8))
        mx.eval(q, table)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(calls[how](q, table))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 2.5 * peaks[0]
    assert peaks[1] < 4 * 2048**2 * 4 / 2  # half of the logits


def test_arrays_are_on_the_host_and_there_is_no_native_path() -> None:
    q = queries()
    assert available()["mlx"] == ["portable"]
    with pytest.raises(ValueError, match="`impl` is 'native', but there is no native path for this call: mlx has none"):
        attend(q, impl="native")
    with pytest.raises(TypeError, match="`q` must be an array of a real floating dtype of its library, got array of"):
        attend(mx.astype(q, mx.int32))

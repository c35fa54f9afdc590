"""NumPy's native path: chosen where it pays, on as many threads as are asked for, in company of other threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from relskew_core import Span, backends, relative_attention
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends import _parallel
from relskew_core.backends._numpy import headwise
from relskew_core.backends._path import PORTABLE


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let the native path use workers, whatever the machine has."""
    backends.set_numpy_threads(2)
    yield
    backends.set_numpy_threads(None)


def arrays(length: int, heads: int = 3) -> tuple[NDArray[np.float64], ...]:
    rng = np.random.default_rng(0)
    q, k, v, table = rng.standard_normal((4, heads, length, 8))
    return q, k, v, table


def attend(*given: Any, **options: Any) -> Any:
    return relative_attention(*given, causal=True, **{"impl": "native", **options})


def blas_threads() -> list[int]:
    """Of NumPy's BLAS; other tests may have loaded another one since."""
    return [pool["num_threads"] for pool in _parallel._blas_controller().info() if pool["user_api"] == "blas"]


def test_small_calls_take_the_portable_code_unless_told_otherwise() -> None:
    for length, native in ((16, False), (90, False), (91, True), (500, True)):
        q, k, v, _ = arrays(length)
        call = problem(Arguments(q, k, v, causal=True))
        assert (backends.path("attention", call, "auto") is not PORTABLE) == native
        assert backends.path("attention", call, "native").attention is headwise.attention


@pytest.mark.parametrize(("dtype", "gate"), [("float32", 2e-6), ("float16", 3e-3)], ids=str)
def test_it_keeps_the_dtype_and_its_gate(dtype: str, gate: float) -> None:
    given = [x.astype(dtype) for x in arrays(300)]
    clip: dict[str, Any] = {"span": Span(20, 0, "clip"), "return_lse": True}
    tables = {"rel_k": given.pop()[:, :21], "rel_v": given[1][:, :21], "rel_bias": given[0][:, :21, 0]}
    found = attend(*given, **tables, **clip)
    wide = [x.astype(np.float64) for x in given]
    exact = attend(*wide, **{name: x.astype(np.float64) for name, x in tables.items()}, **clip, impl="portable")
    assert [x.dtype for x in found] == [dtype, "float32"]
    for x, y in zip(found, exact, strict=True):
        assert np.linalg.norm(x - y) <= gate * np.linalg.norm(y)


@pytest.mark.parametrize("every", [1500, 2], ids=["few", "scattered all over"])
def test_negligible_weights_are_zeros(every: int) -> None:
    """A weight of e^-80 is no subnormal number yet; against values this large it would show."""
    q, k, v = np.ones((2000, 1), np.float32), np.zeros((2000, 1), np.float32), np.zeros((2000, 1), np.float32)
    k[1::every], v[1::every] = -80.0, 1e38
    assert not np.any(attend(q, k, v, scale=1.0))


@pytest.mark.parametrize("heads", [1, 3], ids=["chunks are dealt", "heads are dealt"])
def test_the_number_of_threads_changes_nothing(heads: int) -> None:
    given = arrays(300, heads)
    results = []
    for threads in (1, 2, 3):
        backends.set_numpy_threads(threads)
        results.append(attend(*given))
    backends.set_numpy_threads(None)
    assert all(np.array_equal(result, results[0]) for result in results)
    np.testing.assert_allclose(results[0], attend(*given, impl="portable"), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("threads", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)], ids=str)
def test_a_number_of_threads_that_is_none_is_refused(threads: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`threads` must be an int"):
        backends.set_numpy_threads(threads)


@pytest.mark.usefixtures("two_threads")
def test_blas_has_one_thread_inside_and_its_own_number_after(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[list[int]] = []
    write = headwise._write_exponentials

    def watched(*given: Any) -> Any:
        inside.append(blas_threads())
        return write(*given)

    monkeypatch.setattr(headwise, "_write_exponentials", watched)
    with threadpool_limits(2, "blas"):
        before = blas_threads()
        attend(*arrays(200))
        assert blas_threads() == before
    assert {number for numbers in inside for number in numbers} == {1}


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_worker_is_raised_and_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(200)
    expected, before = attend(*given), blas_threads()
    with monkeypatch.context() as patch:
        patch.setattr(headwise, "_write_exponentials", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            attend(*given)
    assert blas_threads() == before
    assert np.array_equal(attend(*given), expected)


@pytest.mark.usefixtures("two_threads")
def test_without_threadpoolctl_one_thread_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parallel, "_can_limit_blas", lambda: False)
    monkeypatch.setattr(_parallel, "_pool", None)
    given = arrays(200)
    np.testing.assert_allclose(attend(*given), attend(*given, impl="portable"), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("two_threads")
def test_a_thread_pool_may_call_it() -> None:
    given = arrays(150)
    expected, before = attend(*given), blas_threads()
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(out, expected) for out in pool.map(lambda _: attend(*given), range(24)))
    assert blas_threads() == before


def test_a_worker_may_call_it() -> None:
    """A call inside a worker of the same pool waits for nobody."""
    given, found = arrays(150), []
    expected = attend(*given)
    for_each: Any = _parallel.for_each
    for_each(lambda _: found.append(attend(*given)), range(4), workers=2, library="numpy", initializer=lambda: None)
    assert len(found) == 4
    assert all(np.array_equal(out, expected) for out in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_forked_processes_may_call_it() -> None:
    """Forked between calls and in the middle of one; in a process that has nothing else running."""
    script = """
        import multiprocessing, threading
        import numpy as np
        from relskew_core import backends, relative_attention

        backends.set_numpy_threads(2)
        q, k, v, table = np.random.default_rng(0).standard_normal((4, 3, 400, 8))

        def attend():
            return relative_attention(q, k, v, table, causal=True, impl="native")

        expected = attend()  # starts the workers that a child does not have
        context = multiprocessing.get_context("fork")

        def child(queue):
            queue.put(float(np.abs(attend() - expected).max()))

        def fork():
            queue = context.SimpleQueue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            process.join(60)
            assert process.exitcode == 0, process.exitcode
            assert queue.get() < 1e-12

        fork()
        stop = threading.Event()

        def calls():
            while not stop.is_set():
                attend()

        busy = threading.Thread(target=calls)
        busy.start()
        try:
            for _ in range(3):
                fork()
        finally:
            stop.set()
            busy.join()
        assert np.array_equal(attend(), expected)
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr

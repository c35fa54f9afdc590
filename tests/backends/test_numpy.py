"""The compiled kernels for NumPy's arrays: on as many threads as are asked for, in company of other threads."""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dense
from libraries import needs_kernels
from relskew_core import Span, backends, relative_attention, relative_attention_vjp

pytestmark = needs_kernels


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let the native path use workers on any machine."""
    backends.set_numpy_threads(2)
    yield
    backends.set_numpy_threads(None)


def arrays(length: int, heads: int = 3) -> tuple[NDArray[np.float64], ...]:
    rng = np.random.default_rng(0)
    q, k, v, table = rng.standard_normal((4, heads, length, 8))
    return q, k, v, table


def attend(*given: Any, **options: Any) -> Any:
    return relative_attention(*given, causal=True, **{"impl": "native", **options})


@pytest.mark.parametrize(("dtype", "gate"), [("float32", 2e-6), ("float16", 3e-3)], ids=str)
def test_native_results_keep_their_dtype_and_precision(dtype: str, gate: float) -> None:
    given = [x.astype(dtype) for x in arrays(300)]
    clip: dict[str, Any] = {"span": Span(20, 0, "clip"), "return_lse": True}
    tables = {"rel_k": given.pop()[:, :21], "rel_v": given[1][:, :21], "rel_bias": given[0][:, :21, 0]}
    found = attend(*given, **tables, **clip)
    wide = [x.astype(np.float64) for x in given]
    exact = attend(*wide, **{name: x.astype(np.float64) for name, x in tables.items()}, **clip, impl="portable")
    assert [x.dtype for x in found] == [dtype, "float32"]
    for x, y in zip(found, exact, strict=True):
        assert np.linalg.norm(x - y) <= gate * np.linalg.norm(y)


@pytest.mark.parametrize("offset", [0, 2**31 - 40, -(2**33)], ids=str)
def test_a_seed_drops_the_same_weights_to_the_bit(offset: int) -> None:
    q, k, _, _ = arrays(150)
    every = np.broadcast_to(np.eye(150), (3, 150, 150))  # so the output is the weights
    options: dict[str, Any] = {"offset": offset, "dropout": 0.4, "seed": 5}
    native: Any = relative_attention(q, k, every, **options, impl="native")
    portable: Any = relative_attention(q, k, every, **options, impl="portable")
    assert 0.59 < np.mean(native > 0) < 0.61
    np.testing.assert_array_equal(native > 0, portable > 0)
    np.testing.assert_allclose(native, portable, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("threads", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)], ids=str)
def test_a_number_of_threads_that_is_none_is_refused(threads: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`threads` must be an int"):
        backends.set_numpy_threads(threads)


@pytest.mark.usefixtures("two_threads")
def test_a_thread_pool_may_call_it() -> None:
    given = arrays(150)
    expected = attend(*given)
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(out, expected) for out in pool.map(lambda _: attend(*given), range(24)))


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


FAR = np.arange(150) * 2**30
BY_ITEM: dict[str, Any] = {"offset": [1, 0, 2]}
NO_OFFSET = "the values of `offset` are not known, or there are none"
UNFIT = "the compiled kernels do not take such sizes, dtypes, offsets, segments or positions"


@pytest.mark.parametrize(("items", "width", "options", "reason"), [
    (0, 8, {"offset": []}, NO_OFFSET), (3, 0, {}, UNFIT),
], ids=["no items", "no values"])  # fmt: skip
def test_a_refusal_says_why(items: int, width: int, options: dict[str, Any], reason: str) -> None:
    q, k, v = (np.broadcast_to(x, (items, *x.shape)) for x in arrays(150)[:3])
    with pytest.raises(ValueError, match=f"no native path for this call: {re.escape(reason)}$"):
        relative_attention(q, k, v[..., :width], **options, impl="native")


@pytest.mark.parametrize("options",
                         [pytest.param({**BY_ITEM, "block_size": 2}, id="blocks"),
                          pytest.param({**BY_ITEM, "dropout": 0.5, "seed": 0}, id="dropout"),
                          pytest.param({"segments": FAR}, id="segments"),
                          pytest.param({**BY_ITEM, "segments": FAR}, id="segments of a ragged batch")])  # fmt: skip
def test_kernels_take_offsets_by_item_and_segments_far_apart(options: dict[str, Any]) -> None:
    q, k, v = (np.broadcast_to(x, (3, *x.shape)) for x in arrays(150)[:3])
    native, portable = (relative_attention(q, k, v, **options, impl=impl) for impl in ("native", "portable"))
    np.testing.assert_allclose(native, portable, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("impl", "dtype"), [("portable", "float32"), ("auto", "float64")])
@pytest.mark.parametrize("case", dense.CASES, ids=str)
def test_nothing_overflows_divides_by_zero_or_underflows_on_the_way(case: dense.Case, impl: Any, dtype: str) -> None:
    arrays, d_out = case.arrays(dtype), case.d_out().astype(dtype)
    with np.errstate(all="raise"):
        relative_attention(**arrays, **case.call(), return_lse=True, impl=impl)
        relative_attention_vjp(d_out, **arrays, **case.call(), impl=impl)

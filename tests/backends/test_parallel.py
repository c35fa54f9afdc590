"""The threads that share the work: their errors, interrupts, forks and their end.

What needs a process of its own, for its signals, its end or its count of threads, runs as a script.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relskew_core.backends import _compiled, _parallel

SETUP = """
import faulthandler, threading, time
import numpy as np
import psutil
from relskew_core import backends, relative_attention
from relskew_core.backends import _parallel
from relskew_core.backends._numpy import compiled

faulthandler.dump_traceback_later(40, exit=True)
backends.set_numpy_threads(2)
compiled.NUMPY = compiled.NUMPY._replace(shared=0)  # short calls are shared by threads, too
q, k, v, table = np.random.default_rng(0).standard_normal((4, 4, 120, 8))

def attend():
    return relative_attention(q, k, v, table, causal=True, impl="native")
"""


def run(script: str) -> str:
    """Run a script in a process of its own, and without coverage: an interrupt may leave its lock locked for good."""
    if _compiled.kernels is None:
        pytest.skip("no kernels were compiled")
    command = [sys.executable, "-c", SETUP + textwrap.dedent(script)]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def for_each(work: Callable[[Any], Any], tasks: Sequence[Any], *, workers: int = 2) -> None:
    _parallel.for_each(work, tasks, workers=workers)


def everyone_works(workers: int) -> None:
    """Return only after that many threads have had a task at the same time."""
    everyone = threading.Barrier(workers, timeout=20)
    for_each(lambda _: everyone.wait(), range(workers), workers=workers)


@pytest.fixture(autouse=True)
def new_helpers() -> Iterator[None]:
    _parallel._crew.cache_clear()
    yield
    _parallel._crew.cache_clear()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_task_is_done_once(workers: int) -> None:
    done: list[int] = []
    for_each(done.append, range(50), workers=workers)
    assert sorted(done) == list(range(50))


def test_the_caller_and_a_helper_work_at_the_same_time() -> None:
    both, threads = threading.Barrier(2, timeout=20), set()

    def work(_: int) -> None:
        both.wait()
        threads.add(threading.get_ident())

    for_each(work, range(2))
    assert len(threads) == 2
    assert threading.get_ident() in threads


def test_a_call_within_a_helper_stays_in_it() -> None:
    both = threading.Barrier(2, timeout=20)
    outer: set[int] = set()
    inner: list[int] = []

    def work(_: int) -> None:
        both.wait()
        if threading.get_ident() != caller:
            outer.add(threading.get_ident())
            for_each(lambda _: inner.append(threading.get_ident()), range(20))

    caller = threading.get_ident()
    for_each(work, range(2))
    assert inner == [*outer] * 20


@pytest.mark.parametrize("of_the_caller", [True, False], ids=["the caller's", "a helper's"])
def test_the_first_error_is_raised_and_what_is_left_dropped(of_the_caller: bool) -> None:
    caller, both = threading.get_ident(), threading.Barrier(2, timeout=20)
    begun: list[int] = []

    def work(task: int) -> None:
        begun.append(task)
        if task < 2:
            both.wait()
            if (threading.get_ident() == caller) == of_the_caller:
                raise KeyError(task)
        time.sleep(0.001)

    with pytest.raises(KeyError):
        for_each(work, range(5000))
    assert 2 <= len(begun) < 1000


def test_a_long_task_is_left_in_its_middle() -> None:
    caller, both = threading.get_ident(), threading.Barrier(2, timeout=20)

    def work(_: int) -> None:
        both.wait()
        if threading.get_ident() == caller:
            raise KeyError
        while True:
            _parallel.leave_if_dropped()
            assert time.monotonic() < end

    end = time.monotonic() + 20
    with pytest.raises(KeyError):
        for_each(work, range(2))
    assert time.monotonic() < end


def test_an_idle_helper_keeps_nothing_alive() -> None:
    class Large:
        pass

    large = Large()
    alive = weakref.ref(large)

    def call(large: Large) -> None:
        both = threading.Barrier(2, timeout=20)
        for_each(lambda _: [both.wait(), large], range(2))

    for _ in range(3):
        call(large)
    del large
    end = time.monotonic() + _parallel.IDLE_SECONDS / 2
    while alive() is not None and time.monotonic() < end:
        time.sleep(0.001)  # the helper is on its way back
        gc.collect()
    assert alive() is None


def test_a_helper_that_comes_back_during_a_call_takes_part_in_it() -> None:
    everyone = threading.Barrier(3, timeout=20)
    both = threading.Barrier(2, timeout=20)
    threads: list[int] = []
    with ThreadPoolExecutor(1) as other:
        call = other.submit(for_each, lambda _: everyone.wait(), range(2))
        while everyone.n_waiting < 2:
            time.sleep(0.001)

        def work(task: int) -> None:
            if task == 0:
                everyone.wait()
            both.wait()
            threads.append(threading.get_ident())

        for_each(work, range(2))
        call.result(20)
    assert len({*threads, threading.get_ident()}) == 2


def test_no_more_threads_work_on_a_call_than_it_asked_for() -> None:
    """Whatever other calls have started: each thread has its own buffers."""
    everyone_works(6)
    most: list[int] = []

    def call(_: int) -> None:
        working: list[None] = []

        def work(_: int) -> None:
            working.append(None)
            most.append(len(working))
            time.sleep(0.0005)
            working.pop()

        for_each(work, range(12), workers=2)

    with ThreadPoolExecutor(3) as pool:
        assert len([*pool.map(call, range(60))]) == 60
    assert max(most) == 2


def test_where_no_thread_starts_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_parallel, "start_new_thread", refused)
    threads: list[int] = []
    for_each(lambda _: threads.append(threading.get_ident()), range(9), workers=4)
    assert threads == [threading.get_ident()] * 9


def test_idle_helpers_go_and_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parallel, "IDLE_SECONDS", 0.05)
    for _ in range(2):
        everyone_works(4)
        crew = _parallel._crew()
        assert len(crew._present) == 3
        end = time.monotonic() + 20
        while crew._present and time.monotonic() < end:
            time.sleep(0.01)
        assert not crew._present
        assert not crew._idle


def test_helpers_are_no_more_than_the_largest_number_asked_for() -> None:
    """Nor has each caller its own."""
    threads: set[int] = set()

    def work(_: int) -> None:
        threads.add(threading.get_ident())
        time.sleep(0.001)

    def call(workers: int) -> int:
        for_each(work, range(8), workers=workers)
        return threading.get_ident()

    with ThreadPoolExecutor(3) as pool:
        callers = {*pool.map(call, [*range(1, 6), *[5] * 12])}
    assert 1 <= len(threads - callers) <= 4


def test_after_the_end_of_the_main_thread_calls_still_work() -> None:
    script = """
        import atexit

        def late(who):
            for _ in range(3):
                assert np.array_equal(attend(), expected)
            print(who)

        def thread():
            threading.main_thread().join()
            late("thread")

        {warm}
        backends.set_numpy_threads(1)
        expected = attend()
        backends.set_numpy_threads(2)
        atexit.register(late, "atexit")
        threading.Thread(target=thread).start()
    """
    for warm in ("pass", "attend()"):
        assert run(script.format(warm=warm)) == "thread\natexit\n"


def test_idle_helpers_do_not_hold_up_the_end() -> None:
    last_line = float(run("attend()\nprint(time.time())"))
    assert time.time() - last_line < _parallel.IDLE_SECONDS / 2


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
def test_interrupts_are_raised_as_such_and_lose_nothing() -> None:
    """Hundreds of them, anywhere in the calls: none hangs, and none leaves the helpers changed for good."""
    script = """
        import random, signal

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        _parallel.IDLE_SECONDS = 0.2  # until when a helper that an interrupt has lost is missed
        expected, random = attend(), random.Random(0)
        interrupted = 0
        while interrupted < 400:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-3))
                while True:
                    attend()
            except KeyboardInterrupt:
                interrupted += 1
        assert np.array_equal(attend(), expected)
        threads = set()

        def work(_):
            threads.add(threading.get_ident())
            time.sleep(0.01)

        while len(threads) < 2:
            _parallel.for_each(work, range(4), workers=2)
        print("done")
    """
    assert run(script) == "done\n"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
def test_an_interrupted_call_works_no_longer() -> None:
    script = """
        import signal

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        begun = []

        def work(task):
            begun.append(task)
            time.sleep(0.02)

        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            _parallel.for_each(work, range(400), workers=2)
        except KeyboardInterrupt:
            pass
        number, start = len(begun), time.monotonic()
        attend()
        assert time.monotonic() - start < 1
        time.sleep(0.1)
        assert 2 <= len(begun) == number < 50, (number, len(begun))
        print("done")
    """
    assert run(script) == "done\n"


def test_many_calls_take_neither_threads_nor_memory() -> None:
    script = """
        q, k, v, table = (x[:2, :8] for x in (q, k, v, table))
        backends.set_numpy_threads(1)
        process = psutil.Process()
        before, end = process.num_threads(), time.monotonic() + _parallel.IDLE_SECONDS / 2
        for threads in range(1, 33):
            backends.set_numpy_threads(threads)
            attend()
        while process.num_threads() > before + 31:  # calls in close succession may have started some too many
            assert time.monotonic() < end, process.num_threads()
        backends.set_numpy_threads(2)
        for _ in range(1000):
            attend()
        threads, memory = process.num_threads(), process.memory_info().rss
        for _ in range(10_000):
            attend()
        assert process.num_threads() <= threads
        assert process.memory_info().rss - memory < 2**20, process.memory_info().rss - memory
        print("done")
    """
    assert run(script) == "done\n"

"""What every test may ask for."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import runner
from libraries import LIBRARIES, Library

# Code that runs once on a few numbers is compiled in a third of the time, here and in subprocesses of tests.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

if importlib.util.find_spec("jax") is not None:
    import jax

    jax.config.update("jax_enable_x64", True)  # JAX has no float64 unless it is enabled before the first array


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Compile every third case of a test only: each takes a second, and other libraries and the matrix run all.

    The matrix, ``tests/core/test_matrix.py``, chooses cases and dtypes itself.
    """
    without_peers = importlib.util.find_spec("transformers") is None
    tried, chosen, others = Counter[tuple[str, str]](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if without_peers and "from transformers import" in getattr(getattr(item, "dtest", None), "docstring", ""):
            item.add_marker(pytest.mark.skip("needs transformers; tests/peers/test_families_page.py runs it"))
        given: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        library = given.get("library")
        if isinstance(library, Library) and library.compiled and "dtype" not in given:
            of_test = item.nodeid.partition("[")[0], library.name
            tried[of_test] += 1
            (chosen if tried[of_test] % 3 == 1 else others).append(item)
        else:
            chosen.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


psutil: Any = importlib.import_module("psutil")  # has no types
GROWTH, MOST = 80e6, 3e9
"""Bytes by which a process grows until its caches are emptied, and those that a worker may take at most."""
_after_emptying = [0]
_peaks = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    result = yield
    process = psutil.Process()
    if process.memory_info().rss > _after_emptying[0] + GROWTH:
        empty_caches()
        _after_emptying[0] = process.memory_info().rss
    return result


def empty_caches() -> None:
    """Empty the caches of compilers: JAX keeps a program for each operation, shape and dtype."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
    gc.collect()
    if sys.platform != "win32" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc keeps what has been freed
        libc.malloc_trim(0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker say how much memory it took, and fail the run if that was too much for a laptop."""
    unit = 1 if sys.platform == "darwin" else 1024
    if hasattr(session.config, "workeroutput"):
        import resource  # not on Windows, where the tests run in one process

        session.config.workeroutput["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    elif any(peak > MOST for peak in session.config.stash.get(_peaks, {}).values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Read what a worker of pytest-xdist has said at its end; one that died has said nothing."""
    if "peak" in getattr(node, "workeroutput", {}):
        node.config.stash.setdefault(_peaks, {})[node.gateway.id] = node.workeroutput["peak"]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print it last, where the end of a log says why a run without failures failed."""
    for worker, peak in config.stash.get(_peaks, {}).items():
        allowed = f", more than the {MOST / 1e9:g} GB that a worker may take" if peak > MOST else ""
        print(f"{worker} took {peak / 1e9:.2f} GB at most{allowed}")


@pytest.fixture(autouse=True)
def coverage_watches_children_alike(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it leave the processes alone that an unwatched test starts."""
    if request.node.get_closest_marker("no_cover"):
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> None:
    """Here and in the processes that tests start, although a shell that works in the background ignores them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def benchmarks_do_not_pause() -> Iterator[None]:
    """No time is measured in a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "PAUSE_SECONDS", 0.0)
        yield


@pytest.fixture(
    params=[
        pytest.param(library, id=library.name, marks=[pytest.mark.gpu] if library.gpu else []) for library in LIBRARIES
    ]
)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Every row of the matrix of array libraries in turn."""
    row: Library = request.param
    row.needed()
    if row.compiled:
        # Coverage more than doubles the time of their tracers, and NumPy runs the same lines.
        request.node.add_marker("no_cover")
    with row.setting():
        yield row

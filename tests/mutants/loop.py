"""A plugin of pytest that collects the tests once, and then forks for each mutant and runs those that reach it.

The process that forks has run no test: what a test leaves behind, caches above all, hides nothing from the next mutant.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item
from hypothesis import HealthCheck, Phase, settings
from mutmut.mutation.trampoline import set_mutant_under_test

from mutants.record import Mutant

Line: TypeAlias = tuple[str, int]

EXAMPLES = 100  # Hypothesis examples per test
TRACED = 100  # traced calls of each function per test: more would make a test look slow
SECONDS, SLOWER = 5, 5  # the time limit of a mutant's tests, and the factor to their time without it
MEMORY = 8 << 30  # and their memory limit
UNFIT = 0.01  # the share of tests that may fail without a mutant
# Tests of other array libraries, which only differ in how they start; of other runtimes, which run the same graphs;
# tests that compile or measure; and one that starts Python again, which does not find mutmut there.
OTHERS = (
    "torch", "jax", "dask", "strict]", "strict-", "strictest", "cupy", "gpu", "ndonnx",
    "[arm", "[x86-64", "new_array", "compilers_warn", "forked", "first_long", "own_threads",
    "limits_of_time", "test_forms.py::test_memory", "same_bytes", "the_compiler", "compiled_training",
)  # fmt: skip

# The same examples each time, without shrinking: any failure is enough.
settings.register_profile(
    "mutants", database=None, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
)  # fmt: skip
settings.load_profile("mutants")


@dataclass
class Reach:
    """What each test took, which ones come to a line of the code, and what they import."""

    seconds: list[float] = field(default_factory=list)
    tests: dict[Line, list[int]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)  # tests that fail without a mutant: they say nothing of mutants
    _rare: dict[str, Counter[int]] = field(default_factory=dict)

    def of(self, mutant: Mutant) -> list[int]:
        """Return the tests that reach a mutant, or its function if its line is not recorded.

        Or to its module: what runs in another process is not seen here.
        """
        lines = [line for module, line in self.tests if module == mutant.module]
        spans = (range(mutant.place, mutant.place + 1), range(*mutant.span), lines)
        found = ({test for line in span for test in self.tests.get((mutant.module, line), ())} for span in spans)
        return sorted(next(filter(None, found), ()))

    def rare(self, module: str) -> Counter[int]:
        """Return how much each test sees of a module that few others see."""
        if module not in self._rare:
            self._rare[module] = Counter()
            for (name, _), tests in self.tests.items():
                if name == module:
                    self._rare[module].update(dict.fromkeys(tests, 1 / len(tests)))
        return self._rare[module]

    def quick(self, mutant: Mutant, patience: float) -> list[int]:
        """Return tests that together take as long as there is patience, and one at least.

        Half of it is for the quickest ones, the rest for those that see most of what few others see.
        """
        found, rare = sorted(self.of(mutant), key=self.seconds.__getitem__), self.rare(mutant.module)
        tests: dict[int, None] = {}
        for order, enough in ((found, patience / 2), (sorted(found, key=lambda test: -rare[test]), patience)):
            total = sum(self.seconds[test] for test in tests)
            for test in order:
                if test not in tests and total + self.seconds[test] <= enough:
                    tests[test] = None
                    total += self.seconds[test]
        return list(tests) or found[:1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the files that the command shares with this process, and its arguments."""
    parser.addoption("--mutants", type=Path, required=True)
    parser.addoption("--verdicts", type=Path, required=True)
    parser.addoption("--workers", type=int, required=True)
    parser.addoption("--patience", type=float, required=True)
    parser.addoption("--torch", action="store_true")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that do not apply here, and reduce the number of examples."""
    others = [word for word in OTHERS if word != "torch" or not config.getoption("torch")]
    away = [item for item in items if any(word in item.nodeid.rpartition("/")[2].lower() for word in others)]
    items[:] = [item for item in items if item not in away]
    config.hook.pytest_deselected(items=away)
    for item in items:
        test: Any = getattr(item, "function", None)
        if given := getattr(test, "_hypothesis_internal_use_settings", None):  # where Hypothesis stores settings
            test._hypothesis_internal_use_settings = settings(given, max_examples=min(given.max_examples, EXAMPLES))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Try every mutant instead of running every test."""
    option: Any = session.config.getoption
    if session.testsfailed:
        raise session.Interrupted("the tests cannot be collected")
    mutants = [Mutant(**row) for row in json.loads(option("mutants").read_text())]
    reach: Reach = in_a_fork(lambda: measure(session.items))
    for test, why in reach.unfit.items():
        print(f"{test} fails without a mutant: {why.splitlines()[-1]}", flush=True)
    if len(reach.unfit) > UNFIT * len(session.items):
        raise session.Interrupted("too many tests fail without a mutant")
    for name in reach.modules:  # once here, instead of in every fork
        with suppress(Exception):
            importlib.import_module(name)
    if option("torch"):
        export_something()
    gc.collect()
    gc.freeze()  # forks share this memory as long as they do not write to it
    print(f"{len(session.items)} tests, {sum(reach.seconds):.0f} s; {len(mutants)} mutants", flush=True)
    plan = ((mutant.name, reach.quick(mutant, option("patience"))) for mutant in mutants)
    with option("verdicts").open("w") as verdicts:
        for number, (mutant, verdict) in enumerate(trial(session.items, plan, reach.seconds, option("workers")), 1):
            print(json.dumps([mutant, verdict]), file=verdicts, flush=True)
            if number % 500 == 0:
                print(f"{number} of {len(mutants)}", flush=True)
    return True


def measure(items: list[pytest.Item]) -> Reach:
    reach, before = Reach(), set(sys.modules)
    for index, item in enumerate(items):
        lines: set[Line] = set()
        start = busy()
        with tracing(lines):
            why = failure(item)
        if why:
            reach.unfit[item.nodeid] = why
        reach.seconds.append(busy() - start)
        for line in () if why else lines:
            reach.tests.setdefault(line, []).append(index)
    # not JAX, which warns of every fork after it is imported
    away = ("relskew_core", "jax")
    reach.modules = [name for name in sys.modules if name not in before and not name.startswith(away)]
    return reach


def export_something() -> None:
    """Let torch's exporter initialise itself, which takes seconds, without our code."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),), dynamo=True, verbose=False)


def busy() -> float:
    """Return the seconds that this process and those that it waited for have worked, whoever else works here."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def tracing(lines: set[Line]) -> Iterator[None]:
    """Note the lines of functions without a mutant that run."""

    calls: Counter[CodeType] = Counter()

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        if "__mutmut_orig" not in frame.f_code.co_qualname or calls[frame.f_code] == TRACED:
            return None
        calls[frame.f_code] += 1
        return line

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        lines.add((frame.f_globals["__name__"], frame.f_lineno))
        return line

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def trial(
    items: list[pytest.Item], plan: Iterable[tuple[str, list[int]]], seconds: list[float], workers: int
) -> Iterator[tuple[str, str]]:
    """Try the mutants, a few at a time; the tests that noticed the last ones come first."""
    children: dict[int, tuple[str, int]] = {}
    noticed: list[int] = []
    for mutant, tests in plan:
        if not tests:
            yield mutant, "unreached"
            continue
        if len(children) == workers:
            yield judged(children, noticed)
        first = [test for test in reversed(noticed) if test in tests]
        order = list(dict.fromkeys([*first, *tests]))
        told, tell = os.pipe()
        if not (process := os.fork()):
            attempt(items, order, mutant, SECONDS + SLOWER * sum(map(seconds.__getitem__, order)), tell)
        os.close(tell)
        children[process] = mutant, told
    while children:
        yield judged(children, noticed)


def judged(children: dict[int, tuple[str, int]], noticed: list[int]) -> tuple[str, str]:
    """Wait for one of the forks; one that ended before it said anything has noticed too."""
    process, status = os.wait()
    while process not in children:  # a process that a test has left behind
        process, status = os.wait()
    mutant, told = children.pop(process)
    with os.fdopen(told) as pipe:
        words = pipe.read()
    if words.isdigit():
        noticed[:] = [test for test in noticed if test != int(words)] + [int(words)]
        return mutant, "killed"
    late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return mutant, words or ("late" if late else "crashed")


def attempt(items: list[pytest.Item], tests: list[int], mutant: str, seconds: float, tell: int) -> None:
    """Run tests until one fails, tell its number, and end."""
    try:
        silence()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        set_mutant_under_test(mutant)
        number = next((str(test) for test in tests if failure(items[test])), "survived")
        os.write(tell, number.encode())
    finally:  # whatever a mutant raises
        os._exit(1)


def failure(item: pytest.Item) -> str:
    """Run a test with its fixtures, and return why it failed."""
    with catch_warnings_for_item(item.config, item.ihook, "runtest", item):
        reports = runtestprotocol(item, log=False, nextitem=None)
    return "".join(report.longreprtext for report in reports if report.failed)


def silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


def in_a_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns, without what it leaves behind."""
    told, tell = os.pipe()
    if not (process := os.fork()):
        errors = os.fdopen(os.dup(2), "w")
        try:
            silence()
            with os.fdopen(tell, "wb") as pipe:
                pickle.dump(function(), pipe)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=errors, flush=True)
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as pipe:
        words = pipe.read()
    os.waitpid(process, 0)
    if not words:
        sys.exit(1)
    return pickle.loads(words)

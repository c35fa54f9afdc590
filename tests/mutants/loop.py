"""A plugin of pytest that collects the tests once, and then forks for each mutant and runs those that reach it.

The process that forks has run no test: what a test leaves behind, caches above all, hides nothing from the next mutant.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

EXAMPLES = 15  # of Hypothesis, in each test
SECONDS, SLOWER = 5, 5  # a mutant's tests may take so long, and so many times what they took without it
MEMORY = 8 << 30  # and have so much
# Tests of the other array libraries, whose code is the same but for how they start; and those that measure.
OTHERS = ("torch", "jax", "dask", "strict]", "strict-", "strictest", "cupy", "gpu", "limits_of_time")

# The same examples each time; a failure is enough, no smaller one is looked for.
settings.register_profile(
    "mutants",
    database=None,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("mutants")


@dataclass
class Reach:
    """What each test took, and which ones call a function."""

    seconds: dict[int, float] = field(default_factory=dict)
    tests: dict[str, list[int]] = field(default_factory=dict)

    def quick(self, function: str, patience: float) -> list[int]:
        """Return the quick tests of a function that together take as long as there is patience, and one at least."""
        tests: list[int] = []
        total = 0.0
        for test in sorted(self.tests.get(function, []), key=self.seconds.__getitem__):
            total += self.seconds[test]
            if not tests or total <= patience:
                tests.append(test)
        return tests


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know the files that the command shares with this process, and what it was told."""
    parser.addoption("--mutants", type=Path, required=True)
    parser.addoption("--verdicts", type=Path, required=True)
    parser.addoption("--workers", type=int, required=True)
    parser.addoption("--patience", type=float, required=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not for here, and have few examples drawn."""
    away = [item for item in items if any(word in item.nodeid.rpartition("/")[2].lower() for word in OTHERS)]
    items[:] = [item for item in items if item not in away]
    config.hook.pytest_deselected(items=away)
    for item in items:
        test: Any = getattr(item, "function", None)
        if given := getattr(test, "_hypothesis_internal_use_settings", None):  # where Hypothesis keeps them
            test._hypothesis_internal_use_settings = settings(given, max_examples=min(given.max_examples, EXAMPLES))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Try every mutant instead of running every test."""
    option = session.config.getoption
    if session.testsfailed:
        raise session.Interrupted("the tests cannot be collected")
    mutants: list[str] = json.loads(option("mutants").read_text())
    gc.collect()
    gc.freeze()  # forks share what is here as long as they do not write to it
    reach: Reach = in_a_fork(lambda: measure(session.items))
    print(f"{len(session.items)} tests, {sum(reach.seconds.values()):.0f} s; {len(mutants)} mutants", flush=True)
    functions = {mutant.partition("__mutmut_")[0] for mutant in mutants}
    tests = {function: reach.quick(function, option("patience")) for function in functions}
    with option("verdicts").open("w") as verdicts:
        for number, (mutant, verdict) in enumerate(trial(session.items, mutants, tests, reach, option("workers")), 1):
            print(json.dumps([mutant, verdict]), file=verdicts, flush=True)
            if number % 500 == 0:
                print(f"{number} of {len(mutants)}", flush=True)
    return True


def measure(items: list[pytest.Item]) -> Reach:
    """Run every test without a mutant."""
    reach, callers = Reach(), defaultdict(list)
    set_mutant_under_test("stats")  # mutmut notes which functions are called
    for index, item in enumerate(items):
        state()._stats.clear()
        start = time.perf_counter()
        if why := failure(item):
            raise RuntimeError(f"{item.nodeid} fails without a mutant:\n{why}")
        reach.seconds[index] = time.perf_counter() - start
        for function in state()._stats:
            callers[function].append(index)
    reach.tests = dict(callers)
    return reach


def trial(
    items: list[pytest.Item], mutants: Iterable[str], tests: dict[str, list[int]], reach: Reach, workers: int
) -> Iterator[tuple[str, str]]:
    """Try the mutants, a few at a time; the test that noticed the last one of a function comes first."""
    children: dict[int, tuple[str, int]] = {}
    for mutant in mutants:
        chosen = tests[mutant.partition("__mutmut_")[0]]
        if not chosen:
            yield mutant, "unreached"
            continue
        if len(children) == workers:
            yield judged(children, tests)
        told, tell = os.pipe()
        if not (process := os.fork()):
            attempt(items, chosen, mutant, SECONDS + SLOWER * sum(map(reach.seconds.__getitem__, chosen)), tell)
        os.close(tell)
        children[process] = mutant, told
    while children:
        yield judged(children, tests)


def judged(children: dict[int, tuple[str, int]], tests: dict[str, list[int]]) -> tuple[str, str]:
    """Wait for one of the forks; one that ended before it said anything has noticed too."""
    process, status = os.wait()
    mutant, told = children.pop(process)
    with os.fdopen(told) as pipe:
        words = pipe.read()
    if words.isdigit():
        order = tests[mutant.partition("__mutmut_")[0]]
        order.remove(int(words))
        order.insert(0, int(words))
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
    reports = runtestprotocol(item, log=False, nextitem=None)
    return "".join(report.longreprtext for report in reports if report.failed)


def silence() -> None:
    """Print nothing from here on."""
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

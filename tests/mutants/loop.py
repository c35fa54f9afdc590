"""A plugin of pytest that collects the tests once, and then forks for each mutant and runs those that reach it.

The process that forks has run no test: what a test leaves behind, caches above all, hides nothing from the next mutant.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

import coverage
import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item
from hypothesis import HealthCheck, Phase, settings
from mutmut.configuration import config
from mutmut.runners.harness import TestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.workers.isolation import ForkRunner, MutantResult, run_in_fork_with_result

from mutants.record import Mutant

Line: TypeAlias = tuple[str, int]
ASKED: dict[str, Any] = json.loads(Path("mutants.json").read_text())  # mutants, and how the command has them tried

EXAMPLES = 100  # Hypothesis examples per test
MEMORY = 8 << 30  # the memory limit of a mutant's tests; pyproject.toml says how much longer they may take
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
    rare: defaultdict[str, Counter[int]] = field(default_factory=partial(defaultdict, Counter))
    """How much each test sees of a module that few others see."""

    def of(self, mutant: Mutant) -> list[int]:
        """Return the tests that reach a mutant, or its function if its line is not recorded.

        Or to its module: what runs in another process is not seen here.
        """
        lines = [line for module, line in self.tests if module == mutant.module]
        spans = (range(mutant.place, mutant.place + 1), range(*mutant.span), lines)
        found = ({test for line in span for test in self.tests.get((mutant.module, line), ())} for span in spans)
        return sorted(next(filter(None, found), ()))

    def quick(self, mutant: Mutant, patience: float) -> list[int]:
        """Return tests that together take as long as there is patience, and one at least.

        Half of it is for the quickest ones, the rest for those that see most of what few others see.
        """
        found, rare = sorted(self.of(mutant), key=self.seconds.__getitem__), self.rare[mutant.module]
        tests: dict[int, None] = {}
        for order, enough in ((found, patience / 2), (sorted(found, key=lambda test: -rare[test]), patience)):
            total = sum(self.seconds[test] for test in tests)
            for test in order:
                if test not in tests and total + self.seconds[test] <= enough:
                    tests[test] = None
                    total += self.seconds[test]
        return list(tests) or found[:1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that do not apply here, and reduce the number of examples."""
    others = [word for word in OTHERS if word != "torch" or not ASKED["torch"]]
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
    if session.testsfailed:
        raise session.Interrupted("the tests cannot be collected")
    mutants = [Mutant(**row) for row in ASKED["mutants"]]
    reach: Reach = run_in_fork_with_result(measure, session.items)
    for test, why in reach.unfit.items():
        print(f"{test} fails without a mutant: {why.splitlines()[-1]}", flush=True)
    if len(reach.unfit) > UNFIT * len(session.items):
        raise session.Interrupted("too many tests fail without a mutant")
    for name in reach.modules:  # once here, instead of in every fork
        with suppress(Exception):
            importlib.import_module(name)
    if ASKED["torch"]:
        export_something()
    gc.collect()  # mutmut freezes what is left: forks share this memory as long as they do not write to it
    print(f"{len(session.items)} tests, {sum(reach.seconds):.0f} s; {len(mutants)} mutants", flush=True)
    plan = ((mutant.name, reach.quick(mutant, ASKED["patience"])) for mutant in mutants)
    with Path("verdicts").open("w") as verdicts:
        for number, tried in enumerate(trial(session.items, plan, reach.seconds, ASKED["workers"]), 1):
            verdict = status_by_exit_code[tried.exit_code]
            print(json.dumps([tried.mutant_name, verdict]), file=verdicts, flush=True)
            if number % 500 == 0:
                print(f"{number} of {len(mutants)}", flush=True)
    return True


def measure(items: list[pytest.Item]) -> Reach:
    """Run every test once, and note the lines that it comes to."""
    silence()
    reach, before = Reach(), set(sys.modules)
    watch = coverage.Coverage(data_file=None, config_file=False, include=["relskew_core/*"])
    watch.start()
    for index, item in enumerate(items):
        watch.switch_context(str(index))
        start = busy()
        if why := failure(item):
            reach.unfit[item.nodeid] = why
        reach.seconds.append(busy() - start)
    watch.stop()
    lines, fit = watch.get_data(), {str(n) for n, item in enumerate(items) if item.nodeid not in reach.unfit}
    for file in lines.measured_files():
        module = ".".join(Path(file).relative_to(Path.cwd()).with_suffix("").parts).removesuffix(".__init__")
        for line, contexts in lines.contexts_by_lineno(file).items():
            tests = reach.tests[module, line] = sorted(int(test) for test in fit.intersection(contexts))
            reach.rare[module].update(dict.fromkeys(tests, 1 / max(1, len(tests))))
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


class Trial(TestRunner):  # type: ignore[misc]  # mutmut's, which has no types
    """Runs tests, by their numbers, until one fails."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self.items = items

    def run_tests(self, *, mutant_name: str, tests: Iterable[int]) -> int:
        try:
            silence()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            return int(any(failure(self.items[test]) for test in tests))
        except BaseException:  # whatever a mutant raises
            return 1


def trial(
    items: list[pytest.Item], plan: Iterable[tuple[str, list[int]]], seconds: list[float], workers: int
) -> Iterator[MutantResult]:
    """Let mutmut try the mutants, a few at a time, each in a fork with the quickest of its tests first."""
    runner = ForkRunner(workers, Trial(items))
    runner.startup()
    state().duration_by_test = dict(enumerate(seconds))
    for mutant, tests in plan:
        while not runner.has_capacity():
            yield ended(runner)
        expected = sum(seconds[test] for test in tests)
        limit = ceil(2 * (expected + config().timeout_constant) * config().timeout_multiplier)
        runner.submit(mutant, tests, limit, expected)
    while runner.pending_count():
        yield ended(runner)


def ended(runner: ForkRunner) -> MutantResult:
    while True:
        with suppress(KeyError):  # a process that a test or a module has left behind
            return runner.wait_for_result()


def failure(item: pytest.Item) -> str:
    """Run a test with its fixtures, and return why it failed."""
    with catch_warnings_for_item(item.config, item.ihook, "runtest", item):
        reports = runtestprotocol(item, log=False, nextitem=None)
    return "".join(report.longreprtext for report in reports if report.failed)


def silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)

"""The fuzz command passes on what is right, and finds what is wrong."""

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import fuzz.__main__ as command
import jax
import numpy as np
import pytest
import torch
from fuzz import arguments, calls, files, gradients, soak, threads
from fuzz.engine import Target, WrongError, turn
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import relskew_core
from tracked import ROOT

HEALTH = list(HealthCheck)
TARGETS = {target.name: target for target in command.load_targets()}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_passes(name: str) -> None:
    """A few examples; ``.ci/run`` gives them a minute."""
    result = turn(TARGETS[name], 3, examples=5)
    assert result.failure is None
    assert result.examples >= 5


Given = dict[str, Any]


def plant(patch: pytest.MonkeyPatch, target: str, change: Any, name: str = "relative_attention") -> None:
    """Let a target get other results of a function than the library gives."""
    function = getattr(import_module(f"fuzz.{target}"), name)
    patch.setattr(f"fuzz.{target}.{name}", lambda *args, **given: change(function(*args, **given), given))


def test_targets_that_make_asks_for_are_there() -> None:
    asked = re.findall(r"--only (\w+)", (ROOT / "Makefile").read_text())
    assert asked
    assert set(asked) <= TARGETS.keys()


def halved(found: Any, _: Given) -> Any:
    return found if found.rel_v is None else found._replace(rel_v=found.rel_v / 2)


def crossed(model: Any, _: Given) -> Any:
    for node in model.graph.node:
        if node.op_type == "MatMul":
            node.input[0], node.input[1] = node.input[1], node.input[0]
    return model


@pytest.mark.parametrize(("target", "name", "change", "told"), [
    ("calls", "relative_attention", lambda found, _: (found[0], found[1] + 1e-3),
     [r"^relative_attention\($", r"^    q=asarray\(\[", r"lse\[[\d, ]*\] is -?[\d.e-]+, expected -?[\d.e-]+ within"]),
    ("gradients", "relative_attention_vjp", halved,
     [r"the gradient of rel_v\["]),
    ("grids", "relative_attention_nd", lambda pair, _: (pair[0], pair[1] + 1e-3), [r"relative_attention_nd\("]),
    ("exports", "to_onnx", crossed, [r"to_onnx\("]),
])  # fmt: skip
def test_a_wrong_result_is_printed_in_full(monkeypatch: Any, target: str, name: str, change: Any, told: Any) -> None:
    plant(monkeypatch, target, change, name)
    failure = str(turn(TARGETS[target], 1).failure)
    assert all(re.search(part, failure, re.MULTILINE) for part in told)


def test_a_traceback_and_a_status_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "main", lambda arguments: 1)
    example = files.Example("npz", [files.Change("truncate", 0.5, b"")], {})
    with pytest.raises(WrongError, match="ended with 1"):
        files.check(example)


def test_an_error_without_a_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unnamed(**given: Any) -> None:
        raise ValueError("no")

    monkeypatch.setitem(arguments.CALLS, "Span", (unnamed, {}))
    with pytest.raises(WrongError, match="names no argument: no"):
        arguments.check(arguments.Example("Span", {}))


def failure_of(target: Target, **changes: Any) -> str:
    """Return what is told of the first example that fails, of those with these changes; it is not made smaller."""

    @seed(5)
    @settings(max_examples=2000, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HEALTH)
    @given(target.strategy.map(lambda example: replace(example, **changes)))
    def attempt(example: Any) -> None:
        told.clear()
        told.append(str(example))
        target.check(example)

    told: list[str] = []
    # Hypothesis warns that the largest examples are too long to print.
    with warnings.catch_warnings(action="ignore"), pytest.raises(Exception) as raised:  # noqa: PT011  # whatever a planted defect raises
        attempt()
    return f"{told[0]}\n{raised.value!r}"


def is_scattered(x: Any) -> bool:
    return isinstance(x, np.ndarray) and any(step % x.itemsize for step in x.strides)


def with_bad(results: Any, change: Callable[[Any], Any]) -> Any:
    return (change(results[0]), results[1]) if isinstance(results, tuple) else change(results)


SLIPS: dict[str, tuple[str, str, Callable[[Any, Given], Any], str, dict[str, Any]]] = {
    "layout": ("forms", "relative_attention",
               lambda found, given: with_bad(found, lambda out: out + float(is_scattered(given["k"]))),
               "'k': '.*records'", {}),
    "nothing": ("forms", "relative_attention", lambda found, given: found if given["k"].shape[-2] else 1 / 0,
                r"k=zeros\((.|\n)*ZeroDivisionError", {}),
    "gradient": ("forms", "relative_attention_vjp",
                 lambda found, given: found._replace(v=found.v + 1) if is_scattered(given["d_out"]) else found,
                 r"the gradient of v\[", {}),
    **{f"{outside} of JAX": ("traces", "relative_attention",
                             lambda out, given: out + isinstance(given["v"], jax.core.Tracer) * given["v"].mean(),
                             f"; {outside} of ", {"outside": outside, "gradients": gradients})
       for outside, gradients in (("jit", True), ("vmap", False), ("scan", True))},
    "torch's dtype": ("transforms", "relative_attention", lambda out, _: out.to(torch.get_default_dtype()),
                      "out is of torch.", {"how": "call"}),
    "torch's device": ("transforms", "relative_attention", lambda out, _: out.to(torch.empty(()).device),
                       "out is on meta", {"how": "call"}),
}  # fmt: skip
"""A target, a function, a change of its results, what the first failing example says, and what it must have."""


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target, function, change, named, changes = SLIPS[name]
    plant(monkeypatch, target, change, function)
    assert re.search(named, failure_of(TARGETS[target], **changes))


def test_threads_that_disturb_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []

    def careless(*args: Any, **given: Any) -> Any:
        inside.append(1)
        results = relskew_core.relative_attention(*args, **given)
        time.sleep(0.002)
        disturbed = len(inside) > 1
        inside.pop()
        return with_bad(results, lambda out: out + 1) if disturbed else results

    monkeypatch.setattr(threads, "relative_attention", careless)
    told = failure_of(TARGETS["threads"])
    assert "# threads: [[" in told
    assert "thread " in told


def test_the_command_prints_the_seed_the_failure_and_how_to_repeat_it(monkeypatch: Any, capsys: Any) -> None:
    def wrong_above_six(number: int) -> None:
        if number > 6:
            raise WrongError(f"{number} is above 6")

    numbers = Target("numbers", 50, st.integers(0, 1000), wrong_above_six)
    fine = Target("fine", 50, st.integers(0, 1000), lambda number: None)
    monkeypatch.setattr(command, "load_targets", lambda: [numbers, fine])
    assert command.main(["0", "--seed", "17"]) == 1  # however slow the machine is, each has a turn
    printed = capsys.readouterr().out
    assert printed.startswith("seed 17\n")
    assert "numbers: 7\n7 is above 6\n" in printed
    assert "again: make fuzz SEED=17 ONLY=numbers\n" in printed
    assert re.search(r"^numbers +\d+ examples +[\d.]+ s  first seed 17  FAILED$", printed, re.MULTILINE)
    assert re.search(r"^fine +\d+ examples +[\d.]+ s  first seed 18  ok$", printed, re.MULTILINE)
    assert command.main(["0.1", "--seed", "17", "--only", "fine"]) == 0


def test_a_seed_gives_the_same_examples() -> None:
    def drawn() -> list[str]:
        seen: list[str] = []
        assert turn(Target("calls", 5, calls.examples(), lambda example: seen.append(str(example))), 4).failure is None
        return seen

    assert drawn() == drawn() != []


def test_a_soak_reports_wrong_calls_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (calls, gradients):
        monkeypatch.setattr(target, "ROWS", {"numpy": calls.ROWS["numpy"]})
    monkeypatch.setattr(calls, "QUICK", ["numpy"])
    monkeypatch.setattr(soak, "EXAMPLES", dict.fromkeys(soak.EXAMPLES, 5))
    assert soak.play(1, forks=0) == []
    plant(monkeypatch, "calls", lambda found, _: (found[0], found[1] + 1))
    assert re.search(r"^calls: (?s:.*)lse", "\n".join(soak.play(1, forks=0)))
    quiet = [Counter(memory=1000 + n % 3, files=7, threads=2 + (n == 5)) for n in range(9)]
    assert soak.grown([Counter(memory=1), *quiet, Counter(memory=1010, files=7)]) == []
    assert soak.grown([Counter(memory=1000 + 4 * n, files=7 + n) for n in range(9)]) == [
        "files grew from 11 to 14", "memory grew from 1016 to 1028",
    ]  # fmt: skip

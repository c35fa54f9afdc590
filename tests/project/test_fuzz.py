"""The fuzz command passes on what is right, and finds what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import fuzz.__main__ as command
import numpy as np
import pytest
from fuzz import arguments, calls, engine, exports, files, gradients
from fuzz.engine import Target, WrongError, turn
from hypothesis import strategies as st

import relskew_core
from relskew_core.export import to_onnx

TARGETS = {target.name: target for target in command.load_targets()}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_passes(name: str) -> None:
    result = turn(TARGETS[name], 3, examples=5 if name == "files" else 20)
    assert result.failure is None
    assert result.examples >= 5


def changed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(function(*args, **kwargs))


def test_a_wrong_kernel_is_found_and_told_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(results: tuple[Any, Any]) -> tuple[Any, Any]:
        return results[0], results[1] + 1e-3

    monkeypatch.setattr(calls, "relative_attention", changed(relskew_core.relative_attention, shift))
    failure = turn(TARGETS["calls"], 1).failure
    assert failure is not None
    assert re.search(r"^relative_attention\($", failure, re.MULTILINE)
    assert re.search(r"^    q=asarray\(\[", failure, re.MULTILINE)
    assert re.search(r"lse\[[\d, ]*\] is -?[\d.e-]+, expected -?[\d.e-]+ within", failure)


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def halve(found: Any) -> Any:
        return found if found.rel_v is None else found._replace(rel_v=found.rel_v / 2)

    monkeypatch.setattr(gradients, "relative_attention_vjp", changed(relskew_core.relative_attention_vjp, halve))
    failure = turn(TARGETS["gradients"], 1).failure
    assert failure is not None
    assert "the gradient of rel_v[" in failure


def test_a_wrong_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(model: Any) -> Any:
        for node in model.graph.node:
            if node.op_type == "MatMul":
                node.input[0], node.input[1] = node.input[1], node.input[0]
        return model

    monkeypatch.setattr(exports, "to_onnx", changed(to_onnx, shift))
    failure = turn(TARGETS["exports"], 1).failure
    assert failure is not None
    assert "to_onnx(" in failure


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


def wrong_above_six(number: int) -> None:
    if number > 6:
        raise WrongError(f"{number} is above 6")


def test_the_command_prints_the_seed_the_failure_and_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = Target("numbers", 50, st.integers(0, 1000), wrong_above_six)
    fine = Target("fine", 50, st.integers(0, 1000), lambda number: None)
    monkeypatch.setattr(command, "load_targets", lambda: [numbers, fine])
    assert command.main(["0.3", "--seed", "17"]) == 1
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


@pytest.mark.parametrize(
    ("actual", "wrong"),
    [([1.0, -np.inf], None), ([1.0 + 1e-9, -np.inf], None), ([1.1, -np.inf], "x[0] is 1.1, expected 1.0"),
     ([np.nan, -np.inf], "x[0] is nan"), ([1.0, 0.0], "x[1] is 0.0, expected -inf"), ([1.0], "x has shape (1,)")],
)  # fmt: skip
def test_numbers_are_compared_with_their_infinities(actual: list[float], wrong: str | None) -> None:
    if wrong is None:
        engine.same("x", actual, [1.0, -np.inf], 1e-6)
    else:
        with pytest.raises(WrongError, match=f"^{re.escape(wrong)}"):
            engine.same("x", actual, [1.0, -np.inf], 1e-6)

"""Random calls compared with the formula, for other processors: they pass, and find planted errors."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import pytest

import differential
from relskew_core import relative_attention, relative_attention_vjp
from relskew_core.backends import _compiled
from tracked import ROOT

pytestmark = pytest.mark.skipif(_compiled.kernels is None, reason="the kernels were not compiled at installation")


@pytest.mark.parametrize("level", _compiled.kernels.LEVELS if _compiled.kernels else [])
def test_random_calls_are_right(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    _compiled.kernels.use(level)
    try:
        assert differential.main(["60", "--seed", "3"]) == 0
    finally:
        _compiled.kernels.use(_compiled.kernels.LEVELS[-1])
    assert capsys.readouterr().out.endswith("60 calls, 0 wrong\n")


def attend_wrongly(*arrays: Any, **options: Any) -> Any:
    out, lse = relative_attention(*arrays, **options)
    out[..., -1, -1] += 1
    return out, lse


def pull_back_wrongly(*arrays: Any, **options: Any) -> Any:
    found = relative_attention_vjp(*arrays, **options)
    return found._replace(k=found.k + 1) if options["impl"] == "native" else found


def attend_without_numbers(*arrays: Any, **options: Any) -> Any:
    out, lse = relative_attention(*arrays, **options)
    return out, np.full_like(lse, np.nan)


@pytest.mark.parametrize(
    ("name", "function", "told"),
    [
        ("relative_attention", attend_wrongly, "out is wrong by"),
        ("relative_attention", attend_without_numbers, "lse has another shape or another infinity"),
        ("relative_attention_vjp", pull_back_wrongly, "the gradient of k is wrong by"),
    ],
)
def test_what_is_wrong_is_told(
    name: str, function: Any, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(differential, name, function)
    assert differential.main(["3", "--seed", "3"]) == 1
    shown = capsys.readouterr().out
    assert f"call 0: {told}" in shown
    assert shown.endswith("3 calls, 3 wrong\n")


def test_without_kernels_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled, "kernels", None)
    with pytest.raises(SystemExit, match="compiled kernels"):
        differential.main(["3"])


def test_a_processor_that_nobody_emulates_is_refused() -> None:
    ended = subprocess.run([ROOT / ".ci" / "emulated", "vax"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "vax is none of aarch64" in ended.stderr

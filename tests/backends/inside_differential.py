"""Random calls compared with the formula, for other processors: they pass, and find a planted error."""

import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import differential
from compiled_cases import as_torch
from libraries import needs_kernels
from relskew_core import backends, relative_attention, relative_attention_2d, relative_attention_vjp
from relskew_core._functions import prepared
from relskew_core.backends import _compiled
from relskew_core.backends._numpy import compiled as of_numpy
from relskew_core.backends._torch.cpu import compiled as of_torch

pytestmark = needs_kernels


@pytest.mark.parametrize("level", _compiled.kernels.LEVELS if _compiled.kernels else [])
def test_random_calls_are_right(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    _compiled.kernels.use(level)
    try:
        assert differential.main(["60", "--seed", "3"]) == 0
        assert differential.main(["30", "--seed", "3", "--each", "3"]) == 0
        assert differential.main(["30", "--seed", "3", "--bfloat16"]) == 0
    finally:
        _compiled.kernels.use(_compiled.kernels.LEVELS[-1])
    assert "\n60 calls of 60 kinds, 0 wrong\n" in capsys.readouterr().out


def attend_both_ways(given: dict[str, Any]) -> list[differential.Numbers]:
    """Return the results of a call, and its gradients; of a call on a grid, only the output."""
    if "q_grid" in given:
        return [relative_attention_2d(**given)]
    out, lse = relative_attention(**given, return_lse=True)
    gradients = relative_attention_vjp(out, **given, out=out, lse=lse)
    return [np.asarray(x) for x in (out, lse, *gradients) if x is not None]


@pytest.mark.parametrize("most", [2, 256], ids=["forgotten", "remembered"])
def test_threads_that_call_at_once_get_what_each_call_gives_alone(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls have other shapes and the same arrays, and several threads prepare and forget their kinds at once."""
    monkeypatch.setattr(prepared, "MOST", most)
    # several threads for each of these short calls
    monkeypatch.setattr(of_numpy, "NUMPY", of_numpy.NUMPY._replace(shared=0))
    monkeypatch.setattr(of_torch, "TORCH", of_torch.TORCH._replace(shared=0))
    monkeypatch.setattr(backends._threads, "_numpy_threads", 2)
    calls = [differential.drawn(np.random.default_rng([5, number])) for number in range(12)]
    given = [{**call.arrays, **call.labels, **call.options} for call in calls]
    for call in calls[::2]:
        given.append({**{name: as_torch(x) for name, x in {**call.arrays, **call.labels}.items()}, **call.options})
    for side in (2, 3):
        q, k, v = np.random.default_rng(side).standard_normal((3, 2, side * side, 4))
        bias = q[:, 0, :1, None] + np.arange((2 * side - 1) ** 2.0).reshape(2 * side - 1, -1)
        given.append({"q": q, "k": k, "v": v, "rel_bias": bias, "q_grid": (side, side), "k_grid": (side, side)})
    alone = list(map(attend_both_ways, given))
    threads = 4
    together = Barrier(threads)

    def differ(thread: int) -> list[int]:
        order = np.random.default_rng(thread).permutation(len(given) * 3) % len(given)
        together.wait(60)
        return [
            number
            for number in map(int, order)
            if not all(map(np.array_equal, attend_both_ways(given[number]), alone[number]))
        ]

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(differ, range(threads))) == [[]] * threads


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has the GIL")
def test_the_kernels_leave_the_gil_off() -> None:
    code = "import sys; from relskew_core.backends import _compiled; print(_compiled.missing(), sys._is_gil_enabled())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "None False\n"
    assert not ended.stderr


def test_wrong_results_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = relative_attention

    def call(*given: Any, **options: Any) -> Any:
        out, lse = right(*given, **options)
        return out + (options["impl"] == "native"), lse

    monkeypatch.setattr(differential, "relative_attention", call)
    assert differential.main(["3", "--seed", "3"]) == 1
    assert "call 0: out is wrong by" in capsys.readouterr().out

"""A library's own kernels: what they are asked for, what they get and what becomes of what they return."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import added_array
import kernels_built
from relskew_core import backends, relative_attention, relative_attention_vjp
from relskew_core._functions.attention import Backward, attend, pull_back
from relskew_core._kernel import backward, forward
from relskew_core._kernel.call import Arguments, Part
from relskew_core._kernel.problem import problem
from relskew_core.backends import _path
from relskew_core.backends._path import COMMON

HALF, SINGLE = np.dtype("float16"), np.dtype("float32")


@dataclass
class Kernels:
    """The portable ones as a library's, which note what comes."""

    half: bool = False
    unable: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)
    got: list[dict[str, Any]] = field(default_factory=list)

    def serve(self, function: str, call: Any) -> _path.Path | str:
        self.asked.append(function)
        path = _path.Path(self.attention, self.attention_vjp, COMMON, self.half)
        return "too new" if function in self.unable else path

    def attention(self, operands: Any, options: Any, *, xp: Any) -> Any:
        self.got.append({**operands._asdict(), "part": options.part})
        return forward.attention(operands, options, xp=xp)

    def attention_vjp(self, d_out: Any, operands: Any, options: Any, *, xp: Any, **results: Any) -> Any:
        self.got.append({**operands._asdict(), **results, "d_out": d_out, "part": options.part})
        return backward.attention_vjp(d_out, operands, options, xp=xp, **results)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Return NumPy's, for as long as a test runs."""
    found = Kernels()
    monkeypatch.setattr(backends, "_module", lambda library: found)
    monkeypatch.setattr(backends, "_prepared", {})  # the memory of types
    return found


def drawn(seed: int, *shape: int, dtype: Any = HALF) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def arguments() -> dict[str, Any]:
    return {"q": drawn(0, 2, 4, 3), "k": drawn(1, 2, 4, 3), "v": drawn(2, 2, 4, 3), "rel_k": drawn(3, 9, 3)}


def results() -> dict[str, Any]:
    out, lse = relative_attention(**arguments(), return_lse=True, impl="portable")
    return {"out": out, "lse": lse, "d_lse": np.ones_like(lse)}


@pytest.mark.parametrize("half", [False, True])
def test_arrays_and_factors_by_head_reach_it_in_one_dtype(kernels: Kernels, half: bool) -> None:
    kernels.half = half
    given = {**arguments(), "rel_bias": drawn(5, 2, 9), "mask": drawn(6, 4, 4), "scale": drawn(7, 2)}
    out, lse = relative_attention(**given, return_lse=True, impl="native")
    names = ("q", "k", "v", "rel_k", "rel_bias", "mask")
    assert kernels.asked == ["attention"]
    assert {kernels.got[0][name].dtype for name in names} == {HALF if half else SINGLE}
    assert (out.dtype, lse.dtype) == (HALF, SINGLE)
    gradients = relative_attention_vjp(out, **given, impl="native")
    assert {kernels.got[1][name].dtype for name in (*names, "d_out")} == {HALF if half else SINGLE}
    assert {getattr(gradients, name).dtype for name in (*names, "scale")} == {HALF}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("heads", [True, False])
def test_the_backward_call(kernels: Kernels, half: bool, heads: bool) -> None:
    kernels.half = half
    given, back = arguments(), {"d_out": drawn(4, 2, 4, 3), **results()}
    if not heads:
        given, back = ({name: x if name == "rel_k" else x[0] for name, x in of.items()} for of in (given, back))
    kernels.asked.clear()
    kernels.got.clear()
    relative_attention_vjp(**back, **given, impl="native")
    assert kernels.asked == ["attention_vjp"]
    got, wide = kernels.got[0], HALF if half else SINGLE
    assert {name: got[name].dtype for name in (*given, "d_out", "out", "sums", "d_lse")} == {
        **dict.fromkeys((*given, "d_out", "out"), wide), "sums": SINGLE, "d_lse": SINGLE,
    }  # fmt: skip
    assert {got[name].ndim for name in ("q", "d_out", "out")} == {3}
    assert [got[name].shape for name in ("sums", "d_lse")] == [(*got["out"].shape[:-1], 2), got["out"].shape[:-1]]


@pytest.mark.parametrize("half", [False, True])
def test_results_that_count_sinks_come_from_a_forward_call(kernels: Kernels, half: bool) -> None:
    kernels.half = half
    given = {**arguments(), "sinks": drawn(5, 2)}
    relative_attention_vjp(drawn(4, 2, 4, 3), **given, impl="native")
    assert kernels.asked == ["attention_vjp", "attention"]
    assert [got["q"].dtype for got in kernels.got] == [HALF if half else SINGLE] * 2
    kernels.asked.clear()
    relative_attention_vjp(drawn(4, 2, 4, 3), **given, impl="portable")
    assert kernels.asked == []


def test_native_gradients_need_no_native_forward_call(kernels: Kernels) -> None:
    kernels.unable = ("attention",)
    given, d_out = {**arguments(), "sinks": drawn(5, 2)}, drawn(4, 2, 4, 3)
    found = relative_attention_vjp(d_out, **given, impl="native")
    assert kernels.asked == ["attention_vjp", "attention"]
    np.testing.assert_array_equal(found.sinks, relative_attention_vjp(d_out, **given, impl="portable").sinks)
    with pytest.raises(ValueError, match=r"^`impl` is 'native', but .*: too new$"):
        relative_attention(**given, impl="native")


def test_parts_of_more_keys_are_merged_in_single_precision(kernels: Kernels) -> None:
    """What a part returns is rounded once, when all parts are together."""
    part = Part(of_more=True, query=2)
    out, lse = attend(problem(Arguments(**arguments()), return_lse=True, part=part), "native")
    assert lse is not None
    assert (out.dtype, lse.dtype, kernels.got[0]["part"]) == (SINGLE, SINGLE, part)
    pull_back(Backward(drawn(4, 2, 4, 3), **arguments(), impl="native"), part)
    assert kernels.got[1]["part"] == part
    whole, _ = attend(problem(Arguments(**arguments()), return_lse=True), "native")
    assert whole.dtype == HALF


@pytest.mark.no_cover
def test_an_array_that_is_added_is_right_or_refused_in_every_library(tmp_path: Path) -> None:
    shutil.copytree(kernels_built.ROOT / "relskew_core", tmp_path / "relskew_core")
    added_array.add(tmp_path / "relskew_core")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(
        [sys.executable, added_array.__file__, tmp_path],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]

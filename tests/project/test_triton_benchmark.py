"""The benchmark on GPUs at tiny sizes on a CPU: every contender is right, and a wrong one is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import gpu
from benchmarks.gpu_contenders import CONTENDERS, Contender, Inputs, Shape, flex_by, make_inputs
from benchmarks.gpu_reference import error, reference
from relskew_core._reference import TOLERANCES


def tiny(*, causal: bool, gradients: bool = True) -> Inputs:
    shape = Shape(length=90, dim=16, batch=1, heads=2, causal=causal)
    return make_inputs(shape, dtype=torch.float32, device="cpu", gradients=gradients)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in ("sdpa-cudnn", "flex")])
def test_contender_is_the_plain_formula(name: str, causal: bool) -> None:
    x = tiny(causal=causal)
    expected = reference(x, CONTENDERS[name].kind)
    rows = list(gpu.measure(name, x, expected, seconds=0.0))
    assert [row.backward for row in rows] == [False, True]
    for row in rows:
        assert row.skipped is None
        assert row.right
        assert row.error is not None
        assert row.milliseconds is not None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # it is slow, here it may be
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_score_of_flex_attention_is_right(causal: bool) -> None:
    x = tiny(causal=causal, gradients=False)
    expected = reference(x, "full")
    out = flex_by(x, flex_attention)
    assert error(out, expected.out, expected.rows) < TOLERANCES["float32"]


def command(path: Path, *names: str) -> list[str]:
    sizes = ["--lengths", "40", "--dims", "16", "--positions", "40", "--width", "32", "--patterns", "causal"]
    return ["--device", "cpu", "--dtype", "float32", *sizes, "--json", str(path), "--only", *names]


def test_command_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(command(tmp_path / "record.json", "ours", "ours-plain", "sdpa-cudnn")) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["machine"]["versions"]["torch"]
    assert [row["contender"] for row in record["rows"]] == ["ours"] * 2 + ["ours-plain"] * 2 + ["sdpa-cudnn"] * 2
    assert all("backend" in row["skipped"] for row in record["rows"][4:])
    printed = capsys.readouterr().out
    assert "ours backward causal L40 D16: their time / ours: ours-plain " in printed


def test_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTENDERS, "huang", Contender(lambda x: CONTENDERS["ours"].call(x) * 1.01, "full"))
    assert gpu.main(command(tmp_path / "record.json", "huang")) == 1
    assert "WRONG" in capsys.readouterr().out

"""``relskew export`` and ``validate``: every form from the command line, checkpoints, devices, advice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from cli.commands import BLOCK, relskew

from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import to_onnx

CAUSAL = BlockSpec(8, 2, Span.causal(9), causal=True)


def exported(*options: str) -> onnx.ModelProto:
    assert relskew("export", "m.onnx", *BLOCK, "--overwrite", *options) == 0
    return onnx.load("m.onnx")


@pytest.mark.parametrize(("options", "inputs"), [
    (["--segments", "--mask"], ["x", "mask", "segments"]),
    (["--past", "--in-place", "--causal"], ["x", "past_key", "past_value", "past_lengths"]),
    (["--no-projections", "--causal"], ["q", "k", "v"]),
    (["--rel-bias", "--no-rel-keys"], ["x"]),
    (["--rel-bias", "--rel-values"], ["x"]),
    (["--causal", "--operator"], ["x"]),
    (["--chunk-size", "4", "--mask"], ["x", "mask"]),
], ids=["segments", "in place", "core", "bias", "values", "operator", "chunks"])  # fmt: skip
def test_an_exported_model_validates_with_its_seed_alone(options: list[str], inputs: list[str]) -> None:
    model = exported("--length", "9", "--seed", "3", *options)
    assert [value.name for value in model.graph.input] == inputs
    assert bool(model.functions) == ("--operator" in options)
    assert relskew("validate", "m.onnx", "--seed", "3", "--length", "1", "--length", "4", "--batch", "2") == 0
    assert relskew("validate", "m.onnx", "--length", "4", "--batch", "2") == 1


def test_a_device_chooses_the_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    def chunk(*options: str) -> str | None:
        return {entry.key: entry.value for entry in exported(*options).metadata_props}.get("relskew.chunk_size")

    assert chunk("--length", "9") is None
    for device in ((), ("--device", "cpu")):
        assert chunk("--length", "300", *device) == "256"
    assert "chunks of 256" in capsys.readouterr().out
    assert chunk("--length", "9", "--device", "cpu", "--chunk-size", "3") == "3"
    assert chunk("--length", "300", "--device", "cuda") is None
    assert relskew("export", "n.onnx", *BLOCK, "--length", "9", "--device", "npu") == 2
    assert "--device must be cpu or cuda, got 'npu'" in capsys.readouterr().err


def test_device_and_provider(capsys: pytest.CaptureFixture[str]) -> None:
    exported("--length", "9")
    assert relskew("validate", "m.onnx", "--device", "cpu", "--batch", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert {check["provider"] for check in report["checks"]} >= {"CPUExecutionProvider"}
    assert {check["case"].partition(",")[0] for check in report["checks"] if check["case"]} == {"batch 1"}
    for options in (["--device", "cpu", "--provider", "cpu"], ["--device", "tpu"]):
        assert relskew("validate", "m.onnx", *options) == 2
    assert "--device must be cpu or cuda, got 'tpu'" in capsys.readouterr().err


def test_atol(capsys: pytest.CaptureFixture[str]) -> None:
    exported("--length", "9")
    assert relskew("validate", "m.onnx", "--batch", "1", "--atol", "1e-4") == 0
    capsys.readouterr()
    assert relskew("validate", "m.onnx", "--batch", "1", "--atol", "1e-12") == 1
    told = capsys.readouterr().out
    assert "more than atol 1e-12" in told
    assert "atol: the relative errors keep their tolerances" in told
    assert relskew("validate", "m.onnx", "--atol", "-1") == 1
    assert "`atol` must be a finite number > 0" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_torch_checkpoints(ending: str, key: str | None) -> None:
    state: Any = {f"layer.{name}": weight for name, weight in init_weights(CAUSAL, seed=5, xp=torch).items()}
    torch.save({key: state, "epoch": 3} if key else state, f"weights{ending}")
    model = exported("--causal", "--weights", f"weights{ending}", "--prefix", "layer.")
    assert model == to_onnx(CAUSAL, init_weights(CAUSAL, seed=5))


def test_tables_of_a_whole_block_are_enough_for_the_core() -> None:
    np.savez("weights.npz", **init_weights(CAUSAL, seed=5))
    model = exported("--causal", "--no-projections", "--weights", "weights.npz")
    assert [tensor.name for tensor in model.graph.initializer if not tensor.name.startswith("relskew/")] == ["rel_k"]
    assert relskew("validate", "m.onnx", "--weights", "weights.npz", "--batch", "1") == 0


def test_a_model_in_bfloat16_is_validated_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exported("--length", "5", "--dtype", "bfloat16", "--seed", "3")
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if line.startswith("next ")]
    assert relskew(*line.split()[2:], "--length", "4", "--batch", "1") == 0
    assert "--device cuda" in told
    capsys.readouterr()
    assert relskew("validate", "m.onnx", "--seed", "3") == 1
    assert "onnxruntime computes in bfloat16 on CUDA only" in capsys.readouterr().out.splitlines()[-1]
    exported("--length", "5", "--dtype", "bfloat16", "--device", "cuda")
    assert "relskew validate m.onnx --device cuda" in capsys.readouterr().out


def test_validate_ends_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    exported("--length", "9")
    capsys.readouterr()
    assert relskew("validate", "m.onnx", "--seed", "1", "--batch", "1") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("weights: the file was made with other weights")
    assert relskew("validate", "m.onnx", "--provider", "NoSuchExecutionProvider") == 1
    assert "loads: the runtime or provider could not take the file" in capsys.readouterr().out


def test_json_of_an_export(capsys: pytest.CaptureFixture[str]) -> None:
    exported("--length", "9", "--seed", "3")
    capsys.readouterr()
    Path("n.onnx.bak").touch()  # a file of the user
    assert relskew("export", "n.onnx", *BLOCK, "--length", "9", "--seed", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    props = {entry.key: entry.value for entry in onnx.load("m.onnx").metadata_props}
    assert found["graphs"][0]["inputs"][0]["shape"][:2] == ["batch", "query_length"]
    assert found["bytes"] == Path("n.onnx").stat().st_size
    assert (found["path"], found["files"], found["metadata"]["relskew.profile"]) == ("n.onnx", ["n.onnx"], "ort")
    assert found["validate"] == ["relskew", "validate", "n.onnx", "--seed", "3"]
    assert BlockSpec.from_dict(found["spec"]) == BlockSpec.from_dict(json.loads(props["relskew.spec"]))

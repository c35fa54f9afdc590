"""``relskew export`` and ``validate``: every form from the command line, checkpoints, devices, advice."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.commands import BLOCK, Capture, error_of, output_of, relskew

from relskew_core import BlockSpec, Span, init_weights

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


def test_a_device_chooses_the_chunks(capsys: Capture) -> None:
    def chunk(*options: str) -> str | None:
        return {entry.key: entry.value for entry in exported(*options).metadata_props}.get("relskew.chunk_size")

    assert chunk("--length", "9") is None
    for device in ((), ("--device", "cpu")):
        assert chunk("--length", "300", *device) == "256"
    assert "chunks of 256" in capsys.readouterr().out
    assert chunk("--length", "9", "--device", "cpu", "--chunk-size", "3") == "3"
    assert chunk("--length", "300", "--device", "cuda") is None
    told = error_of(capsys, "export", "n.onnx", *BLOCK, "--length", "9", "--device", "npu")
    assert "--device must be cpu or cuda, got 'npu'" in told


def test_device_and_provider(capsys: Capture) -> None:
    exported("--length", "9")
    report = json.loads(output_of(capsys, "validate", "m.onnx", "--device", "cpu", "--batch", "1", "--json"))
    assert {check["provider"] for check in report["checks"]} >= {"CPUExecutionProvider"}
    assert {check["case"].partition(",")[0] for check in report["checks"] if check["case"]} == {"batch 1"}
    error_of(capsys, "validate", "m.onnx", "--device", "cpu", "--provider", "cpu")
    told = error_of(capsys, "validate", "m.onnx", "--device", "tpu")
    assert "--device must be cpu or cuda, got 'tpu'" in told


def test_atol(capsys: Capture) -> None:
    exported("--length", "9")
    assert relskew("validate", "m.onnx", "--batch", "1", "--atol", "1e-4") == 0
    told = output_of(capsys, "validate", "m.onnx", "--batch", "1", "--atol", "1e-12", status=1)
    assert "more than atol 1e-12" in told
    assert "atol: the relative errors keep their tolerances" in told
    told = output_of(capsys, "validate", "m.onnx", "--atol", "-1", status=1)
    assert "`atol` must be a finite number > 0" in told


def test_tables_of_a_whole_block_are_enough_for_the_core() -> None:
    np.savez("weights.npz", **init_weights(CAUSAL, seed=5))
    model = exported("--causal", "--no-projections", "--weights", "weights.npz")
    assert [tensor.name for tensor in model.graph.initializer if not tensor.name.startswith("relskew/")] == ["rel_k"]
    assert relskew("validate", "m.onnx", "--weights", "weights.npz", "--batch", "1") == 0


def test_a_model_in_bfloat16_is_validated_where_it_runs(capsys: Capture) -> None:
    exported("--length", "5", "--dtype", "bfloat16", "--seed", "3")
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if line.startswith("next ")]
    assert relskew(*line.split()[2:], "--length", "4", "--batch", "1") == 0
    assert "--device cuda" in told
    told = output_of(capsys, "validate", "m.onnx", "--seed", "3", status=1)
    assert "onnxruntime computes in bfloat16 on CUDA only" in told.splitlines()[-1]
    exported("--length", "5", "--dtype", "bfloat16", "--device", "cuda")
    assert "relskew validate m.onnx --device cuda" in capsys.readouterr().out


def test_json_of_an_export(capsys: Capture) -> None:
    exported("--length", "9", "--seed", "3")
    Path("n.onnx.bak").touch()  # a file of the user
    found = json.loads(output_of(capsys, "export", "n.onnx", *BLOCK, "--length", "9", "--seed", "3", "--json"))
    props = {entry.key: entry.value for entry in onnx.load("m.onnx").metadata_props}
    assert found["graphs"][0]["inputs"][0]["shape"][:2] == ["batch", "query_length"]
    assert found["bytes"] == Path("n.onnx").stat().st_size
    assert (found["path"], found["files"], found["metadata"]["relskew.profile"]) == ("n.onnx", ["n.onnx"], "ort")
    assert found["validate"] == ["relskew", "validate", "n.onnx", "--seed", "3"]
    assert BlockSpec.from_dict(found["spec"]) == BlockSpec.from_dict(json.loads(props["relskew.spec"]))

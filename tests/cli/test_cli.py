"""The command line: exit codes, one line of error, and what `info`, `export` and `validate` do."""

import io
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli.commands import BLOCK, Capture, error_of, output_of, python, relskew

from relskew_core import BlockSpec, Span, __version__, init_weights


def spec_in(path: str) -> BlockSpec:
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    return BlockSpec.from_dict(json.loads(metadata["relskew.spec"]))


def test_help_names_every_command_and_version_the_version(capsys: Capture) -> None:
    assert output_of(capsys, "--version") == f"relskew {__version__}\n"
    for told in (output_of(capsys), output_of(capsys, "--help")):
        assert all(command in told for command in ("info", "verify", "export", "validate", "draw", "--help"))
        assert "<bool>" not in told.lower()


def test_characters_that_the_output_cannot_encode_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252", write_through=True))
    assert relskew("draw", "span", "--clip", "2") == 0
    assert b"r = key ? query" in written.getvalue()


def test_runs_without_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert relskew("verify", "--library", "numpy", "--case", "causal") == 0


def test_starts_without_any_array_library() -> None:
    program = (
        "import sys\n"
        "from relskew_core.cli import main\n"
        "status = main(['verify', '--help'])\n"
        "print({'numpy', 'torch', 'jax', 'onnx'} & set(sys.modules), file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (0, "set()\n")


def test_runs_as_a_module() -> None:
    done = python("-m", "relskew_core.cli", "verify", "--case", "none")
    assert done.returncode == 2
    assert done.stderr.startswith("relskew: error: --case must be one of")
    assert done.stdout == ""


def test_a_shell_can_complete() -> None:
    words = {"_RELSKEW_COMPLETE": "complete_bash", "COMP_WORDS": "relskew export --ca", "COMP_CWORD": "2"}
    done = python("-m", "relskew_core.cli", **words)
    assert (done.returncode, done.stdout.split()) == (0, ["--causal"])


def test_info_as_json_and_as_tables(capsys: Capture) -> None:
    facts = json.loads(output_of(capsys, "info", "--json"))
    assert facts["relskew"] == __version__
    numpy = next(one for one in facts["libraries"] if one["name"] == "numpy")
    assert numpy["version"] == np.__version__
    assert "portable" in numpy["implementations"]
    assert facts["packages"]["onnx"] == onnx.__version__
    named = {one["name"] for one in facts["libraries"]} | {one["name"] for one in facts["missing"]}
    assert {"cupy", "dask"} <= named
    told = output_of(capsys, "info")
    assert all(one["name"] in told for part in ("libraries", "runtimes", "missing") for one in facts[part])


SPECS = {
    "--length 5": BlockSpec(8, 2, Span.full(5)),
    "--length 5 --causal": BlockSpec(8, 2, Span.causal(5), causal=True),
    "--length 5 --causal --beyond clip": BlockSpec(8, 2, Span.causal(5, "clip"), causal=True),
    "--clip 3": BlockSpec(8, 2, Span.clipped(3)),
    "--length 5 --cross": BlockSpec(8, 2, Span.full(5), cross=True),
    "--block-size 4 --causal": BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4),
    "--block-size 4 --blocks-before 2 --sinks": BlockSpec(8, 2, Span(11, 3), block_size=4, blocks_before=2, sinks=True),
    "--window 3,1": BlockSpec(8, 2, Span(3, 1), window=(3, 1)),
    "--window 3, --causal": BlockSpec(8, 2, Span(3, 0), causal=True, window=(3, None)),
    "--length 5 --num-kv-heads 1 --head-dim 6 --rel-values --shared-table --no-bias": BlockSpec(
        8, 2, Span.full(5), num_kv_heads=1, head_dim=6, rel_values=True, shared_table=True, bias=False
    ),
}


@pytest.mark.parametrize("options", SPECS)
def test_export_options_become_the_spec(capsys: Capture, options: str) -> None:
    told = output_of(capsys, "export", "m.onnx", *BLOCK, *options.split())
    assert spec_in("m.onnx") == SPECS[options]
    assert all(part in told for part in ("wrote    m.onnx", "random, seed 0", "relskew validate m.onnx"))


def test_export_passes_on_how_to_write(capsys: Capture) -> None:
    options = ["--length", "9", "--causal", "--past", "--mask", "--profile", "portable", "--dtype", "float16"]
    assert relskew("export", "m.onnx", *BLOCK, *options, "--max-length", "6", "--opset", "20", "--seed", "3") == 0
    model = onnx.load("m.onnx")
    metadata = {entry.key.removeprefix("relskew."): entry.value for entry in model.metadata_props}
    assert metadata.items() > {"profile": "portable", "dtype": "float16", "max_length": "6"}.items()
    assert model.opset_import[0].version == 20
    assert [value.name for value in model.graph.input] == ["x", "mask", "past_key", "past_value"]
    assert "relskew validate m.onnx --seed 3" in capsys.readouterr().out


def test_export_replaces_only_when_asked(capsys: Capture) -> None:
    assert relskew("export", "m.onnx", *BLOCK, "--length", "5") == 0
    before = Path("m.onnx").read_bytes()
    assert "pass --overwrite to replace it" in error_of(capsys, "export", "m.onnx", *BLOCK, "--length", "6")
    assert Path("m.onnx").read_bytes() == before
    assert relskew("export", "m.onnx", *BLOCK, "--length", "6", "--overwrite") == 0
    assert spec_in("m.onnx").span == Span.full(6)


def test_a_path_in_brackets_is_printed_as_it_is(capsys: Capture) -> None:
    told = output_of(capsys, "export", "m[bold].onnx", *BLOCK, "--length", "4")
    assert "wrote    m[bold].onnx" in told
    assert "relskew validate 'm[bold].onnx'" in told


def write_weights(path: Path, weights: dict[str, Any], key: str | None = None) -> None:
    if path.suffix == ".npz":
        np.savez(path, **weights)
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file(weights, path)
    else:
        torch = pytest.importorskip("torch")
        state = {name: torch.from_numpy(weight.copy()) for name, weight in weights.items()}
        torch.save({key: state, "epoch": 3} if key else state, path)


@pytest.mark.parametrize(("ending", "key"), [
    (".npz", None), (".safetensors", None), (".pt", None), (".pth", "model"), (".bin", "state_dict"), (".bin", None),
    (".ckpt", "model"), (".ckpt", "state_dict"),
])  # fmt: skip
def test_weights_from_a_file_are_the_models(capsys: Capture, ending: str, key: str | None) -> None:
    spec, path = BlockSpec(8, 2, Span.full(5)), Path("weights").with_suffix(ending)
    write_weights(path, {f"layer.0.{name}": weight for name, weight in init_weights(spec, seed=7).items()}, key)
    # The table determines its span.
    assert relskew("export", "m.onnx", *BLOCK, "--weights", str(path), "--prefix", "layer.0.") == 0
    assert spec_in("m.onnx") == spec
    assert relskew("export", "seed.onnx", *BLOCK, "--length", "5", "--seed", "7") == 0
    assert Path("m.onnx").read_bytes() == Path("seed.onnx").read_bytes()
    assert f"relskew validate m.onnx --weights {path} --prefix layer.0." in capsys.readouterr().out
    assert relskew("validate", "m.onnx", "--weights", str(path), "--prefix", "layer.0.") == 0
    assert "--prefix 'layer.0.'" in error_of(capsys, "export", "n.onnx", *BLOCK, "--weights", str(path))
    assert "has no q_proj.weight" in error_of(capsys, "validate", "m.onnx", "--weights", str(path))


@pytest.mark.parametrize("content", [b"nothing of the kind", b"\x80\x5b."], ids=["text", "pickle"])
@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".pt"])
def test_unreadable_weights_are_one_line(capsys: Capture, ending: str, content: bytes) -> None:
    """Without a library's warning: of a pickle's protocol 91, torch warns, and then fails."""
    Path(f"weights{ending}").write_bytes(content)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        told = error_of(capsys, "export", "m.onnx", *BLOCK, "--weights", f"weights{ending}", "--length", "5")
    assert f"cannot be read as {ending}" in told
    assert not shown


def test_a_pickle_is_not_run(capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"q_proj.weight": Path("anything")}, "weights.pt")
    assert "cannot be read as .pt" in error_of(capsys, "export", "m.onnx", *BLOCK, "--weights", "weights.pt")
    torch.save([torch.zeros(2)], "list.pt")
    assert "mapping" in error_of(capsys, "export", "m.onnx", *BLOCK, "--weights", "list.pt")


def test_weights_that_do_not_fit(capsys: Capture) -> None:
    write_weights(Path("w.npz"), init_weights(BlockSpec(8, 2, Span(3, 2)), seed=0))
    assert "not symmetric" in error_of(capsys, "export", "m.onnx", *BLOCK, "--weights", "w.npz")
    narrow = error_of(capsys, "export", "m.onnx", *BLOCK, "--weights", "w.npz", "--length", "5")
    assert "`weights['rel_k']`" in narrow
    assert relskew("export", "m.onnx", *BLOCK, "--weights", "w.npz", "--causal") == 0
    assert spec_in("m.onnx").span == Span.causal(6)
    told = error_of(capsys, "export", "n.onnx", *BLOCK, "--weights", "w.npz", "--causal", "--seed", "1")
    assert "--weights and --seed exclude each other" in told
    write_weights(Path("other.npz"), {"something": np.zeros(2)})
    assert "its names are something" in error_of(capsys, "export", "n.onnx", *BLOCK, "--weights", "other.npz")


def test_validate_says_yes_and_no(capsys: Capture) -> None:
    assert relskew("export", "m.onnx", *BLOCK, "--length", "5", "--seed", "4") == 0
    assert output_of(capsys, "validate", "m.onnx", "--seed", "4").endswith("\nok\n")
    told = output_of(capsys, "validate", "m.onnx", status=1)
    for part in ("random, seed 0", "FAILED weights", "more; --json has them all", "not ok: "):
        assert part in told
    assert told.splitlines()[-1].startswith("weights: the file was made with other weights")
    report = json.loads(output_of(capsys, "validate", "m.onnx", "--json", status=1))
    assert report["ok"] is False
    assert len(report["failures"]) > 6
    report = json.loads(output_of(capsys, "validate", "m.onnx", "--seed", "4", "--runtime", "reference", "--json"))
    assert any("reference" in check["runtime"] for check in report["checks"])


def test_validate_on_a_provider_that_is_not_there(capsys: Capture) -> None:
    assert relskew("export", "m.onnx", *BLOCK, "--length", "5") == 0
    told = output_of(capsys, "validate", "m.onnx", "--provider", "NoSuchProvider", "--provider", "cpu", status=1)
    assert "NoSuchProvider is not available here" in told
    assert "loads: the runtime or provider could not take the file" in told
    assert "not ok: 1 of" in told


def test_validate_refuses_in_one_line(capsys: Capture) -> None:
    Path("text.onnx").write_text("nothing of the kind")
    assert "text.onnx" in error_of(capsys, "validate", "text.onnx")
    assert relskew("export", "m.onnx", *BLOCK, "--length", "5") == 0
    model = onnx.load("m.onnx")
    kept = [entry for entry in model.metadata_props if entry.key != "relskew.spec"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, "foreign.onnx")
    assert "not a model that relskew exported" in error_of(capsys, "validate", "foreign.onnx")
    whole = onnx.load("foreign.onnx")
    del whole.metadata_props[:]
    whole.metadata_props.add(key="relskew.version", value="1")
    onnx.save(whole, "whole.onnx")
    assert "whole.onnx: is a whole model, which was compared with torch" in error_of(capsys, "validate", "whole.onnx")
    model.metadata_props.add(key="relskew.spec", value='{"embed_dim": 8}')
    onnx.save(model, "broken.onnx")
    assert "cannot be read" in error_of(capsys, "validate", "broken.onnx")


def words(argv: str) -> list[str]:
    return argv.replace("BLOCK", " ".join(BLOCK)).split()


@pytest.mark.parametrize(("argv", "part"), [
    ("nothing", "nothing"), ("nonsense", "; see relskew --help\n"), ("verify --wrong", "--wrong"), ("export", "path"),
    ("draw", "; see relskew draw --help\n"), ("draw span", "; see relskew draw span --help\n"),
    ("draw spam", "; see relskew draw --help\n"), ("validate", "; see relskew validate --help\n"),
    ("export x.onnx", "; see relskew export --help\n"), ("export x.onnx BLOCK", "; see relskew export --help\n"),
    ("export m.onnx --embed-dim many --num-heads 2", "--embed-dim"),
    ("verify --library x", "--library must be one of numpy,"), ("verify --case x", "--case must be one of full,"),
    ("verify --dtype int8", "--dtype must be one of float64,"), ("export m.onnx BLOCK", "--length N"),
    ("export m.onnx BLOCK --length 3 --clip 2", "exclude each other"), ("export m.onnx BLOCK --length 0", "`n`"),
    ("export m.onnx BLOCK --length 3 --num-kv-heads 3", "`num_kv_heads`"),
    ("export m.onnx BLOCK --length 3 --block-size 2", "`causal=True`"),
    ("export m.onnx BLOCK --length 3 --past", "past"), ("export m.onnx BLOCK --length 3 --opset 2", "`opset`"),
    ("export m.onnx BLOCK --length 3 --profile x", "`profile`"),
    ("export m.onnx BLOCK --length 3 --dtype int8", "`dtype`"), ("export m.onnx BLOCK --window 3;1", "--window"),
    ("export m.onnx BLOCK --window ,1", "--length N"), ("export m.onnx BLOCK --length 3 --prefix a.", "--prefix"),
    ("export m.onnx BLOCK --weights nothing.npz", "nothing.npz: there is no such file"),
    ("export m.onnx BLOCK --weights weights.txt", "must be a file ending in .npz,"),
    ("export nowhere/m.onnx BLOCK --length 4", "nowhere"), ("validate nothing.onnx", "there is no such file"),
    ("validate .", ".: is not a file"),
    ("draw span --clip 2 --save a.jpg", "--save a.jpg: the path must end in .svg"),
    ("draw span", "--length N"),
    ("draw span --clip 2 --beyond zero", "--length, which must be given"),
    ("draw span --length 2 --beyond x", "--beyond must be one of error, clip"),
    ("draw call --window 3", "--window must be LEFT,RIGHT"),
    ("draw call --segments a", "--segments must be the lengths"),
    ("draw call --length 3", "reaches the relative positions -2 … 2"),
    ("draw weights", "--embed-dim and --num-heads, or --model"),
    ("draw weights BLOCK --clip 2 --head 2", "`heads` must be among the 2 heads"),
    ("draw weights BLOCK --clip 2 --input x.npy", "--input x.npy: cannot be read"),
    ("draw weights BLOCK --clip 2 --memory x.npy", "--cross"),
    ("draw weights --model m.onnx --causal", "--model defines the block"),
])  # fmt: skip
def test_what_is_wrong_is_refused_in_one_line(capsys: Capture, tmp_path: Path, argv: str, part: str) -> None:
    assert part in error_of(capsys, *words(argv))
    assert not list(tmp_path.iterdir())


HUGE = "99999999999999999999999999"


@pytest.mark.parametrize(("argv", "named"), [
    ("draw call --queries 99999", "`n_queries` times `n_keys` must make at most 1048576 cells, got 9999800001"),
    ("draw call --queries 3 --past 999999", "got 3000006"),
    (f"draw call --queries {HUGE}", "--queries"),
    (f"draw call --queries 3 --window {HUGE},1", "--window must reach 1048576 at most"),
    ("draw call --queries 3 --window 1048577,1", "--window must reach 1048576 at most"),
    (f"draw call --queries 3 --segments {HUGE}", "--segments"),
    ("draw weights BLOCK --clip 3 --queries 1025", "--queries"),
    ("draw weights --embed-dim 8 --num-heads 8 --clip 3 --queries 512", "must make at most 1048576 cells"),
    ("draw weights BLOCK --clip 1048576 --queries 4 --rel-values --head-dim 64", "random weights must be 67108864"),
    ("draw weights --embed-dim 999999 --num-heads 1 --clip 3", "random weights must be 67108864 numbers at most"),
    ("export x.onnx BLOCK --head-dim 1048576 --clip 64", "random weights must be 67108864 numbers at most"),
    ("export x.onnx BLOCK --length 1048577", "--length"),
    (f"export x.onnx BLOCK --clip 3 --opset {HUGE}", "`opset` must be"),
    (f"validate x.onnx --batch {HUGE}", "--batch"),
    ("validate x.onnx --length 2000 --batch 7 --batch 1000", "--length times --batch must be 1048576 at most"),
])  # fmt: skip
def test_a_size_above_its_limit_is_refused_with_it(capsys: Capture, tmp_path: Path, argv: str, named: str) -> None:
    """Those that typer compares, of which tests/cli/inside_cli.py lists all, and those that follow from several."""
    told = error_of(capsys, *words(argv))
    assert named in told
    assert re.search(r"\d", told.replace(HUGE, ""))
    assert not list(tmp_path.iterdir())


# Every form from the command line, checkpoints, devices, advice


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
    assert "--device must be cpu or cuda, got 'tpu'" in error_of(capsys, "validate", "m.onnx", "--device", "tpu")


def test_atol(capsys: Capture) -> None:
    exported("--length", "9")
    assert relskew("validate", "m.onnx", "--batch", "1", "--atol", "1e-4") == 0
    told = output_of(capsys, "validate", "m.onnx", "--batch", "1", "--atol", "1e-12", status=1)
    assert "more than atol 1e-12" in told
    assert "atol: the relative errors keep their tolerances" in told
    told = output_of(capsys, "validate", "m.onnx", "--atol", "-1", status=1)
    assert "`atol` must be a finite number > 0" in told


def test_tables_of_a_whole_block_are_enough_for_the_core() -> None:
    np.savez("weights.npz", **init_weights(BlockSpec(8, 2, Span.causal(9), causal=True), seed=5))
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

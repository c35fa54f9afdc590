"""The pages of the drop-ins: programs, docstrings and tutorials run, and the table of families is the code's."""

import doctest
import inspect
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from peers.common import ROOT, hf, page, run
from peers.families import FAMILIES
from peers.test_families_numbers import drop_ins

from relskew_core.export import encoder_decoder_to_onnx, register_exporters
from relskew_core.huggingface import register_attention, replace_attention, replace_rotary

PAGE = (ROOT / "docs" / "huggingface.md").read_text()
T5 = (ROOT / "docs" / "tutorials" / "t5.md").read_text()
WEB = ROOT / ".venv-web" / "node_modules"
HEADERS = [Path(os.environ.get("ONNXRUNTIME_INCLUDE", "/usr/include/onnxruntime")), Path(__file__).parent]
"""Where C++ finds onnxruntime's headers; the second has declarations alone, with which a program is only parsed."""
TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 50}


@torch.enable_grad()
def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tiny random models replace those that the page downloads."""

    def llama(name: str, **options: Any) -> Any:
        return hf("LlamaForCausalLM")._from_config(hf("LlamaConfig")(**TINY), **options)

    monkeypatch.setattr(hf("T5ForConditionalGeneration"), "from_pretrained", lambda name: FAMILIES["T5"].make())
    monkeypatch.setattr(hf("LlamaForCausalLM"), "from_pretrained", llama)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    kinds, blocks = [], page("huggingface.md")
    for block in blocks:
        if "replace_rotary" in block:
            names["model"](torch.arange(6)[None]).logits.sum().backward()
        exec(block, names)
        whole = names["model"]
        kinds.append({type(part).__name__ for part in whole.modules()} | {whole.config._attn_implementation})
    assert blocks[0] in (ROOT / "README.md").read_text()  # its only program that needs transformers
    assert len(kinds) == 6
    assert "T5RelativeAttention" in kinds[0]
    assert "alibi" in kinds[1]
    assert (tmp_path / "exported" / "model.onnx").exists()
    assert "learned" in kinds[3]
    assert "relskew" in kinds[4]
    assert "sinks" in kinds[5]
    assert all(bias.grad is not None for bias in names["biases"])


@pytest.mark.slow
def test_the_answers_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("T5EncoderModel", "T5ForConditionalGeneration"):
        whole = FAMILIES["T5"].make().float()
        made = whole if name == "T5ForConditionalGeneration" else whole.encoder
        monkeypatch.setattr(hf(name), "from_pretrained", lambda name, made=made, **options: made)
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in page("faq.md") if "from transformers" in block]
    names = run(*blocks)
    assert len(blocks) == 2
    assert "T5RelativeAttention" in {type(part).__name__ for part in names["model"].modules()}
    assert (tmp_path / "t5" / "decoder_model.onnx").exists()


@torch.enable_grad()
def test_the_page_of_other_tools_runs() -> None:
    names = run(*(block for block in page("other-tools.md") if "accelerate" in block))
    assert len(drop_ins(names["model"])) == 2


def test_the_page_of_speech_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"num_mel_bins": 16, "subsampling_conv_channels": 4, **TINY}
    encoder, config = hf("ParakeetEncoder"), hf("ParakeetEncoderConfig")(**sizes)
    torch.manual_seed(0)
    made = encoder._from_config(config, attn_implementation="sdpa")
    monkeypatch.setattr(encoder, "from_pretrained", lambda name: made)
    monkeypatch.chdir(tmp_path)
    names = run(*page("speech.md"))
    assert names["encoded"].shape == (1, 450, 32)
    assert {layer.self_attn.window for layer in names["encoder"].layers} == {(128, 128)}


SLOW_EXPORTS = [pytest.param(each, marks=pytest.mark.slow) for each in (encoder_decoder_to_onnx, register_exporters)]


@pytest.mark.parametrize("function", [replace_attention, register_attention, replace_rotary, *SLOW_EXPORTS])
@torch.enable_grad()
def test_the_examples_of_a_docstring_run(function: Any) -> None:
    names = vars(inspect.getmodule(function)).copy()
    (examples,) = doctest.DocTestFinder().find(function, function.__name__, globs=names)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(examples, out=report.append)
    assert examples.examples
    assert not report, "".join(report)


@pytest.mark.parametrize("family", sorted({name.split()[0] for name in FAMILIES}))
def test_the_page_has_every_family(family: str) -> None:
    table = PAGE[PAGE.index("## Families") : PAGE.index("## Limits")]
    assert re.search(rf"^\| .*\b{re.escape(family)}\b", table, re.MULTILINE)


@pytest.mark.parametrize(("name", "encoder"), [("CanaryForConditionalGeneration", "Parakeet"),
                                               ("CohereAsrForConditionalGeneration", "Parakeet"),
                                               ("Nemotron3_5AsrForRNNT", "NemotronAsrStreaming")])  # fmt: skip
def test_the_questions_name_models_with_known_encoders(name: str, encoder: str) -> None:
    with torch.device("meta"):
        theirs = hf(name)(hf(name).config_class())
    before = {path: type(module).__name__ for path, module in theirs.named_modules()}
    ours = replace_attention(theirs)
    changed = {before[path] for path, module in ours.named_modules() if type(module).__name__ != before[path]}
    assert changed == {f"{encoder}EncoderAttention"}


@torch.enable_grad()
def test_models_under_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(*page("tutorials/accelerate.md"))
    assert "T5RelativeAttention" in {type(part).__name__ for part in found["trained"].modules()}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the page's Python, in a folder that its other programs find their files in."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("tutorial")
        patch.chdir(home)
        found = run(*page("tutorials/t5.md"))
    assert len(set(found["tokens"])) > 5
    return {"home": home, **found}


def output(*command: object, folder: Path) -> str:
    run = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_the_tokens_of_c_plus_plus_are_those_of_python(names: dict[str, Any]) -> None:
    compiler, home = shutil.which("c++"), names["home"]
    if compiler is None:
        pytest.skip("no compiler of C++ is here")
    (program,) = page("tutorials/t5.md", "cpp")
    (home / "t5.cpp").write_text(program)
    found = next(folder for folder in HEADERS if (folder / "onnxruntime_cxx_api.h").exists())
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", found, "t5.cpp"]
    if found == HEADERS[-1]:
        output(*command, "-fsyntax-only", folder=home)
        pytest.skip("parsed, not run: ONNXRUNTIME_INCLUDE must name a folder with onnxruntime's headers")
    (library,) = Path(sysconfig.get_path("platlib"), "onnxruntime", "capi").glob("libonnxruntime.so.*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (home / name).symlink_to(library)
    (compile_line, line) = re.findall(r"^\$ (.*)$", T5, re.MULTILINE)
    assert "c++ -std=c++17 -I include t5.cpp" in compile_line
    output(*command, "libonnxruntime.so", "-Wl,-rpath,$ORIGIN", "-o", "t5", folder=home)
    assert output(*line.split(), folder=home).split() == [str(token) for token in names["tokens"]]


def test_the_tokens_of_javascript_are_those_of_python(names: dict[str, Any]) -> None:
    node, home = shutil.which("node"), names["home"]
    if node is None:
        pytest.skip("Node is not here")
    for name, program in zip(("t5.mjs", "main.mjs"), page("tutorials/t5.md", "js"), strict=True):
        (home / name).write_text(program)
        output(node, "--check", name, folder=home)
    if not (WEB / "onnxruntime-web").is_dir():
        pytest.skip("parsed, not run: needs onnxruntime-web, make test-web")
    (home / "node_modules").symlink_to(WEB)
    made = output(node, "main.mjs", "t5-onnx", names["weights"], 20, *names["prompt"], folder=home)
    assert made.split() == [str(token) for token in names["tokens"]]

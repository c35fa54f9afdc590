"""docs/chooser.md line by line: each runs after the page's own setup, or stands in a page that runs elsewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

from docs.site.marks import full_name

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "chooser.md").read_text()
(SETUP, *_) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "model = replace_attention(model)": ("huggingface.md", "model = replace_attention("),
    "model = replace_rotary(model)": ("huggingface.md", "model = replace_rotary(model)"),
    'register_attention("alibi")': ("huggingface.md", 'register_attention("alibi")'),
    'register_attention("sinks", rel_bias=None)': ("huggingface.md", 'register_attention("sinks", rel_bias=None)'),
    'load_vits_encoder("voice.onnx")': ("piper.md", "load_vits_encoder(PATH)"),
    'decoder_to_onnx(model, "decoder.onnx")': ("decoders.md", 'decoder_to_onnx(model, "decoder.onnx")'),
    "generate(path, [3, 1, 4, 1, 5, 9, 2, 6], 12)": ("decoders.md", "generate(path, [3, 1, 4, 1, 5, 9, 2, 6], 12)"),
}
"""Lines that need a model, and the page that runs them."""


cells = [[cell.strip("| ") for cell in line.split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [row for row in cells if len(row) == 3 and row[1] != "what you write"]  # other tables have two columns
LINES = sorted({row[1].strip("`") for row in ROWS if re.fullmatch(r"`[^`]*[(=][^`]*`", row[1])})


@pytest.mark.parametrize("line", LINES)
def test_a_line_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if line in ELSEWHERE:
        page, there = ELSEWHERE[line]
        assert there in (DOCS / page).read_text()
        return
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(SETUP, names)
    exec(line, names)


def test_every_row_has_a_line_a_name_or_a_link() -> None:
    assert len(ROWS) > 30
    assert all(("`" in row[1] or "](" in row[2]) for row in ROWS)


def test_the_names_next_to_the_lines_are_public() -> None:
    theirs = {"relative_key", "relative_key_query", "nn.TransformerEncoderLayer", "query − key"}
    beside = {name for row in ROWS for cell in (row[0], row[2]) for name in re.findall(r"`([^`]+)`", cell)} - theirs
    assert len(beside) > 10
    assert all(full_name(name) for name in beside), beside


def test_every_replaced_family_is_there() -> None:
    (families,) = re.findall(r"## Families\n(.*?)\n## ", (DOCS / "huggingface.md").read_text(), re.DOTALL)
    names = re.findall(r"^\| ((?:[A-Z])[^|]*) \|", families, re.MULTILINE)
    assert len(names) > 10
    assert not [name for name in ", ".join(names).split(", ") if re.sub("-v[23]|Swinv2", "", name) not in PAGE]

"""docs/variants.md cell by cell: every call runs, equals plain loops where they know it, and its comparison exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import oracles

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "variants.md").read_text()
SETUP = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


class Row(NamedTuple):
    """A line of a table with a call."""

    who: str
    what: str
    call: str
    compared: list[str]


def rows() -> list[Row]:
    found, who = [], ""
    for line in PAGE.splitlines():
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and cells[2].startswith("`") and "(" in cells[2]:
            who = cells[0] or who
            found.append(Row(who, cells[1], cells[2].strip("`"), re.findall(r"`([^`]+)`", cells[3])))
    return found


ROWS = rows()


def evaluate(call: str, **replaced: Any) -> Any:
    """Run a call after the page's setup, some functions replaced: random tables come out the same every time."""
    assert SETUP is not None
    names: dict[str, Any] = {}
    exec(SETUP[1], names)
    names |= replaced
    return eval(call, names)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.who}: {row.what}" for row in ROWS])
def test_a_call_runs_and_equals_the_loops(row: Row) -> None:
    got = evaluate(row.call)
    assert np.all(np.isfinite(got))
    assert got.shape[0] == 2
    expected: Any = None
    if row.call.startswith("relative_attention("):

        def attention(*arguments: Any, **options: Any) -> Any:
            if isinstance(offset := options.get("offset"), list):
                (q, k, v), tables = arguments[:3], arguments[3:]
                items = zip(q, k, v, offset, strict=True)
                return np.stack([attention(q, k, v, *tables, **{**options, "offset": o}) for q, k, v, o in items])
            causal = options.pop("causal", False) or ("block_size" in options and "blocks_before" not in options)
            return oracles.relative_attention(*arguments, causal=causal, **options).out

        expected = evaluate(row.call, relative_attention=attention)
        assert oracles.relative_error(got, expected) < 1e-12


def test_the_page_has_every_peer() -> None:
    everyone = " ".join(row.who for row in ROWS)
    for peer in (
        "Shaw", "tensor2tensor", "OpenNMT", "fairseq2", "CTranslate2", "Wav2Vec2-BERT", "SpeechT5", "Granite", "BERT",
        "Music Transformer", "VITS", "Ukhov", "Inkling", "Zipformer", "Lingvo", "Gemma", "DeBERTa", "Transformer-XL",
        "XLNet", "Conformers", "FlexAttention", "T5", "x-transformers", "ALiBi", "WavLM", "BoTNet", "SAM", "MViT",
        "HaloNet", "Swin", "BEiT", "gpt-oss", "Enformer", "Kerple", "Sandwich", "TUPE", "xPos", "UMT5", "NeMo", "HSTU",
    ):  # fmt: skip
        assert peer in everyone


def test_every_comparison_is_a_test() -> None:
    tests = {
        f"{path.stem}.{node.name}"
        for path in (ROOT / "tests" / "peers").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len([name for row in ROWS for name in row.compared]) > 20
    pages = PAGE + (ROOT / "docs" / "huggingface.md").read_text()
    named = set(re.findall(r"`(test_\w+\.test_\w+)`", pages))
    assert named <= tests
    inside_models = (
        "test_drop_in.",
        "test_families_",
        "test_adapters.",
        "test_keras.",
        "test_export_varies.",
        "test_speech_page.",
        "test_decoders.",
        "test_encoder_decoder.",
    )
    drop_ins = {name for name in tests if name.startswith(inside_models)}
    helpers = {"test_text.test_t5_buckets", "test_text.test_deberta_buckets"}
    unnamed = {name for name in tests if ".test_" in name} - named - drop_ins - helpers
    assert not unnamed, f"docs/variants.md does not name {sorted(unnamed)}"


def test_a_wrong_call_would_be_seen() -> None:
    """The loops are no copy of the call: another offset is another number."""

    def elsewhere(*arguments: Any, offset: int, **options: Any) -> Any:
        return oracles.relative_attention(*arguments, offset=offset - 1, **options).out

    call = "relative_attention(q, k, v, table(2 * M - 1, D), Span.full(M), offset=3)"
    assert oracles.relative_error(evaluate(call), evaluate(call, relative_attention=elsewhere)) > 1e-3

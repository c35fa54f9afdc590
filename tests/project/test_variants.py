"""docs/variants.md and docs/chooser.md: calls run, equal plain loops where they have them, and are compared."""

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import oracles
from docs.site.marks import full_name
from tracked import ROOT

PAGE = (ROOT / "docs" / "variants.md").read_text()
PAGE_OF_MODELS = (ROOT / "docs" / "chooser.md").read_text().partition("## A model of your own")[0]
(SETUP, *_) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

COMPARED: dict[str, list[str]] = json.loads(Path(__file__).with_name("variants.json").read_text())
"""The comparisons of each row, some of them families', and a code base that is compared, but not with this call."""


class Row(NamedTuple):
    who: str
    what: str
    call: str

    @property
    def name(self) -> str:
        return f"{self.who}: {self.what}"

    @property
    def compared(self) -> list[str]:
        return [test for test in COMPARED.get(self.name, []) if not test.startswith("not run: ")]


def rows() -> list[Row]:
    found, who = [], ""
    for line in PAGE.splitlines():
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[2].startswith("`") and "(" in cells[2]:
            who = cells[0] or who
            found.append(Row(who, cells[1], cells[2].strip("`")))
    return found


ROWS = rows()


def evaluate(call: str, **replaced: Any) -> Any:
    """Run a call after the page's setup, some functions replaced: random tables come out the same every time."""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    names |= replaced
    return eval(call, names)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
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


INSTALLED = {
    "tensor2tensor": "tensor2tensor", "OpenNMT": "onmt.modules", "fairseq2": "fairseq2.models",
    "fairseq": "fairseq.modules", "Wav2Vec2-BERT": "wav2vec2_bert", "SpeechT5": "speecht5",
    "Granite Speech": "granite_speech", "VITS": "vits.Vits", "Piper": "piper.train", "Coqui TTS": "TTS.tts",
    "MeloTTS": "melo.attentions", "Inkling": "inkling", "Inkling 2": "inkling2", "Zipformer": "zipformer",
    "Gemma 3n": "gemma3n", "Gemma 4": "gemma4",
    "DeBERTa": "deberta", "Transformer-XL": "pytorch_transformers", "XLNet": "XLNet", "ESPnet": "espnet",
    "NeMo": "nemo", "ChunkFormer": "chunkformer", "HF": "Wav2Vec2-Conformer", "SpeechBrain": "speechbrain",
    "Enformer": "enformer_pytorch", "FlexAttention": "flex_attention", "UMT5": "T5Attention", "T5": "T5Attention",
    "x-transformers": "x_transformers", "Bloom": "bloom", "MPT": "mpt", "WavLM": "wavlm", "gpt-oss": "gpt_oss",
    "Swin v2": "swinv2", "timm": "timm", "bottleneck-transformer-pytorch": "bottleneck_transformer",
    "SAM": "sam.Sam", "ViTDet": "vitdet", "MViT": "mvit", "HaloNet": "halo_attn", "BEiT": "beit",
    "LeViT": "levit", "BROS": "bros",
    "torchvision": "torchvision", "MONAI": "monai", "Swin": "swin.Swin",
    "BERT": "RnaBert", "CTranslate2": "ctranslate2", "multimolecule": "multimolecule",
    "uni2ts": "uni2ts", "pope-pytorch": "PoPE_pytorch", "Longformer": "longformer",
    "AlphaFold": "AttentionPairBias", "Boltz": "boltz.model",
}  # fmt: skip
"""Code bases on the pages, and what the comparison with each has in its source."""

ELSEWHERE = {
    "ports to PyTorch", "I. Ukhov", "Lingvo", "HSTU", "Graphormer", "Evoformer",
    "Kerple", "Sandwich", "T5X", "FIRE", "CABLE", "DroPE", "TUPE", "xPos", "flash-attention", "NATTEN",
}  # fmt: skip
"""Code bases that no comparison runs: they cannot be installed with the others, or there is only a paper."""

OTHERS = {
    "Shaw", "Music Transformer", "Music by time and pitch", "Left padding", "Speculative trees", "any", "ALiBi",
    "symmetric", "Conformers", "streaming", "logarithmic", "power", "Packed documents", "BoTNet", "Video Swin",
    "SwinUNETR", "Neighborhood Attention", "generative recommenders", "versions", "Moirai", "Cross-attention",
    "one-sided heads", "slopes by item", "NoPE", "PoPE", "Forgetting attention", "FoX",
}  # fmt: skip
"""What else the first column has: papers whose code is named next to them, and what is no code base."""


KNOWN = {*INSTALLED, *ELSEWHERE, *OTHERS}


def named(text: str, names: Iterable[str]) -> set[str]:
    """Return the names in a text; ``Swin`` is not one in ``Swin v2``."""
    found = set()
    for name in sorted(names, key=len, reverse=True):
        shorter = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "", text)
        found |= {name} if shorter != text else set()
        text = shorter
    return found


def sources() -> dict[str, str]:
    """Return the source of each comparison, with that of the functions it calls."""
    found = {}
    for path in (ROOT / "tests" / "peers").glob("*.py"):
        text = path.read_text()
        parts = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        lines = {node.name: "\n".join(map(ast.unparse, [node, *node.decorator_list])) for node in parts}
        constants = "\n".join(re.findall(r"^(?:[A-Z_0-9]+ = |from peers\.tensor2).*$", text, re.MULTILINE))
        for name in lines:
            used, new = set[str](), {name}
            while new:
                used |= new
                new = set(re.findall(r"\w+", "\n".join(lines[each] for each in new))) & lines.keys() - used
            found[f"{path.stem}.{name}"] = "\n".join(lines[each] for each in used) + constants
    return found


def test_a_code_base_is_compared_or_said_not_to_be() -> None:
    code, said = sources(), PAGE.partition("follow a paper or the source: ")[2].partition("The calls use")[0]
    assert named(" ".join(said.split()), {*INSTALLED, *ELSEWHERE}) - {"T5"} == ELSEWHERE
    assert COMPARED.keys() <= {row.name for row in ROWS}
    for row in ROWS:
        for part in re.split(r"[,()]", row.who):
            assert not part.strip() or named(part, KNOWN), f"{part!r} is on none of the lists"
        compared = "\n".join(code[test.partition("[")[0]] + test for test in row.compared)
        for name in named(row.who, KNOWN):
            runs = name in INSTALLED and (INSTALLED[name] in compared or f"[{name}" in compared)
            not_run = name in ELSEWHERE or f"not run: {name}" in COMPARED.get(row.name, [])
            assert name in OTHERS or runs != not_run, f"{row.who}: {name} is compared, or else said not to be"
    assert {name for row in ROWS for name in named(row.who, INSTALLED)} == INSTALLED.keys()
    assert {name for row in ROWS for name in named(row.who, ELSEWHERE)} == ELSEWHERE


def test_the_chooser_says_what_was_not_run() -> None:
    for row in re.findall(r"^\| (.*) \|$", PAGE_OF_MODELS, re.MULTILINE):
        model, line, more = row.split(" | ")
        if line.strip("`").startswith(("relative_attention(", "relative_attention_")):
            assert named(model, KNOWN), f"{model!r} has no code base"
            assert named(model, ELSEWHERE) == named(more.partition("not run: ")[2], ELSEWHERE), model


def test_every_comparison_is_a_test() -> None:
    tests = {name for name in sources() if name.startswith("test_")}
    found = [name.partition("[") for row in ROWS for name in row.compared]
    named, cases = ({name[place] for name in found} - {""} for place in (0, 2))
    every = "\n".join(path.read_text() for path in (ROOT / "tests" / "peers").glob("*famil*.py"))
    assert all(f'    "{case[:-1]}": ' in every for case in cases)  # a family, whose drop-in makes the call
    assert len(named) > 20
    assert named <= tests
    inside_models = (
        "test_conformers.", "test_families_", "test_keras.",
        "test_export.", "test_exporters.",
        "test_decoders.",
        "test_libraries.",
    )  # fmt: skip
    helpers = {
        "test_text.test_t5_buckets", "test_text.test_deberta_buckets", "test_speech.test_text_encoders_of_voices",
        "test_speech.test_a_text_encoder_with_speakers", "test_speech.test_an_encoder_of_melotts",
    }  # fmt: skip
    unnamed = {name for name in tests - named - helpers if ".test_" in name and not name.startswith(inside_models)}
    assert not unnamed, f"tests/project/variants.json does not name {sorted(unnamed)}"


# docs/chooser.md line by line: each runs after the page's own setup, or stands in a page that runs elsewhere

DOCS = Path(__file__).parents[2] / "docs"
CHOOSER = (DOCS / "chooser.md").read_text()
(SETUP_OF_CHOOSER, *_) = re.findall(r"^```python\n(.*?)^```$", CHOOSER, re.MULTILINE | re.DOTALL)
ON_OTHER_PAGES = {
    "model = replace_attention(model)": ("huggingface.md", "model = replace_attention("),
    "model = replace_rotary(model)": ("huggingface.md", "model = replace_rotary(model)"),
    'register_attention("alibi")': ("huggingface.md", 'register_attention("alibi")'),
    'register_attention("sinks", rel_bias=None)': ("huggingface.md", 'register_attention("sinks", rel_bias=None)'),
    'load_vits_encoder("voice.onnx")': ("piper.md", "load_vits_encoder(PATH)"),
    'decoder_to_onnx(model, "decoder.onnx")': ("decoders.md", 'decoder_to_onnx(model, "decoder.onnx")'),
    "generate(path, [3, 1, 4, 1, 5, 9, 2, 6], 12)": ("decoders.md", "generate(path, [3, 1, 4, 1, 5, 9, 2, 6], 12)"),
}
"""Lines that need a model, and the page that runs them."""


CELLS = [[cell.strip("| ") for cell in line.split(" | ")] for line in CHOOSER.splitlines() if line.startswith("| ")]
MODELS = [row for row in CELLS if len(row) == 3 and row[1] != "what you write"]  # other tables have two columns
LINES = sorted({row[1].strip("`") for row in MODELS if re.fullmatch(r"`[^`]*[(=][^`]*`", row[1])})


@pytest.mark.parametrize("line", LINES)
def test_a_line_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if line in ON_OTHER_PAGES:
        page, there = ON_OTHER_PAGES[line]
        assert there in (DOCS / page).read_text()
        return
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(SETUP_OF_CHOOSER, names)
    exec(line, names)


def test_every_row_has_a_line_a_name_or_a_link() -> None:
    assert len(MODELS) > 30
    assert all(("`" in row[1] or "](" in row[2]) for row in MODELS)


def test_the_names_next_to_the_lines_are_public() -> None:
    theirs = {"relative_key", "relative_key_query", "nn.TransformerEncoderLayer", "query − key"}
    beside = {name for row in MODELS for cell in (row[0], row[2]) for name in re.findall(r"`([^`]+)`", cell)} - theirs
    assert len(beside) > 10
    assert all(full_name(name) for name in beside), beside


def test_every_replaced_family_is_there() -> None:
    (families,) = re.findall(r"## Families\n(.*?)\n## ", (DOCS / "huggingface.md").read_text(), re.DOTALL)
    names = re.findall(r"^\| ((?:[A-Z])[^|]*) \|", families, re.MULTILINE)
    assert len(names) > 10
    assert not [name for name in ", ".join(names).split(", ") if re.sub("-v[23]|Swinv2", "", name) not in CHOOSER]

"""The pages of the drop-ins: their programs run, as do the docstrings', and the table of families is the code's."""

import doctest
import inspect
import re
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

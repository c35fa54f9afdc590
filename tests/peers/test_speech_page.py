"""The page of speech recognition: its programs run, with a small random Parakeet."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peers.common import peer

PAGE = (Path(__file__).parents[2] / "docs" / "speech.md").read_text()


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def small(name: str) -> Any:
        config = peer("transformers.ParakeetEncoderConfig")(
            hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, num_mel_bins=16,
            subsampling_conv_channels=4,
        )  # fmt: skip
        return encoder._from_config(config, attn_implementation="sdpa")

    encoder = peer("transformers.ParakeetEncoder")
    monkeypatch.setattr(encoder, "from_pretrained", small)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["encoded"].shape == (1, 450, 32)
    assert {part.window for part in (layer.self_attn for layer in names["encoder"].layers)} == {(128, 128)}

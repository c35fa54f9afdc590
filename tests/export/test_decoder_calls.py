"""How decoders of transformers are called, without transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relskew_core.export import decoder_to_onnx
from relskew_core.export._models import decoder_calls


class HiddenStates(nn.Module):
    """A decoder that leaves the given cache empty, because it caches its hidden states."""

    def prepare_inputs_for_generation(self) -> None:
        """Mark the class as one that generates."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros((*input_ids.shape, 5)), mems=[])


def test_a_model_that_caches_hidden_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = SimpleNamespace(DynamicCache=lambda: SimpleNamespace(layers=[]))
    monkeypatch.setattr(decoder_calls, "_caches", lambda: caches)
    said = "DynamicCache .* got HiddenStates, which leaves list .*: .* hidden states, is exported .* by torch_to_onnx"
    with pytest.raises(TypeError, match=said):
        decoder_to_onnx(HiddenStates(), tmp_path / "decoder.onnx")

"""Whole models with their attention replaced: the same outputs, caches, gradients, and ONNX graphs of any length."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from relskew_core.huggingface import replace_attention
from tests.peers.common import check, padding, peer, randomised

DYNAMIC = torch.export.Dim.DYNAMIC


def vits(**options: Any) -> Any:
    config = peer("transformers.VitsConfig")(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=2, ffn_dim=32, vocab_size=11, flow_size=16,
        layerdrop=0.0, attention_dropout=0.0, hidden_dropout=0.0, activation_dropout=0.0, **options,
    )  # fmt: skip
    return randomised(peer("transformers.models.vits.modeling_vits.VitsTextEncoder")(config))


class Encoder(torch.nn.Module):
    """A VITS text encoder of tokens and their mask."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        present = mask[..., None].to(self.encoder.embed_tokens.weight.dtype)
        return self.encoder(ids, padding_mask=present, attention_mask=mask, return_dict=False)


def tokens(batch: int, length: int, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(length))
    return ids, padding([length] * (batch - 1) + [max(1, length - 2)], length)[:, 0, 0].long()


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (2, 7), (3, 50)])
@pytest.mark.parametrize("window_size", [1, 4])
def test_vits_keeps_its_outputs(shape: tuple[int, int], window_size: int) -> None:
    theirs = vits(window_size=window_size)
    ours = copy.deepcopy(theirs)
    assert replace_attention(ours) == 2
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for got, want in zip(Encoder(ours)(*tokens(*shape)), Encoder(theirs)(*tokens(*shape)), strict=True):
        check(got, want)


def test_vits_keeps_its_gradients() -> None:
    theirs = vits().train()
    ours = copy.deepcopy(theirs)
    replace_attention(ours)
    for model in (theirs, ours):
        Encoder(model)(*tokens(2, 9))[1].square().sum().backward()
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None and want.grad.norm() > 1e-9:  # key biases have none but rounding
            check(got.grad, want.grad, 1e-9)


def t5(implementation: str = "eager") -> Any:
    config = peer("transformers.T5Config")(
        d_model=24, d_kv=8, num_heads=3, num_layers=2, num_decoder_layers=2, d_ff=32, vocab_size=50,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    config._attn_implementation = implementation
    return randomised(peer("transformers.T5ForConditionalGeneration")(config))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_t5_keeps_its_outputs(implementation: str) -> None:
    theirs = t5(implementation)
    ours = copy.deepcopy(theirs)
    assert replace_attention(ours) == 6  # two encoder layers, two decoder layers of two
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for length, decoded in [(1, 1), (7, 3), (30, 25)]:
        ids, mask = tokens(2, length, 50)
        given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(2, decoded, 50)[0]}
        want, got = theirs(**given).logits, ours(**given).logits
        check(got, want)
    bare = copy.deepcopy(ours)  # the comparison would see a bias that is lost
    bare.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.zero_()
    assert (bare(**given).logits - want).norm() / want.norm() > 1e-3


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_t5_generates_the_same(options: dict[str, Any]) -> None:
    """Steps through a cache, from prefill to 40 tokens, far past the last bucket."""
    theirs = t5()
    ours = copy.deepcopy(theirs)
    replace_attention(ours)
    ids, mask = tokens(2, 20, 50)
    options = {**options, "max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    want, got = (model.generate(ids, attention_mask=mask, output_logits=True, **options) for model in (theirs, ours))
    assert torch.equal(want.sequences, got.sequences)
    check(torch.stack(got.logits), torch.stack(want.logits), 1e-9)


def test_t5_keeps_its_gradients() -> None:
    theirs = t5().train()
    ours = copy.deepcopy(theirs)
    replace_attention(ours)
    ids, mask = tokens(2, 20, 50)
    for model in (theirs, ours):
        model(input_ids=ids, attention_mask=mask, labels=ids[:, :9].contiguous()).loss.backward()
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert got.grad is not None, name
        check(got.grad, want.grad, 1e-9)


def export(model: torch.nn.Module, arguments: tuple[torch.Tensor, ...], path: Path) -> onnxruntime.InferenceSession:
    shapes = tuple(dict.fromkeys(range(x.ndim), DYNAMIC) for x in arguments)
    program = torch.onnx.export(model.eval(), arguments, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(path)
    return onnxruntime.InferenceSession(path)


def run(session: onnxruntime.InferenceSession, arguments: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    feed = {given.name: x.numpy() for given, x in zip(session.get_inputs(), arguments, strict=True)}
    return [torch.from_numpy(np.asarray(x)) for x in session.run(None, feed)]


def test_vits_exports_with_any_length(tmp_path: Path) -> None:
    theirs = vits(window_size=4).float()
    ours = copy.deepcopy(theirs)
    replace_attention(ours)
    session = export(Encoder(ours), tokens(2, 7), tmp_path / "vits.onnx")
    for shape in [(2, 7), (1, 1), (1, 2), (1, 4), (3, 5), (2, 6), (2, 60)]:
        arguments = tokens(*shape)
        for got, want in zip(run(session, arguments), Encoder(theirs)(*arguments), strict=True):
            check(got, want, 1e-5)


class Translator(torch.nn.Module):
    """A T5 from tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, decoded: torch.Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoded, use_cache=False).logits


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_t5_exports_with_any_length(tmp_path: Path, implementation: str) -> None:
    theirs = t5(implementation).float()
    ours = copy.deepcopy(theirs)
    replace_attention(ours)

    def arguments(batch: int, length: int, decoded: int) -> tuple[torch.Tensor, ...]:
        return *tokens(batch, length, 50), tokens(batch, decoded, 50)[0]

    session = export(Translator(ours), arguments(2, 7, 6), tmp_path / "t5.onnx")
    for shape in [(2, 7, 6), (1, 1, 1), (1, 2, 9), (3, 40, 30), (2, 5, 1)]:
        (got,) = run(session, arguments(*shape))
        check(got, Translator(theirs)(*arguments(*shape)), 1e-5)


def test_weights_are_never_held() -> None:
    encoder = vits()
    replace_attention(encoder)
    attention = encoder.encoder.layers[0].attention
    x = torch.zeros(1, 3, 24, dtype=torch.float64)
    with pytest.raises(ValueError, match="`output_attentions` must be False"):
        attention(x, output_attentions=True)
    attention.dropout = 0.1
    attention(x)
    with pytest.raises(ValueError, match=r"attention dropout must be 0 in training, got 0\.1"):
        attention.train()(x)
    with pytest.raises(ValueError, match="`model` must contain VitsAttention or T5Attention, got VitsTextEncoder"):
        replace_attention(encoder)

"""Whole models with their attention replaced: ONNX graphs of any length, and dropout as theirs."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from peers.common import check, padding, peer, randomised

from onnx_sessions import opened
from relskew_core.huggingface import replace_attention

DYNAMIC = torch.export.Dim.DYNAMIC


def vits(**options: Any) -> Any:
    config = peer("transformers.VitsConfig")(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=2, ffn_dim=32, vocab_size=11, flow_size=16,
        layerdrop=0.0, attention_dropout=0.0, hidden_dropout=0.0, activation_dropout=0.0,
        attn_implementation="eager", **options,
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


def t5(implementation: str = "eager") -> Any:
    config = peer("transformers.T5Config")(
        d_model=24, d_kv=8, num_heads=3, num_layers=2, num_decoder_layers=1, d_ff=32, vocab_size=50,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    config._attn_implementation = implementation
    return randomised(peer("transformers.T5ForConditionalGeneration")(config))


def exported(model: torch.nn.Module, arguments: tuple[torch.Tensor, ...], **options: Any) -> tuple[Any, Any]:
    """Export a model with torch's exporter, and return the program and a function that runs it."""
    shapes = tuple(dict.fromkeys(range(x.ndim), DYNAMIC) for x in arguments)
    program = torch.onnx.export(model.eval(), arguments, dynamo=True, dynamic_shapes=shapes, verbose=False, **options)
    assert program is not None
    session = opened(program.model_proto)

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        feed = {value.name: x.numpy() for value, x in zip(session.get_inputs(), given, strict=True)}
        return [torch.from_numpy(np.asarray(x)) for x in session.run(None, feed)]

    return program, run


def check_vits(**options: Any) -> None:
    """Export a text encoder, and compare it at other lengths."""
    theirs = vits(window_size=4).float()
    ours = replace_attention(copy.deepcopy(theirs))
    _, run = exported(Encoder(ours), tokens(2, 7), **options)
    for shape in [(2, 7), (1, 1), (1, 2), (1, 4), (3, 5), (2, 6), (2, 60)]:
        arguments = tokens(*shape)
        for got, want in zip(run(*arguments), Encoder(theirs)(*arguments), strict=True):
            check(got, want, 1e-5)


def test_vits_exports_with_any_length() -> None:
    check_vits()


@pytest.mark.parametrize("implementation", ["eager", None])
@torch.no_grad()
def test_vits_masks_keys_alone(implementation: str | None) -> None:
    """No mask has the size of all pairs. Without an implementation, transformers ignores its mask, and so does ours."""
    theirs = vits()
    theirs.config._attn_implementation = implementation
    ours = replace_attention(copy.deepcopy(theirs))
    masks = list[Any]()
    ours.encoder.layers[0].attention.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    for got, want in zip(Encoder(ours)(*tokens(2, 7)), Encoder(theirs)(*tokens(2, 7)), strict=True):
        check(got, want)
    assert [mask if mask is None else mask.shape for mask in masks] == [implementation and (2, 1, 1, 7)]


class Translator(torch.nn.Module):
    """A T5 from tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, decoded: torch.Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoded, use_cache=False).logits


def check_t5(implementation: str, **options: Any) -> Any:
    """Export a model, compare it at other lengths, and return the program."""
    theirs = t5(implementation).float()
    ours = replace_attention(copy.deepcopy(theirs))

    def arguments(batch: int, length: int, decoded: int) -> tuple[torch.Tensor, ...]:
        return *tokens(batch, length, 50), tokens(batch, decoded, 50)[0]

    program, run = exported(Translator(ours), arguments(2, 7, 6), **options)
    for shape in [(2, 7, 6), (1, 1, 1), (1, 2, 9), (3, 40, 30), (2, 5, 1)]:
        (got,) = run(*arguments(*shape))
        check(got, Translator(theirs)(*arguments(*shape)), 1e-5)
    return program


@pytest.mark.parametrize("implementation", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_t5_exports_with_any_length(implementation: str) -> None:
    check_t5(implementation)


def attentions(kind: str) -> tuple[Any, Any]:
    """An attention of theirs with dropout, and how to call it on 12 positions of which the last two are padding."""
    model = vits() if kind == "vits" else t5()
    theirs = model.encoder.layers[0].attention if kind == "vits" else model.decoder.block[0].layer[0].SelfAttention
    theirs.dropout = 0.25
    given = torch.randn(1, 12, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / 2
    mask = torch.zeros(1, 1, 12, 12, dtype=torch.float64)
    mask[..., 10:] = -1e30
    if kind == "t5":
        mask = mask + torch.full((12, 12), -1e30, dtype=torch.float64).triu(1)
    name = "attention_mask" if kind == "vits" else "mask"
    return theirs, lambda attention, x=given: attention(x, **{name: mask})[0]


@pytest.mark.parametrize("kind", ["vits", "t5"])
def test_training_drops_weights_as_theirs_does(kind: str) -> None:
    """The same mean and the same spread of every output: draws are ours, their distribution is theirs."""
    theirs, call = attentions(kind)
    ours = replace_attention(copy.deepcopy(theirs))
    torch.manual_seed(0)
    draws = 2000
    with torch.no_grad():
        check(call(ours.eval()), call(theirs.eval()))
        moments = []
        for attention in (theirs.train(), ours.train()):
            outs = torch.stack([call(attention) for _ in range(draws)])
            moments.append((outs.mean(0), outs.std(0)))
    (mean, spread), (our_mean, our_spread) = moments
    assert spread.min() > 0.01
    assert ((our_mean - mean).abs() < 6 * spread * (2 / draws) ** 0.5).all()
    assert (our_spread / spread - 1).abs().max() < 0.25
    assert abs((our_spread / spread).mean() - 1) < 0.02


@pytest.mark.parametrize("kind", ["vits", "t5"])
def test_gradients_of_training_with_dropout(kind: str) -> None:
    theirs, call = attentions(kind)
    ours = replace_attention(theirs).train()

    def loss(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)  # the same weights are dropped in every call
        state = dict(zip(dict(ours.named_parameters()), parameters, strict=True))
        out = call(lambda *given, **options: torch.func.functional_call(ours, state, given, options), x)
        return out.square().sum()

    x = torch.randn(1, 12, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)
    given = (x, *(parameter.detach().clone().requires_grad_() for parameter in ours.parameters()))
    assert torch.autograd.gradcheck(loss, given, fast_mode=True)

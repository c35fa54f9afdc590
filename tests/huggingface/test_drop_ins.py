"""The drop-ins without transformers: stand-ins with parameters and no forward; tests/peers has whole models."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from relskew_core import Span, t5_buckets
from relskew_core.huggingface import replace_attention

HEADS, D, E, LENGTH = 2, 4, 6, 7
Tensor = torch.Tensor


class VitsAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.window_size = HEADS, 0.25, 2
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, torch.nn.Linear(E, HEADS * D))
        self.out_proj = torch.nn.Linear(HEADS * D, E)
        self.emb_rel_k, self.emb_rel_v = (torch.nn.Parameter(torch.randn(1, 5, D)) for _ in range(2))


class T5Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.dropout, self.layer_idx, self.is_decoder, self.is_causal = HEADS, 0.25, None, True, True
        self.relative_attention_num_buckets, self.relative_attention_max_distance = 4, 5
        self.has_relative_attention_bias = True
        for name in "qkv":
            setattr(self, name, torch.nn.Linear(E, HEADS * D, bias=False))
        self.o = torch.nn.Linear(HEADS * D, E, bias=False)
        self.relative_attention_bias = torch.nn.Embedding(4, HEADS)


def expected(theirs: Any, x: Tensor) -> np.ndarray:
    """What an attention without dropout is, in plain loops."""
    vits = isinstance(theirs, VitsAttention)
    names = ("q_proj", "k_proj", "v_proj") if vits else ("q", "k", "v")
    q, k, v = (getattr(theirs, name)(x).unflatten(-1, (HEADS, D)).transpose(1, 2).numpy() for name in names)
    if vits:
        options: dict[str, Any] = {"rel_v": theirs.emb_rel_v[0].numpy()}
        out = oracles.relative_attention(q, k, v, theirs.emb_rel_k[0].numpy(), Span(2, 2, "zero"), **options).out
    else:
        span = Span(5, 0, "clip")
        buckets = list(t5_buckets(span, num_buckets=4, max_distance=5, bidirectional=False))
        bias = theirs.relative_attention_bias.weight.numpy()[buckets].T
        out = oracles.relative_attention(q, k, v, None, span, rel_bias=bias, scale=1.0, causal=True).out
    last = theirs.out_proj if vits else theirs.o
    return last(torch.from_numpy(out).transpose(1, 2).flatten(-2)).numpy()


@pytest.fixture(params=[VitsAttention, T5Attention])
def theirs(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param().double()


def test_a_model_is_replaced_once(theirs: Any) -> None:
    model = torch.nn.Sequential(theirs, torch.nn.ReLU())
    keys, kind, parts = list(model.state_dict()), type(theirs), list(model.modules())
    assert replace_attention(model) is model
    assert kind not in map(type, parts)
    assert replace_attention(model) is model
    assert list(model.modules()) == parts
    assert list(model.state_dict()) == keys


def test_an_attention_is_replaced_in_place(theirs: Any) -> None:
    kind = type(theirs)
    assert replace_attention(theirs) is theirs
    assert type(theirs) is not kind
    assert replace_attention(theirs) is theirs


@torch.no_grad()
def test_training_drops_a_share_of_the_weights(theirs: Any) -> None:
    """Nothing when it evaluates; in training other weights in each call, and on average nothing."""
    x = torch.randn(1, LENGTH, E, dtype=torch.float64)
    want = expected(theirs, x)
    ours: Any = replace_attention(copy.deepcopy(theirs).eval())
    assert oracles.relative_error(ours(x)[0].numpy(), want) < 1e-12
    ours.train()
    draws = torch.stack([ours(x)[0] for _ in range(1000)]).numpy()
    spread = draws.std(0)
    assert spread.max() > 0.05
    assert np.all(np.abs(draws.mean(0) - want) < 6 * spread / len(draws) ** 0.5 + 1e-12)
    ours.dropout = 0.0
    assert oracles.relative_error(ours(x)[0].numpy(), want) < 1e-12


class Model(torch.nn.Module):
    """A model that does not pass on whether weights are requested."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention, self.config = attention, SimpleNamespace(output_attentions=False)

    def forward(self, x: torch.Tensor, output_attentions: bool | None = None) -> Any:
        return self.attention(x)


def test_a_model_refuses_to_return_weights(theirs: Any) -> None:
    x = torch.zeros(1, LENGTH, E, dtype=torch.float64)
    ours = replace_attention(replace_attention(Model(theirs)))
    assert len(ours._forward_pre_hooks) == 1
    copied: Any = pickle.loads(pickle.dumps(ours))
    for model in (ours, copied):
        model(x)
        with pytest.raises(ValueError, match=r"^`output_attentions` must be False"):
            model(x, output_attentions=True)
        model.config.output_attentions = True
        model(x, output_attentions=False)
        with pytest.raises(ValueError, match=r"^`output_attentions` must be False"):
            model(x)


def test_refusals(theirs: Any) -> None:
    x, ours = torch.zeros(1, LENGTH, E, dtype=torch.float64), replace_attention(theirs)
    with pytest.raises(ValueError, match="`output_attentions` must be False"):
        ours(x, output_attentions=True)
    ours.dropout = 1.0
    with pytest.raises(ValueError, match=r"attention dropout must be less than 1, got 1\.0"):
        ours(x)

"""Whole models with their attention replaced: graphs of any length by torch's own exporter, and dropout as theirs."""

import copy
from typing import Any

import pytest
import torch
from peers.common import additive, check, randn
from peers.families import FAMILIES
from peers.family import tokens
from peers.test_families_numbers import both, tensors

from onnx_sessions import opened
from relskew_core.huggingface import replace_attention

Tensor = torch.Tensor


class Called(torch.nn.Module):
    """A model that is given ids, their mask and, if it has a decoder, the ids that were decoded."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, *decoded: Tensor) -> list[Tensor]:
        more = {"decoder_input_ids": decoded[0], "use_cache": False} if decoded else {}
        return tensors(self.model(input_ids=ids, attention_mask=mask, **more))


@pytest.mark.parametrize("name", ["VITS", "T5 sdpa", pytest.param("T5", marks=pytest.mark.slow)])
def test_torchs_exporter_alone_makes_graphs_of_any_length(name: str) -> None:
    theirs, ours = (Called(model.float()) for model in both(FAMILIES[name]))

    def arguments(batch: int, length: int, decoded: int) -> tuple[Tensor, ...]:
        more = [tokens(decoded)["input_ids"]] if name != "VITS" else []
        return tuple(x[:batch] for x in (*tokens(length).values(), *more))

    dynamic = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    shapes = (dynamic, dynamic, *[(dynamic,)] * (name != "VITS"))
    given = arguments(2, 7, 6)
    program = torch.onnx.export(ours.eval(), given, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    session = opened(program.model_proto)
    for sizes in [(2, 7, 6), (1, 1, 1), (1, 2, 9), (2, 4, 3), (2, 60, 30), (2, 5, 1)]:
        given = arguments(*sizes)
        feed = {value.name: x.numpy() for value, x in zip(session.get_inputs(), given, strict=True)}
        check(map(torch.from_numpy, session.run(None, feed)), theirs(*given), 1e-5)


@pytest.mark.parametrize("implementation", ["eager", None])
def test_vits_masks_keys_alone(implementation: str | None) -> None:
    """No mask has the size of all pairs. Without an implementation, transformers ignores its mask, and so does ours."""
    theirs: Any = FAMILIES["VITS"].make()
    theirs.model.config._attn_implementation = implementation
    ours, masks = replace_attention(copy.deepcopy(theirs)), list[Any]()
    ours.model.encoder.layers[0].attention.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    check(tensors(ours(**tokens(7))), tensors(theirs(**tokens(7))))
    assert [mask if mask is None else mask.shape for mask in masks] == [implementation and (2, 1, 1, 7)]


def attentions(kind: str) -> tuple[Any, Any, Any]:
    """An attention with dropout, the same replaced, and how to call them where two of 12 positions are padding."""
    whole: Any = FAMILIES[kind].make()
    theirs = (
        whole.model.encoder.layers[0].attention if kind == "VITS" else whole.decoder.block[0].layer[0].SelfAttention
    )
    theirs.dropout = 0.25
    seen = (torch.arange(12) < 10).expand(12, 12)
    mask = additive(seen if kind == "VITS" else seen.tril())[None, None]
    ours = replace_attention(copy.deepcopy(theirs))
    name = "attention_mask" if kind == "VITS" else "mask"
    return theirs, ours, lambda attention, x: attention(x, **{name: mask})[0]


@pytest.mark.parametrize("kind", ["VITS", "T5"])
def test_training_drops_weights_as_theirs_does(kind: str) -> None:
    *models, call = attentions(kind)
    torch.manual_seed(0)
    x, draws = randn(1, 12, 24, seed=3) / 2, 2000
    check(*(call(model.eval(), x) for model in reversed(models)))
    outs = (torch.stack([call(model.train(), x) for _ in range(draws)]) for model in models)
    (mean, spread), (our_mean, our_spread) = ((out.mean(0), out.std(0)) for out in outs)
    assert spread.min() > 0.01
    assert ((our_mean - mean).abs() < 6 * spread * (2 / draws) ** 0.5).all()
    assert (our_spread / spread - 1).abs().max() < 0.25
    assert abs((our_spread / spread).mean() - 1) < 0.02

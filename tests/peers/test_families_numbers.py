"""Every family with a drop-in against itself: outputs, gradients, names of weights, dropout."""

import copy
from typing import Any

import pytest
import torch
from peers.common import additive, check, randn
from peers.families import FAMILIES
from peers.family import Family, tokens

from oracles import relative_error
from relskew_core.huggingface import replace_attention

Tensor = torch.Tensor


def both(family: Family) -> tuple[Any, Any]:
    theirs = family.make()
    ours = copy.deepcopy(theirs)
    assert replace_attention(ours) is ours
    return theirs, ours


def drop_ins(model: Any) -> list[Any]:
    """Return the modules of which a class is one of the library's."""
    return [part for part in model.modules() if any("relskew" in kind.__module__ for kind in type(part).__mro__)]


def given(family: Family, length: int, model: Any) -> dict[str, Any]:
    """Make inputs anew, in the model's dtype: some models write into them."""
    dtype = next(model.parameters()).dtype

    def own(x: Any) -> Any:
        if isinstance(x, list):
            return list(map(own, x))
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else copy.deepcopy(x)

    return {name: own(x) for name, x in family.given(length).items()}


def tensors(out: Any) -> list[Tensor]:
    """What a model computes from what it attends to."""
    if isinstance(out, Tensor):
        return [out]
    found = out.values() if hasattr(out, "values") else out
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]


def present(x: Tensor, mask: Tensor | None) -> Tensor:
    """Leave out padding: some fill its logits, so that nothing flows back, where adding to them lets it flow."""
    return x * mask[..., None] if mask is not None and mask.shape == x.shape[:-1] else x


def outputs(model: Any, family: Family, length: int | None = None, *, whole: bool = False) -> list[Tensor]:
    """Return what a model computes, without padding, or the whole where both are equal there as well."""
    inputs = given(family, length or family.lengths[-2], model)
    out = model(**inputs)
    mask = getattr(out, "attention_mask", inputs.get("attention_mask"))  # Parakeet's mask is subsampled
    found = [present(x, None if whole and family.pads else mask) for x in tensors(out)]
    assert found
    return found


every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@every_family
def test_outputs(family: Family) -> None:
    theirs, ours = both(family)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert len(drop_ins(ours)) == family.count
    for length in family.lengths:
        got, want = (outputs(model, family, length, whole=True) for model in (ours, theirs))
        check(got, want, family.gate)


@every_family
def test_weights_are_refused(family: Family) -> None:
    ours = replace_attention(family.make())
    inputs = given(family, family.lengths[-1], ours)
    with pytest.raises(ValueError, match=r"^`output_attentions` must be False"):
        ours(**inputs, output_attentions=True)


@every_family
def test_quantised(family: Family) -> None:
    model = family.make().float()
    theirs = quantised(replace_attention(copy.deepcopy(model)) if family.takes_out else model)
    ours = replace_attention(quantised(model))
    assert len(drop_ins(ours)) == family.count
    inputs = given(family, family.lengths[-1], ours)
    if not family.pads:  # padded positions affect the steps of all others
        del inputs["attention_mask"]
    want, got = (tensors(part(**copy.deepcopy(inputs)))[0] for part in (theirs, ours))
    gate = max(5e-3, 200 * family.gate)  # numbers between two 8-bit steps may be rounded either way
    if relative_error(got.numpy(), want.numpy()) >= gate:  # such as where an ulp of the weights changes as much
        moved = tensors(quantised(rounded_otherwise(model))(**copy.deepcopy(inputs)))[0]
        gate = relative_error(moved.numpy(), want.numpy())
    check(got, want, gate)


def rounded_otherwise(model: Any) -> Any:
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    for parameter in moved.parameters():
        parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
    return moved


def quantised(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def gradients_of(model: Any, family: Family, length: int | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """Return what a model computes, and the gradients of the sum of its squares."""
    out = outputs(model, family, length)
    torch.stack([x.square().sum() for x in out]).sum().backward()
    return out, {name: parameter.grad for name, parameter in model.named_parameters()}


def check_gradients(got: dict[str, Any], want: dict[str, Any], gate: float, least: float) -> None:
    """Compare all but those of less than a share of the largest, which are only rounding, as those of key biases."""
    assert got.keys() == want.keys()
    largest = max(float(x.norm()) for x in want.values() if x is not None)
    for name, x in want.items():
        if x is not None and x.norm() > least * largest:
            check(got[name], x, gate)


@every_family
@torch.enable_grad()
def test_gradients(family: Family) -> None:
    (out, theirs), (_, ours) = (gradients_of(model.train(), family) for model in both(family))
    assert [name for name, x in ours.items() if x is None] == [name for name, x in theirs.items() if x is None]
    gate = max(10 * family.gate, 1e-7)
    rounding = torch.finfo(out[0].dtype).eps / gate  # smaller gradients may differ by the gate from rounding alone
    check_gradients(ours, theirs, gate, max(1e-9, family.gate / 100, rounding))


@every_family
def test_dropout(family: Family) -> None:
    """A share of nearly nothing is nothing, a share of a half is felt, and each call drops others."""
    ours = replace_attention(family.make()).train()
    outs = [outputs(ours, family, 7, whole=True)[0]]
    for share in (1e-12, 0.5, 0.5):
        for attention in drop_ins(ours):
            drops = getattr(attention, attention.drops, None)
            if isinstance(drops, torch.nn.Module):
                setattr(drops, "p" if isinstance(drops, torch.nn.Dropout) else "drop_prob", share)
            else:
                setattr(attention, attention.drops, share)
        outs.append(outputs(ours, family, 7, whole=True)[0])
    still, nearly, *drawn = outs
    check(nearly, still, 1e-4)
    for x, y in [(drawn[0], still), (drawn[1], still), (drawn[0], drawn[1])]:
        assert (x - y).norm() > 1e-3 * still.norm()


@pytest.mark.parametrize("name", ["timm's Swin", "timm's Swin, version 2"])
def test_timm_changes_the_windows_of_what_took_its_place(name: str) -> None:
    models = both(FAMILIES[name])
    for model in models:
        model.set_input_size(img_size=48, window_size=6)
    pictures = randn(2, 3, 48, 48)
    got, want = (model(pictures) for model in models)
    check(got, want, 1e-6)


def test_a_segment_that_funnel_has_not_is_named() -> None:
    _, ours = both(FAMILIES["Funnel"])
    inputs = given(FAMILIES["Funnel"], 6, ours)
    inputs["token_type_ids"][0, 1:3] = torch.tensor([3, -1])
    with pytest.raises(ValueError, match=r"`token_type_ids` must be 0, 1 or, for `<cls>`, 2, got \[-1, 3\]"):
        ours(**inputs)


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

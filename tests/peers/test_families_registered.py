"""Models that ask transformers' interface for their attention: the same numbers as a bias added by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peers.common import check, peer, randomised
from peers.family import padded_on_the_left, tokens

from relskew_core import Span
from relskew_core.huggingface import register_attention, replace_rotary

Tensor = torch.Tensor
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)


def model(name: str = "Llama", **options: Any) -> Any:
    config = peer(f"transformers.{name}Config")(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=16,
        vocab_size=50, **options,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return randomised(peer(f"transformers.{name}ForCausalLM")(config))


def by_hand(of_distance: Any) -> str:
    """Register attention whose masks, of transformers' own, have the bias added to them. Rows are positions' own."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        # The position of a query is that of the last key that it sees.
        own = torch.where(mask == 0, torch.arange(k.shape[2]), 0).amax(-1)
        distance = torch.arange(k.shape[2]) - own[..., None]
        logits = q @ k.mT * options["scaling"] + of_distance(distance) + mask
        return (logits.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    peer("transformers.AttentionInterface").register("by_hand", attention)
    masks = peer("transformers.masking_utils")
    masks.AttentionMaskInterface.register("by_hand", masks.eager_mask)
    return "by_hand"


def set_to(theirs: Any, name: str) -> Any:
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(name)
    assert ours.config._attn_implementation == name
    return ours


def alibi(distance: Tensor) -> Tensor:
    return -SLOPES[:, None, None] * distance.abs()


@pytest.mark.parametrize(("name", "options"), [("Llama", {}), ("Mistral", {"sliding_window": 5})])
@torch.no_grad()
def test_alibi(name: str, options: dict[str, Any]) -> None:
    theirs = model(name, **options)
    want, ours = set_to(theirs, by_hand(alibi)), set_to(theirs, register_attention("test_alibi"))
    for given in (tokens(1), tokens(12), padded_on_the_left(12), {"input_ids": tokens(12)["input_ids"]}):
        present = given.get("attention_mask", torch.ones(1))[..., None]
        check(ours(**given).logits * present, want(**given).logits * present)
    assert (theirs(**given).logits - want(**given).logits).norm() > 1e-2  # a missing bias would show


@pytest.mark.parametrize(("name", "options"), [("Llama", {}), ("Qwen3", {"head_dim": 8}), ("Gemma2", {"head_dim": 8})])
@torch.no_grad()
def test_instead_of_rotary_positions(name: str, options: dict[str, Any]) -> None:
    """As the model's own code computes it, whose angles are all zero, with the bias added by hand."""
    theirs = model(name, **options)
    want, ours = set_to(theirs, by_hand(alibi)), replace_rotary(copy.deepcopy(theirs))
    again: Any = replace_rotary(ours)
    assert again is ours
    for part in want.modules():
        if hasattr(part, "inv_freq"):
            part.inv_freq.zero_()
    whole = {"input_ids": tokens(12)["input_ids"]}
    if name != "Gemma2":  # its eager attention would need its softcap
        for given in (whole, padded_on_the_left(12)):
            present = given.get("attention_mask", torch.ones(1))[..., None]
            check(ours(**given).logits * present, want(**given).logits * present)
    once = ours(**whole).logits
    past = ours(input_ids=whole["input_ids"][:, :9], use_cache=True).past_key_values
    check(ours(input_ids=whole["input_ids"][:, 9:], past_key_values=past).logits, once[:, 9:])
    shifted = torch.nn.functional.pad(whole["input_ids"], (4, 0))
    seen = torch.nn.functional.pad(torch.ones_like(whole["input_ids"]), (4, 0))
    check(ours(input_ids=shifted, attention_mask=seen).logits[:, 4:], once)
    growing = ours.generate(**whole, max_new_tokens=6, do_sample=False)
    fixed = ours.generate(**whole, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(growing, fixed)


@torch.no_grad()
def test_rotary_positions_stay_in_a_model_without_the_interface() -> None:
    config = peer("transformers.FalconConfig")(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=50
    )
    theirs, whole = randomised(peer("transformers.FalconForCausalLM")(config)), tokens(12)
    before = theirs(**whole).logits
    with pytest.raises(ValueError, match=r"^`model` must use the attention interface of transformers.*, got Falcon"):
        replace_rotary(theirs)
    assert torch.equal(theirs(**whole).logits, before)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("learned", [False, True])
@torch.no_grad()
def test_generation(options: dict[str, Any], learned: bool) -> None:
    numbers = torch.randn(4, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def of_distance(distance: Tensor) -> Tensor:
        return numbers[:, (distance.clamp(-5, 0) + 5)].transpose(0, 1).squeeze(2) if learned else alibi(distance)

    theirs = model()
    name = register_attention("test_generation", rel_bias=numbers if learned else "alibi")
    options = {**options, "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    options |= {"eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    want, got = (
        set_to(theirs, each).generate(**padded_on_the_left(8), **options) for each in (by_hand(of_distance), name)
    )
    check(torch.stack(got.logits), torch.stack(want.logits), 1e-9)


def test_a_learned_bias_gets_gradients() -> None:
    numbers = torch.randn(4, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64).requires_grad_()
    hand = by_hand(lambda distance: numbers[:, distance.clamp(-5, 0) + 5].transpose(0, 1).squeeze(2))
    gradients = []
    for name in (hand, register_attention("test_learned", rel_bias=numbers)):
        set_to(model(), name).train()(tokens(12)["input_ids"]).logits.square().sum().backward()
        assert numbers.grad is not None
        gradients.append(numbers.grad)
        numbers.grad = None
    want, got = gradients
    assert want.abs().min() > 0
    check(got, want, 1e-5)  # norms are float32


def test_a_bias_of_each_layer() -> None:
    biases = [torch.randn(4, 9, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    name = register_attention("test_layers", rel_bias=lambda module: biases[module.layer_idx], span=Span(4, 4, "zero"))
    set_to(model(), name)(**tokens(12)).logits.square().sum().backward()
    for bias in biases:
        assert bias.grad is not None
        assert bias.grad[:, :5].abs().min() > 0
        assert not bias.grad[:, 5:].any()  # the future


def test_dropout_in_training() -> None:
    ours = set_to(model(attention_dropout=0.5), register_attention("test_dropout")).train()
    one, two = (ours(**tokens(12)).logits for _ in range(2))
    assert (one - two).norm() > 1e-2 * one.norm()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="`rel_bias` must be"):
        register_attention(rel_bias="rotary")
    with pytest.raises(TypeError, match=r"`rel_bias` must be 'alibi', a torch\.Tensor or callable, got"):
        register_attention(rel_bias=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`span` must be None with ALiBi"):
        register_attention(span=Span.causal(3))
    ours = set_to(model(), register_attention("test_refusals"))
    with pytest.raises(ValueError, match="`output_attentions` must be False"):
        ours(**tokens(3), output_attentions=True)
    with pytest.raises(ValueError, match="`s_aux` must be None, got"):
        ours(**tokens(3), s_aux=torch.zeros(4))

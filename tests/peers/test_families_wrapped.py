"""Drop-ins inside what people wrap around models: LoRA, checkpointing, half precision."""

import copy
import functools
from typing import Any

import pytest
import torch
from peers.common import check, peer
from peers.families import FAMILIES
from peers.test_families_numbers import both, outputs
from torch.utils.checkpoint import checkpoint

WRAPPED = [
    "T5 sdpa", "DeBERTa-v2", "MPNet", "SAM sdpa", "ViTDet", "SeamlessM4T", "SeamlessM4T-v2", "Donut's Swin",
    "MaskFormer's Swin", "CLAP's Swin", "Swin2SR", "SpeechT5", "Granite Speech", "LayoutLMv3", "UDOP", "ProphetNet",
    "Falcon", "Funnel", "Nemotron", "Gemma 3n", "Gemma 4", "Phi-4", "Data2VecVision", "timm's Swin",
    "torchvision's Swin",
]  # fmt: skip
AS_FLOAT32 = ("Gemma 4", "Inkling 2", "Inkling 2 Loop")
"""Families that do not compute in float64, and whose own classes are around linear layers."""
QUERIES = [
    "q", "query", "query_proj", "q_proj", "linear_q", "qkv", "to_q", "query_key_value", "q_head", "in_proj", "Wqkv",
    "w_qkv",
]  # fmt: skip


def every(*but: str, also: tuple[str, ...] = ()) -> list[Any]:
    """Return one family of each form, and all of them for ``make test-peers-all``."""
    often = (*WRAPPED, *also)
    return [pytest.param(x, marks=() if x in often else pytest.mark.slow) for x in FAMILIES if x not in but]


# Modules that read the weights of layers, or have none, do not support LoRA.
@pytest.mark.parametrize(
    "name", every(*(x for x in FAMILIES if FAMILIES[x].takes_out or "XLNet" in x or x == "SpeechBrain"))
)
@torch.enable_grad()
def test_lora(name: str) -> None:
    """Put on before or after, it gives the same outputs, and its own weights the same gradients."""
    family = FAMILIES[name]
    theirs, ours = both(family)
    queries = ["q_proj.linear"] if name in AS_FLOAT32 else QUERIES
    config = peer("peft.LoraConfig")(r=2, target_modules=queries, init_lora_weights=False)
    found = []
    for model in (theirs, ours):
        torch.manual_seed(0)
        dtype = next(model.parameters()).dtype
        adapted = peer("peft.inject_adapter_in_model")(config, model).to(dtype)
        with torch.no_grad():
            for key, weight in adapted.named_parameters():
                if "lora_" in key:
                    weight.copy_(torch.linspace(-1, 1, weight.numel()).reshape(weight.shape))
        out = outputs(adapted, family)
        torch.stack([x.square().sum() for x in out]).sum().backward()
        found.append((out, {key: x.grad for key, x in adapted.named_parameters() if "lora_" in key}))
    (want, expected), (got, gradients) = found
    assert expected
    assert expected.keys() == gradients.keys()
    check(got[0], want[0], max(100 * family.gate, 1e-9))
    largest = max(float(x.norm()) for x in expected.values() if x is not None)
    for key, gradient in expected.items():
        if gradient is not None and gradient.norm() > 1e-6 * largest:
            check(gradients[key], gradient, max(100 * family.gate, 1e-7))


@pytest.mark.parametrize("name", every())
@torch.enable_grad()
def test_checkpointing(name: str) -> None:
    family = FAMILIES[name]
    _, ours = both(family)
    found = []
    for kept in (False, True):
        model = copy.deepcopy(ours).train()
        if kept:
            turned_on = 0
            for part in model.modules():
                if type(part).__mro__[1].__name__ == "GradientCheckpointingLayer":
                    part.gradient_checkpointing = True
                    part._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
                    turned_on += 1
            if not turned_on:
                pytest.skip("its layers know no checkpointing")
        torch.stack([x.square().sum() for x in outputs(model, family)]).sum().backward()
        found.append({key: x.grad for key, x in model.named_parameters() if x.grad is not None})
    largest = max(float(x.norm()) for x in found[0].values())
    for key, gradient in found[0].items():
        if gradient.norm() > max(1e-9, family.gate / 100 * largest):
            check(found[1][key], gradient, max(100 * family.gate, 1e-12))


def is_no_worse(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> bool:
    wrong, mine = ((x.float() - exact).norm() / exact.norm() for x in (want, got))
    return bool(mine < 2 * wrong + 0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", every("XLNet two streams", "SpeechBrain"))  # in float32, like the originals
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    theirs, ours = (model.to(dtype) for model in both(family))
    for model in (theirs, ours):
        kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        for path, parameter in model.named_parameters():
            if any(part in path for part in kept):  # as transformers loads it
                parameter.data = parameter.data.float()
    want, got = (outputs(model, family)[0] for model in (theirs, ours))
    exact = outputs(theirs.float() if name in AS_FLOAT32 else theirs.double(), family)[0].float()
    if not exact.isfinite().all() or not want.isfinite().all():
        pytest.skip("its random weights overflow")
    assert is_no_worse(got, want, exact)


# The original of DeBERTa overflows.
@pytest.mark.parametrize("name", every("DeBERTa", also=("WavLM", "BEiT", "Swinv2", "Parakeet", "MPT")))
def test_autocast(name: str) -> None:
    """Masks have the dtype of the weights, which differs from that of the computation."""
    theirs, ours = (model.float() for model in both(FAMILIES[name]))
    exact = outputs(theirs, FAMILIES[name])[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert is_no_worse(*(outputs(model, FAMILIES[name])[0] for model in (ours, theirs)), exact)

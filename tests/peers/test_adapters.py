"""Adapters and quantized weights of the packages that people use for them, in the place of our projections."""

import copy
from typing import Any

import pytest
import torch
from peers.common import check, peer, randn, randomised
from torch import nn

from relskew_core import BlockSpec, Span, attention_block
from relskew_core.layers.torch import RelativeMultiheadAttention

SPEC = BlockSpec(32, 4, Span.causal(16), causal=True, num_kv_heads=2)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "out_proj"]


def model() -> Any:
    return randomised(nn.Sequential(nn.Linear(32, 32), RelativeMultiheadAttention(SPEC)))


@torch.enable_grad()
def test_lora_counts_before_it_is_merged_and_after() -> None:
    plain, x = model(), randn(2, 9, 32)
    config = peer("peft.LoraConfig")(r=4, target_modules=PROJECTIONS)
    adapted: Any = peer("peft.get_peft_model")(copy.deepcopy(plain), config)
    check(adapted(x), plain(x))  # a new adapter adds nothing
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    y = adapted(x)
    assert (y - plain(x)).norm() > 0.1 * y.norm()
    y.square().sum().backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)
    merged = adapted.merge_and_unload()
    check(merged(x), y)
    check(attention_block(merged[0](x), merged[1].state_dict(), SPEC), y)


@torch.enable_grad()
def test_lora_trains_tables_that_are_let() -> None:
    adapted: Any = peer("peft.get_peft_model")(model(), peer("peft.LoraConfig")(target_modules=["q_proj"]))
    (attention,) = (part for part in adapted.modules() if isinstance(part, RelativeMultiheadAttention))
    for table in attention.table_parameters():
        table.requires_grad_(True)
    adapted(randn(2, 9, 32)).square().sum().backward()
    assert attention.rel_k is not None
    assert attention.rel_k.grad is not None
    assert attention.rel_k.grad.any()


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_quantizes_the_projections(config: str) -> None:
    plain = model().float()
    quantized, x = copy.deepcopy(plain), randn(2, 9, 32).float()
    peer("torchao.quantization.quantize_")(quantized, peer(f"torchao.quantization.{config}")())
    assert all(type(quantized[1].get_submodule(name).weight).__module__.startswith("torchao") for name in PROJECTIONS)
    with torch.no_grad():
        y, want = quantized(x), plain(x)
        assert 0 < (y - want).norm() < 0.1 * want.norm()
        cached, _ = quantized[1](quantized[0](x), past=quantized[1].empty_cache(2, length=16))
    check(cached, y, 1e-5)

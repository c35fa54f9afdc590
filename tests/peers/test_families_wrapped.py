"""Drop-ins and our modules in what people wrap around models: LoRA, checkpointing, half precision, hooks, 8 bits."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peers.common import check, peer, randn, randomised
from peers.families import FAMILIES
from peers.inside_families_local import local
from peers.test_families_lives import calls_of, check_alike
from peers.test_families_numbers import both, check_gradients, drop_ins, given, gradients_of, outputs
from torch import nn
from torch.utils.checkpoint import checkpoint

from relskew_core import BlockSpec, Span, attention_block
from relskew_core.huggingface import replace_attention
from relskew_core.layers.torch import RelativeMultiheadAttention

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
        out, gradients = gradients_of(adapted, family)
        found.append((out, {key: x for key, x in gradients.items() if "lora_" in key}))
    (want, expected), (got, gradients) = found
    check(got[0], want[0], max(100 * family.gate, 1e-9))
    check_gradients(gradients, expected, max(100 * family.gate, 1e-7), 1e-6)


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
        found.append(gradients_of(model, family)[1])
    check_gradients(found[1], found[0], max(100 * family.gate, 1e-12), family.gate / 100)


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
        got, want = (outputs(model, FAMILIES[name])[0] for model in (ours, theirs))
    assert is_no_worse(got, want, exact)


def dispatched(model: Any) -> Any:
    return peer("accelerate.dispatch_model")(model, {"": "cpu"}, force_hooks=True)


def offloaded(model: Any) -> Any:
    return peer("accelerate.cpu_offload")(model, torch.device("cpu"), offload_buffers=True)


@pytest.mark.parametrize("name", every())
def test_dispatched_models(name: str) -> None:
    """Compare the original with what was replaced before the change, and after it."""
    theirs, call = FAMILIES[name].make(), calls_of(name)
    want = call(theirs)
    before = dispatched(replace_attention(copy.deepcopy(theirs)))
    for ours in (before, replace_attention(dispatched(copy.deepcopy(theirs)))):
        assert len(drop_ins(ours)) == FAMILIES[name].count
        assert all("_hf_hook" in vars(part) for part in ours.modules() if part._parameters)
        check_alike(name, call(ours), want)


@pytest.mark.parametrize("change", [dispatched, offloaded])
def test_windows_under_hooks(change: Callable[[Any], Any]) -> None:
    """With a second hook, and after all of them are removed."""
    hooks, family = peer("accelerate.hooks.ModelHook"), FAMILIES["Wav2Vec2-Conformer"]
    want = outputs(local(family), family)
    model = change(family.make())
    for part in model.modules():
        peer("accelerate.hooks.add_hook_to_module")(part, hooks(), append=True)
    ours = replace_attention(model, window=(3, 2))
    for _ in range(2):
        check(outputs(ours, family), want, family.gate)
        peer("accelerate.hooks.remove_hook_from_module")(ours, recurse=True)


@pytest.mark.parametrize("name", ["T5 sdpa", pytest.param("Parakeet", marks=pytest.mark.slow)])
def test_windows_of_compiled_models(name: str) -> None:
    """A model that has run compiled, by itself or inside another one, is compiled again."""
    family = FAMILIES[name]
    want = outputs(local(family), family)
    for in_place in (True, False):
        compiled = family.make()
        if in_place:
            compiled.compile(backend="eager")
        else:
            compiled = torch.compile(compiled, backend="eager")
        whole = outputs(compiled, family)
        replace_attention(compiled)
        check(outputs(compiled, family), whole, family.gate)
        replace_attention(compiled, window=(3, 2))
        check(outputs(compiled, family), want, family.gate)


TORCHVISION = ("torchvision.models.feature_extraction.create_feature_extractor", ["features.1", "features.3"])
TIMM = ("timm.models._features_fx.create_feature_extractor", ["layers.0", "layers.1"])


@pytest.mark.parametrize("version", ["", ", version 2"])
@pytest.mark.parametrize(("package", "extractor", "nodes"), [("torchvision", *TORCHVISION), ("timm", *TIMM)])
def test_features_by_torch_fx(package: str, extractor: str, nodes: list[str], version: str) -> None:
    family = FAMILIES[f"{package}'s Swin{version}"]
    found = []
    for model in both(family):
        features = peer(extractor)(model, nodes)(*given(family, 4, model).values())
        found.append(features.values() if isinstance(features, dict) else features)
        check(torch.fx.symbolic_trace(model)(*given(family, 4, model).values()), outputs(model, family)[0])
    want, got = found
    assert len(want) == 2
    check(got, want, family.gate)


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

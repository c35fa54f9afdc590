"""Drop-ins under accelerate's hooks, which dispatch a model, or keep its weights elsewhere between calls."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peers.common import check, peer
from peers.families import FAMILIES
from peers.inside_families_local import local
from peers.test_families_lives import calls_of, check_alike
from peers.test_families_numbers import both, drop_ins, given, outputs
from peers.test_families_wrapped import every

from relskew_core.huggingface import replace_attention


def dispatched(model: Any) -> Any:
    return peer("accelerate.dispatch_model")(model, {"": "cpu"}, force_hooks=True)


def offloaded(model: Any) -> Any:
    return peer("accelerate.cpu_offload")(model, torch.device("cpu"), offload_buffers=True)


def compare(name: str, change: Callable[[Any], Any]) -> None:
    """Compare the original with what was replaced before the change, and after it."""
    theirs, call = FAMILIES[name].make(), calls_of(name)
    want = call(theirs)
    for ours in (change(replace_attention(copy.deepcopy(theirs))), replace_attention(change(copy.deepcopy(theirs)))):
        assert len(drop_ins(ours)) == FAMILIES[name].count
        assert all("_hf_hook" in vars(part) for part in ours.modules() if part._parameters)
        check_alike(name, call(ours), want)


@pytest.mark.parametrize("name", every())
def test_dispatched_models(name: str) -> None:
    compare(name, dispatched)


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

"""Families that are made without memory, loaded, averaged, cast, copied and offloaded, before and after they change."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers.common import check, peer
from peers.families import FAMILIES
from peers.test_families_numbers import both, outputs
from torch import Tensor

import lives
from relskew_core.huggingface import replace_attention

BY_BUCKET = [
    "T5 sdpa", "MT5", "UMT5", "LongT5", "SwitchTransformers", "Pop2Piano", "Pix2Struct", "UDOP", "MPNet", "WavLM",
    "DeBERTa", "DeBERTa-v2", "DeBERTa-v3", "SEW-D", "LayoutLMv3", "ProphetNet",
]  # fmt: skip


def calls_of(name: str) -> Callable[[Any], list[Tensor]]:
    family = FAMILIES[name]
    return lambda model: outputs(model, family, family.lengths[-1], whole=True)


def check_alike(name: str, got: list[Tensor], want: list[Tensor]) -> None:
    check(got, want, max(FAMILIES[name].gate, 1e-9))


@pytest.mark.parametrize("step", [step.__name__ for step in lives.LASTING])
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in BY_BUCKET else pytest.mark.slow) for x in FAMILIES])
def test_a_step_changes_both_alike(name: str, step: str) -> None:
    theirs, ours = both(FAMILIES[name])
    call, buffers = calls_of(name), {key: x.clone() for key, x in theirs.named_buffers()}

    def after(model: Any) -> list[Tensor]:
        life = lives.Life(model, call, buffers)
        life()
        life.go(step)
        return life()

    before = call(theirs)
    try:
        want = after(theirs)
    except (RuntimeError, ImportError, pickle.PicklingError) as error:  # packages that cannot be imported whole
        pytest.skip(f"nor can the original: {error}")
    if step == "offloaded" and not torch.allclose(want[0], before[0]):
        pytest.skip("the original reads weights outside of their modules' calls")
    check_alike(name, after(ours), want)


@pytest.mark.parametrize("replaced_first", [False, True])
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("name", [*BY_BUCKET, "Swin sdpa", "Inkling"])  # whose tables are in modules inside
def test_offloading(name: str, where: str, replaced_first: bool, tmp_path: Path) -> None:
    theirs, call = FAMILIES[name].make(), calls_of(name)
    folder = () if where == "cpu" else (tmp_path,)

    def offloaded(model: Any) -> Any:
        options = {"execution_device": torch.device("cpu"), "offload_buffers": name not in BY_BUCKET}
        return peer(f"accelerate.{where}_offload")(model, *folder, **options)

    want = call(theirs)
    try:
        call(offloaded(copy.deepcopy(theirs)))
    except RuntimeError as error:
        pytest.skip(f"nor can the original: {error}")
    ours = offloaded(replace_attention(theirs)) if replaced_first else replace_attention(offloaded(theirs))
    for _ in range(2):
        check_alike(name, call(ours), want)


@pytest.mark.parametrize("name", BY_BUCKET)
def test_empty_weights(name: str, tmp_path: Path) -> None:
    theirs, call = FAMILIES[name].make(), calls_of(name)
    checkpoint = str(tmp_path / "pytorch_model.bin")
    torch.save(theirs.state_dict(), checkpoint)
    with peer("accelerate.init_empty_weights")():
        ours = FAMILIES[name].make()
    getattr(ours, "tie_weights", lambda: None)()
    replace_attention(ours)
    ours = peer("accelerate.load_checkpoint_and_dispatch")(ours, checkpoint, device_map={"": "cpu"})
    check_alike(name, call(ours), call(theirs))

"""Whole models of every family, under ``torch.compile`` and as graphs of ONNX."""

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from peers.common import check
from peers.families import FAMILIES
from peers.test_families_numbers import given, tensors

from onnx_sessions import opened
from relskew_core.export import torch_to_onnx
from relskew_core.huggingface import replace_attention

OFTEN = ("T5 sdpa", "MPNet", "SAM sdpa", "Nemotron", "torchvision's Swin")
"""One family of each form; compiling or exporting all of them takes minutes."""
SHORT = ("Wav2Vec2-BERT relative", "Wav2Vec2-Conformer")
"""Their graphs reach as far as the model's table of sinusoids, here 20 positions."""
BREAKS = ("VITS", "Nemotron", "Phi-4", "NeMo Transformer", "Inkling 2 Loop")
"""Models whose own code breaks the graph: it draws with NumPy, logs, looks for the entries of a mask, has its mask
replaced, or copies layers of a cache."""


def families() -> list[Any]:
    return [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in FAMILIES]


def replaced(name: str) -> Any:
    """Return a model with a single layer of each kind."""
    model = FAMILIES[name].make().float()
    for part in model.modules():
        if isinstance(part, torch.nn.ModuleList) and len({type(x) for x in part}) == 1:
            del part[1:]
    return replace_attention(model)


@pytest.mark.parametrize("name", families())
def test_compiled_families_give_the_same_numbers(name: str) -> None:
    """Traced in one graph, with the shapes of the operators' results: what the backends of torch start from."""
    torch.compiler.reset()
    model = replaced(name)
    inputs = given(FAMILIES[name], FAMILIES[name].lengths[-1], model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=name not in BREAKS)
    want, got = (tensors(call(**copy.deepcopy(inputs))) for call in (model, compiled))
    check(got, want, 1e-5)


def exportable(model: Any) -> Any:
    """Return a model without what torch's exporter cannot write, whether attention is replaced or not."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    for part in model.modules():
        if hasattr(part, "use_clipped_linears"):  # the exporter merges clamps whose bounds are buffers
            part.use_clipped_linears = False
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    return model


@pytest.mark.parametrize("name", families())
def test_exported_families_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Any batch, and any length where it is one of a sequence: of two axes of images, torch follows no division."""
    family, model = FAMILIES[name], exportable(replaced(name))
    short, long = (7, 15) if name in SHORT else (family.lengths[-2], family.lengths[-1])
    inputs = given(family, long, model)
    # Phi-4 makes its masks with NumPy, and Funnel its positions in lists of Python.
    images = any(x.ndim == 4 for x in inputs.values() if isinstance(x, torch.Tensor))
    fixed = name == "Phi-4" or name.startswith("Funnel") or images
    vary = dict.fromkeys(inputs, (0,)) if fixed else None
    torch_to_onnx(model, inputs, tmp_path / "model.onnx", vary=vary, tolerance=1e-3)
    session = opened(tmp_path / "model.onnx")
    for length, batch in [(long, 1), (short, 2)]:
        some = {key: of_batch(x, batch) for key, x in given(family, length, model).items()}
        if fixed and length != long:
            continue
        found = session.run(None, {key: x.numpy() for key, x in named(some).items()})
        check(torch.from_numpy(found[0]), tensors(model(**some))[0], 1e-3)


def of_batch(x: Any, batch: int) -> Any:
    """Return the first items of an input; memories, in a list, have the batch on their second axis."""
    return [part[:, :batch] for part in x] if isinstance(x, list) else x[:batch]


def named(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    lists = {key: x for key, x in inputs.items() if isinstance(x, list)}
    parts = {f"{key}_{index}": part for key, x in lists.items() for index, part in enumerate(x)}
    return {key: x for key, x in inputs.items() if key not in lists} | parts


@pytest.mark.slow
def test_the_operator(tmp_path: Path) -> None:
    """DeBERTa with a node for the library: the export compares it with the library and without."""
    model = replaced("DeBERTa-v2")
    inputs = given(FAMILIES["DeBERTa-v2"], 30, model)
    path = tmp_path / "model.onnx"
    torch_to_onnx(model, inputs, path, operator=True, tolerance=1e-3)
    assert [node.domain for node in onnx.load(path).graph.node].count("relskew") == 1

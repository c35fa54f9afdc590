"""The peers are installed by ``make test-peers`` only; without them nothing here is collected."""

import importlib
import importlib.util
from collections.abc import Iterator

import pytest
import torch

collect_ignore = ["keras_backend.py", "tensor2tensor_calls.py"]  # programs that run by themselves
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py", "inside_*.py"]

if importlib.util.find_spec("torchvision"):
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # a CUDA wheel with a CPU build of torch requires operators that no model here calls
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other people's warnings are theirs."""
    for item in items:
        if "peers" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """Those that need gradients are under `torch.enable_grad`."""
    with torch.no_grad():
        yield

"""The peers are installed by ``make test-peers`` only; without them nothing here is collected."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from benchmarks.families import let_torchvision_in

collect_ignore = ["keras_backend.py", "tensor2tensor_calls.py"]  # programs that run by themselves
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py", "inside_*.py"]

let_torchvision_in()


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


@pytest.fixture(params=[1, 2, 5, 17, 40])
def length(request: pytest.FixtureRequest) -> int:
    """Of the sequences that an attention is compared with."""
    return int(request.param)

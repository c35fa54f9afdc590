"""The peers are installed by ``make test-peers`` only; without them nothing here is collected."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore = ["keras_backend.py"]  # a program for each backend
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other people's warnings are theirs."""
    for item in items:
        if "peers" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))

"""What every test may ask for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from libraries import LIBRARIES, Library

if importlib.util.find_spec("jax") is not None:
    import jax

    jax.config.update("jax_enable_x64", True)  # JAX has no float64 unless asked before its first array


@pytest.fixture(
    params=[
        pytest.param(library, id=library.name, marks=[pytest.mark.gpu] if library.gpu else []) for library in LIBRARIES
    ]
)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Every row of the matrix of array libraries in turn."""
    row: Library = request.param
    reason = row.missing()
    if reason is not None:
        pytest.skip(reason)
    with row.setting():
        yield row

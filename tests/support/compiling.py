"""How the tests have JAX compile what runs once, on a few numbers."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    """Compile in a third of the time. Every test of a module that imports this."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)

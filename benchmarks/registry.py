"""The table of contenders: what each is called, what it needs, and where it cannot run."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import contenders
from benchmarks.inputs import Inputs, Shape
from relskew_core import backends

MEMORY_LIMIT = 8 * 2**30
"""What would need more than this many bytes is skipped with that reason."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A row of the tables."""

    name: str
    label: str
    library: str
    function: Callable[[Inputs], Any]
    relative: bool = True  # computes relative attention, so that its result is checked against float64
    floats: Callable[[Shape], float] = lambda _: 0.0  # how many numbers it holds at once, about, where they are many
    missing: Callable[[], str | None] = lambda: None  # why it cannot run here at all
    compiled: bool = False  # for one shape at a time, so that warming up needs the same shape

    def needs(self, shape: Shape, *, backward: bool = False) -> float:
        """Estimate the bytes that a call allocates."""
        return 4 * self.floats(shape) * (1.6 if backward else 1)

    def excuse(self, shape: Shape, *, backward: bool = False) -> str | None:
        """Say why the contender does not run on a shape, or ``None`` if it does."""
        reason = self.missing()
        if reason is None and self.needs(shape, backward=backward) > MEMORY_LIMIT:
            return f"needs about {self.needs(shape, backward=backward) / 2**30:.0f} GiB"
        return reason


def _logits(buffers: float) -> Callable[[Shape], float]:
    return lambda shape: buffers * shape.heads * shape.length**2


def _no_native(library: str) -> Callable[[], str | None]:
    def reason() -> str | None:
        return None if "native" in backends.available().get(library, []) else f"no native path for {library} here"

    return reason


def _no_compiler() -> str | None:
    return None if shutil.which("g++") or shutil.which("clang++") else "torch.compile needs a C++ compiler"


def _no_x_transformers() -> str | None:
    return None if importlib.util.find_spec("x_transformers") else "x-transformers is not installed"


def _gathered(shape: Shape) -> float:
    return shape.length**2 * (shape.dim + 3 * shape.heads)


def _table() -> dict[str, Contender]:
    c = contenders
    rows = (
        Contender("plain", "plain SDPA, no relative positions", "torch", c.plain, relative=False),
        Contender("shaw", "gather (Shaw)", "torch", c.shaw, floats=_gathered),
        Contender("huang", "pad–reshape–slice (Huang)", "torch", c.huang, floats=_logits(4)),
        Contender("huang-local", "local blocks (Huang)", "torch", c.huang_local),
        Contender("sdpa-bias", "SDPA with a skewed bias", "torch", c.sdpa_bias, floats=_logits(3)),
        Contender("sdpa-local", "SDPA with a local bias", "torch", c.sdpa_local, floats=_logits(3)),
        Contender("toeplitz-bias", "SDPA with a gathered bias", "torch", c.toeplitz_bias, floats=_logits(2)),
        Contender(
            "flex", "compiled FlexAttention", "torch", c.flex, floats=_logits(2), missing=_no_compiler, compiled=True
        ),
        Contender(
            "x-transformers",
            "x-transformers",
            "torch",
            c.x_transformers,
            floats=_logits(3),
            missing=_no_x_transformers,
        ),
        Contender("torch-portable", "relskew on torch, portable", "torch", c.ours_portable),
        Contender("torch", "relskew on torch", "torch", c.ours, missing=_no_native("torch")),
        Contender("numpy-portable", "relskew on NumPy, portable", "numpy", c.ours_portable),
        Contender("numpy", "relskew on NumPy", "numpy", c.ours, missing=_no_native("numpy")),
        Contender("products", "NumPy's three products, causal", "numpy", c.products, relative=False),
        Contender(
            "dense-products",
            "NumPy's three products, dense",
            "numpy",
            c.dense_products,
            relative=False,
            floats=_logits(2),
        ),
    )
    return {row.name: row for row in rows}


CONTENDERS = _table()


def prepare(contender: Contender, inputs: Inputs, *, backward: bool = False) -> Callable[[], Any]:
    """Return the call that is measured, on NumPy's inputs: the output, or with ``backward`` the gradients."""
    if not backward:
        return partial(contender.function, inputs if contender.library == "numpy" else inputs.to_torch())
    if contender.library == "numpy":
        return partial(contenders.numpy_gradients, contender.function, inputs)
    return partial(contenders.torch_gradients, contender.function, inputs.to_torch(gradients=True))

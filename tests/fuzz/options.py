"""Random calls with every option at once, and their gradients: plain loops, and autograd of the dense formula."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

import dense
import strategies
from fuzz.engine import Target, same, told
from libraries import LIBRARIES, Library
from relskew_core import attention_weights, relative_attention, relative_attention_vjp
from strategies import Call

ROWS = {row.name: row for row in LIBRARIES if row.name in ("numpy", "array-api-strict, strictest flags", "torch, CPU")}
TOLERANCE = 1e-9
UNWEIGHED = ("v", "rel_v", "dropout", "seed")


@dataclass(frozen=True)
class Example:
    """A call, what comes back to it, and how it is made."""

    call: Call
    d_out: NDArray[np.float64]
    row: str
    impl: str

    def __str__(self) -> str:
        head = f"# {self.row}\n"
        arguments = {"d_out": self.d_out, **self.call.arrays, **self.call.options, "impl": self.impl}
        return head + told("relative_attention_vjp", arguments)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Draw a call and what comes back to it."""
    call = draw(strategies.rich_calls())
    numbers = np.random.default_rng(draw(strategies.seeds))
    shape = (*call.arrays["q"].shape[:-1], call.arrays["v"].shape[-1])
    row, impl = draw(st.sampled_from(sorted(ROWS))), draw(st.sampled_from(["auto", "portable"]))
    return Example(call, numbers.standard_normal(shape), row, impl)


def check(example: Example) -> None:
    """Hold output, log-sum-exp, weights and every gradient against the formula."""
    library: Library = ROWS[example.row]
    arrays, options = example.call.arrays, {**example.call.options, "impl": example.impl}
    given = {name: dense.each(library.asarray, x) for name, x in arrays.items()}
    expected = example.call.oracle()
    size = max(1.0, float(np.max(np.abs(expected.lse), initial=0.0, where=np.isfinite(expected.lse))))
    with library.setting():
        out, lse = relative_attention(**given, **options, return_lse=True)
        d_out = library.asarray(example.d_out)
        found = relative_attention_vjp(d_out, **given, **options)
        looked = {name: x for name, x in {**given, **example.call.options}.items() if name not in UNWEIGHED}
        weights = attention_weights(**looked)
    same("lse", library.to_numpy(lse), expected.lse, TOLERANCE * size)
    same("out", library.to_numpy(out), expected.out, TOLERANCE * size)
    if not example.call.options.get("dropout") and "rel_v" not in arrays:
        values = (
            np.repeat(arrays["v"], arrays["q"].shape[-3] // arrays["v"].shape[-3], -3) if out.ndim > 2 else arrays["v"]
        )
        same("weights @ v", library.to_numpy(weights) @ values, expected.out, TOLERANCE * size)
    for name, gradient in gradients(example).items():
        same(name, library.to_numpy(getattr(found, name)), gradient, TOLERANCE * size)


def gradients(example: Example) -> dict[str, Any]:
    """Return what autograd makes of the dense formula."""
    options = {name: x for name, x in example.call.options.items() if name != "chunk_size"}
    with torch.enable_grad():
        return dict(dense.vjp(example.d_out, example.call.arrays, options))


TARGET = Target("options", 25, examples(), check)

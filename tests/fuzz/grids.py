"""Random grids of one to three axes, with every option, and their gradients: the formula with all logits at once."""

import math
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from core.test_grid import formula
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracles
import strategies
from fuzz.engine import Target, same, told
from libraries import LIBRARIES
from relskew_core import Span, relative_attention_nd
from relskew_core._functions import prepared
from relskew_core._kernel import grids as inside

ROWS = {row.name: row for row in LIBRARIES if row.name in ("numpy", "torch, CPU")}
TOLERANCES = {"float64": 1e-11, "float32": 2e-5}
Arrays = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Example:
    """A call, its arrays in float64 by name (those of tables by axis), and how it is made."""

    arrays: Arrays
    options: dict[str, Any]
    spans: list[Span]  # those that the call implies included
    d_out: NDArray[np.float64]
    row: str
    dtype: str
    small: int  # up to how many numbers a bias is written out for every query and key

    def __str__(self) -> str:
        head = f"# {self.row}, {self.dtype}, inside.SMALL = {self.small}\n"
        return head + told("relative_attention_nd", {"d_out": self.d_out, **self.arrays, **self.options})

    def given(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call, made of its arrays in any library."""
        found = {name: x for name, x in arrays.items() if not name.startswith("table")}
        tables = [arrays.get(f"table{axis}") for axis in range(len(self.options["q_grid"]))]
        return found | self.options | ({"tables": tables} if any(x is not None for x in tables) else {})

    def formula(self, arrays: dict[str, torch.Tensor]) -> oracles.Attention:
        """Attend in float64, with what positions add for every query and key at once."""
        by_head = {name: arrays[name].reshape(-1) for name in ("scale", "rel_scale") if name in arrays}
        given = {name: x for name, x in self.given(arrays | by_head).items() if x is not None and name != "chunk_size"}
        return formula(**given | {"spans": self.spans})


def places(options: dict[str, Any], axis: int) -> NDArray[np.int64]:
    """Return the relative positions along an axis, (queries, keys)."""
    steps = [(options[f"{which}_step"] or (1,) * 9)[axis] for which in "qk"]
    queries, keys = (np.arange(options[f"{which}_grid"][axis]) * step for which, step in zip("qk", steps, strict=True))
    return keys - (queries[:, None] + (options["offset"] or (0,) * 9)[axis])


def seen(options: dict[str, Any], axis: int) -> NDArray[np.bool_]:
    """Return which keys are seen along an axis, (queries, keys)."""
    r = places(options, axis)
    if options["neighborhood"] is not None:  # Hassani et al. 2023, equation 2
        size, m = options["neighborhood"][axis], options["k_grid"][axis]
        queries = -r[:, :1]
        first = np.clip(queries - size // 2, 0, m - size)
        found: NDArray[np.bool_] = (np.arange(m) >= first) & (np.arange(m) < first + size)
        return found
    left, right = (None, None) if options["window"] is None else options["window"][axis]
    return (r >= (-math.inf if left is None else -left)) & (r <= (math.inf if right is None else right))


@st.composite
def layouts(draw: st.DrawFn, *, biased: bool) -> dict[str, Any]:
    """Draw grids, where they lie, and who sees whom."""
    count = draw(st.sampled_from([1, 2, 2, 2, 3]))
    side = st.integers(1, 5 if count < 3 else 3)
    sides = [tuple(draw(side) for _ in range(count)) for _ in range(2)]
    if draw(st.booleans()):
        sides[1] = sides[0]
    surroundings = draw(st.sampled_from([None, None, "window", "neighborhood"]))
    steps: list[Any] = [None, None]
    if not biased and surroundings != "neighborhood":
        steps = [draw(st.none() | st.tuples(*[st.integers(1, 3)] * count)) for _ in range(2)]
    options: dict[str, Any] = {"q_grid": sides[0], "k_grid": sides[1], "q_step": steps[0], "k_step": steps[1]}
    options["offset"] = draw(st.tuples(*[st.integers(-4, 4)] * count))
    if all(n * a == m * b for n, m, a, b in zip(*sides, *(x or (1,) * count for x in steps), strict=True)):
        options["offset"] = draw(st.none() | st.just(options["offset"]))
    pair = st.tuples(*[st.none() | st.integers(0, 5)] * 2)
    options["window"] = draw(st.tuples(*[pair] * count)) if surroundings == "window" else None
    sizes = st.tuples(*[st.integers(1, m) for m in sides[1]])
    options["neighborhood"] = draw(sizes) if surroundings == "neighborhood" else None
    return options


@st.composite
def examples(draw: st.DrawFn) -> Example:
    kinds = draw(st.sets(st.sampled_from(["tables", "rel_bias", "prefix", "mask"])))
    options = draw(layouts(biased="rel_bias" in kinds))
    rng = np.random.default_rng(draw(strategies.seeds))
    count, prefix = len(options["q_grid"]), draw(st.tuples(*[st.integers(0, 2)] * 2)) if "prefix" in kinds else (0, 0)
    n, m = (prefix[which] + math.prod(options[f"{name}_grid"]) for which, name in enumerate("qk"))
    kv_heads, width, out = draw(st.sampled_from([1, 2])), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    lead = draw(st.sampled_from([(), (2,), (1,), (2, 1)]))
    none = heads == 1 and not lead and draw(st.booleans())  # without heads
    normal = rng.standard_normal
    sizes = {"q": (heads, n, width), "k": (kv_heads, m, width), "v": (kv_heads, m, out)}
    arrays = {name: normal(size[1:] if none else (*lead, *size)) for name, size in sizes.items()}
    spans = []
    for axis in range(count):
        whole = draw(st.booleans()) or options["q_step"] or options["k_step"]  # tables also have rows between steps
        r = places(options, axis) if whole else places(options, axis)[seen(options, axis)]
        spans.append(draw(strategies.spans([int(x) for x in r.flat])))
    rows = [span.left + span.right + 1 for span in spans]
    if "tables" in kinds:
        for axis in draw(st.sets(st.integers(0, count - 1), min_size=1)) if draw(st.booleans()) else range(count):
            by_head = () if none or draw(st.booleans()) else (heads,)
            arrays[f"table{axis}"] = normal((*by_head, rows[axis], width))
    if "rel_bias" in kinds:
        arrays["rel_bias"] = normal((*(() if none or draw(st.booleans()) else (heads,)), *rows))
    if "prefix" in kinds and draw(st.booleans()):
        arrays["prefix_bias"] = normal((*(() if none or draw(st.booleans()) else (heads,)), 3))
    if "mask" in kinds:
        full = (n, m) if none else (*lead, heads, n, m)
        mask = draw(strategies.masks(full, rng))
        if mask is not None:
            arrays["mask"] = mask
    needed = kinds & {"tables", "rel_bias"}
    implied = [span.left == span.right and span.beyond == "error" and draw(st.booleans()) for span in spans]
    given = [None if left_out else span for left_out, span in zip(implied, spans, strict=True)]
    options |= {"prefix": prefix, "spans": given if needed else None}
    for name in ("scale", "rel_scale"):
        options[name] = draw(st.none() | st.floats(-2, 2))
        if draw(st.integers(0, 4)) == 0:
            options[name] = None
            arrays[name] = normal(() if none or draw(st.booleans()) else (heads,))
    options = {name: x for name, x in options.items() if name not in arrays}
    options["chunk_size"] = draw(st.none() | st.integers(1, 9))
    row, dtype = draw(st.sampled_from(sorted(ROWS))), draw(st.sampled_from(sorted(TOLERANCES)))
    d_out = normal((*arrays["q"].shape[:-1], out))
    return Example(arrays, options, spans, d_out, row, dtype, draw(st.sampled_from([0, inside.SMALL])))


def check(example: Example) -> None:
    row, differentiated = ROWS[example.row], example.row != "numpy"
    exact = {name: torch.from_numpy(np.asarray(x).copy()) for name, x in example.arrays.items()}
    exact = {name: x.requires_grad_(x.is_floating_point()) for name, x in exact.items()}
    expected, lse = example.formula(exact)
    finite = lse.detach().numpy()
    size = max(1.0, float(np.max(np.abs(finite), initial=0.0, where=np.isfinite(finite))))
    tolerance = TOLERANCES[example.dtype] * size
    own = {name: row.asarray(x, None if x.dtype == np.bool_ else example.dtype) for name, x in example.arrays.items()}
    if differentiated:
        own = {name: x.requires_grad_(x.is_floating_point()) for name, x in own.items()}
    with mock.patch.object(inside, "SMALL", example.small), mock.patch.object(prepared, "_checked", {}):
        found: Any = relative_attention_nd(**example.given(own), return_lse=True)
    if differentiated:
        (found[0] * row.asarray(example.d_out, example.dtype)).sum().backward()
        found = [x.detach() for x in found]
    same("lse", row.to_numpy(found[1]), finite, tolerance)
    same("out", row.to_numpy(found[0]), expected.detach().numpy(), tolerance)
    if not differentiated:
        return
    (expected * torch.from_numpy(example.d_out)).sum().backward()
    for name, x in exact.items():
        if x.grad is not None:
            got = np.zeros(x.shape) if own[name].grad is None else row.to_numpy(own[name].grad)
            where = True if name != "mask" else np.isfinite(example.arrays[name])
            same(f"the gradient of {name}", got, x.grad.numpy(), 10 * tolerance, where)


TARGET = Target("grids", 25, examples(), check)

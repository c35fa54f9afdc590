"""Random gradients, first and second ones and those of parts of the keys, against autograd of the dense formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import dense
import oracles
import strategies
from fuzz.engine import Target, largest_logit, same, told
from libraries import LIBRARIES, Library
from relskew_core import relative_attention, relative_attention_vjp
from strategies import Call

Arrays = Mapping[str, Any]
ROWS = {row.name: row for row in LIBRARIES if row.name in ("numpy", "array-api-strict, strictest flags", "torch, CPU")}
GATES = {"float64": 1e-10, "float32": 5e-5}


@dataclass(frozen=True)
class Example:
    """A call, the gradients that come back to it, and how its own are asked for."""

    call: Call
    d_out: NDArray[np.float64]
    d_lse: NDArray[np.float64] | None
    row: str
    impl: str
    how: str  # one of HOW
    given: tuple[str, ...]  # which results of the forward pass are passed
    cut: int  # where the keys are split into two parts
    dtype: str

    def __str__(self) -> str:
        head = f"# {self.row}, {self.dtype}; {self.how}; given: {self.given}; cut at {self.cut}\n"
        arguments = {"d_out": self.d_out, **self.call.arrays, **self.call.options, "d_lse": self.d_lse}
        return head + told("relative_attention_vjp", {**arguments, "impl": self.impl})

    def of(self, dtype: str) -> Example:
        arrays = {name: x if x.dtype == np.bool_ else x.astype(dtype) for name, x in self.call.arrays.items()}
        d_lse = None if self.d_lse is None else self.d_lse.astype(dtype)
        return replace(self, call=self.call.but(**arrays), d_out=self.d_out.astype(dtype), d_lse=d_lse)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    call = draw(strategies.calls())
    numbers = np.random.default_rng(draw(strategies.seeds))
    factor = draw(st.sampled_from([1.0, 1.0, 10.0]))
    call = call.but(**{name: factor * call.arrays[name] for name in ("q", "rel_q") if name in call.arrays})
    queries = call.arrays["q"].shape[:-1]
    row = draw(st.sampled_from(sorted(ROWS)))
    step = call.options["block_size"] or 1  # a part begins with the first key of a block
    how = draw(st.sampled_from(["vjp", "parts", "autograd", "second"] if row.startswith("torch") else ["vjp", "parts"]))
    return Example(call, numbers.standard_normal((*queries, call.arrays["v"].shape[-1])),
                   numbers.standard_normal(queries) if draw(st.booleans()) else None, row,
                   draw(st.sampled_from(["auto", "portable"])), how,
                   draw(st.sampled_from([(), ("out",), ("lse",), ("out", "lse")])),
                   min(call.m, step * draw(st.integers(0, call.m // step))),
                   "float64" if how == "second" else draw(st.sampled_from(sorted(GATES))))  # fmt: skip


def check(example: Example) -> None:
    example = example.of(example.dtype)
    call = example.call
    plain = {name: option for name, option in call.options.items() if name != "chunk_size"}
    options = {**call.options, "impl": example.impl}
    expected = differentiated(partial(oracles.attention, **plain), example.of("float64"))
    with np.errstate(all="ignore"):
        actual = HOW[example.how](example, ROWS[example.row], options)
    peak = max(1.0, largest_logit(call.arrays, call.options) / 16)
    size = max(1.0, *(float(np.max(np.abs(x), initial=0.0)) for x in expected.values()))
    for name, gradient in expected.items():
        same(f"the gradient of {name}", actual[name], gradient, GATES[example.dtype] * peak * size)


def autograd(example: Example, row: Library, options: Arrays) -> Arrays:
    """Let torch differentiate the library, once or twice."""
    return differentiated(partial(relative_attention, **options, return_lse=True), example)


def differentiated(function: Callable[..., Any], example: Example) -> Arrays:
    second = example.how == "second"
    return dense.differentiated(function, example.call.arrays, example.d_out, example.d_lse, second=second)[2]


def vjp(example: Example, row: Library, options: Arrays) -> Arrays:
    """Ask ``relative_attention_vjp``, with the results of the forward call or without."""
    arrays = {name: row.asarray(x) for name, x in example.call.arrays.items()}
    with row.setting():
        out, lse = relative_attention(**arrays, **options, return_lse=True)
        results = {name: x for name, x in (("out", out), ("lse", lse)) if name in example.given}
        return pulled_back(example, row, arrays, results, options)


def parts(example: Example, row: Library, options: Arrays) -> Arrays:
    """Ask for the share of each of two parts of the keys, with the results of the whole, as ring attention does."""
    arrays, cut, m = example.call.arrays, example.cut, example.call.m
    found = []
    with row.setting():
        given = {name: row.asarray(x) for name, x in arrays.items()}
        results = dict(zip(("out", "lse"), relative_attention(**given, **options, return_lse=True), strict=True))
        for first, end in ((0, cut), (cut, m)):
            own = {name: x[..., first:end, :] if name in ("k", "v") else x for name, x in arrays.items()}
            if "mask" in own and own["mask"].shape[-1] == m:
                own["mask"] = own["mask"][..., first:end]
            part = {name: row.asarray(x) for name, x in own.items()}
            shifted = {**options, "offset": example.call.offset - first}
            found.append(pulled_back(example, row, part, results, shifted))
    whole = {}
    for name, x in found[0].items():
        by_key = {"k": -2, "v": -2, "mask": -1 if arrays.get("mask", np.zeros(1)).shape[-1] == m else None}.get(name)
        other = found[1][name]
        whole[name] = x + other if by_key is None else np.concatenate([x, other], axis=by_key)
    return whole


def pulled_back(example: Example, row: Library, arrays: Arrays, results: Arrays, options: Arrays) -> Arrays:
    back = {"d_out": example.d_out} | ({} if example.d_lse is None else {"d_lse": example.d_lse})
    cotangents = {name: row.asarray(x) for name, x in back.items()}
    gradients = relative_attention_vjp(**cotangents, **arrays, **results, **options)
    return {name: row.to_numpy(x) for name, x in gradients._asdict().items() if x is not None}


HOW = {"vjp": vjp, "parts": parts, "autograd": autograd, "second": autograd}
TARGET = Target("gradients", 50, examples(), check)

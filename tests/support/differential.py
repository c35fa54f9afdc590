"""Random calls of the compiled kernels beside the formula in float64: for machines that have NumPy alone.

``python tests/support/differential.py 200 --seed 1`` tries two hundred; ``.ci/emulated`` does so on other processors.
``--each 20`` tries every kind of a short call with twenty sets of queries, keys and values, which takes little longer,
and ``--bfloat16`` tries that dtype, in torch: some processors have products of it that serve nothing else.
Outputs and gradients are held to the portable code in float64, and the outputs of short calls to ``by_pairs`` too.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import by_pairs
from relskew_core import Span, relative_attention, relative_attention_vjp
from relskew_core.backends import _compiled
from relskew_core.backends._compiled.availability import availability

Numbers = NDArray[Any]
TOLERANCES = {
    "float64": (1e-13, 1e-12, 1e-12), "float32": (2e-5, 1e-4, 1e-4),
    "float16": (2e-3, 3e-3, 2e-2), "bfloat16": (1e-2, 2e-2, 2e-1),
}  # fmt: skip
"""Of results, of gradients by item, and of those that add up what all items and queries have, with its errors.

They are shares of an array's largest number. Gradients take outputs as they were rounded, unless there are sinks, with
which outputs stay in float32.
"""


BY_ITEM = ("q", "k", "v", "rel_q")
"""The arrays that have the axis of the batch."""


class Call(NamedTuple):
    """A call, or several with the same tables, masks, labels and options, one after the other along the batch."""

    arrays: dict[str, Numbers]
    labels: dict[str, tuple[Numbers, Numbers]]
    options: dict[str, Any]
    calls: int = 1
    bfloat16: bool = False
    """Whether the numbers, which are stored in float32, are those of this dtype, and torch attends to them."""

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {x.shape} {x.dtype}" for name, x in self.arrays.items())
        return f"{shapes}, {', '.join([*self.labels, str(self.options)])}"

    def given(self, dtype: str | None = None) -> dict[str, Any]:
        arrays = {name: x if x.dtype == bool else x.astype(dtype or x.dtype) for name, x in self.arrays.items()}
        given: dict[str, Any] = {**arrays, **self.labels}
        if self.bfloat16 and dtype is None:
            given = {name: as_torch(x) for name, x in given.items()}
        return {**given, **self.options}

    def each(self) -> Iterator["Call"]:
        parts = {name: np.split(x, self.calls) for name, x in self.arrays.items() if name in BY_ITEM}
        for number in range(self.calls):
            yield self._replace(arrays=self.arrays | {name: part[number] for name, part in parts.items()}, calls=1)


def as_torch(x: Any) -> Any:
    import torch  # which other processors may not have

    if isinstance(x, tuple):
        return tuple(map(as_torch, x))
    made = torch.from_numpy(x)
    return made.bfloat16() if made.dtype == torch.float32 else made


def as_numpy(x: Any) -> Any:
    return x.float().numpy() if hasattr(x, "numpy") else x


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, *, bfloat16: bool) -> Numbers:
    x = rng.standard_normal(shape).astype(dtype)
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if bfloat16 else x


def drawn(rng: np.random.Generator, each: int = 1, *, bfloat16: bool = False) -> Call:
    """Draw a call that the kernels serve, or ``each``; a sixth is single, and longer than the blocks these work on."""

    def maybe(share: float) -> bool:
        return bool(rng.random() < share)

    dtype = str(rng.choice(["float32"] if bfloat16 else ["float32", "float32", "float64", "float16"]))
    long = maybe(1 / 6)
    n, m = map(int, rng.integers(1, 600 if long else 80, 2))
    n = min(n, int(rng.integers(1, 5))) if maybe(0.2) else n
    d, dv = map(int, rng.integers(1, 70, 2))
    batch, kv_heads, group = map(int, rng.integers(1, 3, 3))
    heads, calls = kv_heads * group, 1 if long else each
    batch *= calls

    def normal(*shape: int) -> Numbers:
        return numbers(rng, shape, dtype, bfloat16=bfloat16)

    shapes = {"q": (heads, n, d), "k": (kv_heads, m, d), "v": (kv_heads, m, dv)}
    arrays = {name: normal(batch, *shape) for name, shape in shapes.items()}
    span = Span(int(rng.integers(m + m // 5 + 1)), int(rng.integers(40)), "clip" if maybe(0.5) else "zero")
    options: dict[str, Any] = {"span": span, "causal": maybe(0.5)}
    own = (heads,) if maybe(0.5) else ()
    for name, row in {"rel_k": (d,), "rel_v": (dv,), "rel_bias": (), "key_table": (d,)}.items():
        if maybe(0.4):
            arrays[name] = normal(*own, span.rows, *row)
    if "rel_k" in arrays and maybe(0.2):
        arrays["rel_q"] = normal(batch, heads, n, d)
    if maybe(0.2):
        arrays["sinks"] = normal(heads)
    if maybe(0.3):
        allowed = rng.random((heads if maybe(0.5) else 1, n, m)) < 0.7
        arrays["mask"] = allowed if maybe(0.5) else np.where(allowed, normal(*allowed.shape), -np.inf).astype(dtype)
    labels = {}
    if maybe(0.2):
        labels["segments"] = np.sort(rng.integers(0, 3, n)), np.sort(rng.integers(0, 3, m))
    if maybe(0.2):
        labels["positions"] = rng.integers(0, m, n), rng.integers(0, m, m)
    else:
        options["offset"] = m - n if maybe(0.5) else int(rng.integers(-20, 20))
    options |= {"window": tuple(map(int, rng.integers(0, m, 2)))} if maybe(0.3) else {}
    options |= {"softcap": 5.0} if maybe(0.2) else {}
    options |= {"rel_scale": 0.3} if maybe(0.2) else {}
    return Call(arrays, labels, options, calls, bfloat16)


PORTABLE = partial(relative_attention, return_lse=True, impl="portable")
SHORT = 3000
"""Up to how many pairs of queries and keys, of all heads, ``by_pairs`` is called: emulated, that takes seconds."""


def formula(call: Call) -> tuple[Numbers, Numbers]:
    """Attend in float64; return the log-sum-exp too."""
    q, m = call.arrays["q"], call.arrays["k"].shape[-2]
    attend = by_pairs.attention if q[..., 0].size * m <= SHORT else PORTABLE
    out, lse = attend(**call.given("float64"))
    return out, lse


def differs(name: str, found: Numbers, expected: Numbers, tolerance: float) -> str | None:
    found = found.astype(float)
    finite = np.isfinite(expected)
    if found.shape != expected.shape or (np.isfinite(found) != finite).any():
        return f"{name} has another shape or another infinity"
    error = np.abs(found[finite] - expected[finite]).max(initial=0) / np.abs(expected[finite]).max(initial=1)
    return None if error < tolerance else f"{name} is wrong by {error:.2g}"


def wrong(call: Call, rng: np.random.Generator) -> str | None:
    """Say what is wrong about the output, the log-sum-exp or a gradient of a call.

    Of several calls, the gradients of what they share are added, and their errors with them.
    """
    dtype = call.arrays["q"].dtype.name
    tolerance, by_item, of_sums = TOLERANCES["bfloat16" if call.bfloat16 else dtype]
    given = [one.given() for one in call.each()]
    each = ([as_numpy(x) for x in relative_attention(**one, return_lse=True, impl="native")] for one in given)
    results, expectations = [np.concatenate(parts) for parts in zip(*each, strict=True)], formula(call)
    for name, found, right in zip(("out", "lse"), results, expectations, strict=True):
        if message := differs(name, found, right, tolerance):
            return message
    d_out = numbers(rng, (*call.arrays["q"].shape[:-1], call.arrays["v"].shape[-1]), dtype, bfloat16=call.bfloat16)
    gradients = [
        relative_attention_vjp(as_torch(part) if call.bfloat16 else part, **one, impl="native")
        for part, one in zip(np.split(d_out, call.calls), given, strict=True)
    ]
    kept: dict[str, Any] = {"out": results[0].astype(float), "lse": expectations[1]}
    kept = kept if "sinks" not in call.arrays else {}
    expected = relative_attention_vjp(d_out.astype(float), **call.given("float64"), **kept, impl="portable")
    for name in expected._fields:
        right, parts = getattr(expected, name), [as_numpy(getattr(one, name)) for one in gradients]
        if right is None and parts == [None] * call.calls:
            continue
        found = np.concatenate(parts) if name in BY_ITEM else np.sum(parts, axis=0, dtype=float)
        allowed = by_item if name in BY_ITEM else of_sums * call.calls**0.5
        if message := differs(f"the gradient of {name}", found, right, allowed):
            return message
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", type=int)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true")
    asked = parser.parse_args(argv)
    if _compiled.kernels is None:
        sys.exit(f"compiled kernels: {availability()}")
    print(f"kernels {availability()}; seed {asked.seed}", flush=True)
    made = kinds = failures = 0
    while made < asked.calls:
        rng = np.random.default_rng([asked.seed, kinds])
        call = drawn(rng, asked.each, bfloat16=asked.bfloat16)
        if message := wrong(call, rng):
            failures += 1
            print(f"call {kinds}: {message}: {call}", flush=True)
        made, kinds = made + call.calls, kinds + 1
    print(f"{made} calls of {kinds} kinds, {failures} wrong")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

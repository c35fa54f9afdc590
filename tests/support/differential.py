"""Random calls of the compiled kernels beside the formula in float64: for machines that have NumPy alone.

``python tests/support/differential.py 200 --seed 1`` tries two hundred; ``.ci/emulated`` does so on other processors.
Outputs are held to a dense formula that shares no code with the library, gradients to the portable code in float64.
"""

import argparse
import sys
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relskew_core import Span, relative_attention, relative_attention_vjp
from relskew_core.backends import _compiled
from relskew_core.backends._compiled.availability import availability

Numbers = NDArray[Any]
TOLERANCES = {"float32": (1e-4, 1e-4), "float64": (1e-11, 1e-11), "float16": (1e-2, 5e-2)}
"""Of results and of gradients, as a share of an array's largest number. Gradients take outputs as they were rounded."""


class Call(NamedTuple):
    """A call of ``relative_attention``: its arrays, its labels and what else it is given."""

    arrays: dict[str, Numbers]
    labels: dict[str, tuple[Numbers, Numbers]]
    options: dict[str, Any]

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {x.shape} {x.dtype}" for name, x in self.arrays.items())
        return f"{shapes}, {', '.join([*self.labels, str(self.options)])}"

    def given(self, dtype: str | None = None) -> dict[str, Any]:
        """Return the arguments, the floating arrays in another dtype if one is named."""
        arrays = {name: x if x.dtype == bool else x.astype(dtype or x.dtype) for name, x in self.arrays.items()}
        return {**arrays, **self.labels, **self.options}


def drawn(rng: np.random.Generator) -> Call:
    """Draw a call that the kernels serve; a sixth of them is longer than the blocks that these work on."""

    def maybe(share: float) -> bool:
        return bool(rng.random() < share)

    dtype = str(rng.choice(["float32", "float32", "float64", "float16"]))
    n, m = map(int, rng.integers(1, 600 if maybe(1 / 6) else 80, 2))
    n = min(n, int(rng.integers(1, 5))) if maybe(0.2) else n
    d, dv = map(int, rng.integers(1, 70, 2))
    batch, kv_heads, group = map(int, rng.integers(1, 3, 3))
    heads = kv_heads * group

    def normal(*shape: int) -> Numbers:
        return rng.standard_normal(shape).astype(dtype)

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
    return Call(arrays, labels, options)


def formula(call: Call) -> tuple[Numbers, Numbers]:
    """Attend in float64, with everything of the size of queries times keys written out; return the log-sum-exp too."""
    x, options = call.given("float64"), call.options
    q, n, m = x["q"], x["q"].shape[-2], x["k"].shape[-2]
    k, v = (np.repeat(x[name], q.shape[1] // x[name].shape[1], axis=1) for name in ("k", "v"))
    at, keys_at = call.labels.get("positions", (np.arange(n) + options.get("offset", 0), np.arange(m)))
    r = keys_at - at[:, None]
    seen = (r <= 0) | (not options["causal"])
    left, right = options.get("window", (n + m + 1000, n + m + 1000))
    seen &= (-left <= r) & (r <= right)
    of_queries, of_keys = call.labels.get("segments", (np.zeros(n), np.zeros(m)))
    seen &= of_queries[:, None] == of_keys
    span = options["span"]
    rows = np.clip(r, -span.left, span.right) + span.left
    counts = (rows - span.left == r) | (span.beyond == "clip")

    def of_pairs(numbers: Numbers, rows: Numbers) -> Numbers:
        """(..., n, R) -> (..., n, m)"""
        places = np.broadcast_to(rows, (*numbers.shape[:-2], *rows.shape))
        return np.take_along_axis(numbers, places, -1)

    scale = q.shape[-1] ** -0.5
    rel_scale = options.get("rel_scale", scale)
    logits = scale * (q @ k.swapaxes(-1, -2))
    if "rel_k" in x:
        logits += rel_scale * counts * of_pairs(x.get("rel_q", q) @ x["rel_k"].swapaxes(-1, -2), rows)
    if "key_table" in x:
        turned = of_pairs(k @ x["key_table"].swapaxes(-1, -2), rows.T)
        logits += rel_scale * counts * turned.swapaxes(-1, -2)
    if "rel_bias" in x:
        logits += counts * x["rel_bias"][..., rows]
    if "softcap" in options:
        logits = options["softcap"] * np.tanh(logits / options["softcap"])
    mask = x.get("mask", np.ones((n, m), bool))
    logits = np.where(seen & (mask if mask.dtype == bool else mask > -np.inf), logits, -np.inf)
    logits = logits if mask.dtype == bool else logits + np.where(mask > -np.inf, mask, 0)
    sink = x["sinks"][:, None, None] if "sinks" in x else -np.inf
    highest = np.maximum(logits.max(-1, keepdims=True), sink)
    highest = np.where(highest > -np.inf, highest, 0)
    weights = np.exp(logits - highest)
    total = weights.sum(-1, keepdims=True) + np.exp(sink - highest)
    weights = weights / np.where(total > 0, total, 1)
    out = weights @ v
    if "rel_v" in x:
        by_row = np.zeros((*weights.shape[:-1], span.rows))
        for row in np.ndindex(*weights.shape[:-1]):
            by_row[row] = np.bincount(rows[row[-1]], weights[row] * counts[row[-1]], span.rows)
        out += by_row @ x["rel_v"]
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + highest)[..., 0]


def differs(name: str, found: Numbers, expected: Numbers, tolerance: float) -> str | None:
    """Say how far an array is from what it must be, as a share of its largest number."""
    found = found.astype(float)
    finite = np.isfinite(expected)
    if found.shape != expected.shape or (np.isfinite(found) != finite).any():
        return f"{name} has another shape or another infinity"
    error = np.abs(found[finite] - expected[finite]).max(initial=0) / np.abs(expected[finite]).max(initial=1)
    return None if error < tolerance else f"{name} is wrong by {error:.2g}"


def wrong(call: Call, rng: np.random.Generator) -> str | None:
    """Say what is wrong about the output, the log-sum-exp or a gradient of a call."""
    dtype = call.arrays["q"].dtype
    tolerance, of_gradients = TOLERANCES[dtype.name]
    results = relative_attention(**call.given(), return_lse=True, impl="native")
    for name, found, right in zip(("out", "lse"), results, formula(call), strict=True):
        if message := differs(name, found, right, tolerance):
            return message
    d_out = rng.standard_normal(results[0].shape).astype(dtype)
    gradients = relative_attention_vjp(d_out, **call.given(), impl="native")
    expected = relative_attention_vjp(d_out.astype(float), **call.given("float64"), impl="portable")
    for name, found in gradients._asdict().items():
        if found is None:
            continue
        if message := differs(f"the gradient of {name}", found, getattr(expected, name), of_gradients):
            return message
    return None


def main(argv: list[str] | None = None) -> int:
    """Try calls, tell of those that are wrong, and return 1 if there were any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", type=int)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args(argv)
    if _compiled.kernels is None:
        sys.exit(f"compiled kernels: {availability()}")
    print(f"kernels {availability()}; seed {asked.seed}", flush=True)
    failures = 0
    for number in range(asked.calls):
        rng = np.random.default_rng([asked.seed, number])
        call = drawn(rng)
        if message := wrong(call, rng):
            failures += 1
            print(f"call {number}: {message}: {call}", flush=True)
    print(f"{asked.calls} calls, {failures} wrong")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

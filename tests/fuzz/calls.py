"""Random calls of ``relative_attention`` on every array library, against plain loops.

Beside what ``strategies`` draws: large logits, NaN and infinities where nobody may see them, offsets of every kind, and
windows beyond all integers that a library has.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import oracles
import strategies
from fuzz.engine import Target, WrongError, largest_logit, same, told
from libraries import GATES, LIBRARIES, Library
from relskew_core import relative_attention
from strategies import Call

ROWS = {row.name: row for row in LIBRARIES if row.name != "torch.compile" and row.missing() is None}
QUICK = [name for name in ROWS if "jax" not in name.lower()]
"""Rows that compile nothing; the others are drawn now and then."""
HUGE = (2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**70)
OFFSETS = ("int", "numpy scalar", "0-d array", "list", "tuple", "array")
KINDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True)
class Example:
    call: Call  # its offset is an int, or a list with one for each item
    row: str
    impl: str
    dtype: str
    offset: str
    integers: str

    def __str__(self) -> str:
        how = f"# {self.row}, {self.dtype}; the offset: {self.offset}, {self.integers}\n"
        return how + told("relative_attention", {**self.call.arrays, **self.call.options, "impl": self.impl})

    @property
    def library(self) -> Library:
        return ROWS[self.row]

    def given_offset(self) -> Any:
        offset = self.call.options["offset"]
        if self.offset == "numpy scalar":
            return np.dtype(self.integers).type(offset)
        if self.offset in ("0-d array", "array"):
            return self.library.asarray(np.asarray(offset, self.integers))
        return tuple(offset) if self.offset == "tuple" else offset


@st.composite
def examples(draw: st.DrawFn) -> Example:
    call = draw(strategies.calls())
    row = draw(st.sampled_from(draw(st.sampled_from([QUICK] * 9 + [list(ROWS)]))))
    forms = OFFSETS if call.arrays["q"].ndim == 4 else OFFSETS[:3]
    offset, integers = draw(st.sampled_from(forms)), draw(st.sampled_from(KINDS))
    call = call.but(**draw(extremes(call, offset, integers)))
    numbers = np.random.default_rng(draw(strategies.seeds))
    factor = draw(st.sampled_from([1.0, 1.0, 30.0, 1000.0]))
    call = call.but(**{name: factor * call.arrays[name] for name in ("q", "rel_q") if name in call.arrays})
    for poison in (hide_keys, hide_values, hide_rows):
        if draw(st.booleans()):
            poison(call, numbers)
    impl, dtype = draw(st.sampled_from(["auto", "portable", "native"])), draw(st.sampled_from(ROWS[row].dtypes))
    return Example(call, row, impl, dtype, offset, integers)


@st.composite
def extremes(draw: st.DrawFn, call: Call, offset: str, integers: str) -> dict[str, Any]:
    """Draw what no ordinary call has: offsets by item, distances that no integer of a library holds."""
    changes: dict[str, Any] = {}
    huge = st.none() | st.sampled_from(HUGE)
    if draw(st.sampled_from([False] * 5 + [True])):
        changes["window"] = (draw(huge), draw(huge))
    if call.options["block_size"] is not None and draw(st.sampled_from([False] * 9 + [True])):
        changes["block_size"] = draw(st.sampled_from(HUGE))
    by_item = offset in ("list", "tuple", "array")
    first = call.offset
    if offset in ("int", "list", "tuple") and draw(st.sampled_from([False] * 9 + [True])):
        first += draw(st.sampled_from(HUGE)) * draw(st.sampled_from([-1, 1]))
    some = first if not by_item else [first + draw(st.integers(-3, 3)) for _ in call.arrays["q"]]
    unsigned = integers.startswith("u") and offset in ("numpy scalar", "0-d array", "array")
    return {**changes, "offset": np.abs(some).tolist() if unsigned else some}


def items(call: Call) -> list[Call]:
    """Return the calls that form a batch with separate offsets: views of its arrays."""
    offsets = call.options["offset"]
    if isinstance(offsets, int):
        return [call]
    full = (*call.arrays["q"].shape[:-1], call.m)
    own = {name: x for name, x in call.arrays.items() if name in ("q", "k", "v", "rel_q")}
    if "mask" in call.arrays:
        own["mask"] = np.broadcast_to(call.arrays["mask"], full)
    return [call.but(offset=offset, **{name: x[i] for name, x in own.items()}) for i, offset in enumerate(offsets)]


def hide_keys(call: Call, numbers: np.random.Generator) -> None:
    """Put NaN into a key, which must not affect queries that do not see it, and infinities into hidden keys."""
    for item in items(call):
        seen = item.visible().reshape(-1, item.n, item.m).any(axis=(0, 1))
        item.arrays["k"][..., ~seen, :] = numbers.choice([np.nan, np.inf, -np.inf])
        item.arrays["k"][..., int(numbers.integers(item.m)), :] = np.nan


def hide_values(call: Call, numbers: np.random.Generator) -> None:
    """Put no numbers into the values that the pattern hides from all queries."""
    for item in items(call):
        item.arrays["v"][..., ~item.pattern().any(axis=0), :] = numbers.choice([np.nan, np.inf])


def hide_rows(call: Call, numbers: np.random.Generator) -> None:
    """Put no numbers into the rows of tables that the pattern hides from all queries."""
    try:
        seen = set().union(*(item.seen_rows() for item in items(call)))
    except (LookupError, OverflowError):  # the table is too short, which must be rejected; or the offset is huge
        return
    unseen = [row for row in range(call.options["span"].rows) if row not in seen]
    for name, axis in (("rel_k", -2), ("rel_v", -2), ("rel_bias", -1)):
        if name in call.arrays:
            np.moveaxis(call.arrays[name], axis, 0)[unseen] = numbers.choice([np.nan, np.inf])


def check(example: Example) -> None:
    library, options = example.library, {**example.call.options, "impl": example.impl, "return_lse": True}
    arrays = {
        name: library.asarray(x, None if x.dtype == np.bool_ else example.dtype)
        for name, x in example.call.arrays.items()
    }
    rounded = example.call.but(**{name: library.to_numpy(x) for name, x in arrays.items()})
    try:
        expected = oracle(rounded)
    except LookupError:
        expected = None  # a table that is too short
    options["offset"] = example.given_offset()
    # The values of a traced array, or of one outside the CPU's memory, are unknown: instead of an error there is NaN.
    unknown = example.offset in ("0-d array", "array") and (library.traced or "second device" in library.name)
    if library.traced and unknown:
        arrays["offset"] = options.pop("offset")
    try:
        with np.errstate(all="ignore"), library.setting():
            out, lse = library.call(relative_attention, arrays, **options)
            out, lse = library.to_numpy(out), library.to_numpy(lse)
    except ValueError as error:
        huge = max(abs(item.offset) for item in items(example.call)) > 2**61
        if (expected is None and str(error).startswith("`rel_")) or (huge and str(error).startswith("`offset")):
            return
        if example.impl == "native" and "there is no native path" in str(error):
            return
        raise
    if expected is None:
        if not unknown:
            raise WrongError("a table that is too short was not refused")
        return
    peak = largest_logit(rounded.arrays, example.call.options)
    tolerance = 4 * GATES[example.dtype] * max(1.0, peak / 16)
    told_by_loops = ~np.isnan(expected.lse)  # the result of a query that sees NaN is undefined
    same("lse", lse, expected.lse, tolerance, told_by_loops)
    same("out", out, expected.out, tolerance, told_by_loops[..., None])


def oracle(call: Call) -> oracles.Attention:
    if isinstance(call.options["offset"], int):
        return call.oracle()
    return oracles.Attention(*map(np.stack, zip(*(item.oracle() for item in items(call)), strict=True)))


TARGET = Target("calls", 50, examples(), check)

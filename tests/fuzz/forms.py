"""Random calls at their edges, forward and backward, of arrays that lie in memory in every way that there is.

Values that nobody may see are no numbers, and arguments that are what they are by default are left out.
"""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

import dense
import oracles
import strategies
from fuzz.engine import Target, WrongError, refused_heads, same, told
from libraries import LIBRARIES, Library
from relskew_core import attention_weights, relative_attention, relative_attention_vjp
from strategies import Call

Array = NDArray[Any]
ROWS = {row.name: row for row in LIBRARIES if row.name in ("numpy", "array-api-strict, strictest flags", "torch, CPU")}
TOLERANCES = {"float64": 1e-9, "float32": 3e-4}
DEFAULTS = {"causal": False, "offset": 0}  # all others have the default None


def _record(x: Array) -> Array:
    records = np.zeros(x.shape, [("value", x.dtype), ("flag", "i1"), ("half", "f2")])
    records["value"] = x
    return records["value"]


def _rows(x: Array) -> Array:
    """Rows of packed records: one byte more apart than they are long."""
    records = np.zeros(x.shape[:-1], [("flag", "i1"), ("row", x.dtype, x.shape[-1:])])
    records["row"] = x
    return records["row"]


def _read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


def _mapped(x: Array) -> Array:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, x.dtype, "w+", shape=x.shape)
    mapped[...] = x
    return mapped


def _repeated(x: Array, axis: int) -> Array:
    """Return the first entry of an axis in place of all, with steps of 0; other numbers than there were."""
    return np.broadcast_to(x.take([0], axis), x.shape) if x.ndim >= -axis and x.shape[axis] else x


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "field of records": _record,
    "rows of records": _rows,
    "unaligned": lambda x: np.frombuffer(b"-" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "read-only": _read_only,
    "mapped": _mapped,
    "Fortran": np.asfortranarray,
    "transposed": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2) if x.ndim > 1 else x,
    "backwards": lambda x: np.flip(np.flip(x).copy()),
    "in between": lambda x: np.repeat(x, 3, axis=-1)[..., 1::3],
    **{f"repeated along {axis}": partial(_repeated, axis=axis) for axis in (-1, -2, -3)},
}


TORCH_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "in between": lambda x: x.repeat_interleave(3, -1)[..., 1::3],
    "lazily negated": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag if x.is_floating_point() else x,
    "at an odd place": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[min(1, x.numel()) :].view(x.shape),
}
SHARED = ("repeated along -1", "repeated along -2", "repeated along -3", "read-only", "unaligned", "mapped")
"""Strides of NumPy arrays that torch accepts."""


@dataclass(frozen=True)
class Example:
    """A call, what comes back to it, and how its arrays lie."""

    call: Call
    d_out: Array
    d_lse: Array | None
    row: str
    impl: str
    dtype: str
    layouts: dict[str, str]
    hidden: float | None  # the value of hidden entries
    given: tuple[str, ...]  # which results of the forward pass are passed
    omitted: bool  # whether arguments that equal their defaults are omitted

    def __str__(self) -> str:
        head = f"# {self.row}, {self.dtype}; layouts: {self.layouts}; hidden: {self.hidden}; given: {self.given}\n"
        arguments = {"d_out": self.d_out, **self.call.arrays, **self.options(), "d_lse": self.d_lse}
        return head + told("relative_attention_vjp", {**arguments, "impl": self.impl})

    @property
    def gives_weights(self) -> bool:
        """Whether the product of the weights and the values is the output."""
        arrays, sizes = self.call.arrays, (*self.call.arrays["v"].shape, *self.call.arrays["q"].shape)
        return "rel_v" not in arrays and not self.call.options.get("dropout") and 0 not in sizes

    def options(self) -> dict[str, Any]:
        options = {**self.call.options, "impl": self.impl}
        if not self.omitted:
            return options
        return {name: x for name, x in options.items() if x != DEFAULTS.get(name) or isinstance(x, float)}


@st.composite
def examples(draw: st.DrawFn) -> Example:
    call, dtype, row = (
        draw(strategies.edge_calls()), draw(st.sampled_from(sorted(TOLERANCES))), draw(st.sampled_from(sorted(ROWS))),
    )  # fmt: skip
    known = {"numpy": sorted(LAYOUTS), "torch, CPU": sorted({*TORCH_LAYOUTS, *SHARED})}.get(row, [])
    layouts = {
        name: draw(st.sampled_from(["plain", *known])) for name in [*call.arrays, "d_out", "d_lse", "out", "lse"]
    }
    numbers = np.random.default_rng(draw(strategies.seeds))
    queries = call.arrays["q"].shape[:-1]

    def lying(name: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(lying(name, one) for one in x)
        x = x.astype(dtype) if x.dtype.kind == "f" else x
        repeat = LAYOUTS.get(layouts.get(name, ""), np.asarray) if layouts[name].startswith("repeated") else np.asarray
        return np.array(repeat(x))

    call = Call({name: lying(name, x) for name, x in call.arrays.items()}, call.options)
    return Example(call, lying("d_out", numbers.standard_normal((*queries, call.arrays["v"].shape[-1]))),
                   lying("d_lse", numbers.standard_normal(queries)) if draw(st.booleans()) else None, row,
                   draw(st.sampled_from(["auto", "auto", "portable"])), dtype, layouts,
                   draw(st.sampled_from([None, np.nan, np.inf, -np.inf])),
                   draw(st.sampled_from([(), ("out",), ("lse",), ("out", "lse")])), draw(st.booleans()))  # fmt: skip


def laid(example: Example, name: str, x: Any) -> Any:
    """Return an array of the library that lies as it was drawn; ``np.float64`` of it are the same numbers."""
    if isinstance(x, tuple):
        return tuple(laid(example, name, one) for one in x)
    layout = example.layouts[name]
    if "strict" in example.row:
        return ROWS[example.row].asarray(x)
    if example.row == "numpy":
        return LAYOUTS[layout](x) if layout in LAYOUTS else x
    if layout in TORCH_LAYOUTS:
        return TORCH_LAYOUTS[layout](torch.tensor(x))
    if layout not in LAYOUTS or x.dtype.kind == "u":
        return torch.tensor(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only memory
        return torch.from_numpy(LAYOUTS[layout](x))


def hidden(example: Example) -> dict[str, Any]:
    """Return the arrays without numbers in keys, values and rows of tables that are always hidden."""
    call, arrays = example.call, dict(example.call.arrays)
    if example.hidden is None or "positions" in arrays:
        return arrays
    pattern = call.pattern()
    seen, rows = pattern.any(axis=0), call.seen_rows()
    unseen_rows = np.asarray([row not in rows for row in range(call.options["span"].rows)])
    places = {"k": ~seen, "v": ~seen, **dict.fromkeys(("rel_k", "rel_v", "rel_bias"), unseen_rows)}
    for name, unseen in places.items():
        if name in arrays and not example.layouts[name].startswith("repeated"):
            arrays[name] = arrays[name].copy()
            np.moveaxis(arrays[name], -1 if name == "rel_bias" else -2, 0)[unseen] = example.hidden
    return arrays


def check(example: Example) -> None:
    library: Library = ROWS[example.row]
    arrays = {name: laid(example, name, x) for name, x in hidden(example).items()}
    wide = {name: dense.each(_wide, x) for name, x in example.call.arrays.items()}
    expected = expectation(example, wide)
    tolerance = TOLERANCES[example.dtype] * expected.pop("size")
    try:
        with np.errstate(all="ignore"), library.setting():
            found = results(example, arrays)
    except ValueError as error:
        if "offset" not in example.options() and example.call.n != example.call.m and str(error).startswith("`offset`"):
            return  # it must be given
        if refused_heads(example.call.arrays["q"], error):
            return
        raise
    for name, x in expected.items():
        if name not in found or found[name] is None:
            raise WrongError(f"there is no {name}")
        same(name, library.to_numpy(found[name]), x, tolerance)


def results(example: Example, arrays: dict[str, Any]) -> dict[str, Any]:
    options = example.options()
    out, lse = relative_attention(**arrays, **options, return_lse=True)
    to_numpy = ROWS[example.row].to_numpy
    given = {
        name: laid(example, name, np.asarray(to_numpy(x), example.dtype))
        for name, x in (("out", out), ("lse", lse))
        if name in example.given and not example.layouts[name].startswith("repeated")
    }
    back = {"d_out": laid(example, "d_out", example.d_out)}
    if example.d_lse is not None:
        back["d_lse"] = laid(example, "d_lse", example.d_lse)
    gradients = relative_attention_vjp(**back, **arrays, **given, **options)._asdict()
    found = {"out": out, "lse": lse, **{f"the gradient of {name}": x for name, x in gradients.items()}}
    if example.gives_weights:
        looked = {name: x for name, x in {**arrays, **options}.items() if name not in ("v", "impl")}
        weights, v = to_numpy(attention_weights(**looked)), np.asarray(example.call.arrays["v"], np.float64)
        found["weights @ v"] = ROWS[example.row].asarray(
            weights @ (v if v.ndim == 2 else v.repeat(weights.shape[-3] // v.shape[-3], -3))
        )
    return found


def expectation(example: Example, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return what autograd makes of the dense formula in float64, and how large its numbers are."""
    options = {name: x for name, x in example.call.options.items() if name != "chunk_size"}
    out, lse, gradients = dense.differentiated(
        partial(oracles.attention, **options), arrays, example.d_out, example.d_lse
    )
    found = {"out": out, "lse": lse} | ({"weights @ v": out} if example.gives_weights else {})
    found |= {f"the gradient of {name}": x for name, x in gradients.items()}
    finite = [np.abs(x[np.isfinite(x)]) for x in found.values()]
    return {**found, "size": max(1.0, *(float(x.max(initial=0.0)) for x in finite))}


def _wide(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


TARGET = Target("forms", 50, examples(), check)

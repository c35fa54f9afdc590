"""Random calls at their edges, forward and backward, of arrays that lie in memory in every way that there is.

Values that nobody may see are no numbers, and arguments that are what they are by default are left out.
"""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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


def _unaligned(x: Array) -> Array:
    return np.frombuffer(b"-" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)


def _read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


def _mapped(x: Array) -> Array:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, x.dtype, "w+", shape=x.shape)
    mapped[...] = x
    return mapped


def _transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2).copy().swapaxes(-1, -2) if x.ndim > 1 else x


def _backwards(x: Array) -> Array:
    return np.flip(np.flip(x).copy())


def _in_between(x: Array) -> Array:
    return np.repeat(x, 3, axis=-1)[..., 1::3]


def _repeated(axis: int) -> Callable[[Array], Array]:
    """Return what repeats the first entry of an axis in place, with steps of 0; other numbers than there were."""

    def repeated(x: Array) -> Array:
        return np.broadcast_to(x.take([0], axis), x.shape) if x.ndim >= -axis and x.shape[axis] else x

    return repeated


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "field of records": _record,
    "rows of records": _rows,
    "unaligned": _unaligned,
    "read-only": _read_only,
    "mapped": _mapped,
    "Fortran": np.asfortranarray,
    "transposed": _transposed,
    "backwards": _backwards,
    "in between": _in_between,
    **{f"repeated along {axis}": _repeated(axis) for axis in (-1, -2, -3)},
}


def _negated(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which torch remembers that it is to be negated, as imaginary parts of conjugates are."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


TORCH_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "in between": lambda x: x.repeat_interleave(3, -1)[..., 1::3],
    "lazily negated": lambda x: _negated(x) if x.is_floating_point() else x,
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

    def options(self) -> dict[str, Any]:
        """Return the options as they are given."""
        options = {**self.call.options, "impl": self.impl}
        if not self.omitted:
            return options
        return {name: x for name, x in options.items() if x != DEFAULTS.get(name) or isinstance(x, float)}


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Draw a call at an edge, and how its arrays lie."""
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
    places = [("k", ~seen, -2), ("v", ~seen, -2), ("rel_k", unseen_rows, -2), ("rel_v", unseen_rows, -2)]
    for name, unseen, axis in [*places, ("rel_bias", unseen_rows, -1)]:
        if name in arrays and not example.layouts[name].startswith("repeated"):
            arrays[name] = arrays[name].copy()
            np.moveaxis(arrays[name], axis, 0)[unseen] = example.hidden
    return arrays


def check(example: Example) -> None:
    """Hold output, log-sum-exp and every gradient against the formula of the same numbers."""
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
    """Call the library, forward and backward."""
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
    if gives_weights(example):
        looked = {name: x for name, x in {**arrays, **options}.items() if name not in ("v", "impl")}
        weights, v = to_numpy(attention_weights(**looked)), np.asarray(example.call.arrays["v"], np.float64)
        found["weights @ v"] = ROWS[example.row].asarray(
            weights @ (v if v.ndim == 2 else v.repeat(weights.shape[-3] // v.shape[-3], -3))
        )
    return found


def gives_weights(example: Example) -> bool:
    """Whether the product of the weights and the values is the output."""
    arrays, options = example.call.arrays, example.call.options
    return "rel_v" not in arrays and not options.get("dropout") and 0 not in (*arrays["v"].shape, *arrays["q"].shape)


def expectation(example: Example, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return what autograd makes of the dense formula in float64, and how large its numbers are."""
    options = {name: x for name, x in example.call.options.items() if name != "chunk_size"}
    given: dict[str, Any] = {name: dense.each(torch.tensor, x) for name, x in arrays.items()}
    wanted = {name: x.requires_grad_() for name, x in given.items() if name in dense.floating(arrays)}
    out, lse = oracles.attention(**given, **options)
    pulled = (out * torch.tensor(example.d_out)).sum()
    if example.d_lse is not None:  # the lse of queries that see nothing is -inf
        pulled = pulled + (torch.where(lse > -torch.inf, lse, 0.0) * torch.tensor(example.d_lse)).sum()
    gradients = torch.autograd.grad(pulled, list(wanted.values()), materialize_grads=True, allow_unused=True)
    found = {"out": out, "lse": lse} | ({"weights @ v": out} if gives_weights(example) else {})
    found |= {f"the gradient of {name}": x for name, x in zip(wanted, gradients, strict=True)}
    numbers: dict[str, Any] = {name: x.detach().numpy() for name, x in found.items()}
    finite = [np.abs(x[np.isfinite(x)]) for x in numbers.values()]
    return {**numbers, "size": max(1.0, *(float(x.max(initial=0.0)) for x in finite))}


def _wide(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


TARGET = Target("forms", 50, examples(), check)

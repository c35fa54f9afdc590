"""Random wrong arguments: a public function accepts them, or its error names the wrong one."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import array_api_strict
import numpy as np
import torch
from core.test_errors import CALLS as OF_ERRORS
from core.test_errors import SPEC, WEIGHTS
from hypothesis import strategies as st

from fuzz.engine import Target, WrongError
from relskew_core import Span
from relskew_core.export import to_onnx

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{name: (function, good) for name, (function, good, _) in OF_ERRORS.items()},
    "to_onnx": (to_onnx, {"spec": SPEC, "weights": WEIGHTS}),
}


class Odd:
    """An object that is like nothing."""

    def __repr__(self) -> str:
        return "Odd()"


INTS = [-(2**70), -(2**63), -1, 0, 1, 2, 3, 5, 7]
SCALARS = [
    None, True, False, *INTS, 0.0, -0.5, 1.5, 1e308, np.nan, np.inf, -np.inf, 1j, "", "text", "auto", "native", "clip",
    "float32", b"text", ..., Odd(), Odd, np, Decimal("1.5"), Fraction(1, 3), date(2000, 1, 1), np.float32(2.5),
    np.int8(3), np.bool_(True), np.str_("auto"), slice(3), range(3), NotImplemented,
]  # fmt: skip
SHAPES = [
    (), (0,), (1,), (3,), (5,), (4, 0), (0, 4), (3, 3), (3, 4), (5, 4), (2, 5), (2, 3, 4), (2, 3, 3), (1, 3, 4),
    (2, 6, 4), (0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 2, 3, 4), (2, 1, 1, 1, 3),
]  # fmt: skip
DTYPES = ["float64", "float32", "float16", "int64", "uint8", "bool", "complex128", "O", "U3", "M8[s]", "i4,f8"]
LIBRARIES: dict[str, Callable[[Any], Any]] = {
    "numpy": np.asarray, "masked": np.ma.asarray, "memory": lambda x: np.ascontiguousarray(x).data,
    "matrix in lists": lambda x: x.tolist(), "torch": torch.asarray, "strict": array_api_strict.asarray,
}  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Draw an array of some shape, dtype and library; where a library has no such thing, NumPy's."""
    array = np.zeros(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(["float64"] * 5 + DTYPES)))
    try:
        return LIBRARIES[draw(st.sampled_from(["numpy"] * 4 + sorted(LIBRARIES)))](array)
    except (TypeError, ValueError):
        return array


scalars = st.sampled_from(SCALARS)
spans = st.builds(Span, st.integers(0, 4), st.integers(0, 4), st.sampled_from(["error", "clip", "zero"]))
parts = scalars | arrays() | spans | st.sampled_from([SPEC, WEIGHTS])
junk = (
    parts
    | st.lists(parts, max_size=3)
    | st.lists(parts, max_size=3).map(tuple)
    | st.dictionaries(st.sampled_from([*WEIGHTS, "left", 1, None]), parts, max_size=2)
    | st.dictionaries(st.sampled_from(sorted(WEIGHTS)), parts, max_size=2).map(lambda some: {**WEIGHTS, **some})
    | st.frozensets(st.sampled_from(INTS), max_size=3)
)


@dataclass(frozen=True)
class Example:
    function: str
    changed: dict[str, Any]

    def __str__(self) -> str:
        changed = ", ".join(f"{name}={_shown(value)}" for name, value in self.changed.items())
        return f"{self.function}({changed}), all else as in a good call"


def _shown(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{value!r} of dtype {dtype} and shape {shape}" if isinstance(shape, tuple) else repr(value)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    function = draw(st.sampled_from(sorted(CALLS)))
    names = sorted(set(inspect.signature(CALLS[function][0]).parameters) - {"dtype"})  # the library rejects dtypes
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    return Example(function, {name: draw(junk) for name in chosen})


def check(example: Example) -> None:
    function, good = CALLS[example.function]
    names = inspect.signature(function).parameters
    try:
        with np.errstate(all="ignore"):
            function(**{**good, **example.changed})
    except (TypeError, ValueError) as error:
        quoted = re.findall(r"`(\w+)", str(error))
        if not any(name in names for name in quoted):
            raise WrongError(f"{type(error).__name__} names no argument: {error}") from error


TARGET = Target("arguments", 200, examples(), check)

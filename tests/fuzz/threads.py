"""Random calls in several threads at once, the same and different ones, against themselves alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import dense
import strategies
from fuzz.engine import Target, same, told
from libraries import LIBRARIES
from relskew_core import relative_attention, relative_attention_vjp
from strategies import Call

ROWS = {row.name: row for row in LIBRARIES if row.name in ("numpy", "torch, CPU")}
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True)
class One:
    call: Call
    row: str
    dtype: str
    backward: bool

    def __str__(self) -> str:
        function = "relative_attention_vjp, d_out the queries' first column" if self.backward else "relative_attention"
        return f"# {self.row}, {self.dtype}\n" + told(function, {**self.call.arrays, **self.call.options})

    def results(self) -> dict[str, NDArray[Any]]:
        row = ROWS[self.row]

        def given(x: NDArray[Any]) -> Any:
            return row.asarray(x, self.dtype if x.dtype.kind == "f" else None)

        arrays = {name: dense.each(given, x) for name, x in self.call.arrays.items()}
        out, lse = relative_attention(**arrays, **self.call.options, return_lse=True)
        found = {"out": out, "lse": lse}
        if self.backward:
            d_out = given(np.broadcast_to(self.call.arrays["q"][..., :1], tuple(out.shape)).copy())
            gradients = relative_attention_vjp(d_out, **arrays, **self.call.options)._asdict()
            found |= {f"the gradient of {name}": x for name, x in gradients.items() if x is not None}
        return {name: row.to_numpy(x) for name, x in found.items()}


@dataclass(frozen=True)
class Example:
    """Calls, and which of them each thread makes in turn."""

    calls: list[One]
    turns: list[list[int]]

    def __str__(self) -> str:
        return "\n".join([f"# threads: {self.turns}", *map(str, self.calls)])


@st.composite
def examples(draw: st.DrawFn) -> Example:
    rows, dtypes = st.sampled_from(sorted(ROWS)), st.sampled_from(sorted(TOLERANCES))
    one = st.builds(One, strategies.rich_calls(), rows, dtypes, st.booleans())
    calls = draw(st.lists(one, min_size=1, max_size=3))
    turns = st.lists(st.integers(0, len(calls) - 1), min_size=1, max_size=8)
    return Example(calls, draw(st.lists(turns, min_size=2, max_size=4)))


def check(example: Example) -> None:
    with np.errstate(all="ignore"):
        alone = [one.results() for one in example.calls]
    together = Barrier(len(example.turns))

    def make(turns: list[int]) -> list[dict[str, NDArray[Any]]]:
        together.wait()
        with np.errstate(all="ignore"):
            return [example.calls[number].results() for number in turns]

    with ThreadPoolExecutor(len(example.turns)) as threads:
        found = list(threads.map(make, example.turns))
    for thread, (turns, results) in enumerate(zip(example.turns, found, strict=True)):
        for number, result in zip(turns, results, strict=True):
            for name, x in alone[number].items():
                told_as = f"thread {thread}, call {number}: {name}"
                same(told_as, result[name], x, TOLERANCES[example.calls[number].dtype])


TARGET = Target("threads", 10, examples(), check)

"""Random lives of modules: made without memory, loaded, averaged, cast, copied, hooked, traced, in any order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from huggingface.stand_ins import STAND_INS
from hypothesis import strategies as st
from layers.test_lives import MODULES, call

import lives
from fuzz.engine import Target, same
from relskew_core.huggingface import replace_attention

QUICK = sorted(lives.STEPS.keys() - {"compiled", "exported"})


@dataclass(frozen=True)
class Example:
    name: str
    steps: list[tuple[str, bool]]

    def __str__(self) -> str:
        return f"{self.name}: " + ", ".join(f"{step}{' and a call' if called else ''}" for step, called in self.steps)


def replaced(name: str) -> Any:
    torch.manual_seed(0)
    return replace_attention(STAND_INS[name][0]()).eval()


BUILT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    **{name: (make, call) for name, make in MODULES.items()},
    **{f"drop-in {name}": (partial(replaced, name), called) for name, (_, called) in STAND_INS.items()},
}


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Draw a module and its steps; those that take seconds are rare."""
    name = draw(st.sampled_from(sorted(BUILT)))
    step = st.sampled_from(QUICK) if draw(st.integers(0, 40)) else st.sampled_from(sorted(lives.STEPS))
    return Example(name, draw(st.lists(st.tuples(step, st.booleans()), min_size=1, max_size=8)))


@torch.no_grad()
def check(example: Example) -> None:
    """Hold each call, and the last, against a module that no step but the rounding of its weights has touched."""
    make, called = BUILT[example.name]
    life, untouched = lives.Life(make().eval(), called), make().eval()
    for step, now in example.steps:
        life.go(step)
        untouched = lives.lost_by(step, untouched)
        if now:
            same(f"the call after {step}", life().numpy(), called(untouched).numpy(), 1e-11)
    same("the last call", life().numpy(), called(untouched).numpy(), 1e-11)


TARGET = Target("lives", 8, examples(), check)

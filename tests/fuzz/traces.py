"""Random calls on JAX under its transformations, against those of the dense formula, which torch makes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import dense
from fuzz import transforms
from fuzz.engine import Target, WrongError, refused_heads, same, told
from libraries import unchanged
from relskew_core import relative_attention

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Example:
    """A call on torch, whose formula is differentiated, and how it is made on JAX."""

    on_torch: transforms.Example
    outside: str  # one of OUTSIDE, of the call or of its gradients
    inside: str  # one of INSIDE, of the call alone
    gradients: bool

    def __str__(self) -> str:
        given, of = self.on_torch, f"the gradients of {self.inside}" if self.gradients else self.inside
        head = f"# JAX, {given.dtype}; {self.outside} of {of}, of {given.chosen}, labels too: {given.labels}\n"
        return head + told("relative_attention", {**given.call.arrays, **given.options, "d_out": given.d_out})


def scanned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda items: lax.scan(lambda carry, item: (carry, function(item)), None, items)[1]


OUTSIDE: dict[str, Transform] = {"call": unchanged, "jit": jax.jit, "vmap": jax.vmap, "scan": scanned}
INSIDE: dict[str, Transform] = {"call": unchanged, "jit": jax.jit, "checkpoint": jax.checkpoint}
FORMULAS = {  # by whether items are mapped, and whether gradients are asked for
    (False, False): transforms.plain, (False, True): transforms.functional,
    (True, False): transforms.mapped, (True, True): transforms.mapped_gradients,
}  # fmt: skip


def check(example: Example) -> None:
    given, over_items = example.on_torch, example.outside in ("vmap", "scan")
    arrays, d_out = given.tensors()
    expected, size = transforms.expected_of(given, FORMULAS[over_items, example.gradients])
    # integers have no gradients, and are constants there
    labels = given.labels and not example.gradients
    traced = {*given.chosen, *(set(arrays) - set(dense.floating(given.call.arrays)) if labels else ())}
    own = {name: x for name, x in arrays.items() if name in traced}
    own = transforms.stacked(given, arrays, labels=labels) if over_items else own
    constants, back = {name: dense.each(_to_jax, x) for name, x in arrays.items()}, _to_jax(d_out)

    def attend(own: Any) -> Any:
        return INSIDE[example.inside](lambda own: relative_attention(**{**constants, **own}, **given.options))(own)

    function = jax.grad(lambda own: (attend(own) * back).sum()) if example.gradients else attend
    try:
        found = OUTSIDE[example.outside](function)({name: dense.each(_to_jax, x) for name, x in own.items()})
    except ValueError as error:
        if refused_heads(given.call.arrays["q"], error):
            return
        raise
    for name, x in expected.items():
        result = found[name] if example.gradients else found
        if result.dtype != back.dtype:
            raise WrongError(f"{name} is of {result.dtype}")
        same(name, np.asarray(result, np.float64), x, transforms.TOLERANCES[given.dtype] * size)


def _to_jax(x: Any) -> Any:
    return jnp.asarray(x.numpy())


EXAMPLES = st.builds(
    Example, transforms.examples(), st.sampled_from(sorted(OUTSIDE)), st.sampled_from(sorted(INSIDE)), st.booleans()
)
TARGET = Target("traces", 5, EXAMPLES, check)

"""Random calls on torch under all that torch does to functions, and under other defaults of dtype and device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import dense
import oracles
import strategies
from fuzz.engine import Target, WrongError, refused_heads, same, told
from relskew_core import relative_attention
from strategies import Call

Tensors = dict[str, Any]
DTYPES = ("float64", "float32", "bfloat16", "float16")
TOLERANCES = {"float64": 1e-9, "float32": 3e-4}
HALF = 0.1  # the tolerance of bfloat16 under autocast


@dataclass(frozen=True)
class Example:
    call: Call
    d_out: NDArray[np.float64]
    how: str  # one of HOW
    chosen: tuple[str, ...]  # arrays that are differentiated, or that have an additional axis
    labels: bool  # whether integers and boolean masks have an additional axis, too
    seed: int
    dtype: str
    impl: str
    default_dtype: str
    default_device: str

    def __str__(self) -> str:
        head = f"# torch, {self.dtype}; {self.how} of {self.chosen}, labels too: {self.labels}, seed {self.seed}; "
        head += f"defaults: {self.default_dtype} on {self.default_device}\n"
        return head + told("relative_attention", {**self.call.arrays, **self.options, "d_out": self.d_out})

    @property
    def options(self) -> dict[str, Any]:
        return {**self.call.options, "impl": self.impl}

    def numbers(self, *shape: int) -> torch.Tensor:
        numbers = np.random.default_rng(self.seed + sum(shape)).standard_normal(shape)
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def tensors(self) -> tuple[Tensors, torch.Tensor]:
        dtype = getattr(torch, self.dtype)

        def tensor(x: NDArray[Any]) -> torch.Tensor:
            return torch.tensor(x, dtype=dtype if x.dtype.kind == "f" else None)

        arrays = {name: dense.each(tensor, x) for name, x in self.call.arrays.items()}
        return arrays, tensor(self.d_out)

    def formula(self, **arrays: Any) -> torch.Tensor:
        options = {name: x for name, x in self.call.options.items() if name != "chunk_size"}
        wide = {name: dense.each(_wide, x) for name, x in arrays.items()}
        return oracles.attention(**wide, **options).out


How = Callable[[Example, Callable[..., Any], Tensors, torch.Tensor], Tensors]


@st.composite
def examples(draw: st.DrawFn) -> Example:
    call = draw(strategies.edge_calls())
    rng = np.random.default_rng(draw(strategies.seeds))
    how = draw(st.sampled_from(draw(st.sampled_from([sorted(set(HOW) - {"compile"})] * 59 + [["compile"]]))))
    chosen = draw(st.lists(st.sampled_from(sorted(dense.floating(call.arrays))), min_size=1, unique=True).map(sorted))
    return Example(call, rng.standard_normal((*call.arrays["q"].shape[:-1], call.arrays["v"].shape[-1])), how,
                   tuple(chosen), draw(st.booleans()), draw(st.integers(0, 2**16)),
                   draw(st.sampled_from(sorted(TOLERANCES))), draw(st.sampled_from(["auto", "auto", "portable"])),
                   draw(st.sampled_from(["float32", *DTYPES])),
                   draw(st.sampled_from(["cpu", "cpu", "meta"])))  # fmt: skip


@contextmanager
def defaults(dtype: str, device: str) -> Iterator[None]:
    """Let torch make other tensors where nothing is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def expected_of(example: Example, how: How) -> tuple[dict[str, NDArray[Any]], float]:
    """Return what a transformation of the dense formula gives, and its largest number, at least 1."""
    found = how(example, example.formula, *example.tensors())
    expected = {name: x.detach().double().numpy() for name, x in found.items()}
    return expected, max(1.0, *(float(np.abs(x).max(initial=0.0)) for x in expected.values()))


def check(example: Example) -> None:
    arrays, d_out = example.tensors()
    expected, size = expected_of(example, HOW[example.how])

    def ours(**given: Any) -> Any:
        return relative_attention(**given, **example.options)

    again = {name: dense.each(torch.clone, x) for name, x in arrays.items()}
    try:
        with defaults(example.default_dtype, example.default_device):
            found = HOW[example.how](example, ours, again, d_out)
    except Exception as error:  # compilers wrap a ValueError
        if refused_heads(example.call.arrays["q"], error):
            return
        raise
    tolerance = HALF if example.how == "autocast" else TOLERANCES[example.dtype]
    for name, x in expected.items():
        if found[name].device.type != "cpu":
            raise WrongError(f"{name} is on {found[name].device}")
        if example.how != "autocast" and found[name].dtype != d_out.dtype:
            raise WrongError(f"{name} is of {found[name].dtype}")
        same(name, found[name].detach().double().resolve_neg().numpy(), x, tolerance * size)


def plain(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    return {"out": attend(**arrays)}


def inference(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    with torch.inference_mode():
        return {"out": attend(**arrays).clone()}


def autocast(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    with torch.autocast("cpu", torch.bfloat16):
        return {"out": attend(**arrays)}


def compiled(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    if attend == example.formula:
        return plain(example, attend, arrays, d_out)
    torch.compiler.reset()
    return {"out": torch.compile(attend, fullgraph=True, backend="aot_eager")(**arrays)}


def backward(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    given = {name: x.detach().requires_grad_() if name in example.chosen else x for name, x in arrays.items()}
    out = attend(**given)
    if out.requires_grad or attend != example.formula:  # a scale may have no product to multiply
        out.backward(d_out.to(out.dtype))
    return {"out": out, **{name: _or_zeros(given[name].grad, given[name]) for name in example.chosen}}


def kept(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    """Go back through it, for which it is computed again."""
    again = attend if attend == example.formula else partial(checkpoint, attend, use_reentrant=False)
    return backward(example, again, arrays, d_out)


def pulled(attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Callable[[Tensors], torch.Tensor]:
    def pull(own: Tensors) -> torch.Tensor:
        out = attend(**{**arrays, **own})
        return (out * d_out.to(out.dtype)).sum()

    return pull


def functional(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    """Ask ``torch.func`` for gradients."""
    own = {name: arrays[name] for name in example.chosen}
    return dict(torch.func.grad(pulled(attend, arrays, d_out))(own))


def stacked(example: Example, arrays: Tensors, *, labels: bool = False) -> Tensors:
    """Return three different versions of the chosen arrays, and of ``labels`` and masks, along a new first axis."""
    own = {name: torch.stack([_times(arrays[name], factor) for factor in (1.0, -0.5, 2.0)]) for name in example.chosen}
    others = sorted(set(arrays) - set(dense.floating(example.call.arrays))) if labels else []
    return own | {name: dense.each(lambda x: torch.stack([x, x.roll(1, -1), x]), arrays[name]) for name in others}


def mapped(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    """Map it over a new axis of the arrays that are chosen, and of segments, positions and boolean masks."""
    own = stacked(example, arrays, labels=example.labels)
    if attend == example.formula:
        items = [{name: dense.each(itemgetter(i), x) for name, x in own.items()} for i in range(3)]
        return {"out": torch.stack([attend(**{**arrays, **item}) for item in items])}
    return {"out": torch.vmap(lambda given: attend(**{**arrays, **given}), randomness="same")(own)}


def mapped_gradients(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    """Ask for the gradients of each of several items."""
    own, gradient = stacked(example, arrays), torch.func.grad(pulled(attend, arrays, d_out))
    if attend == example.formula:
        items = [gradient({name: x[i] for name, x in own.items()}) for i in range(3)]
        return {name: torch.stack([item[name] for item in items]) for name in own}
    return dict(torch.vmap(gradient, randomness="same")(own))


def forward(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    """Push tangents through it."""
    own = {name: arrays[name] for name in example.chosen}
    tangents = {name: example.numbers(*x.shape).to(x.dtype) for name, x in own.items()}
    if attend == example.formula:  # autograd differentiates two products
        cotangent = torch.zeros_like(d_out, dtype=torch.float64, requires_grad=True)
        wide = {name: x.double().requires_grad_() for name, x in own.items()}
        out = attend(**{**arrays, **wide})
        if not out.requires_grad:  # it depends on none of the chosen arrays
            return {"out": out, "tangent": torch.zeros_like(out)}
        back = torch.autograd.grad(out, list(wide.values()), cotangent, create_graph=True, materialize_grads=True)
        sums = sum(((x * tangents[name].double()).sum() for name, x in zip(wide, back, strict=True)), torch.zeros(()))
        tangent = torch.autograd.grad(sums, cotangent)[0] if sums.requires_grad else torch.zeros_like(out)
        return {"out": out, "tangent": tangent}
    out, tangent, *_ = torch.func.jvp(lambda given: attend(**{**arrays, **given}), (own,), (tangents,))
    return {"out": out, "tangent": tangent}


def dual(example: Example, attend: Callable[..., Any], arrays: Tensors, d_out: torch.Tensor) -> Tensors:
    """Push tangents through it as dual numbers."""
    if attend == example.formula:
        return forward(example, attend, arrays, d_out)
    with forward_ad.dual_level():
        own = {
            name: forward_ad.make_dual(arrays[name], example.numbers(*arrays[name].shape).to(arrays[name].dtype))
            for name in example.chosen
        }
        out, tangent = forward_ad.unpack_dual(attend(**{**arrays, **own}))
        return {"out": out, "tangent": _or_zeros(tangent, out)}


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply, but for what a mask hides."""
    return torch.where(x.isfinite(), x * factor, x)


def _or_zeros(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if x is None else x


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


HOW: dict[str, How] = {
    "call": plain, "inference": inference, "autocast": autocast, "compile": compiled, "backward": backward,
    "checkpoint": kept, "grad": functional, "vmap": mapped, "vmap of grad": mapped_gradients, "jvp": forward,
    "dual": dual,
}  # fmt: skip
TARGET = Target("transforms", 40, examples(), check)

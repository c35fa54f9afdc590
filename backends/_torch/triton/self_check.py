"""Triton: a self-check. The first fused call of a kind in a process is compared with the portable code.

Nothing is tried on devices that have a record in ``benchmarks/records``, with the releases of Triton that made it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache
from itertools import count
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.extras import warn_caller
from relskew_core._array.namespace import private
from relskew_core._array.softmax import log_sum_exp
from relskew_core._kernel.backward import attention_vjp as portable_vjp
from relskew_core._kernel.call import Arguments, Operands, Options
from relskew_core._kernel.forward import attention as portable
from relskew_core._kernel.problem import problem
from relskew_core._positions.span import Span
from relskew_core.backends._torch.triton.call import decodes

VERIFIED = frozenset[tuple[int, int, str]]()
"""The compute capabilities on which these kernels have been verified, and the releases of Triton that compiled them."""

TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 5e-3}
"""Relative L2 errors that rounding explains, including TF32's; a wrong kernel has far larger ones."""

LENGTH = 330
"""Queries and keys of a trial: more than five tiles, so that each loop repeats."""

Features = tuple[str, ...]


def refusal(operands: Operands, options: Options, *, paged: bool = False) -> str | None:
    """Return that the fused kernels failed on this device for calls of this kind, ``None`` if they did not."""
    q = operands.q
    widths = q.shape[-1], operands.v.shape[-1], (q if operands.rel_q is None else operands.rel_q).shape[-1]
    grouped = operands.k.shape[-3] != q.shape[-3]
    found = features(operands, options, paged=paged)
    return verdict(str(q.device), str(q.dtype).removeprefix("torch."), found, widths, grouped)


def features(operands: Operands, options: Options, *, paged: bool = False) -> Features:
    """Return the features of the kernels that a call uses."""
    found = [name for name, x in operands._asdict().items() if x is not None]
    if operands.mask is not None and operands.mask.dtype == torch.bool:
        found.append("boolean")
    pattern = options.visibility
    found += [name for name in ("left", "right", "block_size", "blocks_before") if getattr(pattern, name) is not None]
    if paged or decodes(operands, options):
        found += ["pages"] * paged + ["one" if pattern.n_queries == 1 else "few"]
    return (*found, options.span.beyond, *(["softcap"] if options.softcap is not None else []))


@cache
def _verdict(device: str, dtype: str, features: Features, widths: tuple[int, int, int], grouped: bool) -> str | None:
    if torch.device(device).type == "cuda":  # pragma: gpu only
        import triton

        release = ".".join(triton.__version__.split(".")[:2])
        if (*torch.cuda.get_device_capability(device), release) in VERIFIED:
            return None
    with private("_subclasses.fake_tensor.unset_fake_temporarily", nullcontext)():
        arguments = trial(torch.device(device), getattr(torch, dtype), features, widths, grouped=grouped)
        found = errors(arguments, paged="pages" in features)
        wrong = {name: error for name, error in found.items() if not error <= TOLERANCES[arguments.q.dtype]}
    if not wrong:
        return None
    listed = ", ".join(f"{name} by {error:.1e}" for name, error in wrong.items())
    reason = f"on {device} the fused kernels differ from the portable code in {listed} ({dtype}, {' '.join(features)})"
    warn_caller(
        f"relskew: {reason}. The portable code works in their place; please report this with the versions of torch and "
        "Triton and the name of the device.",
        RuntimeWarning,
    )
    return reason


verdict: Any = torch.compiler.assume_constant_result(lambda *kind: _verdict(*kind))  # which must not be traced
"""Return the result of the trial of a kind of call; torch.compile asks once."""


def trial(
    device: torch.device, dtype: torch.dtype, features: Features, widths: tuple[int, int, int], *, grouped: bool
) -> Arguments:
    """Return a small call of a kind."""
    numbers = count(1)

    def random(*shape: int) -> Tensor:
        """Return numbers from -1 to 1, by a formula, because ``torch.vmap`` forbids random ones."""
        x = torch.arange(math.prod(shape), dtype=torch.float64, device=device) * 12.9898 + 78.233 * next(numbers)
        return ((x.sin() * 43758.5453) % 2 - 1).reshape(shape).to(dtype)

    width, value_width, relative_width = widths
    span = Span(9, 7, "clip") if "clip" in features else Span(9, 7, "zero") if "zero" in features else Span.full(LENGTH)
    shapes = {"rel_k": (span.rows, relative_width), "rel_v": (span.rows, value_width), "rel_bias": (span.rows,),
              "key_table": (span.rows, width)}  # fmt: skip
    arrays: dict[str, Any] = {name: random(2, *shape) for name, shape in shapes.items() if name in features}
    n = 1 if "one" in features else 3 if "few" in features else LENGTH
    if "rel_q" in features:
        arrays["rel_q"] = random(1, 2, n, relative_width)
    if "mask" in features:
        mask = random(1, 1, n, LENGTH)
        arrays["mask"] = mask > -1 if "boolean" in features else mask
    window = (40 if "left" in features else None, 0 if "right" in features else None)
    places = torch.arange(LENGTH, dtype=torch.int64, device=device)
    if "q_segments" in features:
        arrays["segments"] = places // 90, places // 100
    if "q_positions" in features:
        arrays["positions"] = (places * 7) % LENGTH, places.flip(0)
    if "seed" in features:
        arrays |= {"dropout": 0.25, "seed": 3}
    return Arguments(
        random(1, 2, n, width),
        random(1, 1 if grouped else 2, LENGTH, width),
        random(1, 1 if grouped else 2, LENGTH, value_width),
        span=span,
        offset=LENGTH - n,
        **arrays,
        window=window,
        block_size=32 if "block_size" in features else None,
        blocks_before=2 if "blocks_before" in features else None,
        softcap=2.0 if "softcap" in features else None,
    )


def errors(arguments: Arguments, *, paged: bool = False) -> dict[str, float]:
    """Return the relative L2 error of the output, of the log-sum-exp and of every gradient, as a dictionary."""
    from relskew_core.backends._torch.triton import backward, forward

    call = problem(arguments, return_lse=True)
    with torch.no_grad(), torch.autocast(call.given.q.device.type, enabled=False):
        wide = Operands(*(x.double() if x is not None and x.is_floating_point() else x for x in call.given))
        pages = forward.Pages(*laid(call.given)) if paged else None
        out, sums = forward.attention(call.given, call.options, pages)
        own, of_own = portable(wide, call.options, xp=xp)
        assert of_own is not None
        expected = {"out": own, "lse": log_sum_exp(of_own)}
        found = {"out": out, "lse": log_sum_exp(sums)}
        d_out = torch.ones_like(out) * torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
        expected |= portable_vjp(d_out.double(), wide, call.options, xp=xp)._asdict()
        found |= backward.attention_vjp(d_out, call.given, call.options, out=out, sums=sums)._asdict()
    return {name: _error(found[name], x) for name, x in expected.items() if x is not None and found[name] is not None}


def laid(x: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the keys and values of one item in pages of 16, the last one first, their numbers, and the length."""
    length = x.k.shape[-2]
    count = -(-length // 16)
    pools = (
        torch.nn.functional.pad(y[0], (0, 0, 0, 16 * count - length)).unflatten(1, (count, 16)) for y in (x.k, x.v)
    )
    k, v = (pool.permute(1, 2, 0, 3).flip(0).contiguous() for pool in pools)
    numbers = torch.arange(count, dtype=torch.int32, device=k.device).flip(0)[None]
    return k, v, numbers, torch.full((1,), length, dtype=torch.int32, device=k.device)


def _error(found: Tensor, expected: Tensor) -> float:
    finite = expected.isfinite()
    if not torch.equal(found[~finite].double(), expected[~finite]):
        return math.inf
    return float((found[finite] - expected[finite]).norm() / expected[finite].norm().clamp(min=1e-3))

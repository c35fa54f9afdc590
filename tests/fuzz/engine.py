"""The shared part of all targets: a turn of examples from one seed, and the report of a wrong number."""

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from numpy.typing import NDArray


class WrongError(AssertionError):
    """The library did something else than it should; the message says what."""


@dataclass(frozen=True)
class Target:
    name: str
    examples: int  # how many make a turn, a second or two
    strategy: SearchStrategy[Any]
    check: Callable[[Any], None]  # raises where an example shows a defect; ``str`` of the example tells it in full


class Turn(NamedTuple):
    examples: int
    failure: str | None


def turn(target: Target, number: int, examples: int | None = None) -> Turn:
    """Try the examples that a seed gives; a failing one is made as small as it gets."""
    count, worst = 0, ""

    @seed(number)
    @settings(max_examples=examples or target.examples, database=None, deadline=None,
              phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(target.strategy)
    def attempt(example: Any) -> None:
        nonlocal count, worst
        count += 1
        try:
            target.check(example)
        except Exception:
            worst = str(example)  # the last failure is the smallest
            raise

    try:
        attempt()
    except WrongError as error:
        return Turn(count, f"{worst}\n{error}")
    except Exception as error:
        error.__notes__ = []  # Hypothesis' description of the example
        return Turn(count, f"{worst}\n{''.join(traceback.format_exception(error))}")
    return Turn(count, None)


def same(name: str, actual: Any, expected: Any, tolerance: float, where: Any = True) -> None:
    """Hold every number against what it should be, infinities included, in proportion to the largest."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise WrongError(f"{name} has shape {actual.shape}, expected {expected.shape}")
    finite = np.isfinite(expected)
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0, where=finite)))
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - expected) <= tolerance * size
    wrong = np.argwhere(~np.where(finite, near, actual == expected) & where)
    if len(wrong):
        place = tuple(map(int, wrong[0]))
        raise WrongError(
            f"{name}{list(place)} is {float(actual[place])!r}, expected {float(expected[place])!r} "
            f"within {tolerance * size:.2g}; wrong are {len(wrong)} of {expected.size}"
        )


def refused_heads(q: NDArray[Any], error: Exception) -> bool:
    """Whether a call without any head was refused by name."""
    return q.shape[-3:-2] == (0,) and "the 0 heads of `q`" in str(error)


def told(function: str, arguments: Mapping[str, Any]) -> str:
    lines = [f"    {name}={_written(value)}," for name, value in arguments.items() if value is not None]
    return "\n".join([f"{function}(", *lines, ")"])


def _written(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    numbers = np.array2string(value, separator=", ", threshold=sys.maxsize, floatmode="unique", max_line_width=120)
    return f"asarray({numbers})" if value.size else f"zeros({value.shape})"


def largest_logit(arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]) -> float:
    """Bound the logits: to round one of size ``s`` costs ``s · eps``, in any implementation."""
    q, k = arrays["q"], arrays["k"]
    scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    rel_scale = scale if options["rel_scale"] is None else options["rel_scale"]
    rel_k, key_table = (_longest(arrays[name]) if name in arrays else 0.0 for name in ("rel_k", "key_table"))
    products = abs(scale) * _longest(q) * _longest(k)
    products += abs(rel_scale) * (_longest(arrays.get("rel_q", q)) * rel_k + key_table * _longest(k))
    added = [arrays[name] for name in ("rel_bias", "mask") if name in arrays and arrays[name].dtype != np.bool_]
    return float(products + sum(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)) for x in added))


def _longest(x: NDArray[Any]) -> float:
    x = np.where(np.isfinite(x), x, 0.0).astype(np.float64)
    return float(np.max(np.linalg.norm(x, axis=-1), initial=0.0))

"""Random blocks as ONNX graphs, run at several lengths, against plain loops in float64."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

import onnx_sessions
import strategies
from export_forms import PROFILES, random_weights
from fuzz.engine import Target, WrongError, same, told
from libraries import GATES
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx
from relskew_core.export._check.inspect import Subject
from relskew_core.export._check.questions import expected_outputs
from relskew_core.export._check.runtimes import Source
from relskew_core.export._files.library import found_library
from relskew_core.export._form.plan import make_plan

Arrays = dict[str, NDArray[Any]]
OF_PLAN = ("profile", "max_length", "past", "in_place", "mask", "segments", "projections")
sides = st.none() | st.integers(0, 6)


class Sizes(NamedTuple):
    """One input of a graph; in a cache in place, every item of the batch has a separate past."""

    batch: int
    queries: int
    past: int
    memory: int
    cache: int  # free places of a cache in place


@dataclass(frozen=True)
class Example:
    spec: BlockSpec
    options: dict[str, Any]
    runtime: str
    seed: int
    inputs: list[Sizes]

    def __str__(self) -> str:
        head = f"# {self.runtime}; seed {self.seed}; {self.inputs}\n"
        return head + told("to_onnx", {"spec": self.spec, **self.options})

    @property
    def projections(self) -> bool:
        return bool(self.options["projections"])


@st.composite
def specs(draw: st.DrawFn) -> BlockSpec:
    kv_heads, kind = draw(st.integers(1, 2)), draw(st.sampled_from(["all", "causal", "cross", "blocks", "stream"]))
    tables = draw(st.sampled_from(["rel_keys", "rel_values", "rel_bias"]))
    causal = kind in ("causal", "blocks") or draw(st.booleans())
    window, left = draw(st.none() | st.tuples(sides, sides)), draw(st.integers(0, 9))
    # whether the future is bounded
    said = causal or kind == "cross" or left == 0 or (window is not None and window[1] is not None)
    return BlockSpec(
        draw(st.integers(1, 5)), kv_heads * draw(st.integers(1, 3)),
        Span(left, draw(st.integers(0 if said else 1, 9)), draw(st.sampled_from(["error", "clip", "zero"]))),
        num_kv_heads=kv_heads, head_dim=draw(st.integers(1, 4)), causal=causal, cross=kind == "cross", window=window,
        block_size=draw(st.integers(1, 4)) if kind in ("blocks", "stream") else None,
        blocks_before=draw(st.integers(0, 3)) if kind == "stream" else None, sinks=draw(st.booleans()),
        shared_table=draw(st.booleans()), bias=draw(st.booleans()),
        **{name: name == tables or draw(st.booleans()) for name in ("rel_keys", "rel_values", "rel_bias")},
    )  # fmt: skip


@st.composite
def examples(draw: st.DrawFn) -> Example:
    spec = draw(specs())
    cached = (spec.causal or spec.blocks_before is not None) and not spec.cross and draw(st.booleans())
    in_place = cached and spec.causal and draw(st.booleans())
    longest = spec.span.left + 1 if spec.causal and not spec.cross else min(spec.span.left, spec.span.right) + 1
    dtype, runtime = draw(st.sampled_from(["float32", "float32", "float64", "float16"])), "onnxruntime"
    if dtype == "float32" and not in_place and draw(st.sampled_from([False] * 4 + [True])):
        runtime = "reference"
    operator = draw(st.sampled_from([False, False, True]))
    if operator and runtime != "reference" and draw(st.booleans()) and found_library() is not None:
        runtime = "onnxruntime with the operator library"
    options = {
        "profile": "ort" if in_place else draw(st.sampled_from(PROFILES)), "dtype": dtype,
        "max_length": draw(st.none() | st.integers(1, longest)), "past": cached, "in_place": in_place,
        "mask": draw(st.booleans()), "segments": not spec.cross and draw(st.booleans()),
        "projections": draw(st.booleans()), "operator": operator,
        "chunk_size": None if in_place or spec.block_size else draw(st.none() | st.integers(1, 5)),
    }  # fmt: skip
    pasts = st.integers(0, 6) if cached else st.just(0)
    lengths = st.builds(Sizes, st.integers(1, 3), st.integers(1, 14), pasts, st.integers(1, 14), st.integers(0, 4))
    return Example(spec, options, runtime, draw(strategies.seeds), draw(st.lists(lengths, min_size=1, max_size=4)))


def check(example: Example) -> None:
    spec, options = example.spec, example.options
    weights = random_weights(spec, example.seed, projections=example.projections)
    try:
        model = to_onnx(spec, weights, **options)
    except ValueError as error:  # a stream with a cache may not exceed its table at any length
        if spec.blocks_before is not None and "requires a table that reaches" in str(error):
            return
        if options["operator"] and "requires a `max_length` that cuts both ends of the tables" in str(error):
            return
        raise
    run = opened(model, example.runtime)
    dtype = options["dtype"]
    plan = make_plan(spec, np.dtype(dtype), **{name: options[name] for name in OF_PLAN})
    subject = Subject(Source(model, None), plan, {name: x.astype(dtype) for name, x in weights.items()}, ())
    for number, sizes in enumerate(example.inputs):
        feeds = drawn(example, sizes, np.random.default_rng([example.seed, number]))
        try:
            expected, _ = expected_outputs(subject, feeds)
        except ValueError as error:
            if "no row for the relative positions" not in str(error):
                raise
            expected = []
        may_fail = not expected or too_long(options["max_length"], sizes, spec) or short_of_blocks(sizes, spec)
        try:
            actual = run(feeds)
        except Exception as error:
            if may_fail:
                continue
            raise WrongError(f"{sizes}: {type(error).__name__}: {str(error)[:2000]}") from error
        if may_fail and not np.all(np.isfinite(actual[0])):
            continue
        if not expected:
            raise WrongError(f"{sizes}: past the table's reach, yet all numbers are finite")
        for name, x, y in zip(("y", "present_key", "present_value"), actual, expected, strict=False):
            same(f"{sizes}: {name}", x.astype(np.float64), y, 10 * GATES[dtype])


def too_long(max_length: int | None, sizes: Sizes, spec: BlockSpec) -> bool:
    """Whether an input is longer than was asked for: the graph may fail then, but never give other numbers."""
    keys = sizes.memory if spec.cross else sizes.past + sizes.queries
    return max_length is not None and max(sizes.queries, keys) > max_length


def short_of_blocks(sizes: Sizes, spec: BlockSpec) -> bool:
    """Whether the past is longer than a table that reaches less far than blocks can: the graph reads rows beyond it."""
    if spec.block_size is None or spec.span.beyond != "error" or not sizes.past:
        return False
    before = 1 if spec.blocks_before is None else spec.blocks_before
    seen = [(before + 1) * spec.block_size - 1, *(side for side in (spec.window or ())[:1] if side is not None)]
    return min(seen) > spec.span.left and sizes.past + sizes.queries > spec.span.left + 1


def opened(model: Any, runtime: str) -> Any:
    if runtime == "reference":
        evaluator = ReferenceEvaluator(model)
        return lambda feeds: evaluator.run(None, feeds)
    session = onnx_sessions.opened(model, library=runtime != "onnxruntime", intra_op_num_threads=1)
    return lambda feeds: session.run(None, feeds)


def drawn(example: Example, sizes: Sizes, numbers: np.random.Generator) -> Arrays:
    spec, options = example.spec, example.options
    keys = sizes.memory if spec.cross else sizes.queries

    def normal(*shape: int) -> NDArray[Any]:
        return numbers.standard_normal(shape).astype(options["dtype"])

    if example.projections:
        feeds = {"x": normal(sizes.batch, sizes.queries, spec.embed_dim)}
        if spec.cross:
            feeds["memory"] = normal(sizes.batch, keys, spec.embed_dim)
    else:
        feeds = {"q": normal(sizes.batch, spec.num_heads, sizes.queries, spec.head_dim)}
        feeds |= {name: normal(sizes.batch, spec.num_kv_heads, keys, spec.head_dim) for name in "kv"}
    cache = sizes.past + (sizes.queries + sizes.cache if options["in_place"] else 0)
    if options["past"]:
        shape = (sizes.batch, spec.num_kv_heads, cache, spec.head_dim)
        feeds |= {"past_key": normal(*shape), "past_value": normal(*shape)}
    total = cache if options["in_place"] else keys + cache
    if options["mask"]:
        full = (sizes.batch, spec.num_heads, sizes.queries, total)
        some = tuple(int(numbers.choice([1, size])) for size in full[:3])
        feeds["mask"] = numbers.random((*some, total)) < numbers.choice([0.3, 0.8, 1.0])
    if options["segments"]:
        feeds["segments"] = numbers.integers(0, 3, (sizes.batch, total))
    if options["in_place"]:
        feeds["past_lengths"] = numbers.integers(0, sizes.past + 1, sizes.batch)
    return feeds


TARGET = Target("exports", 20, examples(), check)

"""Graphs of every form with inputs that `validate` tries: empty batches, symbols, queries without a key, nodes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops import op_attention

from export_forms import FORMS, IN_PLACE, PROFILES, exported, made, valid
from graph_text import FOLDER, WRITTEN, model_of, plans, text
from onnx_sessions import BROADCASTS_EMPTY, opened
from operator_runs import needs_library
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import quantize, to_onnx
from relskew_core.export._check.runtimes import Feeds, Source, open_reference, refuses_empty_batch
from relskew_core.export._check.trials import Trial, make_inputs, make_trials
from relskew_core.export._form.plan import GraphPlan, make_plan
from relskew_core.export._nodes.emitter import Emitter

CASES = [
    *((form, {"profile": PROFILES[place % 3]}) for place, form in enumerate(FORMS)),
    *((form, {"profile": ("ort", "portable")[place % 2]} | {"chunk_size": 3})
      for place, (form, (spec, _)) in enumerate(FORMS.items()) if spec.block_size is None),
    *((form, {"profile": "ort"}) for form in IN_PLACE),
]  # fmt: skip
case = pytest.mark.parametrize(
    ("form", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
REFUSALS = re.compile(r"running (\w+) node\. Name:'([^']*)'")


def planned(form: str, options: dict[str, Any]) -> tuple[onnx.ModelProto, GraphPlan]:
    spec, own, weights = made(form)
    return to_onnx(spec, weights, **own, **options), make_plan(spec, np.dtype(np.float32), **own, **options)


def tried(plan: GraphPlan, lengths: list[int] | None = None) -> list[Feeds]:
    return [make_inputs(plan, trial, seed) for trial, seed in make_trials(plan, lengths, (2,), 0) if trial.fits]


def shapes(plan: GraphPlan, trial: Trial) -> list[tuple[int, ...]]:
    spec, width = plan.spec, plan.spec.head_dim
    heads = (0, spec.num_heads, trial.queries, width)
    cache = (0, spec.num_kv_heads, trial.cache or trial.keys, width)
    return [(0, trial.queries, spec.embed_dim) if plan.projections else heads, *([cache] * 2 if plan.past else [])]


@pytest.mark.parametrize("kind", ["weights-8", "static"])
@pytest.mark.parametrize("blocks", [{}, {"block_size": 32}], ids=str)
def test_an_empty_batch_is_refused_by_quantised_products(kind: Any, blocks: dict[str, Any], tmp_path: Path) -> None:
    """As products with tables of heads do in float32: those of older releases, and then the attention after them."""
    spec = BlockSpec(64, 2, Span.causal(64), causal=True, **blocks)
    weights = init_weights(spec, seed=0)
    x = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    given = [{"x": 9 * x}] if kind == "static" else None
    path = quantize(to_onnx(spec, weights), tmp_path / "small.onnx", kind, inputs=given)
    report = valid(path, spec, weights, tolerance=0.6)
    (empty,) = {check.detail.split(" of ")[0] for check in report.checks if "batch 0" in check.case}
    products = ("refused by MatMulIntegerToFloat", "refused by QLinearMatMul")
    assert empty in (("refused by Attention",) if BROADCASTS_EMPTY else products)


@pytest.mark.no_cover
@case
def test_an_empty_batch_gives_empty_results_or_the_refusals_of_the_page(form: str, options: dict[str, Any]) -> None:
    """Supported by the standard; `docs/graphs.md` describes what onnxruntime rejects."""
    model, plan = planned(form, options)
    trials = [trial for trial, _ in make_trials(plan, None, (1,), 0) if trial.fits and trial.queries < 20]
    trial = replace(max(trials, key=lambda trial: (trial.queries, trial.past)), batch=0)
    feeds = make_inputs(plan, trial, 0)
    results: Any = open_reference(Source(model, None), "").run(feeds)
    assert [result.shape for result in results] == shapes(plan, trial)
    refusal: Any = None
    try:
        results = opened(model).run(None, feeds)
    except Exception as error:  # its class is not defined
        refusal = error
    if refusal is None:
        assert [result.shape for result in results] == shapes(plan, trial)
        return
    assert refuses_empty_batch(refusal)
    op_type, name = REFUSALS.findall(str(refusal))[-1]
    table_by_head = not plan.spec.shared_table and ("/relative/logits" in name or "/relative/values" in name)
    table_by_head &= not BROADCASTS_EMPTY
    assert op_type == "Attention" or (table_by_head and op_type in ("MatMul", "FusedMatMul")), refusal


class Attention(op_attention.Attention):  # named like the operator that it replaces
    """Makes NaN of queries that see no key, as onnxruntime did before 1.28 and others may."""

    made = 0

    def _run(self, *args: Any, **attributes: Any) -> Any:
        out, *others = super()._run(*args, **attributes)
        dead = np.all(out == 0, axis=-1, keepdims=True)
        Attention.made += int(dead.sum())
        return np.where(dead, np.nan, out).astype(out.dtype), *others


@pytest.mark.parametrize("form", [
    "full, mask", "cache, mask", "cache, window, mask", "cross, window", "stream, mask", "core: full, mask",
    "core: cross, window, mask",
])  # fmt: skip
@pytest.mark.parametrize("profile", ["ort", "trt"])
def test_queries_without_a_key_are_zeros_where_attention_makes_nan(form: str, profile: str) -> None:
    (model, plan), before = planned(form, {"profile": profile}), Attention.made
    assert plan.fused
    old, new = ReferenceEvaluator(model, new_ops=[Attention]), opened(model)
    for feeds in tried(plan):
        for result, wanted in zip(old.run(None, dict(feeds)), new.run(None, feeds), strict=True):
            np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-5)
    assert Attention.made > before


@pytest.mark.no_cover
@pytest.mark.parametrize("form", FORMS)
def test_equal_symbols_are_equal_lengths(form: str) -> None:
    """Runtimes share buffers between tensors of equal symbolic shapes."""
    model, plan = planned(form, {"profile": PROFILES[[*FORMS].index(form) % 3]})
    del model.graph.output[1:]
    model.graph.output.extend(info for info in model.graph.value_info)
    written = {info.name: info.type.tensor_type for info in model.graph.output}
    run = opened(model)
    for feeds in tried(plan)[:6]:
        lengths: dict[str, int] = {}
        for value, result in zip(run.get_outputs(), list[Any](run.run(None, feeds)), strict=True):
            dims = written[value.name].shape.dim
            assert len(dims) == result.ndim, value.name
            for dim, length in zip(dims, result.shape, strict=True):
                wanted = lengths.setdefault(dim.dim_param, length) if dim.dim_param else dim.dim_value
                assert length == wanted, (value.name, dim.dim_param, result.shape)


def results(model: onnx.ModelProto, feeds: Feeds, *, library: bool = False) -> list[Any] | None:
    session = opened(model, library=library)
    try:
        return list(session.run(None, feeds))
    except Exception as error:
        if "relskew" not in str(error):  # the error names a node or the operator
            raise
        return None


@needs_library
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("cross, clip, short", "cross, zero, short")])
def test_a_node_gives_the_plain_numbers_with_the_library_and_without(form: str) -> None:
    (model, *_), (plain, plan) = exported(form, operator=True), planned(form, {})
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count("RelativeAttention") == 1
    for trial, seed in make_trials(plan, [4, 10], [3], 0)[:4]:
        feeds = make_inputs(plan, trial, seed)
        expected = results(plain, feeds)
        for library in (True, False):
            found = results(model, feeds, library=library)
            assert (found is None) == (expected is None)
            for one, other in zip(found or (), expected or (), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def test_many_blocks_before_are_masked_instead_of_folded() -> None:
    """Each block before is one more copy of the keys."""
    for before, folded in ((8, True), (9, False)):
        spec = BlockSpec(8, 2, Span(2 * before + 1, 1), block_size=2, blocks_before=before)
        assert make_plan(spec, np.dtype(np.float32)).local == folded


# Graphs, to the letter: names, shapes and doc strings are promises too, and a change of them must be meant


@pytest.mark.parametrize("name", WRITTEN)
def test_graph(name: str) -> None:
    """``tests/support/graph_text.py`` writes them anew; what changed is to be read."""
    assert text(model_of(name)) == (FOLDER / f"{name}.txt").read_text()


def test_no_two_tensors_have_one_name() -> None:
    """Also in branches and loops, in which outer names are visible."""
    g = Emitter(np.dtype(np.float32))
    x = g.input("x", ("n",), "numbers")
    g.compute("Abs", [x], "twice", x.shape)
    for inner in (g, Emitter(g.dtype, g)):
        with pytest.raises(ValueError, match="two tensors of the graph would be called 'relskew/compute/twice'"):
            inner.compute("Abs", [x], "twice", x.shape)
    Emitter(g.dtype, g, "branch/").compute("Abs", [x], "twice", x.shape)


def test_plans_and_no_other_graph_are_there() -> None:
    assert plans() == (FOLDER / "plans.txt").read_text()
    assert {path.stem for path in FOLDER.iterdir()} == {*WRITTEN, "plans", "trials"}

"""A batch of nothing gives nothing: every form in every profile, but where onnxruntime refuses it itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import FORMS, IN_PLACE, PROFILES, made
from onnx_sessions import BROADCASTS_EMPTY, opened
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import quantize, to_onnx, validate
from relskew_core.export._check.runtimes import Source, open_reference, refuses_empty_batch
from relskew_core.export._check.trials import Trial, make_inputs, make_trials
from relskew_core.export._form.plan import GraphPlan, make_plan

CHUNKS = {"chunk_size": 3}
CASES = [
    *((form, {"profile": PROFILES[place % 3]}) for place, form in enumerate(FORMS)),
    *((form, {"profile": ("ort", "portable")[place % 2]} | CHUNKS)
      for place, (form, (spec, _)) in enumerate(FORMS.items()) if spec.block_size is None),
    *((form, {"profile": "ort"}) for form in IN_PLACE),
]  # fmt: skip
case = pytest.mark.parametrize(
    ("form", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
REFUSALS = re.compile(r"running (\w+) node\. Name:'([^']*)'")


def exported(form: str, options: dict[str, Any]) -> tuple[onnx.ModelProto, GraphPlan, Trial]:
    """Return a graph, its plan, and an input of several positions with a batch of 0."""
    spec, own, weights = made(form)
    plan = make_plan(spec, np.dtype(np.float32), **own, **options)
    trials = [trial for trial, _ in make_trials(plan, None, (1,), 0) if trial.fits and trial.queries < 20]
    longest = max(trials, key=lambda trial: (trial.queries, trial.past))
    return to_onnx(spec, weights, **own, **options), plan, replace(longest, batch=0)


def shapes(plan: GraphPlan, trial: Trial) -> list[tuple[int, ...]]:
    """Return what the outputs should be like."""
    spec, width = plan.spec, plan.spec.head_dim
    heads = (0, spec.num_heads, trial.queries, width)
    cache = (0, spec.num_kv_heads, trial.cache or trial.keys, width)
    return [(0, trial.queries, spec.embed_dim) if plan.projections else heads, *([cache] * 2 if plan.past else [])]


@pytest.mark.parametrize("kind", ["weights-8", "static"])
@pytest.mark.parametrize("blocks", [{}, {"block_size": 32}], ids=str)
def test_quantised_products_refuse_an_empty_batch_too(kind: Any, blocks: dict[str, Any], tmp_path: Path) -> None:
    """As products with tables of heads do in float32: those of older releases, and then the attention after them."""
    spec = BlockSpec(64, 2, Span.causal(64), causal=True, **blocks)
    weights = init_weights(spec, seed=0)
    x = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    given = [{"x": 9 * x}] if kind == "static" else None
    path = quantize(to_onnx(spec, weights), tmp_path / "small.onnx", kind, inputs=given)
    report = validate(path, spec, weights, tolerance=0.6)
    assert report.ok, report.table()
    (empty,) = {check.detail.split(" of ")[0] for check in report.checks if "batch 0" in check.case}
    products = ("refused by MatMulIntegerToFloat", "refused by QLinearMatMul")
    assert empty in (("refused by Attention",) if BROADCASTS_EMPTY else products)


@pytest.mark.no_cover
@case
def test_an_empty_batch(form: str, options: dict[str, Any]) -> None:
    """Supported by the standard; `docs/export.md` describes what onnxruntime rejects."""
    model, plan, trial = exported(form, options)
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

"""Models of torch with relative attention, exported by torch.onnx.export with our translations, in onnxruntime."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from relskew_core import BlockSpec, Span, relative_attention
from relskew_core._kernel.call import KINDS, LABELS, Arguments, Options, unsupported
from relskew_core._kernel.problem import problem
from relskew_core._positions.visibility import Visibility
from relskew_core.export._translate.translation import SUPPORTED
from relskew_core.layers.torch import RelativeMultiheadAttention
from torch_calls import ALONG, CLIP, CROSS, FULL, LONG, PLACED, TABLE, VALUES
from torch_exports import VARY, assert_same, export, operators, random, session


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = RelativeMultiheadAttention(BlockSpec(16, 4, **options))
        self.across = RelativeMultiheadAttention(
            BlockSpec(16, 4, Span.clipped(3), cross=True, num_kv_heads=2, rel_values=True)
        )
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = x + self.across(x, memory)
        result: Tensor = x + self.feed(x)
        return result


class Model(nn.Module):
    """Embedding, an encoder, two layers with cross attention, the logits of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.encoder = RelativeMultiheadAttention(BlockSpec(16, 4, Span.full(24), shared_table=True))
        self.layers = nn.ModuleList(
            [Layer(span=Span.causal(24), causal=True), Layer(span=Span(4, 0), causal=True, window=(4, None))]
        )

    def forward(self, tokens: Tensor, source: Tensor) -> Tensor:
        memory = self.encoder(self.embedding(source))
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, memory)
        return x @ self.embedding.weight.T


def tokens(batch: int, *lengths: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 50, (batch, length), generator=generator) for length in lengths)


@pytest.mark.no_cover
def test_model() -> None:
    model, opset = Model(), 23
    vary = {"tokens": {0: VARY, 1: VARY}, "source": {0: VARY, 1: VARY}}
    program = export(model, tokens(2, 7, 5), vary, opset)
    assert operators(program).count("Attention") == 3  # relative values are separate nodes
    assert {"": opset} == dict(program.model.opset_imports)
    ours = [node.name.split("/") for node in program.model.graph if node.name.startswith("relskew/compute/")]
    assert {path[2] for path in ours} == {f"attention_{number}" for number in range(1, 6)}
    run = session(program)
    for batch, queries, keys in ((1, 1, 1), (2, 7, 5), (3, 1, 9), (1, 24, 1), (2, 3, 24), (1, 24, 24)):
        assert_same(run(*tokens(batch, queries, keys)), model, *tokens(batch, queries, keys))
    for queries, keys in ((25, 1), (1, 25)):  # at the ends of the tables
        with pytest.raises(Exception, match="Reshape"):
            run(*tokens(1, queries, keys))


class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Any:
        return relative_attention(q, k, k, scale=1.0)


def test_attention_without_tables_has_no_longest_length() -> None:
    def arrays(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, 2, queries, 4), torch.randn(batch, 2, keys, 4)

    vary = {"q": {0: VARY, 2: VARY}, "k": {0: VARY, 2: VARY}}
    run = session(export(Plain(), arrays(2, 7, 5), vary, 23))
    for shape in ((1, 1, 1), (1, 2, 9), (3, 40, 30), (2, 5, 1)):
        given = arrays(*shape)
        assert_same(run(*given), Plain(), *given)


class Cached(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = RelativeMultiheadAttention(BlockSpec(16, 4, num_kv_heads=2, causal=True, **options))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        y, present = self.attention(x, past=(keys, values))
        return y, *present


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("opset", "options"),
    [(23, {"span": Span.causal(24)}), (18, {"span": Span(2, 0, "zero"), "window": (4, None), "rel_values": True})],
    ids=["causal", "window"],
)
def test_cache(opset: int, options: dict[str, Any]) -> None:
    model = Cached(**options)
    cache = {0: VARY, 2: VARY}
    inputs = torch.randn(2, 5, 16), torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    program = export(model, inputs, {"x": {0: VARY, 1: VARY}, "keys": cache, "values": cache}, opset)
    assert "Clip" not in operators(program)  # a single sequence is known, with half the product of the table
    run = session(program)
    x = torch.randn(3, 24, 16)
    keys = values = torch.zeros(3, 2, 0, 4)
    pieces = []
    for piece in x.split([7, 1, 1, 4, 11], dim=1):
        results = run(piece, keys, values)
        assert_same(results, model, piece, keys, values)
        keys, values = map(torch.from_numpy, results[1:])
        pieces.append(results[0])
    at_once = run(x, torch.zeros(3, 2, 0, 4), torch.zeros(3, 2, 0, 4))[0]
    assert np.allclose(np.concatenate(pieces, axis=1), at_once, atol=1e-5)


class Across(nn.Module):
    """Many calls with queries and keys of different lengths, and masks that hide all keys of some queries."""

    def __init__(self, calls: Iterable[str]) -> None:
        super().__init__()
        self.calls = [CROSS[name] for name in calls]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Any, ...]:
        results: list[Any] = []
        for call in self.calls:
            for shown in (None, mask):
                result = relative_attention(q, k, v, **{"offset": 0, **call}, mask=shown)
                results += result if isinstance(result, tuple) else [result]
        return tuple(results)


class Shapes(nn.Module):
    """Masks that are added, arrays with fewer axes and with more."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Any, ...]:
        additive = torch.where(mask, q[:, :1, :, :1], -torch.inf)
        return (
            relative_attention(q, k, v, TABLE, CLIP, offset=0, mask=additive),
            relative_attention(q, k, v, TABLE, CLIP, offset=0, mask=additive, rel_v=VALUES),
            relative_attention(q, k, v, TABLE, CLIP, offset=0, rel_q=q + 1),
            relative_attention(q[0], k[0], v[0], TABLE, CLIP, offset=0, mask=mask[0]),
            relative_attention(q[None] * 2, k[None], v[None], TABLE, CLIP, offset=0),
            relative_attention(q[0, 0], k[0, 0], v[0, 0], TABLE[0], CLIP, offset=0),
            *relative_attention(q[None] * 2, k[None], v[None], TABLE, CLIP, offset=0, return_lse=True),
            *relative_attention(q[0], k[0], v[0], TABLE, CLIP, offset=0, return_lse=True),
            relative_attention(q, k, v, TABLE, CLIP, offset=0, mask=additive, softcap=1.5),
            # More queries than keys: the first ones are before all keys.
            relative_attention(q, k, v, TABLE, CLIP, offset=k.shape[2] - q.shape[2], causal=True),
            relative_attention(q, k, v, key_table=TABLE, span=CLIP, offset=k.shape[2] - q.shape[2]),
            relative_attention(q, k[:, :1], v[:, :1], key_table=TABLE, span=CLIP, offset=0),
        )


def across(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    mask = random(batch, 1, queries, keys, seed=4) > 0
    mask[0, :, 0] = False
    q, k, v = random(batch, 4, queries, 6, seed=1), random(batch, 2, keys, 6, seed=2), random(batch, 2, keys, 5, seed=3)
    return q, k, v, mask


ACROSS = {
    "q": {0: VARY, 2: VARY},
    "k": {0: VARY, 2: VARY},
    "v": {0: VARY, 2: VARY},
    "mask": {0: VARY, 2: VARY, 3: VARY},
}


def compare_across(model: nn.Module, opset: int) -> None:
    run = session(export(model, across(2, 5, 7), ACROSS, opset))
    for shape in ((2, 5, 7), (1, 1, 1), (3, 1, 8), (2, 12, 1), (1, 12, 12)):
        assert_same(run(*across(*shape)), model, *across(*shape))


@pytest.mark.no_cover
@pytest.mark.parametrize(("opset", "part"), [(18, slice(0, None, 3)), (23, slice(1, None, 4))])
def test_calls_optimised(opset: int, part: slice) -> None:
    """Some calls, because torch's exporter takes seconds; `test_translation.py` has all of them without it."""
    compare_across(Across([*CROSS][part]), opset)


def test_other_shapes() -> None:
    compare_across(Shapes(), 18)


class Along(nn.Module):
    """Many calls with queries and keys known to be of one length."""

    def __init__(self, calls: Iterable[str]) -> None:
        super().__init__()
        self.calls = [ALONG[name] for name in calls]

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Any, ...]:
        q, k = x, x[:, :2] * 2
        return tuple(
            relative_attention(q, k, k - 1, **call, mask=shown) for call in self.calls for shown in (None, mask)
        )


@pytest.mark.parametrize(("opset", "part"), [(18, slice(1, None, 2)), (23, slice(0, None, 2))])
def test_calls_along_one_sequence(opset: int, part: slice) -> None:
    def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
        return random(batch, 4, length, 6, seed=1), random(batch, 1, 1, length, seed=2) > -1

    model = Along([*ALONG][part])
    program = export(model, inputs(2, 5), {"x": {0: VARY, 2: VARY}, "mask": {0: VARY, 3: VARY}}, opset)
    causal = sum(node.attributes.get_int("is_causal", 0) for node in program.model.graph if node.op_type == "Attention")
    single = [call for call in model.calls if "rel_v" not in call]
    unmasked = sum("causal" in call and "blocks_before" not in call for call in single)
    assert causal == (unmasked if opset == 23 else 0)  # with a mask it is part of the condition
    run = session(program)
    for shape in ((2, 5), (1, 1), (3, 12), (1, 7)):
        assert_same(run(*inputs(*shape)), model, *inputs(*shape))


class Placed(nn.Module):
    """Many calls with positions in any order and segments."""

    def __init__(self, calls: Iterable[str]) -> None:
        super().__init__()
        self.calls = [PLACED[name] for name in calls]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor, keys_at: Tensor, of: Tensor, keys_of: Tensor) -> Any:
        results: list[Any] = []
        for call in self.calls:
            for stands, segments in (((at, keys_at), None), ((at[0], keys_at), (of, keys_of[0]))):
                result = relative_attention(q, k, v, **call, positions=stands, segments=segments)
                results += result if isinstance(result, tuple) else [result]
        results += [
            relative_attention(q, k, v, TABLE, CLIP, offset=0, segments=(of, keys_of)),
            relative_attention(
                q, k, v, TABLE, CLIP, offset=0, segments=(of, keys_of), rel_v=VALUES, sinks=TABLE[:, 0, 0]
            ),
            relative_attention(q[None], k[None], v[None], TABLE, CLIP, offset=0, segments=(of[None], keys_of[0])),
            relative_attention(q[0], k[0], v[0], TABLE, CLIP, positions=(at[0], keys_at[0])),
        ]
        return tuple(results)


def placed(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    labels = [
        torch.randint(*limits, (batch, length), generator=generator)
        for limits in ((-4, 5), (0, 3))
        for length in (queries, keys)
    ]
    return (*across(batch, queries, keys)[:3], *labels)


@pytest.mark.parametrize(("opset", "part"), [(18, slice(None, None, 2)), (23, slice(1, None, 2))])
def test_positions_and_segments(opset: int, part: slice) -> None:
    model = Placed([*PLACED][part])
    vary = {name: {0: VARY, 2: VARY} for name in "qkv"} | {
        name: {0: VARY, 1: VARY} for name in ("at", "keys_at", "of", "keys_of")
    }
    program = export(model, placed(2, 5, 7), vary, opset)
    run = session(program)
    for shape in ((2, 5, 7), (1, 1, 1), (3, 1, 8), (2, 12, 1), (1, 12, 12)):
        assert_same(run(*placed(*shape)), model, *placed(*shape))


REFUSED = {"seed", "dropout", "part", "axis_tables"}
"""Fields of a call that no graph has: of training, of a call that is split over processes, and of grids in kernels."""


def test_every_field_of_a_call_is_tried_here_or_refused() -> None:
    q, k, v, mask = across(2, 5, 7)
    at, keys_at, of, keys_of = placed(2, 5, 7)[3:]
    labels = {"positions": (at, keys_at), "segments": (of, keys_of)}
    groups: list[tuple[tuple[Tensor, ...], dict[str, Any], dict[str, dict[str, Any]]]] = [
        ((q, k, v), {"mask": mask}, CROSS),
        ((q, q[:, :2], q[:, :2]), {}, ALONG),
        ((q, k, v), labels, PLACED),
    ]
    tried: set[str] = set()
    for (queries, keys, values), more, calls in groups:
        for call in calls.values():
            options = call | more
            asks = options.pop("return_lse", False)
            offset = {} if "positions" in options else {"offset": 0}  # lengths differ
            checked = problem(Arguments(queries, keys, values, **{**offset, **options}), return_lse=asks)
            tried.update(unsupported(checked.given, checked.options, frozenset()))
    tried.add("rel_q")  # one of `Shapes`
    fields = {name.partition("_")[2] if name in LABELS else name for name in KINDS}
    fields.update(name for kind in (Options, Span, Visibility) for name in defaults_of(kind))
    fields.remove("by_value")
    assert fields - tried == REFUSED
    assert not REFUSED & SUPPORTED


def defaults_of(kind: Any) -> list[str]:
    missing = dataclasses.MISSING
    return [
        field.name for field in dataclasses.fields(kind)
        if field.default is not missing or field.default_factory is not missing
    ]  # fmt: skip


class Gap(nn.Module):
    """Queries and keys of lengths of their own, and an offset that is the length of something else."""

    def forward(self, q: Tensor, k: Tensor, gap: Tensor) -> Any:
        offset = gap.shape[0]
        full = relative_attention(q, k, k, LONG, FULL, offset=offset)
        return full, relative_attention(q, k, k, TABLE, CLIP, offset=offset, rel_v=TABLE)


def test_an_offset_unknown_to_torch() -> None:
    def inputs(queries: int, keys: int, gap: int) -> tuple[Tensor, ...]:
        return random(2, 4, queries, 6, seed=1), random(2, 2, keys, 6, seed=2), random(gap)

    model = Gap()
    run = session(export(model, inputs(3, 7, 2), {"q": {2: VARY}, "k": {2: VARY}, "gap": {0: VARY}}, 18))
    for shape in ((3, 7, 2), (1, 1, 1), (2, 3, 10), (1, 12, 0), (5, 15, 4)):
        assert_same(run(*inputs(*shape)), model, *inputs(*shape))
    for queries, keys, gap in ((5, 3, 8), (2, 17, 4), (1, 14, 1)):  # one position too far, to the left or to the right
        with pytest.raises(Exception, match="Max"):
            run(*inputs(queries, keys, gap))


class One(nn.Module):
    """One call with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor) -> Any:
        return relative_attention(q[:, None], k[:, None], k[:, None], TABLE, CLIP, offset=0, **self.options)


def test_dropout_is_refused() -> None:
    inputs = random(2, 4, 5, 6), random(2, 2, 7, 6)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - torch wraps it in its own
        export(One(dropout=0.5, seed=1), inputs, {"q": {2: VARY}, "k": {2: VARY}}, 23)
    told = []
    error: BaseException | None = caught.value
    while error is not None:
        told.append(str(error))
        error = error.__cause__
    assert "`dropout` belongs to training" in "\n".join(told)


def test_export_needs_neither_torch_nor_onnxscript() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'onnxscript', 'onnx_ir'): sys.modules[name] = None\n"
        "import relskew_core.export as export\n"
        "try: export.torch_translation_table()\n"
        "except ImportError as error: print(error.name)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.strip() in ("onnxscript", "torch")

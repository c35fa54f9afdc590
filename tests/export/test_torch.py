"""Models of torch with relative attention, exported by torch.onnx.export with our translations and without."""

import subprocess
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.layers.torch import RelativeMultiheadAttention
from torch_calls import ALONG, CLIP, CROSS, FULL, LONG, PLACED, TABLE, VALUES
from torch_exports import SIZES, VARY, agrees, assert_same, export, of, random, session


def flat(results: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(x for result in results for x in (result if isinstance(result, tuple) else (result,)))


def heads(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    return random(batch, 4, queries, 6, seed=1), random(batch, 2, keys, 6, seed=2), random(batch, 2, keys, 5, seed=3)


def across(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    """Return queries and keys of different lengths, and a mask that hides all keys of some queries."""
    mask = random(batch, 1, queries, keys, seed=4) > 0
    mask[0, :, 0] = False
    return *heads(batch, queries, keys), mask


def along(batch: int, length: int, _: int) -> tuple[Tensor, ...]:
    return random(batch, 4, length, 6, seed=1), random(batch, 1, 1, length, seed=2) > -1


def placed(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    """Return positions in any order and segments, too."""
    generator = torch.Generator().manual_seed(7)
    labels = [
        torch.randint(*limits, (batch, length), generator=generator)
        for limits in ((-4, 5), (0, 3)) for length in (queries, keys)
    ]  # fmt: skip
    return *heads(batch, queries, keys), *labels


def call_across(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    calls = ({"offset": 0, **call, "mask": shown} for call in self.calls for shown in (None, mask))
    return flat(relative_attention(q, k, v, **call) for call in calls)


def call_along(self: Any, x: Tensor, mask: Tensor) -> Any:
    """Lengths of queries and keys are known to be equal."""
    q, k = x, x[:, :2] * 2
    return flat(relative_attention(q, k, k - 1, **call, mask=shown) for call in self.calls for shown in (None, mask))


def call_placed(
    self: Any, q: Tensor, k: Tensor, v: Tensor, at: Tensor, keys_at: Tensor, of: Tensor, keys_of: Tensor
) -> Any:
    every = (((at, keys_at), None), ((at[0], keys_at), (of, keys_of[0])))
    documents: dict[str, Any] = {"offset": 0, "segments": (of, keys_of)}
    return flat([
        *(relative_attention(q, k, v, **call, positions=x, segments=y) for call in self.calls for x, y in every),
        relative_attention(q, k, v, TABLE, CLIP, **documents),
        relative_attention(q, k, v, TABLE, CLIP, **documents, rel_v=VALUES, sinks=TABLE[:, 0, 0]),
        relative_attention(q[None], k[None], v[None], TABLE, CLIP, offset=0, segments=(of[None], keys_of[0])),
        relative_attention(q[0], k[0], v[0], TABLE, CLIP, positions=(at[0], keys_at[0])),
    ])  # fmt: skip


def call_in_other_shapes(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    """A mask that is added, arrays with fewer axes and with more."""
    additive, behind = torch.where(mask, q[:, :1, :, :1], -torch.inf), k.shape[2] - q.shape[2]
    return flat([
        relative_attention(q, k, v, TABLE, CLIP, offset=0, mask=additive, rel_v=VALUES, rel_q=q + 1),
        relative_attention(q, k, v, TABLE, CLIP, offset=0, sinks=q[..., 0], return_lse=True),
        relative_attention(q[0], k[0], v[0], TABLE, CLIP, offset=0, mask=mask[0]),
        relative_attention(q[0, 0], k[0, 0], v[0, 0], TABLE[0], CLIP, offset=0),
        relative_attention(q[None] * 2, k[None], v[None], TABLE, CLIP, offset=0, return_lse=True),
        relative_attention(q[0], k[0], v[0], TABLE, CLIP, offset=0, return_lse=True),
        # More queries than keys: the first ones are before all keys.
        relative_attention(q, k, v, TABLE, CLIP, offset=behind, causal=True),
        relative_attention(q, k[:, :1], v[:, :1], key_table=TABLE, span=CLIP, offset=behind),
    ])  # fmt: skip


HEADS, LABELS = {0: VARY, 2: VARY}, {0: VARY, 1: VARY}
ACROSS: dict[str, Any] = {**dict.fromkeys("qkv", HEADS), "mask": {0: VARY, 2: VARY, 3: VARY}}
VARYING: dict[Any, dict[str, Any]] = {
    call_across: ACROSS,
    call_along: {"x": HEADS, "mask": {0: VARY, 3: VARY}},
    call_placed: {**dict.fromkeys("qkv", HEADS), **dict.fromkeys(("at", "keys_at", "of", "keys_of"), LABELS)},
    call_in_other_shapes: ACROSS,
}


@pytest.mark.no_cover
@pytest.mark.parametrize(("forward", "inputs", "calls", "opset"), [
    (call_across, across, [*CROSS.values()][::3], 18), (call_across, across, [*CROSS.values()][1::4], 23),
    (call_along, along, [*ALONG.values()][1::2], 18), (call_along, along, [*ALONG.values()][::2], 23),
    (call_placed, placed, [*PLACED.values()][::2], 18), (call_placed, placed, [*PLACED.values()][1::2], 23),
    (call_in_other_shapes, across, [], 18),
])  # fmt: skip
def test_exported_calls_give_torchs_numbers_at_every_size(forward: Any, inputs: Any, calls: Any, opset: int) -> None:
    """Some calls, because torch's exporter takes seconds; `inside_translation.py` has all of them without it."""
    model = of(forward)
    model.calls = calls
    program = export(model, inputs(2, 5, 7), VARYING[forward], opset)
    if forward is call_along:
        attentions = [node for node in program.model.graph if node.op_type == "Attention"]
        causal = sum(node.attributes.get_int("is_causal", 0) for node in attentions)
        unmasked = sum("causal" in x and "blocks_before" not in x for x in calls if "rel_v" not in x)
        assert causal == (unmasked if opset == 23 else 0)  # with a mask it is part of the condition
    run = session(program)
    for shape in SIZES:
        assert_same(run(*inputs(*shape)), model, *inputs(*shape))


def call_with_a_gap(self: Any, q: Tensor, k: Tensor, gap: Tensor) -> Any:
    """An offset that is the length of something else."""
    offset = gap.shape[0]
    full = relative_attention(q, k, k, LONG, FULL, offset=offset)
    return full, relative_attention(q, k, k, TABLE, CLIP, offset=offset, rel_v=TABLE)


def test_an_offset_unknown_to_torch_fails_past_the_table() -> None:
    def inputs(queries: int, keys: int, gap: int) -> tuple[Tensor, ...]:
        return random(2, 4, queries, 6, seed=1), random(2, 2, keys, 6, seed=2), random(gap)

    model, sizes = of(call_with_a_gap), ((3, 7, 2), (1, 1, 1), (2, 3, 10), (1, 12, 0), (5, 15, 4))
    run = agrees(model, inputs, {"q": {2: VARY}, "k": {2: VARY}, "gap": {0: VARY}}, 18, sizes)
    for queries, keys, gap in ((5, 3, 8), (2, 17, 4), (1, 14, 1)):  # one position too far, to the left or to the right
        with pytest.raises(Exception, match="Max"):
            run(*inputs(queries, keys, gap))


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


# Without a translation of ours, as users call it: torch's operators, the same numbers

WITHOUT = "torch.onnx.export writes relative attention as many operators"
REACH = 20
SPECS = {
    "full": BlockSpec(8, 2, Span.full(REACH)),
    "causal": BlockSpec(8, 2, Span.causal(REACH), causal=True),
    "bias, grouped": BlockSpec(8, 4, Span.clipped(3), num_kv_heads=2, rel_bias=True),
    "values, window": BlockSpec(8, 2, Span(2, 1, "zero"), rel_values=True, window=(4, None)),
    "blocks": BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4),
    "stream, sinks": BlockSpec(8, 2, Span.clipped(2), block_size=3, blocks_before=1, sinks=True),
    "no table": BlockSpec(8, 2, Span.full(REACH), rel_keys=False),
}


class Blocks(nn.Module):
    """Gives the results of several blocks, with padding and without."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RelativeMultiheadAttention(spec) for spec in SPECS.values())
        for number, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, seed=number) * 0.5

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        return tuple(y for block in self.blocks for y in (block(x), block(x, key_padding_mask=padding)))


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    x = random(batch, length, 8, seed=length)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, length // 2 :] = True  # in a batch of one everything is padding if the length is 1
    return x, padding


def exported(model: Any, given: Any, vary: Any, **options: Any) -> Any:
    """Export with warnings recorded: the graph in onnxruntime, and the messages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = torch.onnx.export(
            model, given, dynamo=True, opset_version=23, verbose=False, dynamic_shapes=vary, **options
        )
    assert program is not None
    return program, [(str(one.message), one.filename) for one in caught if str(one.message).startswith(WITHOUT)]


@pytest.mark.filterwarnings("ignore:.key_padding_mask. hides every key of an item")
def test_blocks_of_any_length_give_the_numbers_of_torch_with_one_warning() -> None:
    model = Blocks().eval()
    vary = ({0: VARY, 1: VARY}, {0: VARY, 1: VARY})
    program, told = exported(model, inputs(2, 5), vary)
    ((message, file),) = told
    assert "relskew_core.export.torch_to_onnx" in message
    assert file == __file__
    assert {node.domain for node in program.model.graph} == {""}
    run = session(program)
    for batch, length in ((2, 5), (1, 1), (3, 12), (1, REACH)):
        given = inputs(batch, length)
        assert_same(run(*given), model, *given)
    assert np.isnan(run(*inputs(1, REACH + 1))[0]).any()  # the table has no rows for these distances


def test_a_program_of_torch_export_becomes_a_graph() -> None:
    def forward(self: Any, q: Any, k: Any, table: Tensor, places: Tensor, labels: Tensor) -> Any:
        keys = torch.arange(k.shape[-2])
        options: dict[str, Any] = {"segments": (labels, keys % 2), "softcap": 3.0, "key_table": table}
        return relative_attention(q, k, k, table, Span(2, 2, "clip"), positions=(places, keys), **options)

    model, draw = of(forward), torch.Generator().manual_seed(0)

    def given(n: int, m: int) -> tuple[Tensor, ...]:
        q, k, table = (torch.randn(shape, generator=draw) for shape in ((2, 3, n, 4), (2, 3, m, 4), (5, 4)))
        return q, k, table, torch.randperm(n, generator=draw), torch.randint(2, (n,), generator=draw)

    vary: Any = ({2: VARY}, {2: VARY}, {}, {0: VARY}, {0: VARY})
    made, told = exported(torch.export.export(model, given(5, 7), dynamic_shapes=vary), (), None)
    assert len(told) == 1
    for sizes in ((5, 7), (9, 4)):
        arrays = given(*sizes)
        assert_same(session(made)(*arrays), model, *arrays, gate=1e-5)


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
def test_training_is_refused() -> None:
    block = RelativeMultiheadAttention(SPECS["full"], dropout=0.1).train()
    with pytest.raises(Exception, match=r"`dropout` belongs to training: call `model.eval\(\)` before the export"):
        torch.onnx.export(block, (torch.randn(2, 5, 8),), dynamo=True, opset_version=23, verbose=False)

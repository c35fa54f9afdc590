"""Models of torch with relative attention, exported by torch.onnx.export with our translations, in onnxruntime."""

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from relskew_core import relative_attention
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
    """Masks that are added, arrays with fewer axes and with more."""
    additive, behind = torch.where(mask, q[:, :1, :, :1], -torch.inf), k.shape[2] - q.shape[2]
    return flat([
        relative_attention(q, k, v, TABLE, CLIP, offset=0, mask=additive),
        relative_attention(q, k, v, TABLE, CLIP, offset=0, mask=additive, rel_v=VALUES),
        relative_attention(q, k, v, TABLE, CLIP, offset=0, rel_q=q + 1),
        relative_attention(q, k, v, TABLE, CLIP, offset=0, sinks=q[..., 0], return_lse=True),
        relative_attention(q[0], k[0], v[0], TABLE, CLIP, offset=0, mask=mask[0]),
        relative_attention(q[None] * 2, k[None], v[None], TABLE, CLIP, offset=0),
        relative_attention(q[0, 0], k[0, 0], v[0, 0], TABLE[0], CLIP, offset=0),
        relative_attention(q[None] * 2, k[None], v[None], TABLE, CLIP, offset=0, return_lse=True),
        relative_attention(q[0], k[0], v[0], TABLE, CLIP, offset=0, return_lse=True),
        relative_attention(q, k, v, TABLE, CLIP, offset=0, mask=additive, softcap=1.5),
        # More queries than keys: the first ones are before all keys.
        relative_attention(q, k, v, TABLE, CLIP, offset=behind, causal=True),
        relative_attention(q, k, v, key_table=TABLE, span=CLIP, offset=behind),
        relative_attention(q, k[:, :1], v[:, :1], key_table=TABLE, span=CLIP, offset=0),
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


def test_dropout_is_refused() -> None:
    model = of(lambda self, q, k: relative_attention(q, k, k, TABLE, CLIP, offset=0, dropout=0.5, seed=1))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - torch wraps it in its own
        export(model, heads(2, 5, 7)[:2], {"q": {2: VARY}, "k": {2: VARY}}, 23)
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

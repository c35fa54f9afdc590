"""Caches: growing, of one length, sliding; each equals attention without one, however the sequence is cut."""

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from layers.modules import SPECS, dense_module, inputs, made
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from libraries import needs_kernels
from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import FixedCache, RelativeMultiheadAttention, SlidingCache

DECODERS = {
    "causal": SPECS["causal"],
    "grouped": BlockSpec(8, 4, Span.causal(16), causal=True, num_kv_heads=2, rel_values=True, rel_bias=True),
    "local": SPECS["local"],
    "window": BlockSpec(8, 2, Span(3, 0), causal=True, window=(3, 0), rel_values=True),
    "clipped": BlockSpec(8, 2, Span(2, 0, "clip"), causal=True, rel_values=True),
    "alibi": SPECS["alibi, causal, grouped"],
    "t5": SPECS["t5, causal"],
}
ROOMS: list[dict[str, Any]] = [{}, {"length": 9}, {"keep": 9}]

CUTS = [(9,), (4, 1, 1, 3), (1,) * 9, (1, 8)]

every_cut = pytest.mark.parametrize("cut", CUTS, ids=str)


def fed(module: Any, x: Tensor, cut: Sequence[int], cache: Any, **more: Any) -> tuple[Tensor, Any]:
    """Give a sequence to a module piece by piece."""
    pieces = []
    with torch.no_grad():
        for piece in x.split(list(cut), dim=1):
            y, cache = module(piece, past=cache, **more)
            pieces.append(y)
    return torch.cat(pieces, dim=1), cache


@every_cut
@pytest.mark.parametrize("length", [None, 9, 12])
@pytest.mark.parametrize("name", DECODERS)
def test_pieces_with_a_cache_equal_the_whole(name: str, length: int | None, cut: Sequence[int]) -> None:
    module = made(DECODERS[name])
    (x,) = inputs(module.spec)
    empty = module.empty_cache(2, length=length)
    y, cache = fed(module, x, cut, empty)
    torch.testing.assert_close(y, dense_module(module, x), rtol=0, atol=1e-12)
    assert isinstance(cache, type(empty))
    assert cache.keys.shape == (2, module.spec.num_kv_heads, length or 9, module.spec.head_dim)
    if isinstance(cache, FixedCache):
        assert cache.length == 9


@every_cut
@pytest.mark.parametrize("keep", [0, 1, 3, 5, 20])
@pytest.mark.parametrize("name", ["causal", "grouped", "window", "clipped"])
def test_a_sliding_cache_is_a_window(name: str, keep: int, cut: Sequence[int]) -> None:
    """The ``keep`` positions before a query and the query itself, for inputs of any length."""
    spec = replace(DECODERS[name], span=Span(20, 0, DECODERS[name].span.beyond))
    module = made(spec)
    (x,) = inputs(spec)
    y, cache = fed(module, x, cut, module.empty_cache(2, keep=keep))
    kept = keep if spec.window is None else min(keep, 3)
    windowed = made(replace(spec, window=(kept, 0)))
    torch.testing.assert_close(y, dense_module(windowed, x), rtol=0, atol=1e-12)
    assert isinstance(cache, SlidingCache)
    assert cache.keys.shape == (2, spec.num_kv_heads, kept, spec.head_dim)
    assert cache.length == min(kept, 9)


def test_a_sliding_cache_asks_for_a_table_that_reaches_its_window_only() -> None:
    module = made(BlockSpec(8, 2, Span(3, 0), causal=True))
    (x,) = inputs(module.spec)
    assert fed(module, x, CUTS[1], module.empty_cache(2, keep=3))[0].isfinite().all()
    with pytest.raises(ValueError, match=r"`rel_k` reaches the relative positions -3 … 0, but queries see -4 … 0"):
        module(x[:, :1], past=module.empty_cache(2, keep=4))


def test_what_a_cache_has_yet_to_fill_counts_for_nothing() -> None:
    module = made(DECODERS["grouped"])
    (x,) = inputs(module.spec)
    for empty in (module.empty_cache(2, length=12), module.empty_cache(2, keep=12)):
        empty.keys.fill_(1e6)
        empty.values.fill_(1e6)
        y, _ = fed(module, x, CUTS[1], empty)
        torch.testing.assert_close(y, dense_module(module, x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("room", [{}, {"length": 12}, {"keep": 11}], ids=str)
def test_padding_on_the_left_of_prompts(room: dict[str, Any]) -> None:
    module = made(DECODERS["causal"])
    (x,) = inputs(module.spec)
    cache, steps = module.empty_cache(2, **room), []
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        keys = torch.arange(start - 11, stop) if "keep" in room else torch.arange(room.get("length", stop))
        padding = (keys >= 0) & (keys < torch.tensor([[0], [2]]))
        with torch.no_grad():
            y, cache = module(x[:, start:stop], past=cache, key_padding_mask=padding)
        steps.append(y)
    actual = torch.cat(steps, dim=1)
    torch.testing.assert_close(actual[:1], dense_module(module, x[:1, :7]), rtol=0, atol=1e-12)
    torch.testing.assert_close(actual[1:, 2:], dense_module(module, x[1:, 2:7]), rtol=0, atol=1e-12)


def test_masks_speak_of_all_places() -> None:
    module = made(DECODERS["clipped"])
    (x,) = inputs(module.spec)
    mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    _, cache = fed(module, x[:, :5], (5,), module.empty_cache(2, length=9), mask=mask[:5])
    y, _ = fed(module, x[:, 5:], (4,), cache, mask=mask[5:])
    torch.testing.assert_close(y, dense_module(module, x, mask=mask)[:, 5:], rtol=0, atol=1e-12)


def test_packed_documents_in_a_cache() -> None:
    module = made(DECODERS["causal"])
    (x,) = inputs(module.spec)
    documents = torch.tensor([0] * 4 + [1] * 5)
    for room in ROOMS:
        cache = module.empty_cache(2, **room)
        for start, stop in ((0, 6), (6, 9)):
            keys = documents[: room.get("length", stop)]
            if "keep" in room:
                keys = torch.cat([torch.full((9 - start,), -1), documents[:stop]])
            y, cache = fed(module, x[:, start:stop], (stop - start,), cache, segments=(documents[start:stop], keys))
        torch.testing.assert_close(y, dense_module(module, x[:, 4:])[:, 2:], rtol=0, atol=1e-12)


def test_unbatched_sequences_and_several_batch_axes() -> None:
    module = made(DECODERS["causal"])
    (x,) = inputs(module.spec)
    for given, room in itertools.product((x[0], x[None]), ROOMS):
        y, _ = module(given, past=module.empty_cache(given.shape[:-2], **room))
        torch.testing.assert_close(y, module(given), rtol=0, atol=1e-12)


# A growing cache without gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tokens_are_written_after_a_growing_cache_and_not_into_a_copy(mode: Any) -> None:
    module = made(BlockSpec(8, 2, Span.causal(700), causal=True))
    x = torch.randn(2, 650, 8, dtype=torch.float64)
    with mode():
        y, cache = module(x[:, :10], past=module.empty_cache(2))
        outputs, memory = [y], []
        for token in x[:, 10:].split(1, dim=1):
            y, cache = module(token, past=cache)
            outputs.append(y)
            memory.append((cache.keys.data_ptr(), cache.values.data_ptr()))
    assert len(set(memory)) == 3  # room for 256 tokens at once
    torch.testing.assert_close(torch.cat(outputs, dim=1), module(x), rtol=0, atol=1e-11)


def test_every_continuation_of_a_growing_cache_has_keys_of_its_own() -> None:
    module = made(DECODERS["causal"])
    (x,) = inputs(module.spec)
    _, cache = fed(module, x[:, :4], (3, 1), module.empty_cache(2))
    others = [(x[:, 4:8] * factor).split([1, 3], dim=1) for factor in (1, -2, 3)]
    with torch.no_grad():
        first = [module(one, past=cache) for one, _ in others]
        for (_, past), (one, three), factor in zip(first, others, (1, -2, 3), strict=True):
            y, present = module(three, past=past)
            whole = module(torch.cat([x[:, :4], one, three], dim=1))
            torch.testing.assert_close(y, whole[:, 5:], rtol=0, atol=1e-12, msg=str(factor))
            assert present.keys.shape[-2] == 8
    assert cache.keys.shape[-2] == 4


def test_a_growing_cache_may_change_modes_and_be_copied() -> None:
    module = made(DECODERS["causal"])
    (x,) = inputs(module.spec)
    whole, changes = module(x), [torch.inference_mode, torch.no_grad, torch.enable_grad, torch.no_grad]
    with torch.inference_mode():
        _, cache = fed(module, x[:, :4], (3, 1), module.empty_cache(2))
    for place, mode in enumerate(changes, start=4):
        with mode():
            copied = pickle.loads(pickle.dumps(cache))
            assert all(map(torch.equal, cache, copied))
            for past in (copied, cache):
                y, cache = module(x[:, place : place + 1], past=past)
                torch.testing.assert_close(y, whole[:, place : place + 1], rtol=0, atol=1e-12)
    compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
    assert compiled(x[:, 8:], past=cache)[1].keys.shape[-2] == 9


def test_gradients_through_a_growing_cache_are_those_of_the_whole() -> None:
    """Also after a prompt without gradients, whose cache has room."""
    module = made(DECODERS["causal"])
    (x,) = inputs(module.spec)
    _, cache = fed(module, x[:, :4], (3, 1), module.empty_cache(2))
    outputs = []
    for token in x[:, 4:].split(1, dim=1):
        y, cache = module(token, past=cache)
        outputs.append(y)
    with torch.no_grad():
        module(x[:, 4:5], past=cache)
    # keys of the prompt have no gradient
    weights = [module.get_parameter(f"{name}_proj.weight") for name in ("q", "out")]
    found = torch.autograd.grad(torch.cat(outputs, dim=1).sum(), weights)
    torch.testing.assert_close(found, torch.autograd.grad(module(x)[:, 4:].sum(), weights))


# Compiled


@pytest.mark.parametrize("room", [{}, {"length": 96}, {"keep": 95}], ids=str)
def test_compiled_decoding_makes_two_graphs(room: dict[str, Any]) -> None:
    """One for the prompt, one for all of 80 tokens."""
    torch.compiler.reset()
    module = made(BlockSpec(8, 2, Span.causal(96), causal=True))
    x = torch.randn(1, 90, 8, dtype=torch.float64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    y, _ = fed(compiled, x, (10, *(1,) * 80), module.empty_cache(1, **room))
    assert counter.frame_count == 2
    torch.testing.assert_close(y, module(x), rtol=0, atol=1e-11)


# Precision, and refusals


def test_the_dtype_of_a_cache() -> None:
    module = RelativeMultiheadAttention(DECODERS["causal"])
    (x,) = inputs(module.spec, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        for room in ROOMS:
            y, cache = module(x, past=module.empty_cache(2, **room))
            assert (y.dtype, cache.keys.dtype) == (torch.bfloat16,) * 2
    assert module.empty_cache(2, dtype=torch.float64).keys.dtype == torch.float64
    assert module.bfloat16().empty_cache(2, length=4).values.dtype == torch.bfloat16
    assert module.to("meta").empty_cache(2, keep=4).values.device.type == "meta"


@needs_kernels  # the portable code leaves these gradients and errors to torch
@pytest.mark.parametrize("lengths", [None, [4, 3]], ids=["alike", "by item"])
def test_gradients_of_an_overwritten_cache_are_an_error(lengths: list[int] | None) -> None:
    """Those of the last call are not, which nothing overwrote."""
    module = made(DECODERS["causal"])
    (x,) = inputs(module.spec)

    def outputs(cache: Any) -> list[Tensor]:
        y, cache = module(x[:, :4], past=cache)
        if lengths is not None:
            cache = cache._replace(length=torch.tensor(lengths))
        return [y, module(x[:, 4:], past=cache)[0]]

    written = outputs(module.empty_cache(2, length=9))
    if lengths is None:
        grown = outputs(module.empty_cache(2))
        (weight,) = (x for name, x in module.named_parameters() if name == "k_proj.weight")
        found = [torch.autograd.grad(each[1].sum(), weight, retain_graph=True) for each in (written, grown)]
        torch.testing.assert_close(*found)
        torch.cat(grown, dim=1).sum().backward()
    with pytest.raises(ValueError, match=r"`past`: to train through several calls, pass empty_cache\(batch\)"):
        written[0].sum().backward()

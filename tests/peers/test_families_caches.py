"""Families that generate: step by step through their caches, far past buckets, extents and windows."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peers.common import check, hf
from peers.families import FAMILIES
from peers.family import Family, tokens

from relskew_core.huggingface import replace_attention

GENERATING = {name: family for name, family in FAMILIES.items() if family.generates}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("family", GENERATING.values(), ids=GENERATING)
def test_generate_gives_the_originals_logits_in_every_cache(family: Family, options: dict[str, Any]) -> None:
    theirs = family.make()
    if options.get("cache_implementation") and type(theirs).__name__.startswith(("Inkling", "Falcon", "ProphetNet")):
        pytest.skip("its own bias does not fit its cache of a fixed size")
    ours = replace_attention(copy.deepcopy(theirs))
    given = {name: x for name, x in family.given(10).items() if name != "decoder_input_ids"}
    options = {**options, "max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    options |= {"eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    want, got = (model.generate(**given, **options) for model in (theirs, ours))
    check(torch.stack(got.logits), torch.stack(want.logits), 10 * family.gate)
    assert torch.equal(want.sequences, got.sequences)


def test_a_cache_of_a_fixed_size_that_falcon_gets_a_whole_mask_for() -> None:
    theirs = FAMILIES["Falcon"].make()
    ours, ids = replace_attention(copy.deepcopy(theirs)), tokens(9)["input_ids"]
    cache = hf("StaticCache")(config=theirs.config, max_cache_len=12)
    found = []
    for first, end in [(0, 5), (5, 8), (8, 9)]:
        mask = (torch.arange(12) < end).long().expand(len(ids), -1)
        found.append(ours(ids[:, first:end], attention_mask=mask, past_key_values=cache, use_cache=True).logits)
    check(torch.cat(found, 1), theirs(ids).logits, 1e-4)


@pytest.mark.parametrize("family", GENERATING.values(), ids=GENERATING)
def test_a_cache_filled_in_pieces(family: Family) -> None:
    theirs = family.make()
    if type(theirs).__name__.startswith("ProphetNet"):
        pytest.skip("it takes one token after a past")
    ours = replace_attention(copy.deepcopy(theirs))
    boxes = {name: x for name, x in family.given(5).items() if name == "bbox"}
    want, got = (_in_pieces(model, tokens(20)["input_ids"], boxes) for model in (theirs, ours))
    check(got, want, 10 * family.gate)


@pytest.mark.parametrize("name", ["MPT", "Bloom", "Falcon"])
def test_tokens_are_written_after_a_dynamic_cache_and_not_into_a_copy(name: str) -> None:
    ours = replace_attention(FAMILIES[name].make())
    ids, cache, memory = tokens(40)["input_ids"], hf("DynamicCache")(), []
    for first, end in [(0, 10), *((place, place + 1) for place in range(10, 40))]:
        ours(ids[:, first:end], past_key_values=cache, use_cache=True)
        memory.append(cache.layers[-1].keys.data_ptr())
    assert len(set(memory)) == 2


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(cache: Any) -> None:
        for layer in cache.layers:
            setattr(layer, name, change(getattr(layer, name)))

    return apply


CHANGES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda cache: cache.crop(-2),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(3),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([-1, 0])),
    "deepcopy": copy.deepcopy,
    "other numbers": changed("keys", lambda x: x + 1),
    "other memory": changed("values", torch.clone),
    "nothing": lambda cache: None,
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("name", ["MPT", "Bloom"])
def test_what_changes_a_dynamic_cache_changes_it_in_place_as_well(name: str) -> None:
    """Also where gradients are recorded, and in inference mode, after each change."""
    theirs = FAMILIES[name].make().requires_grad_(False)
    ours, ids = replace_attention(copy.deepcopy(theirs)), tokens(60)["input_ids"]
    caches = [hf("DynamicCache")() for _ in "to"]
    modes = [torch.no_grad, torch.enable_grad, torch.inference_mode]
    steps = [*itertools.product(CHANGES, modes), *((change, mode) for mode in modes for change in CHANGES)]
    for place, (change, mode) in enumerate([("nothing", torch.no_grad), *steps]):
        caches = [CHANGES[change](cache) or cache for cache in caches]
        for token in range(2):
            given = ids[:, place + token : place + token + 1]
            batch = caches[1].layers[0].keys.shape[0] if caches[1].get_seq_length() else 2
            with mode():
                want, got = (model(given.repeat(27, 1)[:batch], past_key_values=cache, use_cache=True).logits
                             for model, cache in zip((theirs, ours), caches, strict=True))  # fmt: skip
            check(got, want, 10 * FAMILIES[name].gate)


def test_a_cache_that_offloads_is_updated_by_itself() -> None:
    ours, cache, updated = replace_attention(FAMILIES["MPT"].make()), hf("DynamicCache")(), []
    ours(tokens(3)["input_ids"], past_key_values=cache, use_cache=True)
    own = cache.update

    def update(k: torch.Tensor, v: torch.Tensor, layer: int, *more: Any) -> Any:
        cache.offloading = False  # there is no other device
        updated.append(layer)
        found = own(k, v, layer, *more)
        cache.offloading = True
        return found

    cache.offloading, cache.update = True, update
    ours(tokens(1)["input_ids"], past_key_values=cache, use_cache=True)
    assert updated == [0, 1]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_a_dynamic_cache_continue_apart(copied: Callable[[Any], Any]) -> None:
    ours, ids = replace_attention(FAMILIES["MPT"].make()), tokens(14)["input_ids"]
    first, other = (hf("DynamicCache")() for _ in range(2))
    for place in range(9):
        ours(ids[:, place : place + 1], past_key_values=first, use_cache=True)
    other.layers = [copied(layer) for layer in first.layers]
    texts = [ids, torch.cat([ids[:, :9], ids[:, 9:].flip(1)], 1)]
    for start, end in [(9, 10), (10, 12), (12, 14)]:
        for cache, text in zip((first, other), texts, strict=True):
            got = ours(text[:, start:end], past_key_values=cache, use_cache=True).logits
            check(got, ours(text[:, :end]).logits[:, start:], 10 * FAMILIES["MPT"].gate)


def _in_pieces(model: Any, ids: torch.Tensor, boxes: dict[str, Any]) -> torch.Tensor:
    name = "input_ids"
    given: dict[str, Any] = {"use_cache": True}
    if model.config.is_encoder_decoder:
        name, given = "decoder_input_ids", {"input_ids": ids[:, :5], **boxes}
    past, pieces = None, []
    for start, stop in [(0, 9), (9, 10), (10, 20)]:
        out = model(**{name: ids[:, start:stop]}, **given, past_key_values=past)
        past = out.past_key_values
        assert past is not None
        pieces.append(out.logits)
    return torch.cat(pieces, 1)

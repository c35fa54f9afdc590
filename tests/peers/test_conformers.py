"""What calls of ESPnet's, fairseq's, NeMo's and SpeechBrain's Conformers have besides, against their own code."""

import copy
from typing import Any

import pytest
import torch
from peers.common import alone, check, padding, peer, randn, randomised
from peers.families_conformers import Encoder, espnet, frames, nemo, nemo_transformer, speechbrain
from peers.test_families_numbers import drop_ins

from relskew_core import BlockSpec, Span, conventions, sinusoidal_table
from relskew_core.huggingface import replace_attention
from relskew_core.layers.torch import ConformerAttention

ESPNET = "espnet.nets.pytorch_backend.transformer.attention"
LENGTHS = [1, 2, 3, 9]


def both(theirs: Any) -> tuple[Any, Any]:
    return theirs, replace_attention(copy.deepcopy(theirs))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("zero_triu", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_espnet(legacy: bool, zero_triu: bool, length: int) -> None:
    """Any rows, the last queries alone, a mask of all pairs, and no positions in the future."""
    kind = peer(f"{ESPNET}.{'Legacy' * legacy}RelPositionMultiHeadedAttention")
    theirs, ours = both(randomised(kind(3, 24, 0.0, zero_triu)))
    x, rows = randn(2, length, 24), randn(1, length if legacy else 2 * length - 1, 24)
    mask = torch.rand(2, length, length, generator=torch.Generator().manual_seed(1)) < 0.7
    for count in range(1, 2 if zero_triu else length + 1) if length > 1 else [1]:
        given = x[:, -count:], x, x, rows
        if not zero_triu:  # which ESPnet counts from the first query
            check(ours(*given, mask[:, -count:]), theirs(*given, mask[:, -count:]))
    check(ours(x, x, x, rows, mask), theirs(x, x, x, rows, mask))
    check(ours(x, x, x, rows, None), theirs(x, x, x, rows, None))
    ours.window = (2, 1)
    relative = torch.arange(length) - torch.arange(length)[:, None]
    band = ((relative >= -2) & (relative <= 1)).expand(2, -1, -1)
    check(ours(x, x, x, rows, mask[:, -1:]), theirs(x, x, x, rows, mask[:, -1:] & band))


def test_espnets_legacy_positions_depend_on_its_table_and_on_the_length_of_a_batch() -> None:
    """The row of a key at its own query is that of ``max_len`` minus the length: padding changes what is said."""
    theirs, ours = both(espnet(legacy=True))
    x = frames(9)["frames"]
    want = theirs(x)
    check(ours(x), want)
    longer = torch.nn.functional.pad(x, (0, 0, 0, 2))
    mask = padding([9, 9], 11)[:, 0, 0]
    check(ours(longer, mask), theirs(longer, mask))
    assert (ours(longer, mask)[:, :7] - want[:, :7]).norm() > 1e-2 * want.norm()
    for model in (theirs, ours):
        model.encoder.embed[-1].extend_pe(torch.zeros(1, 6000, dtype=torch.float64))
    check(ours(x), theirs(x))
    assert (ours(x) - want).norm() > 1e-2 * want.norm()


def wenet() -> Any:
    """Return an attention with WeNet's arguments, which shifts nothing."""

    def forward(self: Any, query: Any, key: Any, value: Any, mask: Any = None, pos_emb: Any = None) -> None: ...

    theirs = peer(f"{ESPNET}.RelPositionMultiHeadedAttention")
    return type(theirs.__name__, (theirs,), {"forward": forward})(3, 24, 0.0)


def espnet_transducer() -> Any:
    return alone("espnet2.asr_transducer.encoder.modules.attention.RelPositionMultiHeadedAttention")(3, 24)


@pytest.mark.parametrize("make", [wenet, espnet_transducer])
def test_others_of_this_name_are_left(make: Any) -> None:
    with pytest.raises(ValueError, match="`model` must have relative positions"):
        replace_attention(make())


CONTEXTS: list[dict[str, Any]] = [
    {},
    {"use_pytorch_sdpa": True},
    {"att_context_size": [4, 1]},
    {"att_context_size": [-1, 2]},
    {"att_context_size": [6, 2], "att_context_style": "chunked_limited"},
    {"att_context_size": [-1, 3], "att_context_style": "chunked_limited"},
    {"att_context_size": [4, 3, 2], "att_context_style": "chunked_limited_with_rc"},
    {"untie_biases": False, "use_bias": False},
]


@pytest.mark.parametrize("options", CONTEXTS, ids=str)
def test_nemos_contexts(options: dict[str, Any]) -> None:
    """Windows and chunks of its own, at padding too; a window of the call hides what it hides besides."""
    theirs, ours = both(nemo(**options))
    for length in (1, 7, 30):
        check(ours(**frames(length)), theirs(**frames(length)), 1e-9)
    replace_attention(ours, window=(3, 2))
    make = theirs.encoder._create_masks

    def banded(max_audio_length: int, **given: Any) -> Any:
        hidden, pairs = make(max_audio_length=max_audio_length, **given)
        relative = torch.arange(max_audio_length) - torch.arange(max_audio_length)[:, None]
        return hidden, pairs | (relative < -3) | (relative > 2)

    theirs.encoder._create_masks = banded
    check(ours(**frames(30)), theirs(**frames(30)), 1e-9)


def test_nemos_cache() -> None:
    theirs, ours = both(nemo(att_context_size=[6, 2], att_context_style="chunked_limited"))
    x, rows = randn(2, 3, 24), randn(1, 17, 24)
    found = []
    for model in (theirs, ours):
        attention = model.encoder.layers[0].self_attn
        attention.cache_drop_size = 0
        out, cache = attention(x, x, x, None, rows, randn(2, 6, 24, seed=2))
        found.append((out, cache))
    check(*reversed(found))


def test_nemo_makes_its_masks_for_attention_that_it_changes_back() -> None:
    theirs, ours = both(nemo())
    for mine, original in zip(ours.encoder.layers, theirs.encoder.layers, strict=True):
        mine.self_attn = original.self_attn
    check(ours(**frames(7)), theirs(**frames(7)))


@pytest.mark.parametrize("options", [{}, {"attn_mode": "causal"}, {"qkv_bias": True, "qk_norm": True}], ids=str)
def test_nemos_transformer(options: dict[str, Any]) -> None:
    """The whole encoder, one attention with a mask of blocks or none, and the module here with its weights."""
    theirs, ours = both(nemo_transformer(**options))
    given = {**frames(7), "frames": randn(2, 7, 48)}
    check(ours(**given), theirs(**given), 1e-9)
    their, our = (model.encoder.layers[0].attn for model in (theirs, ours))
    x, rows = randn(2, 7, 48), randn(1, 13, 48)
    blocks = peer("torch.nn.attention.flex_attention.create_block_mask")(
        lambda b, h, i, j: (j < 7 - 2 * b) & (i >= j - 1), 2, 1, 7, 7, device="cpu"
    )
    check(our(x, blocks, rows), their(x, blocks, rows))
    check(our(x, None, rows), their(x, None, rows))
    if "qk_norm" not in options:
        rows = theirs.encoder.pos_enc(x)[1]
        module = ConformerAttention(BlockSpec(48, 3, Span.full(20)), dtype=torch.float64)
        state = theirs.encoder.state_dict()
        module.load_state_dict(conventions.load_conformer(state, num_heads=3, prefix="layers.0.attn."))
        check(module(x), their(x, None, rows), 1e-6)


@pytest.mark.parametrize("options", [{"vbias": True}, {"mask_pos_future": True}, {}], ids=str)
def test_speechbrain(options: dict[str, Any]) -> None:
    """Both kinds of masks, other keys than queries, no weights, and ``mask_pos_future``, which hides nothing."""
    attention = alone("speechbrain.nnet.attention.RelPosMHAXL", "torchaudio")
    theirs, ours = both(randomised(attention(24, 3, **options)).float())
    x, memory, rows = randn(2, 5, 24).float(), randn(2, 9, 24, seed=2).float(), randn(1, 17, 24).float()
    hidden = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.3
    padded = ~padding([9, 6], 9)[:, 0, 0]
    heads = hidden.expand(6, -1, -1).clone()
    heads[0, 3, 4] = True
    for pairs in (None, hidden, heads, hidden * 0.5, heads * 0.5):
        for keys in (None, padded):
            given = memory, memory, memory, rows, keys, pairs
            want, _ = theirs(*given)
            got, weights = ours(*given)
            assert weights is None
            check(got, want, 1e-5)
    for others in ((x, memory, memory, rows), (memory, memory.flip(1), memory, rows)):
        check(ours(*others, return_attn_weights=False), theirs(*others, return_attn_weights=False), 1e-5)
    if "mask_pos_future" in options:
        theirs.mask_pos_future = False
        check(ours(memory, memory, memory, rows)[0], theirs(memory, memory, memory, rows)[0], 1e-5)


def test_a_window_leaves_speechbrains_cross_attention() -> None:
    theirs, ours = both(speechbrain())
    replace_attention(ours, window=(1, 1))
    assert {part.window for part in drop_ins(ours)} == {(1, 1)}
    x, memory, rows = randn(2, 5, 24), randn(2, 9, 24, seed=2), randn(1, 17, 24)
    their, our = (model.encoder.layers[0].mha_layer.float() for model in (theirs, ours))
    given = [y.float() for y in (x, memory, memory, rows)]
    check(our(*given)[0], their(*given)[0], 1e-5)


@pytest.mark.parametrize("direction", ["both", "past"])
def test_speechbrains_sines(direction: str) -> None:
    """Of distances, and of positions, as encoders with ``use_legacy_symmetric=False`` pass them."""
    theirs, ours = both(speechbrain().float())
    if direction == "past":
        for model in (theirs, ours):
            model.encoder.positions.forward = _sines_of_positions
    given = {**frames(9), "frames": frames(9)["frames"].float()}
    check(ours(**given), theirs(**given), 1e-5)


def _sines_of_positions(x: torch.Tensor) -> torch.Tensor:
    return sinusoidal_table(Span.full(x.shape[1]), 24, xp=torch, dtype=x.dtype, order="interleaved")[None]


def test_a_window_is_for_all_of_them() -> None:
    for model in (espnet(), espnet(legacy=True), speechbrain(), nemo(), nemo_transformer()):
        assert isinstance(model, Encoder)
        assert {part.window for part in drop_ins(replace_attention(model, window=(3, 2)))} == {(3, 2)}

"""Models that ask transformers' interface for their attention: the same numbers as a bias added by hand."""

import contextlib
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peers.common import check, hf, peer, randn
from peers.family import built, padded_on_the_left, tokens

import lives
from relskew_core import Span, t5_buckets
from relskew_core.export import decoder_to_onnx, generate, torch_to_onnx
from relskew_core.huggingface import register_attention, replace_rotary

Tensor = torch.Tensor
LENGTH, ROOM = 12, 16
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
NUMBERS = torch.randn(4, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 16, "vocab_size": 50,
}  # fmt: skip


def model(name: str = "Llama", **options: Any) -> Any:
    return built(f"{name.removesuffix('Text')}ForCausalLM", "eager", f"{name}Config", **SMALL | options)()


def hybrid() -> Any:
    """A model with layers of sliding windows, whose caches differ from the others'."""
    kinds = ["sliding_attention", "full_attention"]
    return model("Gemma3Text", head_dim=8, sliding_window=5, layer_types=kinds)


def alibi(distance: Tensor) -> Tensor:
    return -SLOPES[:, None, None] * distance.abs()


def learned(distance: Tensor) -> Tensor:
    return NUMBERS[:, distance.clamp(-5, 0) + 5]


def two_sided(distance: Tensor) -> Tensor:
    return NUMBERS[:, distance.clamp(-3, 2) + 3]


FAR = Span.causal(20, "clip")
BUCKETS = torch.tensor(t5_buckets(FAR, num_buckets=6, max_distance=16, bidirectional=False))


def bucketed(distance: Tensor) -> Tensor:
    return NUMBERS[:, BUCKETS[distance.clamp(-19, 0) + 19]]


BIASES: dict[Callable[[Tensor], Tensor], dict[str, Any]] = {
    alibi: {},
    learned: {"rel_bias": NUMBERS},
    two_sided: {"rel_bias": NUMBERS, "span": Span(3, 2, "clip")},
    bucketed: {"rel_bias": NUMBERS[:, BUCKETS], "span": FAR},
}


def by_hand(of_distance: Callable[[Tensor], Tensor]) -> str:
    """Register attention of whole sequences, without caches, with a dense bias, if the module is not `other`."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = q @ k.mT * options["scaling"]
        if not getattr(module, "other", False):
            assert q.shape[2] == k.shape[2]
            own = torch.arange(k.shape[2])
            logits = logits + of_distance(own - own[:, None])
        if (cap := options.get("softcap")) is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits if mask is None else logits + mask
        return (logits.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    hf("AttentionInterface").register("by_hand", attention)
    masks = peer("transformers.masking_utils")
    masks.AttentionMaskInterface.register("by_hand", masks.eager_mask)
    return "by_hand"


def set_to(theirs: Any, name: str) -> Any:
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(name)
    assert ours.config._attn_implementation == name
    return ours


def copies(module: Any, given: Any, options: dict[str, Any]) -> Any:
    """Pass a module copies, as between devices."""
    return given, {name: x.clone() if isinstance(x, Tensor) else x for name, x in options.items()}


def four_axes(present: Tensor, start: int, stop: int, room: int, dtype: torch.dtype) -> Tensor:
    keys = torch.nn.functional.pad(present, (0, ROOM))[:, None, None, :room].bool()
    seen = keys & (torch.arange(room) <= torch.arange(start, stop)[:, None])
    return (
        seen if dtype == torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    )


def in_pieces(ours: Any, ids: Tensor, present: Tensor, mask: str, cache: Any) -> Tensor:
    """Return the logits of a text that a model reads in pieces."""
    logits, start = [], 0
    positions = (present.cumsum(-1) - 1).clamp(0)
    for stop in (LENGTH,) if cache is None else (4, 5, 8, 9, 11, LENGTH):
        given = {"input_ids": ids[:, start:stop], "position_ids": positions[:, start:stop]}
        if mask == "2d":
            given["attention_mask"] = present[:, :stop]
        elif mask:
            room = ROOM if cache is not None and cache.is_compileable else stop
            given["attention_mask"] = four_axes(present, start, stop, room, getattr(torch, mask))
        logits.append(ours(**given, **({"use_cache": False} if cache is None else {"cache": cache})).logits)
        start = stop
    return torch.cat(logits, 1)


PRESENT = {
    "none": torch.ones(2, LENGTH, dtype=torch.int64),
    "left": padded_on_the_left(LENGTH)["attention_mask"],
    "right": tokens(LENGTH)["attention_mask"],
}


@pytest.mark.parametrize("mask", ["", "2d", "bool", "float64"])
@pytest.mark.parametrize("cache", ["", "Dynamic", "Static"])
def test_a_text_in_pieces_has_its_logits_with_every_cache_and_mask(cache: str, mask: str) -> None:
    """What a query sees is the same in one pass over the text, whatever carries its position from call to call."""
    ids = tokens(LENGTH)["input_ids"]
    for build in (model, hybrid)[: 2 if mask in ("", "2d") else 1]:
        theirs = build()
        for number, (of_distance, bias) in enumerate(BIASES.items()):
            want = set_to(theirs, by_hand(of_distance))
            ours = set_to(theirs, register_attention("test_caches", **bias))
            for padding in PRESENT if mask else ("none",):
                present = PRESENT[padding]
                once = in_pieces(want, ids, present, "2d", None)
                for copied in (False, True):
                    hooks = [
                        part.self_attn.register_forward_pre_hook(copies, with_kwargs=True)
                        for part in ours.model.layers[: 2 * copied]
                    ]
                    room = {"max_cache_len": ROOM} if cache == "Static" else {}
                    kept = hf(f"{cache}Cache")(config=ours.config, **room) if cache else None
                    got = in_pieces(ours, ids, present, mask, kept)
                    for hook in hooks:
                        hook.remove()
                    check(got * present[..., None], once * present[..., None])
            if number == 0:
                bare = set_to(theirs, "eager")
                assert (in_pieces(bare, ids, present, "2d", None) - once).norm() > 1e-2 * once.norm()


def test_masks_that_do_not_show_where_queries_are() -> None:
    """In a cache with room, queries that see later keys may be anywhere: but masks of transformers say where."""
    ids, name = tokens(LENGTH)["input_ids"], register_attention("test_unclear", rel_bias=NUMBERS)
    theirs = model()
    ours, cache = set_to(theirs, name), hf("StaticCache")
    present = torch.ones(2, LENGTH, dtype=torch.int64)
    together = four_axes(present, 0, LENGTH, ROOM, torch.bool).clone()
    together[..., 2:7, 2:7] = True  # as the tokens of an image
    given = {"input_ids": ids, "attention_mask": together}
    with pytest.raises(ValueError, match=r"^`attention_mask` must show which 12 of 16 keys are those of the queries"):
        ours(**given, cache=cache(config=ours.config, max_cache_len=ROOM))
    padded = present.clone()
    padded[:, 9:] = 0
    want = set_to(theirs, by_hand(learned))(ids, attention_mask=padded, use_cache=False).logits[:, :9]
    kept = cache(config=ours.config, max_cache_len=ROOM)
    check(ours(ids, attention_mask=padded, cache=kept).logits[:, :9], want)


NONE: dict[str, Any] = {"rel_bias": None, "name": "test_none"}


@pytest.mark.parametrize(("name", "options", "bias"), [
    ("Llama", {}, {}), ("Llama", {}, NONE), ("Qwen3", {"head_dim": 8}, {}), ("Gemma2", {"head_dim": 8}, {}),
])  # fmt: skip
def test_instead_of_rotary_positions(name: str, options: dict[str, Any], bias: dict[str, Any]) -> None:
    """ALiBi, or no positions at all."""
    theirs = model(name, **options)
    want = set_to(theirs, by_hand((lambda distance: 0 * alibi(distance)) if bias else alibi))
    ours: Any = replace_rotary(copy.deepcopy(theirs), **bias)
    again: Any = replace_rotary(ours, **bias)
    assert again is ours
    for part in want.modules():
        if hasattr(part, "inv_freq"):
            part.inv_freq.zero_()
    whole = {"input_ids": tokens(12)["input_ids"]}
    for given in (whole, padded_on_the_left(12)):
        present = given.get("attention_mask", torch.ones(1))[..., None]
        check(ours(**given).logits * present, want(**given).logits * present)
    once = ours(**whole).logits
    past = ours(input_ids=whole["input_ids"][:, :9], use_cache=True).past_key_values
    check(ours(input_ids=whole["input_ids"][:, 9:], past_key_values=past).logits, once[:, 9:])
    shifted = torch.nn.functional.pad(whole["input_ids"], (4, 0))
    seen = torch.nn.functional.pad(torch.ones_like(whole["input_ids"]), (4, 0))
    check(ours(input_ids=shifted, attention_mask=seen).logits[:, 4:], once)
    growing = ours.generate(**whole, max_new_tokens=6, do_sample=False)
    fixed = ours.generate(**whole, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(growing, fixed)


def test_alibi_on_both_sides() -> None:
    attend = hf("AttentionInterface")()[register_attention("test_both_sides")]
    (q, k, v), places = (randn(1, 4, 5, 8, seed=seed) for seed in range(3)), torch.arange(5)
    got, weights = attend(SimpleNamespace(is_causal=False), q, k, v, None, scaling=0.5, dropout=0.0, position_ids=None)
    bias = alibi(places - places[:, None])
    check(got.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, scale=0.5))
    assert weights is None


def test_a_compiled_call_checks_where_queries_are() -> None:
    attend = hf("AttentionInterface")()[register_attention("test_where", rel_bias=NUMBERS)]
    (q, k, v), module = (randn(1, 4, length, 8) for length in (3, 9, 9)), SimpleNamespace(is_causal=True)
    compiled = torch.compile(lambda mask: attend(module, q, k, v, mask)[0], backend="aot_eager", fullgraph=True)
    seen = four_axes(torch.ones(1, 9, dtype=torch.int64), 2, 5, 9, torch.bool)
    check(compiled(seen), attend(module, q, k, v, seen)[0])
    with pytest.raises(RuntimeError, match="`attention_mask` must show which 3 of 9 keys are those of the queries"):
        compiled(seen | (torch.arange(9) < 5))


def test_keys_of_another_text_have_no_bias() -> None:
    """Modules that attend to both say which: by their class, by their attributes, or they are refused."""
    far = torch.full((4, 9), 1e3, dtype=torch.float64).cumsum(-1)
    attend = hf("AttentionInterface")()[register_attention("test_another", rel_bias=far, span=Span.full(5))]
    q, k, v = (randn(1, 4, 5, 8, seed=seed) for seed in range(3))

    class StandIn(torch.nn.Module):
        def forward(self, hidden_states: Any, encoder_hidden_states: Any = None) -> Any: ...

    class StandInCross(StandIn): ...

    def differs(kind: type[Any], **attributes: Any) -> bool:
        module = kind()
        vars(module).update(attributes)
        got, _ = attend(module, q, k, v, None)
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(attributes.get("is_causal")))
        return not torch.allclose(got.transpose(1, 2), plain)

    assert not differs(StandInCross)
    assert not differs(StandIn, is_cross_attention=True)
    assert not differs(StandIn, is_decoder=True, is_causal=False)
    assert differs(StandIn, is_decoder=False, is_causal=False)
    assert differs(StandIn, is_decoder=True, is_causal=True)
    assert differs(StandIn, is_causal=True)
    assert differs(torch.nn.Module, is_causal=False)
    with pytest.raises(ValueError, match="`model` must have attention that says whether it attends to another seq"):
        differs(StandIn, is_causal=False)
    with pytest.raises(ValueError, match="`attention_mask` must be a mask, got None: Module has no `is_causal`"):
        differs(torch.nn.Module)
    q = q[..., :3, :]
    with pytest.raises(ValueError, match="`attention_mask` must be a mask where 3 queries attend to 5 keys and"):
        differs(torch.nn.Module, is_causal=False)


@pytest.mark.parametrize("kind", ["complex", "other"])
def test_rotary_embeddings_of_other_kinds(kind: str) -> None:
    theirs, x = model(), randn(3, 4)
    rotary = theirs.model.rotary_emb
    rotary.forward = lambda *given: torch.complex(x, x) if kind == "complex" else x
    for _ in range(2):
        assert replace_rotary(theirs, name="test_kinds") is theirs
    assert len(rotary._forward_hooks) == 1
    if kind == "complex":
        assert (rotary() == 1).all()
        return
    with pytest.raises(ValueError, match=r"^`model` must have rotary embeddings that return a cosine and a sine"):
        rotary()


class StandInRotaryEmbedding(torch.nn.Module):
    def __init__(self, angles: Any) -> None:
        super().__init__()
        self.angles = angles

    def forward(self) -> Any:
        return self.angles


class StandInModel(torch.nn.Sequential):
    """A model that uses transformers' interface for its attention, or does not and ignores the name."""

    def __init__(self, *parts: torch.nn.Module, uses: bool = True) -> None:
        super().__init__(*parts)
        self.uses, self.config = uses, SimpleNamespace(_attn_implementation="eager")

    def set_attn_implementation(self, name: str) -> None:
        for part in self.modules():
            if isinstance(part, StandInModel) and part.uses:
                part.config._attn_implementation = name


def test_rotary_positions_stay_if_a_part_has_not_the_interface() -> None:
    rotary = StandInRotaryEmbedding((torch.ones(2), torch.ones(2)))
    inner = StandInModel(rotary, uses=False)
    with pytest.raises(ValueError, match=r"^`model` must use the attention interface of transformers.*got StandInM"):
        replace_rotary(StandInModel(inner))
    assert not rotary._forward_hooks
    replace_rotary(StandInModel(StandInModel(rotary), uses=False))
    assert rotary._forward_hooks


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("build", [model, hybrid])
def test_generate_gives_the_tokens_of_a_dense_bias(
    options: dict[str, Any], padded: bool, build: Callable[[], Any]
) -> None:
    theirs = build()
    name = register_attention("test_generation", rel_bias=NUMBERS)
    given = padded_on_the_left(8) if padded else {"input_ids": tokens(8)["input_ids"]}
    given |= {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    given |= {"eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    beams = {"num_beams": options.get("num_beams", 1)}
    want = set_to(theirs, by_hand(learned)).generate(**given, **beams, use_cache=False)
    got = set_to(theirs, name).generate(**given, **options)
    assert torch.equal(got.sequences, want.sequences)
    check(torch.stack(got.logits), torch.stack(want.logits), 1e-6)  # generate rounds logits to float32


@torch.enable_grad()
def test_a_learned_bias_gets_gradients() -> None:
    numbers = NUMBERS.clone().requires_grad_()
    hand = by_hand(lambda distance: numbers[:, distance.clamp(-5, 0) + 5])
    gradients = []
    for name in (hand, register_attention("test_learned", rel_bias=numbers)):
        set_to(model(), name).train()(tokens(12)["input_ids"]).logits.square().sum().backward()
        assert numbers.grad is not None
        gradients.append(numbers.grad)
        numbers.grad = None
    want, got = gradients
    assert want.abs().min() > 0
    check(got, want, 1e-5)  # norms are float32


ENCODER_DECODERS: dict[str, Any] = {
    "WhisperForConditionalGeneration": {
        "num_mel_bins": 8, "max_source_positions": 9, "max_target_positions": 20, "decoder_start_token_id": 1,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "BartForConditionalGeneration": {"max_position_embeddings": 64},
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 4, "n_layer": 2, "add_cross_attention": True, "n_positions": 64},
    "BertLMHeadModel": {**SMALL, "is_decoder": True, "add_cross_attention": True},
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_attention_to_another_text_has_no_bias(name: str) -> None:
    stem = name.removesuffix("ForConditionalGeneration").removesuffix("LMHeadModel")
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 16))}  # fmt: skip
    own = {"d_model": 32, "vocab_size": 50, **sides} if "Conditional" in name else {"vocab_size": 50}
    theirs = built(name, **own | ENCODER_DECODERS[name])()
    for path, part in theirs.named_modules():
        part.other = any(cross in path for cross in ("encoder_attn", "crossattention"))
    assert sum(part.other for part in theirs.modules()) > 2
    ids = tokens(LENGTH)["input_ids"]
    memory = torch.randn(2, LENGTH, 32, dtype=torch.float64)  # as many as tokens, so that lengths say nothing
    given: dict[str, Any] = {"encoder_hidden_states": memory}
    word = "input_ids"
    if stem == "Whisper":
        given, word = {"input_features": torch.randn(2, 8, 18, dtype=torch.float64)}, "decoder_input_ids"
    elif stem == "Bart":
        given, word = padded_on_the_left(7), "decoder_input_ids"
    for of_distance, bias in BIASES.items():
        ours = set_to(theirs, register_attention("test_another_text", **bias))
        once = set_to(theirs, by_hand(of_distance))(**given, **{word: ids}, use_cache=False).logits
        check(ours(**given, **{word: ids}, use_cache=False).logits, once)
        steps: list[Tensor] = []
        kept = None
        for start, stop in ((0, 1), (1, 2), (2, 6), (6, 7), (7, LENGTH)):
            out = ours(**given, **{word: ids[:, start:stop]}, cache=kept, use_cache=True)
            steps, kept = [*steps, out.logits], out.cache
        check(torch.cat(steps, 1), once)


def test_logits_of_the_last_tokens() -> None:
    """The upper layers of Gemma 4 drop the queries whose logits are not asked for, and masks need not be given."""
    kinds = ["sliding_attention", "full_attention"] * 2
    theirs = model(
        "Gemma4Text", head_dim=8, global_head_dim=8, sliding_window=5, layer_types=kinds, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=50, num_hidden_layers=4,
    )  # fmt: skip
    ids = tokens(LENGTH)["input_ids"]
    want = set_to(theirs, by_hand(learned))(ids, use_cache=False).logits
    ours = set_to(theirs, register_attention("test_last", rel_bias=NUMBERS))
    for kept in (0, 1, 3):
        check(ours(ids, logits_to_keep=kept).logits, want[:, -kept:])
        cache = hf("StaticCache")(config=ours.config, max_cache_len=ROOM)
        check(ours(ids, logits_to_keep=kept, cache=cache).logits, want[:, -kept:])


def test_a_compiled_decoder() -> None:
    """One graph for all steps, whether it makes its masks or gets copies of them."""
    theirs, ids = model(num_hidden_layers=1), tokens(LENGTH)["input_ids"]
    want = set_to(theirs, by_hand(learned))(ids, use_cache=False).logits
    ours = set_to(theirs, register_attention("test_compiled", rel_bias=NUMBERS))
    present = torch.ones(2, LENGTH, dtype=torch.int64)
    for with_mask in (False, True):
        counter = peer("torch._dynamo.testing.CompileCounterWithBackend")("aot_eager")
        compiled: Any = torch.compile(ours, fullgraph=True, backend=counter)
        cache = hf("StaticCache")(config=ours.config, max_cache_len=ROOM)
        logits = [ours(ids[:, :4], cache=cache).logits]
        for start in range(4, LENGTH):
            mask = {"attention_mask": four_axes(present, start, start + 1, ROOM, torch.bool)} if with_mask else {}
            logits.append(compiled(ids[:, start : start + 1], cache=cache, **mask).logits)
        assert counter.frame_count == 1
        check(torch.cat(logits, 1), want)


def test_an_exported_cache_of_a_fixed_length() -> None:
    theirs, ids = model(), tokens(LENGTH)["input_ids"][:1]
    ours = set_to(theirs, register_attention("test_exported", rel_bias=NUMBERS))
    ours.generation_config.cache_implementation = "static"
    held = peer("transformers.integrations.executorch.TorchExportableModuleWithStaticCache")(ours, 1, ROOM)
    program = torch.export.export(held, (ids[:, :1], None, torch.tensor([0]))).module()
    logits = [program(ids[:, i : i + 1], None, torch.tensor([i])) for i in range(LENGTH)]
    check(torch.cat(logits, 1), set_to(theirs, by_hand(learned))(ids, use_cache=False).logits)


@pytest.mark.parametrize("step", sorted(lives.TRACED - {"compiled"}))
def test_nothing_of_a_traced_call_stays(step: str) -> None:
    theirs, ids = model(), tokens(LENGTH)["input_ids"]
    ours = set_to(theirs, register_attention("test_traced"))
    life = lives.Life(ours, lambda model: model(ids, use_cache=False).logits)
    life.go(step)
    check(life(), set_to(theirs, by_hand(alibi))(ids, use_cache=False).logits)


def tiny(config: Any) -> None:
    """Make a configuration of any family small, in place."""
    for name in SIZES.keys() & vars(config).keys():
        if type(getattr(config, name)) is int:
            setattr(config, name, SIZES[name])
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            tiny(getattr(config, name))


SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "attention_window", "block_size"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    "vocab_size": 50, "moe_intermediate_size": 16, "sliding_window": 5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def decoder(family: str, name: str) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Return a small decoder of a family, and its logits of a text."""
    config = hf("CONFIG_MAPPING")[family]()
    tiny(config)
    config.is_decoder = True
    made = hf(name)
    with torch.device("meta"):
        assert sum(x.numel() for x in made(config).parameters()) < 5e6
    theirs = made(config).eval()
    for x in theirs.parameters():
        torch.nn.init.normal_(x, std=0.2, generator=torch.Generator().manual_seed(x.numel()))
    source = {"input_ids": tokens(7)["input_ids"]} if config.is_encoder_decoder else {}
    word = "decoder_input_ids" if source else "input_ids"
    return theirs, lambda ids: theirs(**source, **{word: ids}, use_cache=False).logits


def change_of_the_past(logits: Callable[[Tensor], Tensor]) -> float:
    ids = tokens(9)["input_ids"]
    other = torch.cat([ids[:, :6], ids[:, 6:] % 40 + 5], 1)
    return float((logits(ids)[:, :6] - logits(other)[:, :6]).abs().max())


REFUSED = {
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "bigbird_pegasus": "BigBirdPegasusForConditionalGeneration",
    "pegasus_x": "PegasusXForConditionalGeneration",
    "git": "GitForCausalLM",
}


@pytest.mark.parametrize("family", REFUSED)
def test_decoders_without_causal_masks_are_refused(family: str) -> None:
    theirs, logits = decoder(family, REFUSED[family])
    assert change_of_the_past(logits) < 1e-4
    theirs.set_attn_implementation(register_attention("test_refused"))
    with pytest.raises(ValueError, match=r"^`model` must support attention functions of transformers' interface"):
        logits(tokens(9)["input_ids"])


@pytest.mark.slow
def test_no_decoder_sees_the_future() -> None:
    """Every decoder of transformers that can be made small, unless it is refused."""
    names = hf("auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    names = names | hf("auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
    tried = 0
    for family, name in names.items():
        try:
            theirs, logits = decoder(family, name if isinstance(name, str) else name[0])
            if change_of_the_past(logits) > 1e-4:
                continue
        except Exception:
            continue  # sizes that do not fit together, or arguments of other kinds
        theirs.set_attn_implementation(register_attention("test_future", rel_bias=NUMBERS))
        with contextlib.suppress(ValueError):  # refused
            assert change_of_the_past(logits) < 1e-4, family
        tried += 1
    assert tried > 100


WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SINKS: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {**WINDOWS, **EXPERTS, "head_dim": 8},
    "OpenAIPrivacyFilterForTokenClassification": {**EXPERTS, "head_dim": 8, "sliding_window": 3},
    "MiMoV2FlashForCausalLM": {
        **WINDOWS, "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16, "head_dim": 8,
        "v_head_dim": 6, "n_group": 1, "topk_group": 1,
    },
    "FlintForCausalLM": {"sliding_window": 5, "head_dim": 8},
    "GraniteSWAForCausalLM": WINDOWS,
    "GraniteMoeSWAForCausalLM": {**WINDOWS, **EXPERTS},
}  # fmt: skip


def with_sinks(name: str) -> Any:
    config = hf(f"{name.partition('For')[0]}Config")(
        **SMALL | SINKS[name], pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64
    )
    config._attn_implementation = "eager"
    theirs = hf(name)(config).eval()  # float32: transformers multiplies no experts of float64
    for seed, x in enumerate(theirs.parameters()):
        torch.nn.init.normal_(x, std=0.3, generator=torch.Generator().manual_seed(seed))
    return theirs


@pytest.mark.parametrize("name", SINKS)
@torch.enable_grad()
def test_attention_sinks(name: str) -> None:
    """Models with sinks, which only eager attention of transformers supports on CPUs, without a bias."""
    theirs = with_sinks(name)
    ours = set_to(theirs, register_attention("test_sinks", rel_bias=None))
    for given in ({"input_ids": tokens(LENGTH)["input_ids"]}, padded_on_the_left(LENGTH)):
        present = given.get("attention_mask", torch.ones(1))[..., None]
        want, got = (each(**given).logits * present for each in (theirs, ours))
        check(got, want, 1e-6)
    for logits in (want, got):
        logits.square().sum().backward()
    for (path, x), y in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        if x.grad is not None and x.grad.any():
            assert y.grad is not None
            check(y.grad, x.grad, 1e-5)
        assert x.grad is not None or "sinks" not in path
    if not name.endswith("CausalLM"):
        return
    for options in ({}, {"cache_implementation": "static"}):
        steps = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **options}
        assert torch.equal(ours.generate(**given, **steps), theirs.generate(**given, **steps))


def test_sinks_are_not_rounded() -> None:
    """Flint keeps its sinks in float32 in a model of half precision."""
    theirs = with_sinks("FlintForCausalLM").bfloat16()
    module = theirs.model.layers[0].self_attn
    module.sinks = torch.nn.Parameter(torch.full((4,), 1.0 + 2**-9))
    heads = [torch.zeros(1, n, 3, 8, dtype=torch.bfloat16) for n in (4, 2, 2)]
    heads[2] += 1
    ours = hf("AttentionInterface")()[register_attention("test_rounded", rel_bias=None)]
    got, _ = ours(module, *heads, None, s_aux=module.sinks, scaling=1.0)
    keys = torch.arange(1, 4)
    want = keys / (keys + module.sinks[0].exp())
    assert torch.equal(got[0, :, 0, 0], want.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("name", SINKS)
def test_exported_sinks(name: str, tmp_path: Path) -> None:
    ours = set_to(with_sinks(name), register_attention("test_exported_sinks", rel_bias=None))
    ours.set_experts_implementation("batched_mm")  # torch exports no other
    if not name.endswith("CausalLM"):
        torch_to_onnx(ours, padded_on_the_left(LENGTH), tmp_path / "model.onnx")  # compares both
        return
    made = generate(decoder_to_onnx(ours, tmp_path / "model.onnx"), tokens(4)["input_ids"].numpy(), 8)
    given = {"input_ids": tokens(4)["input_ids"], "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    want = ours.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert np.array_equal(made, want[:, 4:].numpy())


def test_keys_of_several_positions_are_refused() -> None:
    """DeepSeek V4 compresses keys, and its masks must be numbers; others choose keys by indices instead of masks."""
    theirs, logits = decoder("deepseek_v4", "DeepseekV4ForCausalLM")
    theirs.set_attn_implementation(register_attention("test_several", rel_bias=None))
    with pytest.raises(ValueError, match="`value` must not be `key`"):
        logits(tokens(9)["input_ids"])


@torch.enable_grad()
def test_a_bias_of_each_layer() -> None:
    biases = [torch.randn(4, 9, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    name = register_attention("test_layers", rel_bias=lambda module: biases[module.layer_idx], span=Span(4, 4, "zero"))
    set_to(model(), name)(**tokens(12)).logits.square().sum().backward()
    for bias in biases:
        assert bias.grad is not None
        assert bias.grad[:, :5].abs().min() > 0
        assert not bias.grad[:, 5:].any()  # the future


def test_dropout_in_training() -> None:
    ours = set_to(model(), register_attention("test_dropout")).train()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    one, two = (ours(**tokens(12)).logits for _ in range(2))
    assert (one - two).norm() > 1e-2 * one.norm()


def test_wrong_biases_and_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="`rel_bias` must be"):
        register_attention(rel_bias="rotary")
    with pytest.raises(TypeError, match=r"`rel_bias` must be 'alibi', a torch\.Tensor, callable or None, got"):
        register_attention(rel_bias=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`span` must be None with ALiBi"):
        register_attention(span=Span.causal(3))
    ours = set_to(model(), register_attention("test_refusals"))
    for name, value, message in [("output_attentions", True, "False"), ("indices", torch.zeros(4), "None, got"),
                                 ("position_bias", torch.zeros(4), "None, got")]:  # fmt: skip
        with pytest.raises(ValueError, match=f"`{name}` must be {message}"):
            ours(**tokens(3), **{name: value})
    with pytest.raises(ValueError, match="`name` must not be one of transformers' own, got 'sdpa'"):
        register_attention("sdpa")
    with pytest.raises(ValueError, match=r"^`model` must be one of transformers with modules of rotary embeddings"):
        replace_rotary(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^`model` must be a torch\.nn\.Module, got"):
        replace_rotary("llama")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="needs transformers: pip install transformers"):
        register_attention("test_refusals")

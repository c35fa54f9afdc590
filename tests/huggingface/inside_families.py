"""Drop-ins without transformers: both ways of working give the same numbers. tests/peers has the originals."""

import contextlib
import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface import stand_ins
from huggingface.stand_ins import HEADS, LENGTH, STAND_INS, Cache, D, DynamicCache, E, x

import oracles
from relskew_core import Span, alibi_bias
from relskew_core._functions import prepared
from relskew_core.backends import _compiled
from relskew_core.huggingface import _images, replace_attention
from relskew_core.huggingface._attend import DropIn, additive, extend
from relskew_core.huggingface._images import by_cell
from relskew_core.huggingface._register import _Registered

Tensor = torch.Tensor


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Choose between the compiled kernels and the portable code, and whether BEiT's matrix is held."""
    compiled = _compiled.kernels

    def choose(taken: bool) -> None:
        monkeypatch.setattr(_images, "HELD", 0 if taken else 2**40)
        monkeypatch.setattr(_compiled, "kernels", None if taken else compiled)
        monkeypatch.setattr(prepared, "_checked", {})

    return choose


@pytest.mark.parametrize("name", STAND_INS)
def test_the_kernels_and_the_portable_code_agree(name: str, portable: Callable[[bool], None]) -> None:
    """In outputs, and in the gradients of all parameters."""
    make, call = STAND_INS[name]
    torch.manual_seed(0)
    model = make()
    keys = list(model.state_dict())
    ours: Any = replace_attention(model).eval()
    assert list(ours.state_dict()) == keys
    found = []
    for taken in (False, True):
        portable(taken)
        out = call(ours)
        ours.zero_grad()
        out.square().sum().backward()
        gradients = {key: parameter.grad for key, parameter in ours.named_parameters() if parameter.grad is not None}
        found.append((out.detach(), gradients))
    (out, gradients), (other_out, other_gradients) = found
    assert oracles.relative_error(other_out.numpy(), out.numpy()) < 1e-10
    assert gradients.keys() == other_gradients.keys()
    largest = max(gradient.norm() for gradient in gradients.values())
    for key, gradient in gradients.items():
        assert (other_gradients[key] - gradient).norm() < 1e-10 * largest, key


@torch.no_grad()
def test_fewer_cells_than_a_window_has() -> None:
    """MONAI takes the bias of the first cells where an image is smaller than a window."""
    ours: Any = replace_attention(STAND_INS["windows"][0]()).eval()
    cells = x(2, 4, E)
    bias = by_cell(ours.relative_position_bias_table, (3, 3))[:, :4, :4]
    q, k, v = (y.unflatten(-1, (HEADS, D)).transpose(1, 2) for y in ours.qkv(cells).chunk(3, -1))
    want = ours.proj(((q @ k.mT * D**-0.5 + bias).softmax(-1) @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(ours(cells), want)


def seen(cache: dict[str, Any]) -> int:
    return LENGTH + 4 * any(cache.values())


CACHED: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    "umt5": (STAND_INS["umt5"][0], lambda ours, **cache: ours(x(), **cache)[0]),
    "mpt": (STAND_INS["mpt"][0], lambda ours, **cache: ours(x(), x(HEADS, 1, seen(cache)), **cache)[0]),
    "inkling": (STAND_INS["inkling"][0], lambda ours, **cache: ours(x(), None, **cache)[0]),
    "prophet": (STAND_INS["prophet"][0], lambda ours, **cache: ours(x(2, 3 * LENGTH, E), **cache)[0]),
    "nemotron": (lambda: stand_ins.parakeet("NemotronAsrStreamingEncoderAttention"), lambda ours,
                 **cache: ours(x(), x(1, 2 * seen(cache) - 1, E), **cache)[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHED)
@torch.no_grad()
def test_a_cache_of_either_name(name: str) -> None:
    """transformers 5.24 calls `cache` what was `past_key_values` before."""
    make, call = CACHED[name]
    torch.manual_seed(0)
    ours: Any = replace_attention(make()).eval()
    cache = Cache(x(2, HEADS, 4, D), 2 * x(2, HEADS, 4, D))
    out = call(ours, cache=cache)
    assert torch.equal(call(ours, past_key_values=cache), out)
    assert torch.equal(call(ours, past_key_values=None), call(ours))
    assert (out - call(ours)).norm() > 1e-3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_growing_cache_of_transformers_is_copied_once_in_many_tokens(mode: Any) -> None:
    keys, values = x(2, HEADS, 600, D), 2 * x(2, HEADS, 600, D)
    cache, memory = DynamicCache(), []
    with mode():
        for place in range(600):
            k, v = (y[:, :, place : place + 1] for y in (keys, values))
            found = extend(cache, k, v, 0)
            memory.append(tuple(y.data_ptr() for y in found))
    assert len(set(memory)) == 4  # the first token, and room for 256 at once
    assert cache.copies == 1
    assert all(map(torch.equal, found, (keys, values)))


@torch.no_grad()
def test_what_changes_a_growing_cache_of_transformers_is_followed() -> None:
    keys, cache = x(2, HEADS, 20, D), DynamicCache()

    def add(cache: DynamicCache, first: int, end: int, factor: int = 1) -> None:
        new = factor * keys[:, :, first:end]
        extend(cache, new, 2 * new, 0)

    def others(cache: DynamicCache, copied: Callable[[Any], Any]) -> DynamicCache:
        other = DynamicCache()
        other.layers = [copied(layer) for layer in cache.layers]
        return other

    for place in range(9):
        add(cache, place, place + 1)
    copies = [others(cache, how) for how in (copy.copy, copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own)))]
    for factor, one in enumerate([cache, *copies], 1):
        add(one, 9, 10, factor)
    for factor, one in enumerate([cache, *copies], 1):
        add(one, 10, 12, factor)
        want = torch.cat([keys[:, :, :9], factor * keys[:, :, 9:12]], 2)
        assert torch.equal(one.layers[0].keys, want)
        assert torch.equal(one.layers[0].values, 2 * want)
    layer, want = cache.layers[0], keys[:, :, :12]
    changes: list[Callable[[Tensor], Tensor]] = [lambda y: y[:, :, :-3], lambda y: y.flip(0), lambda y: y + 1]
    for change in changes:  # taken back, in another order, other numbers
        layer.keys, layer.values, want = change(layer.keys), change(layer.values), change(want)
        for place in range(12, 14):
            add(cache, place, place + 1)
        want = torch.cat([want, keys[:, :, 12:14]], 2)
        assert torch.equal(layer.keys, want)
    layer.values = layer.values.clone()
    add(cache, 14, 15)
    assert layer.values.shape == layer.keys.shape
    before, cache.offloading = cache.copies, True
    add(cache, 15, 16)
    with torch.enable_grad():
        add(cache, 16, 17)
    assert cache.copies == before + 2
    assert torch.equal(layer.keys[:, :, -3:], keys[:, :, 14:17])


LOCAL = {"wav2vec2", "rows of each item", "relative_key", "fastspeech2", "parakeet", "wavlm", "umt5", "seamless"}


@pytest.mark.parametrize("name", sorted(LOCAL))
@torch.no_grad()
def test_a_window_hides_changes_outside_of_it(name: str, portable: Callable[[bool], None]) -> None:
    """A change outside the window of a query changes nothing for it, and one inside does."""
    make, call = STAND_INS[name]
    torch.manual_seed(0)
    original = make().eval()
    ours: Any = replace_attention(copy.deepcopy(original), window=(2, 1))
    keys = next(getattr(ours, part) for part in ("linear_k", "k_proj", "k") if hasattr(ours, part))
    changed: list[int] = []
    keys.register_forward_hook(
        lambda layer, given, out: out.index_fill(1, torch.tensor(changed, dtype=torch.int64), 3.0)
    )
    for taken in (False, True):
        portable(taken)
        changed[:] = []
        before = call(ours)
        changed[:] = [4]
        differs = (call(ours) - before).abs().amax((0, 2)) > 1e-9
        assert differs.nonzero().flatten().tolist() == [3, 4, 5, 6]
    whole = replace_attention(copy.deepcopy(original), window=(LENGTH, LENGTH))
    torch.testing.assert_close(call(whole), call(replace_attention(original)))


@pytest.mark.parametrize("name", sorted(STAND_INS.keys() - LOCAL - {"wavlm's second layer", "mpnet", "speecht5"}))
def test_windows_are_refused_by_name(name: str) -> None:
    model = torch.nn.ModuleList([STAND_INS[name][0]()])
    parts = list(model.modules())
    kind = next(type(part).__name__ for part in parts if "Attention" in type(part).__name__)
    with pytest.raises(ValueError, match=r"`window` must be None, except for .*: got one for") as error:
        replace_attention(model, window=(2, 1))
    assert kind[:4] in str(error.value)
    assert list(model.modules()) == parts


@pytest.mark.parametrize("window", [(None, 2), (2, None), (None, None)])
def test_windows_have_two_sides(window: Any) -> None:
    with pytest.raises(ValueError, match="`window` must be bounded on both sides, or None"):
        replace_attention(STAND_INS["wavlm"][0](), window=window)
    with pytest.raises(TypeError, match="`window` must be None or a pair"):
        replace_attention(STAND_INS["wavlm"][0](), window=3)  # type: ignore[arg-type]


def test_a_decoder_has_no_window() -> None:
    decoder = STAND_INS["umt5"][0]()
    decoder.is_decoder = True
    with pytest.raises(ValueError, match="no encoder of this model has relative positions"):
        replace_attention(decoder, window=(2, 1))
    both: Any = replace_attention(torch.nn.ModuleList([decoder, STAND_INS["umt5"][0]()]), window=(2, 1))
    assert [part.window for part in both] == [None, (2, 1)]
    replace_attention(both, window=(3, 0))
    assert [part.window for part in replace_attention(both)] == [None, (3, 0)]


def test_attention_without_relative_positions_stays() -> None:
    rotary = stand_ins.conformer("Wav2Vec2ConformerSelfAttention")
    rotary.position_embeddings_type = "rotary"
    with pytest.raises(ValueError, match=r"got Wav2Vec2Conf.* with Wav2Vec2ConformerSelfAtt.* Supported are Beit"):
        replace_attention(rotary)
    both = torch.nn.ModuleList([rotary, stand_ins.conformer("Wav2Vec2ConformerSelfAttention")])
    replace_attention(both)
    assert both[0] is rotary
    assert isinstance(both[1], DropIn)


@pytest.mark.parametrize("kind", sorted(DropIn.known))
def test_a_class_that_shares_only_its_name_stays(kind: str) -> None:
    names = [kind, *(drop_in.needs for drop_in in DropIn.known[kind] if drop_in.needs)]
    model = torch.nn.ModuleList([type(name, (torch.nn.Module,), {})() for name in names])
    with pytest.raises(ValueError, match=r"^`model` must have relative positions in one .* got ModuleList with"):
        replace_attention(model)


def test_a_class_whose_other_half_is_missing_stays() -> None:
    model = STAND_INS["mpnet"][0]()
    del model.encoder.layer.q
    with pytest.raises(ValueError, match=r"^`model` must have relative positions in one .* got ModuleDict with"):
        replace_attention(model)


# What `forward` reads if another layer passes no bias, or if products with keys or with queries are asked for.
SOMETIMES = {
    "relative_attention_bias", "rel_attn_embed", "pos_proj", "pos_q_proj", "pos_key_proj", "pos_query_proj", "key_proj",
}  # fmt: skip


@pytest.mark.parametrize("name", STAND_INS)
@torch.no_grad()
def test_a_class_without_one_attribute_stays_or_works(name: str) -> None:
    make, call = STAND_INS[name]
    attentions = [i for i, part in enumerate(make().modules()) if type(part).__name__ in DropIn.known]
    for i in attentions:
        first = list(make().modules())[i]
        for attribute in (*first._modules, *first._parameters, *vars(first).keys() - vars(torch.nn.Module()).keys()):
            model = make().eval()
            part = list(model.modules())[i]
            delattr(part, attribute)
            with contextlib.suppress(ValueError):  # where nothing is left to be replaced
                replace_attention(model)
            if isinstance(part, DropIn) and attribute not in SOMETIMES:
                call(model)


def with_forward(made: Any, forward: Any) -> Any:
    made.__class__ = type(type(made).__name__, (torch.nn.Module,), {"forward": forward})
    return made


@pytest.mark.parametrize(
    "foreign",
    [
        lambda: stand_ins.module(
            "WindowAttention", "qkv", "proj", num_heads=2, win_size=3, relative_position_bias_table=x()
        ),
        lambda: with_forward(STAND_INS["windows"][0](), lambda self, x, rpi, mask=None: x),
        lambda: with_forward(STAND_INS["umt5"][0](), lambda self, x, context=None, mask=None, pos_bias=None: x),
    ],
    ids=["Uformer", "HAT", "Wan"],
)  # fmt: skip
def test_attention_of_other_packages_stays(foreign: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"^`model` must have relative positions in one .* By hand: "):
        replace_attention(foreign())


@pytest.mark.parametrize(("kind", "hint"), [
    ("LayoutLMv3SelfAttention", r"By hand: `conventions\.T5` has these buckets, docs/variants\.md"),
    ("ShiftedWindowAttention", r"By hand: `conventions\.Swin` reads the table, docs/variants\.md"),
    ("OtherRotaryEmbedding", r"By hand: `register_attention` adds a bias to rotary positions, `replace_rotary` "),
    ("OtherAttention", r"By hand: the calls for other code are in docs/chooser\.md"),
])  # fmt: skip
def test_a_refused_model_gets_a_next_step(kind: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        replace_attention(stand_ins.module(kind))


def test_an_attention_of_the_authors_of_vits_gets_its_loader() -> None:
    theirs = stand_ins.module("MultiHeadAttention")
    theirs.emb_rel_k = torch.nn.Parameter(torch.zeros(1, 9, 4))
    with pytest.raises(ValueError, match=r"By hand: `conventions\.load_vits` and `load_vits_encoder` read the weights"):
        replace_attention(theirs)


@pytest.mark.parametrize("model", ["t5-small", torch.nn.Linear])
def test_an_argument_that_is_no_module_is_named(model: Any) -> None:
    with pytest.raises(TypeError, match=r"^`model` must be a torch\.nn\.Module, got (str|type)"):
        replace_attention(model)


def test_a_bias_without_its_attention_stays() -> None:
    table = STAND_INS["beit"][0]().bias
    with pytest.raises(ValueError, match="got BeitRelativePositionBias with no attention"):
        replace_attention(table)


def test_a_module_in_two_places_is_replaced_by_one() -> None:
    attention = stand_ins.conformer("FastSpeech2ConformerAttention")
    model: Any = replace_attention(torch.nn.ModuleDict({"a": attention, "b": torch.nn.ModuleList([attention])}))
    assert model["a"] is model["b"][0]


def test_a_model_of_which_one_part_is_refused_stays_as_it_was() -> None:
    refused = stand_ins.deberta(1)
    refused.max_relative_positions = 0
    model = torch.nn.ModuleList([stand_ins.deberta(1), refused, stand_ins.conformer("Wav2Vec2ConformerSelfAttention")])
    parts = list(model.modules())
    with pytest.raises(ValueError, match="`left` must be"):
        replace_attention(model)
    assert list(model.modules()) == parts


@pytest.mark.parametrize(("name", "given", "named"), [
    ("wav2vec2", {"hidden_states": x()}, "relative_position_embeddings"),
    ("fastspeech2", {"hidden_states": x()}, "pos_emb"),
    ("parakeet", {"hidden_states": x()}, "position_embeddings"),
])  # fmt: skip
def test_missing_positions_are_named(name: str, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}` must be given for relative positions, got None"):
        replace_attention(STAND_INS[name][0]())(**given)


@torch.no_grad()
def test_deberta_reads_masks_of_floats_as_masks() -> None:
    make, _ = STAND_INS["deberta"]
    ours, seen = replace_attention(make()).eval(), stand_ins.boolean()
    found = [ours(x(), mask, rel_embeddings=x(14, E))[0] for mask in (seen, seen.float(), seen.double())]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_masks_that_are_added_keep_their_sense_in_another_dtype() -> None:
    mask = torch.tensor([0.0, -1.0, torch.finfo(torch.float32).min])
    for dtype in (torch.bfloat16, torch.float16):
        added = additive(mask, dtype)
        assert added is not None
        assert added.tolist() == [0.0, -1.0, torch.finfo(dtype).min]


def test_deberta_attends_from_where_it_attends_to() -> None:
    ours = replace_attention(stand_ins.deberta(1))
    with pytest.raises(ValueError, match="`query_states` must be None"):
        ours(x(), None, query_states=x(), rel_embeddings=x(14, E))


@torch.no_grad()
def test_a_mask_is_added_to_a_bias_of_cells_in_a_compiled_program() -> None:
    make, call = STAND_INS["beit"]
    layer = replace_attention(make()).eval()
    torch.testing.assert_close(torch.compile(call, backend="eager")(layer), call(layer), rtol=0, atol=1e-12)


@pytest.fixture(params=[stand_ins.vits, lambda: stand_ins.t5(is_decoder=True, is_causal=True)], ids=["VITS", "T5"])
def theirs(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param()


def test_a_model_or_an_attention_is_replaced_once_in_place(theirs: Any) -> None:
    model, kind, keys = (
        torch.nn.Sequential(copy.deepcopy(theirs), torch.nn.ReLU()), type(theirs), [*theirs.state_dict()],
    )  # fmt: skip
    parts = list(model.modules())
    for given in (model, theirs):
        for _ in range(2):
            assert replace_attention(given) is given
    assert list(model.modules()) == parts
    assert kind not in {type(theirs), *map(type, parts)}
    assert list(theirs.state_dict()) == keys


class Model(torch.nn.Module):
    """A model that does not pass on whether weights are requested."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention, self.config = attention, SimpleNamespace(output_attentions=False)

    def forward(self, x: torch.Tensor, output_attentions: bool | None = None) -> Any:
        return self.attention(x)


def test_a_request_for_weights_is_refused_by_model_and_attention(theirs: Any) -> None:
    refused = pytest.raises(ValueError, match=r"^`output_attentions` must be False")
    ours = replace_attention(replace_attention(Model(theirs)))
    assert len(ours._forward_pre_hooks) == 1
    copied: Any = pickle.loads(pickle.dumps(ours))
    for model in (ours, copied):
        model(x())
        with refused:
            model(x(), output_attentions=True)
        model.config.output_attentions = True
        model(x(), output_attentions=False)
        with refused:
            model(x())
    with refused:
        theirs(x(), output_attentions=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_is_rounded_once(dtype: torch.dtype) -> None:
    """Half precision has neither all distances nor the slopes of twelve heads."""
    bias, span = _Registered("alibi", None)._bias(None, torch.zeros(1, 12, 1, D, dtype=dtype), 3000, 1)
    want = alibi_bias(12, Span(span.left, span.right), xp=torch, dtype=torch.float32)
    assert torch.equal(bias, want.to(dtype))

"""Drop-ins without transformers: both ways of working give the same numbers. tests/peers has the originals."""

import contextlib
import copy
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface import stand_ins
from huggingface.stand_ins import HEADS, LENGTH, STAND_INS, Cache, D, E, rows, x

import oracles
from relskew_core import Span, alibi_bias
from relskew_core._functions import prepared
from relskew_core.backends import _compiled
from relskew_core.huggingface import _images, replace_attention
from relskew_core.huggingface._attend import DropIn, additive
from relskew_core.huggingface._images import by_cell
from relskew_core.huggingface._register import _Registered
from torch_modules import of

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


def rotary() -> Any:
    return stand_ins.conformer("Wav2Vec2ConformerSelfAttention", "rotary")


def without_its_other_half() -> Any:
    model = STAND_INS["mpnet"][0]()
    del model.encoder.layer.q
    return model


def with_forward(name: str, forward: Any) -> Any:
    made: Any = STAND_INS[name][0]()
    made.__class__ = type(type(made).__name__, (torch.nn.Module,), {"forward": forward})
    return made


def of_hat() -> Any:
    return with_forward("windows", lambda self, x, rpi, mask=None: x)


def of_wan() -> Any:
    return with_forward("umt5", lambda self, x, context=None, mask=None, pos_bias=None: x)


def of_uformer() -> Any:
    attributes = {"num_heads": 2, "win_size": 3, "relative_position_bias_table": x()}
    return stand_ins.module("WindowAttention", "qkv", "proj", **attributes)


NO_ATTENTION = r"^`model` must have relative positions in one .*"
TWO_SIDES = "`window` must be bounded on both sides, or None"
NEXT_STEPS = {
    "LayoutLMv3SelfAttention": r"`conventions\.T5` has these buckets, docs/variants\.md",
    "ShiftedWindowAttention": r"`conventions\.Swin` reads the table, docs/variants\.md",
    "OtherRotaryEmbedding": r"`register_attention` adds a bias to rotary positions, `replace_rotary` ",
    "OtherAttention": r"the calls for other code are in docs/chooser\.md",
}
REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    **{f"window {pair}": (stand_ins.wavlm, pair, TWO_SIDES) for pair in [(None, 2), (2, None), (None, None)]},
    "window 3": (stand_ins.wavlm, 3, "`window` must be None or a pair"),
    "decoder": (lambda: stand_ins.t5(is_decoder=True), (2, 1), "no encoder of this model has relative positions"),
    "rotary": (rotary, None, "got Wav2Vec2Conf.* with Wav2Vec2ConformerSelfAtt.* Supported are Beit"),
    "half of MPNet": (without_its_other_half, None, f"{NO_ATTENTION} got ModuleDict with"),
    "bias alone": (lambda: STAND_INS["beit"][0]().bias, None, "got BeitRelativePositionBias with no attention"),
    **{make.__name__: (make, None, f"{NO_ATTENTION} By hand: ") for make in (of_uformer, of_hat, of_wan)},
    **{kind: (partial(stand_ins.module, kind), None, f"By hand: {hint}") for kind, hint in NEXT_STEPS.items()},
    "VITS of its authors": (
        lambda: stand_ins.module("MultiHeadAttention", emb_rel_k=stand_ins.numbers(1, 9, 4)), None,
        r"By hand: `conventions\.load_vits` and `load_vits_encoder` read the weights",
    ),
    "name": (lambda: "t5-small", None, r"^`model` must be a torch\.nn\.Module, got str"),
    "class": (lambda: torch.nn.Linear, None, r"^`model` must be a torch\.nn\.Module, got type"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_or_a_window_is_refused(name: str) -> None:
    make, window, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        replace_attention(make(), window=window)


def test_what_is_not_supported_stays_as_it_is() -> None:
    both: Any = torch.nn.ModuleList([rotary(), stand_ins.conformer("Wav2Vec2ConformerSelfAttention")])
    first = both[0]
    assert replace_attention(both)[0] is first
    assert isinstance(both[1], DropIn)
    both = torch.nn.ModuleList([stand_ins.t5(is_decoder=True), STAND_INS["umt5"][0]()])
    for given, kept in ({"window": (2, 1)}, (2, 1)), ({"window": (3, 0)}, (3, 0)), ({}, (3, 0)):
        assert [part.window for part in replace_attention(both, **given)] == [None, kept]


@pytest.mark.parametrize("kind", sorted(DropIn.known))
def test_a_class_that_shares_only_its_name_stays(kind: str) -> None:
    names = [kind, *(drop_in.needs for drop_in in DropIn.known[kind] if drop_in.needs)]
    model = torch.nn.ModuleList([type(name, (torch.nn.Module,), {})() for name in names])
    with pytest.raises(ValueError, match=f"{NO_ATTENTION} got ModuleList with"):
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


@pytest.mark.parametrize(("name", "given", "message"), [
    ("wav2vec2", {}, "`relative_position_embeddings` must be given for relative positions, got None"),
    ("fastspeech2", {}, "`pos_emb` must be given for relative positions, got None"),
    ("parakeet", {}, "`position_embeddings` must be given for relative positions, got None"),
    ("deberta", {"attention_mask": None, "query_states": x(), "rel_embeddings": x()}, "`query_states` must be None"),
])  # fmt: skip
def test_arguments_of_calls_are_named(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace_attention(STAND_INS[name][0]())(x(), **given)


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


@pytest.fixture(params=[stand_ins.vits, lambda: stand_ins.t5(is_decoder=True, is_causal=True)], ids=["VITS", "T5"])
def theirs(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param()


def test_a_model_or_an_attention_is_replaced_once_in_place(theirs: Any) -> None:
    model, kind = torch.nn.Sequential(copy.deepcopy(theirs), torch.nn.ReLU()), type(theirs)
    keys = list(theirs.state_dict())
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


def encoding(self: Any, *states: Tensor) -> Tensor:
    out: Tensor = self.attention(*states)[0]
    return out


def with_past(self: Any, *states: Tensor) -> Tensor:
    out: Tensor = self.attention(states[0], cache=Cache(*states[1:]))[0]
    return out


WITH_WINDOWS: dict[str, tuple[tuple[Tensor, ...], list[tuple[int, ...]]]] = {
    "wavlm": ((x(), torch.ones(2, LENGTH).long()), [(0, 1), (0, 1)]),
    "parakeet": ((x(), rows(2)), [(0, 1), (0, 1)]),
    "wav2vec2": ((x(), x(2, 1, 1, LENGTH), rows()), [(0, 1), (0, 3), (1,)]),
}
"""Inputs, and their axes that vary."""
CASES = WITH_WINDOWS | {
    "mpt": ((x(), torch.arange(1.0 - LENGTH, 1.0) / 8 * x(HEADS, 1, 1)), [(0, 1), (2,)]),
    "bloom": ((x(), x(), x(2 * HEADS, 1, LENGTH), x(2, 1, 1, LENGTH)), [(0, 1), (0, 1), (0, 2), (0, 3)]),
    "granite": ((x(),), [(0, 1)]),
    "sam": ((x(2, 3, 4, E),), [(0, 1, 2)]),
    "vitdet": ((x(2, 3, 4, E),), [(0, 1, 2)]),
    "a table of its own": ((x(4, LENGTH, E),), [(0,)]),
    "with a past": ((x(2, 3, E), x(2, HEADS, 5, D), x(2, HEADS, 5, D)), [(0, 1), (0, 2), (0, 2)]),
}


@pytest.mark.parametrize(("name", "window"), [*((x, None) for x in CASES), *((x, (2, 1)) for x in WITH_WINDOWS)])
def test_what_varies(name: str, window: tuple[int, int] | None) -> None:
    if name == "with a past":
        model = of(with_past, attention=stand_ins.t5("UMT5Attention", is_decoder=True, is_causal=True))
    else:
        model = of(encoding, attention=STAND_INS[name][0]())
    replace_attention(model, window=window).eval()
    arguments, vary = CASES[name]
    dims = tuple({i: torch.export.Dim.AUTO for i, size in enumerate(given.shape) if size > 1} for given in arguments)
    program = torch.export.export(model, arguments, dynamic_shapes=(dims,))
    given = set(program.graph_signature.user_inputs)
    sizes = [node.meta["val"].shape for node in program.graph.nodes if node.name in given]
    fixed = [[axis for axis in axes if isinstance(shape[axis], int)] for axes, shape in zip(vary, sizes, strict=True)]
    assert not any(fixed)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*arguments), model(*arguments))


@pytest.mark.parametrize("name", ["mpnet", "beit", "vitdet", "a table of its own", "granite"])
@torch.no_grad()
def test_compiled_drop_ins_give_the_same_numbers(name: str) -> None:
    """torch.compile traces them."""
    make, call = STAND_INS[name]
    ours = replace_attention(make()).eval()
    torch.testing.assert_close(torch.compile(lambda: call(ours), backend="eager")(), call(ours))

"""``MultiheadAttention`` against ``torch.nn.MultiheadAttention``, alone and inside torch's transformer layers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
from relskew_core import Span
from relskew_core.layers.torch import MultiheadAttention

F64: dict[str, Any] = {"dtype": torch.float64}
SPAN = Span.clipped(3)


def pair(**options: Any) -> tuple[Any, MultiheadAttention]:
    """A module of torch with random biases too, and ours that took over from it."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, **options, **F64)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    return theirs, MultiheadAttention.from_multihead(theirs, SPAN, rel_values=True)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **F64)


def same(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if other is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


# Alone

HIDDEN = torch.rand(7, 5, generator=torch.Generator().manual_seed(1)) > 0.6
HIDDEN[:, 0] = False  # a query that sees nothing gives NaN in torch
PADDING = torch.arange(5) >= torch.tensor([[5], [3], [4]])
BY_HEAD = torch.rand(12, 7, 5, generator=torch.Generator().manual_seed(2)) > 0.6
BY_HEAD[:, :, 0] = False

MASKS: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "mask": {"attn_mask": HIDDEN},
    "additive mask": {"attn_mask": drawn(7, 5)},
    "mask by head": {"attn_mask": BY_HEAD},
    "additive mask by head": {"attn_mask": drawn(12, 7, 5)},
    "padding": {"key_padding_mask": PADDING},
    "additive padding": {"key_padding_mask": drawn(3, 5)},
    "both": {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
    "both, by head": {"attn_mask": BY_HEAD, "key_padding_mask": PADDING},
    "both, additive": {"attn_mask": drawn(7, 5), "key_padding_mask": drawn(3, 5)},
    "both, one additive": {"attn_mask": drawn(7, 5), "key_padding_mask": PADDING},
    "both, the other additive": {"attn_mask": HIDDEN, "key_padding_mask": drawn(3, 5)},
}

WEIGHTS: list[dict[str, bool]] = [{}, {"average_attn_weights": False}, {"need_weights": False}]


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask is deprecated:UserWarning")
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
def test_masks_and_weights_are_torchs(batch_first: bool, masks: str, weights: dict[str, bool]) -> None:
    theirs, ours = pair(batch_first=batch_first)
    inputs = drawn(3, 7, 16), drawn(3, 5, 16), drawn(3, 5, 16) + 1
    given: Any = [x if batch_first else x.transpose(0, 1) for x in inputs]
    options: Any = {**MASKS[masks], **weights}
    same(ours(*given, **options), theirs(*given, **options))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 10}, {"kdim": 6, "bias": False}], ids=str)
def test_inputs_of_other_widths_and_no_bias(options: dict[str, Any]) -> None:
    theirs, ours = pair(batch_first=True, **options)
    given: Any = [drawn(3, 7, 16), drawn(3, 5, theirs.kdim), drawn(3, 5, theirs.vdim)]
    same(ours(*given), theirs(*given))
    results = []
    modules: Any = (ours, theirs)
    for module in modules:
        given = [x.requires_grad_() for x in given]
        named = {name: x for name, x in module.named_parameters() if not name.startswith("rel_")}
        y = module(*given, need_weights=False)[0]
        gradients = torch.autograd.grad(y.sin().sum(), [*given, *named.values()])
        results.append(dict(zip([*"qkv", *named], gradients, strict=True)))
    assert results[0].keys() == results[1].keys()
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", [None, HIDDEN, BY_HEAD[:4]], ids=["no mask", "mask", "mask by head"])
def test_unbatched_inputs(mask: Tensor | None) -> None:
    theirs, ours = pair()
    given = drawn(7, 16), drawn(5, 16), drawn(5, 16)
    calls: list[dict[str, Any]] = [*WEIGHTS, {"key_padding_mask": PADDING[1]}]
    for options in calls:
        same(ours(*given, attn_mask=mask, **options), theirs(*given, attn_mask=mask, **options))


def test_causal_calls() -> None:
    theirs, ours = pair(batch_first=True)
    x = drawn(3, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7, **F64)
    expected = theirs(x, x, x, attn_mask=mask, is_causal=True)
    same(ours(x, x, x, attn_mask=mask, is_causal=True), expected)
    same(ours(x, x, x, is_causal=True), expected)
    same(ours(x, x, x, attn_mask=mask), expected)
    short = MultiheadAttention.from_multihead(theirs, Span.causal(7))
    same(short(x, x, x, is_causal=True), expected)
    for span in (Span.causal(7), Span.causal(3, "clip")):  # these have no rows for the future
        clipped = MultiheadAttention.from_multihead(theirs, span)
        with pytest.raises(ValueError, match=r"^`is_causal` must be True, or `attn_mask` be given"):
            clipped(x, x, x)
    same(clipped(x, x, x, attn_mask=mask), expected)
    same(clipped(x[:, :1], x[:, :1], x[:, :1]), theirs(x[:, :1], x[:, :1], x[:, :1]))  # a single token has no future
    memory = drawn(3, 5, 16)
    same(clipped(x, memory, memory), theirs(x, memory, memory))


def test_a_window_may_take_the_place_of_is_causal() -> None:
    theirs, _ = pair(batch_first=True)
    x, places = drawn(3, 7, 16), torch.arange(7)
    made = MultiheadAttention.from_multihead
    hidden = (places > places[:, None]) | (places < places[:, None] - 2)
    same(made(theirs, Span.causal(7), window=(2, 0))(x, x, x), theirs(x, x, x, attn_mask=hidden))
    with pytest.raises(ValueError, match=r"^`is_causal` must be True, or `attn_mask` be given"):
        made(theirs, Span.causal(7), window=(2, None))(x, x, x)


def test_some_inputs_may_be_the_same() -> None:
    theirs, ours = pair(batch_first=True)
    x = drawn(3, 5, 16)
    for given in ((x, x, x.sin()), (x, x.sin(), x), (x.sin(), x, x), (x, x, x)):
        same(ours(*given), theirs(*given))


def test_tables_count_and_so_do_they_in_the_weights() -> None:
    theirs, _ = pair(batch_first=True)
    ours = MultiheadAttention.from_multihead(theirs, SPAN, rel_values=True, rel_bias=True, window=(4, 2))
    with torch.no_grad():
        for table in ours.table_parameters():
            table.normal_()
    x = drawn(3, 7, 16)
    q, k, v = (ours._project(x, x, x)[i].unflatten(-1, (4, 4)).transpose(1, 2) for i in range(3))
    expected = oracles.attention(q, k, v, ours.rel_k, ours.rel_v, ours.rel_bias, span=SPAN, window=(4, 2))
    y, weights = ours(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(y, ours.out_proj(expected.out.transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 7, **F64))
    plain = MultiheadAttention.from_multihead(theirs, SPAN)(x, x, x, average_attn_weights=False)[1]
    assert not torch.allclose(weights, plain)
    values = (weights @ v).transpose(1, 2).flatten(2)  # from the keys alone: the values' table accounts for the rest
    without = copy.deepcopy(ours)
    without.rel_v = None
    torch.testing.assert_close(without(x, x, x)[0], ours.out_proj(values), rtol=0, atol=1e-12)


def test_dropout_is_for_training_and_not_in_the_weights() -> None:
    _, ours = pair(batch_first=True, dropout=0.5)
    x = drawn(3, 7, 16)
    torch.manual_seed(0)
    (one, weights), (other, again) = ours(x, x, x), ours(x, x, x)
    assert not torch.equal(one, other)
    assert torch.equal(weights, again)
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_a_query_that_sees_nothing_gives_no_nan() -> None:
    _, ours = pair(batch_first=True)
    x = drawn(1, 4, 16)
    y, weights = ours(x, x, x, attn_mask=torch.eye(4, dtype=torch.bool) | (torch.arange(4)[:, None] == 2))
    torch.testing.assert_close(y[0, 2], ours.out_proj.bias)
    assert not weights[0, 2].any()


# The same weights


def test_a_seed_gives_torchs_weights_and_tables_of_zeros() -> None:
    choices: list[dict[str, Any]] = [{}, {"bias": False}, {"kdim": 6}]
    for options in choices:
        torch.manual_seed(3)
        theirs = nn.MultiheadAttention(16, 4, **options)
        torch.manual_seed(3)
        ours = MultiheadAttention(16, 4, SPAN, rel_bias=True, **options)
        state = ours.state_dict()
        assert set(state) - set(theirs.state_dict()) == {"rel_k", "rel_bias"}
        assert not state["rel_k"].any()
        for name, x in theirs.state_dict().items():
            assert torch.equal(state[name], x)
    y, _ = ours(torch.randn(2, 16), torch.randn(3, 6), torch.randn(3, 16))
    (gradient,) = torch.autograd.grad(y.sum(), ours.table_parameters()[0])
    assert gradient.any()  # zeros must not be a stationary point


def test_a_checkpoint_of_an_encoder_loads() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **F64)
    theirs: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    layer.self_attn = MultiheadAttention(16, 4, SPAN, dropout=0.1, batch_first=True, **F64)  # type: ignore[assignment]
    ours: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing == ["layers.0.self_attn.rel_k", "layers.1.self_attn.rel_k"]
    assert not unexpected
    x = drawn(3, 7, 16)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_what_has_no_position_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"no keys without a position, got one made with {option}"):
        MultiheadAttention.from_multihead(nn.MultiheadAttention(16, 4, **{option: True}), SPAN)
    with pytest.raises(TypeError, match=r"`attention` must be a torch\.nn\.MultiheadAttention, got Linear"):
        MultiheadAttention.from_multihead(nn.Linear(1, 1), SPAN)  # type: ignore[arg-type]


# Inside torch's layers


def taken_over(model: Any, *, random: bool = False) -> Any:
    """A model of torch's layers with all its attention replaced."""
    model = copy.deepcopy(model)
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(part, name, MultiheadAttention.from_multihead(child, SPAN))
    if random:
        for part in model.modules():
            if isinstance(part, MultiheadAttention):
                nn.init.normal_(part.table_parameters()[0])
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"norm_first": True}, {"bias": False}], ids=str)
def test_torchs_encoder_runs_with_replaced_attention(options: dict[str, Any], training: bool) -> None:
    """In eval and without gradients torch makes nested tensors of padded batches, and would leave out our tables."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, **{"batch_first": True, **options}, **F64)
    theirs = nn.TransformerEncoder(layer, 2).train(training)
    ours, other = taken_over(theirs), taken_over(theirs, random=True)
    x = drawn(3, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[7], [4], [5]])
    first = options.get("batch_first", True)
    there = ~padding if first else ~padding.T
    given = x if first else x.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(7, **F64)
    of_padding: dict[str, Any] = {"src_key_padding_mask": padding}
    for call in ({}, {"mask": causal}, {"mask": causal, "is_causal": True}, of_padding):
        with torch.set_grad_enabled(training):
            expected, actual, changed = (model(given, **call) for model in (theirs, ours, other))
        torch.testing.assert_close(actual[there], expected[there], rtol=0, atol=1e-12)
        assert not torch.allclose(changed[there], expected[there], atol=1e-3)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
def test_torchs_decoder_runs_with_replaced_attention(batch_first: bool, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first, **F64)
    theirs = nn.TransformerDecoder(layer, 2).train(training)
    ours = taken_over(theirs)
    x, memory = drawn(3, 7, 16), drawn(3, 5, 16)
    given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    causal = nn.Transformer.generate_square_subsequent_mask(7, **F64)
    call = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": PADDING}
    torch.testing.assert_close(ours(*given, **call), theirs(*given, **call), rtol=0, atol=1e-12)


def test_a_layer_trains_compiled_and_with_dropout() -> None:
    torch.compiler.reset()
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **F64)
    model.self_attn = MultiheadAttention(16, 4, SPAN, dropout=0.2, batch_first=True, **F64)  # type: ignore[assignment]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, results = drawn(3, 7, 16), []
    for function in (model, compiled):
        torch.manual_seed(1)
        y = function(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_autocast_and_half_precision() -> None:
    ours = MultiheadAttention(16, 4, SPAN, batch_first=True)
    x = drawn(3, 7, 16).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, weights = ours(x, x, x, attn_mask=torch.zeros(7, 7), key_padding_mask=torch.zeros(3, 7, dtype=torch.bool))
    assert (y.dtype, weights.dtype) == (torch.bfloat16,) * 2
    torch.testing.assert_close(y.float(), ours(x, x, x)[0], rtol=0, atol=3e-2)
    half = x.bfloat16()
    assert ours.bfloat16()(half, half, half)[0].dtype == torch.bfloat16


# Refusals


X = drawn(3, 7, 16)
GIVEN = (drawn(3, 7, 16), drawn(3, 5, 16), drawn(3, 5, 16))
NESTED = torch.nested.as_nested_tensor([X[0], X[1, :3]], layout=torch.jagged)
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "shape of mask": (GIVEN, {"attn_mask": torch.zeros(5, 7, dtype=torch.bool)}, ValueError,
                      r"`attn_mask` must be a boolean tensor.* \(7, 5\) or \(12, 7"),
    "dtype of mask": (GIVEN, {"attn_mask": torch.zeros(7, 5, dtype=torch.uint8)}, ValueError,
                      "`attn_mask` must be a boolean tensor.*got Tensor of dtype"),
    "type of mask": (GIVEN, {"attn_mask": [[False]]}, ValueError, "`attn_mask` must be a boolean tensor.*got list"),
    "padding": (GIVEN, {"key_padding_mask": torch.zeros(3, 7)}, ValueError,
                r"`key_padding_mask` must be .* of shape \(3, 5\)"),
    "width": ((X[..., :8], X, X), {}, ValueError, "`query` must have 2 axes or 3, the last one 16 long"),
    "axes": ((X, X, X[0]), {}, ValueError, "`value` must have the 3 axes of `query`, the last one 16 long"),
    "nested": ((NESTED,) * 3, {}, ValueError, "`need_weights` must be False for nested tensors"),
    "is_causal": ((X, X, X), {"is_causal": 1}, TypeError, "`is_causal` must be a bool, got int 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    given, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        pair(batch_first=True)[1](*given, **options)


def test_arguments_that_do_not_fit_are_refused() -> None:
    for name, error in {"kdim": TypeError, "batch_first": TypeError, "impl": ValueError}.items():
        with pytest.raises(error, match=f"`{name}` must be"):
            MultiheadAttention(16, 4, SPAN, **{name: "x"})  # type: ignore[arg-type]

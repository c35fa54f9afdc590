"""``RelativeMultiheadAttention``: the block as a torch module."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layers.modules import SPECS, dense_module, inputs, made
from torch import Tensor, nn

from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core.layers.torch import RelativeMultiheadAttention

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


def check_gradients(
    module: RelativeMultiheadAttention, one: Callable[..., Tensor], other: Callable[..., Tensor], atol: float
) -> None:
    """Compare what two functions return for one seed, and the gradients of the inputs and of the parameters."""
    results = []
    for function in (one, other):
        torch.manual_seed(11)
        given = [x.requires_grad_() for x in inputs(module.spec)]
        y = function(*given)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [*given, *module.parameters()])])
    torch.testing.assert_close(*results, rtol=0, atol=atol)


@every_spec
def test_the_module_and_its_gradients_equal_the_formula(spec: BlockSpec) -> None:
    """And its state dict makes it a block."""
    module = made(spec)
    check_gradients(module, module, partial(dense_module, module), 1e-10)
    state = module.state_dict()
    spec.check_weights(state)
    x, *memory = inputs(spec)
    expected = attention_block(x, state, spec, memory=memory[0] if memory else None)
    torch.testing.assert_close(module(x, *memory), expected, rtol=0, atol=1e-13)


def test_weights_see_masks_and_caches() -> None:
    module = made(SPECS["alibi, causal, grouped"]).eval()
    (x,) = inputs(module.spec)
    padding = torch.arange(9) >= torch.tensor([[9], [6]])
    whole = module.attention_weights(x, key_padding_mask=padding)
    assert not whole[1, :, :, 6:].any()
    rooms: list[dict[str, Any]] = [{}, {"length": 9}]
    for room in rooms:
        _, past = module(x[:, :5], past=module.empty_cache(2, **room))
        rest = module.attention_weights(x[:, 5:], past=past, key_padding_mask=padding)
        torch.testing.assert_close(rest, whole[:, :, 5:], rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=r"^`offset` must be None with `past`, which sets it"):
        module.attention_weights(x[:, :1], past=past, offset=3)


def test_alibi_reaches_as_far_as_a_call_looks() -> None:
    """Offsets and positions of every kind: the bias is that of the distance."""
    module: Any = made(BlockSpec.alibi(8, 2, cross=True))
    x, memory = inputs(module.spec)
    for offset in (0, 3, -2, torch.tensor(5), torch.tensor([4, 700])):
        positions = (torch.arange(9) + torch.as_tensor(offset)[..., None], torch.arange(7))
        want = module.attention_weights(x, memory, positions=positions)
        q = module.q_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k = module.k_proj(memory).unflatten(-1, (2, 4)).transpose(1, 2)
        distances = (positions[1] - positions[0][..., None]).abs()
        bias = -torch.tensor([2.0**-4, 2.0**-8])[:, None, None] * distances[..., None, :, :]
        torch.testing.assert_close(want, (q @ k.mT / 2 + bias).softmax(-1), rtol=0, atol=1e-12)
        torch.testing.assert_close(module.attention_weights(x, memory, offset=offset), want, rtol=0, atol=1e-12)


def test_what_is_fixed_is_not_stored() -> None:
    """Nothing but parameters: a state, an average or a cast could not keep it right."""
    for name, spec in SPECS.items():
        module = RelativeMultiheadAttention(spec)
        assert not list(module.buffers()), name
        assert module.state_dict().keys() == spec.weight_shapes().keys(), name
    assert RelativeMultiheadAttention(SPECS["alibi"]).table_parameters() == []
    halved = RelativeMultiheadAttention(SPECS["alibi, causal, grouped"], dtype=torch.bfloat16)
    assert halved.empty_cache(1).keys.dtype == torch.bfloat16


@pytest.mark.parametrize("assign", [False, True])
def test_weights_of_numpy_load(assign: bool) -> None:
    """As those of an ONNX file, here with a table that a convention has flipped; in a model, the rest stays torch's."""
    spec = SPECS["bidirectional"]
    weights = init_weights(spec, seed=7)
    weights["rel_k"] = weights["rel_k"][..., ::-1, :]
    model = nn.Sequential(nn.Linear(8, 8), RelativeMultiheadAttention(spec))
    state = {f"0.{key}": x for key, x in model[0].state_dict().items()} | {f"1.{key}": x for key, x in weights.items()}
    assert not any(model.load_state_dict(state, assign=assign))
    x = torch.randn(2, 5, 8)
    expected = attention_block(model[0](x), {key: torch.tensor(x.copy()) for key, x in weights.items()}, spec)
    torch.testing.assert_close(model(x), expected)
    del state["1.rel_v"]
    with pytest.raises(RuntimeError, match="rel_v"):
        model.load_state_dict(state, assign=assign)


# Masks and caches


@every_spec
def test_padding_does_not_count(spec: BlockSpec) -> None:
    module: Any = made(spec)
    given = inputs(spec)
    padding = torch.zeros(given[-1].shape[:-1], dtype=torch.bool)
    padding[1, -3:] = True
    expected = dense_module(module, *given, mask=~padding[:, None, None])
    torch.testing.assert_close(module(*given, key_padding_mask=padding), expected, rtol=0, atol=1e-10)


def test_an_unbatched_sequence_and_its_padding() -> None:
    module = made(SPECS["causal"])
    (x,) = inputs(module.spec)
    padding = torch.arange(9) < 2  # on the left: the first queries see nothing and only get the bias
    y = module(x[0], key_padding_mask=padding)
    torch.testing.assert_close(y, module(x, key_padding_mask=padding.expand(2, -1))[0], rtol=0, atol=1e-12)
    assert torch.equal(y[0], module.get_parameter("out_proj.bias"))


# Dropout


@pytest.mark.parametrize("name", ["causal", "bidirectional", "cross", "local", "window"])
def test_dropout_is_dropout_and_has_its_gradients(name: str) -> None:
    """By the seed that the module draws."""
    module = made(SPECS[name], dropout=0.4)
    torch.manual_seed(11)
    seed = int(torch.randint(2**31, ()))
    check_gradients(module, module, partial(dense_module, module, dropout=0.4, seed=seed), 1e-10)


def test_dropout_is_for_training_and_follows_torchs_seed() -> None:
    module, quiet = made(SPECS["causal"], dropout=0.5), made(SPECS["causal"])
    (x,) = inputs(module.spec)
    torch.manual_seed(1)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
    module.eval()
    torch.testing.assert_close(module(x), dense_module(module, x), rtol=0, atol=1e-12)
    assert torch.equal(module.train().attention_weights(x), quiet.attention_weights(x))
    module.eval()
    state = torch.get_rng_state()
    module(x)
    assert torch.equal(torch.get_rng_state(), state)
    quiet(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_survives_checkpoints() -> None:
    module = made(SPECS["bidirectional"], dropout=0.5)
    check_gradients(module, module, partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=False), 0)


def test_the_second_derivative_goes_through_dropout() -> None:
    module = made(SPECS["causal"], dropout=0.5)
    (x,) = inputs(module.spec, n=4)

    def attend(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        y: Tensor = module(x)
        return y

    assert torch.autograd.gradgradcheck(attend, (x.requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("name", ["causal", "bidirectional"])
def test_torch_func_goes_through_dropout(name: str) -> None:
    """By the portable kernels, which drop what autograd's drop; another seed draws something else."""
    module = made(SPECS[name], dropout=0.25)
    (x,) = inputs(module.spec)
    weights: dict[str, Tensor] = dict(module.named_parameters())

    def loss(weights: dict[str, Tensor], seed: int) -> Tensor:
        torch.manual_seed(seed)
        y: Tensor = torch.func.functional_call(module, weights, (x,))
        return y.sin().sum()

    gradients = torch.func.grad(loss)(weights, 1)
    expected = torch.autograd.grad(loss(weights, 1), [*weights.values()])
    torch.testing.assert_close([*gradients.values()], [*expected], rtol=0, atol=1e-10)
    assert not torch.allclose(gradients["rel_k"], torch.func.grad(loss)(weights, 2)["rel_k"])


def test_every_sample_has_a_gradient_and_drops_of_its_own() -> None:
    module = made(SPECS["causal"], dropout=0.5)
    x = inputs(module.spec)[0][:1].expand(2, -1, -1)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(module, weights, (x,))
        return y.sin().sum()

    by_sample = torch.vmap(torch.func.grad(loss), (None, 0), randomness="different")
    gradients = by_sample(dict(module.named_parameters()), x)["rel_k"]
    assert not torch.allclose(gradients[0], gradients[1])


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_over_dropout(randomness: str) -> None:
    module = made(SPECS["causal"], dropout=0.5)
    x = inputs(module.spec)[0][:1].expand(3, -1, -1)
    y = torch.vmap(module, randomness=randomness)(x)
    assert torch.equal(y[0], y[1]) == (randomness == "same")


# Other requirements of a module


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("name", "dropout"), [("bidirectional", 0.0), ("stream", 0.0), ("alibi, causal, grouped", 0.0), ("cross", 0.3)]
)
def test_the_compiler_takes_it_whole(name: str, dropout: float) -> None:
    torch.compiler.reset()
    spec = SPECS[name]
    module = made(spec, dropout=dropout)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    check_gradients(module, module, compiled, 1e-12)
    if name in ("bidirectional", "stream"):  # padding requires another compilation
        given, padding = inputs(spec), torch.arange(9) >= torch.tensor([[9], [6]])
        module.eval()
        torch.testing.assert_close(
            compiled(*given, key_padding_mask=padding), module(*given, key_padding_mask=padding), rtol=0, atol=1e-12
        )


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated, of a category that differs between releases
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", SPECS)
def test_jit_trace_serves_other_lengths_or_says_that_it_does_not(name: str) -> None:
    module = made(SPECS[name]).eval()
    traced = torch.jit.trace(module, inputs(module.spec))
    refused = 0
    for n, m in ((9, 7), (1, 1), (4, 6), (20, 24)):
        given = inputs(module.spec, n, m)
        try:
            y = traced(*given)
        except RuntimeError as error:  # the table, or ALiBi's numbers of the traced lengths, are too short
            assert re.search(r"ValueError: `rel_\w+` reaches the relative positions", str(error))  # noqa: PT017
            refused += 1
        else:
            torch.testing.assert_close(y, module(*given), rtol=1e-5, atol=1e-6)  # a traced width's root is in float32
    assert refused <= 1


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_autocast(dropout: float) -> None:
    module = RelativeMultiheadAttention(SPECS["bidirectional"], dropout=dropout)
    (x,) = inputs(module.spec, dtype=torch.float32)
    results = []
    for enabled in (True, False):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = module(x, mask=torch.zeros(9, 9))
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
        gradients = torch.autograd.grad(y.float().sin().sum(), list(module.parameters()))
        assert {x.dtype for x in gradients} == {torch.float32}
        results.append(torch.cat([x.flatten() for x in gradients]))
    assert (results[0] - results[1]).norm() < 3e-2 * results[1].norm()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module.eval()
        _, past = module(x.bfloat16(), past=(torch.zeros(2, 2, 0, 4),) * 2)
    assert past[0].dtype == torch.bfloat16


def test_devices_and_dtypes() -> None:
    spec = SPECS["bidirectional"]
    module = RelativeMultiheadAttention(spec, device="meta", dtype=torch.bfloat16)
    assert {(x.device.type, x.dtype) for x in module.parameters()} == {("meta", torch.bfloat16)}
    y = module(torch.empty(2, 5, 8, device="meta", dtype=torch.bfloat16))
    assert (y.shape, y.device.type) == ((2, 5, 8), "meta")
    with torch.device("meta"):
        assert {x.device.type for x in RelativeMultiheadAttention(spec).parameters()} == {"meta"}
    module = RelativeMultiheadAttention(spec).to(torch.bfloat16)
    assert module(torch.randn(2, 5, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="same dtype"):  # raised by a projection
        module(torch.randn(2, 5, 8))
    assert module.double()(*inputs(spec)).dtype == torch.float64


def test_repr_shows_what_differs_from_the_defaults() -> None:
    """What differs from the default; and what a spec shows makes it."""
    for spec in SPECS.values():
        assert eval(repr(spec), {"BlockSpec": BlockSpec, "Span": Span}) == spec
    assert RelativeMultiheadAttention(SPECS["causal"]).extra_repr() == (
        "embed_dim=8, num_heads=2, span=Span(left=15, right=0, beyond='error'), causal=True"
    )
    assert RelativeMultiheadAttention(SPECS["grouped, wide heads"], dropout=0.5).extra_repr() == (
        "embed_dim=8, num_heads=4, span=Span(left=15, right=15, beyond='error'), "
        "num_kv_heads=2, head_dim=3, rel_values=True, dropout=0.5"
    )
    shown = RelativeMultiheadAttention(SPECS["local"]).extra_repr()
    assert shown.endswith("causal=True, block_size=4, shared_table=True, bias=False")


# From nn.MultiheadAttention


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_it_takes_over_from_multihead_attention(causal: bool, bias: bool) -> None:
    old = nn.MultiheadAttention(16, 4, bias=bias, batch_first=True, dropout=0.3, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.normal_()
    new = RelativeMultiheadAttention.from_multihead(old, Span.clipped(4), causal=causal, rel_values=True)
    assert (new.dropout, new.training, new.spec.causal) == (0.3, False, causal)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([[7], [5], [1]])
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    expected, _ = old(x, x, x, key_padding_mask=padding, attn_mask=hidden, need_weights=False)
    torch.testing.assert_close(new(x, key_padding_mask=padding), expected, rtol=0, atol=1e-12)
    assert not new.rel_k.any()
    (gradient,) = torch.autograd.grad(new(x).sin().sum(), new.rel_k)
    assert gradient.any()


def test_it_takes_over_cross_attention() -> None:
    old = nn.MultiheadAttention(16, 4, dtype=torch.float64).train()
    new = RelativeMultiheadAttention.from_multihead(old, Span.clipped(4), cross=True)
    assert new.training
    x, memory = torch.randn(3, 7, 16, dtype=torch.float64), torch.randn(3, 5, 16, dtype=torch.float64)
    expected, _ = old(x.transpose(0, 1), memory.transpose(0, 1), memory.transpose(0, 1))
    torch.testing.assert_close(new(x, memory), expected.transpose(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "option", [{"kdim": 8}, {"vdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=lambda x: next(iter(x))
)
def test_what_a_block_has_not_is_refused(option: dict[str, Any]) -> None:
    old = nn.MultiheadAttention(16, 4, **option)
    with pytest.raises(ValueError, match=f"got one made with {next(iter(option))}"):
        RelativeMultiheadAttention.from_multihead(old, Span.clipped(4))
    with pytest.raises(TypeError, match=r"`attention` must be a torch\.nn\.MultiheadAttention"):
        RelativeMultiheadAttention.from_multihead(nn.Linear(2, 2), Span.clipped(4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`sinks` must be False"):
        RelativeMultiheadAttention.from_multihead(nn.MultiheadAttention(8, 2), Span.clipped(4), sinks=True)

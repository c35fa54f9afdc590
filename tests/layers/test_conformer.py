"""Attention of Conformers: its formula, a stream of chunks, weights of other code bases, ONNX."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from relskew_core import BlockSpec, Span, conventions, relative_attention, sinusoidal_table

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
from relskew_core.layers.torch import ChunkCache, ConformerAttention

E, H, SIZE, BEFORE = 8, 2, 4, 2
STREAM = BlockSpec(E, H, Span.full(SIZE * (BEFORE + 1)), block_size=SIZE, blocks_before=BEFORE)


def drawn(spec: BlockSpec, **options: Any) -> Any:
    torch.manual_seed(0)
    made = ConformerAttention(spec, dtype=torch.float64, **options)
    with torch.no_grad():
        for bias in (made.u, made.w):
            bias.normal_()
    return made.eval()


def x(length: int, batch: int = 2) -> Any:
    return torch.randn(batch, length, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_formula(module: Any, given: Any, seen: Any) -> Any:
    """Dense, as Dai et al. write it: equation by equation."""
    q, k, v = (
        getattr(module, name)(given).unflatten(-1, (H, -1)).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj")
    )
    n = given.shape[1]
    table = sinusoidal_table(Span.full(n), E, xp=torch, dtype=torch.float64, order="interleaved")
    rows = module.pos_proj(table).unflatten(-1, (H, -1))
    r = torch.arange(n) - torch.arange(n)[:, None] + n - 1
    logits = (q + module.u[:, None]) @ k.mT + torch.einsum("bhid,ijhd->bhij", q + module.w[:, None], rows[r])
    weights = torch.where(seen, logits * (E // H) ** -0.5, -torch.inf).softmax(-1)
    return module.out_proj((weights @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("length", [1, 3, 11, 30])
def test_a_conformers_attention_equals_the_formula(length: int) -> None:
    """Without chunks, with them, and in a window."""
    steps = torch.arange(length)
    relative, blocks = steps - steps[:, None], steps // SIZE
    chunked = (blocks <= blocks[:, None]) & (blocks >= blocks[:, None] - BEFORE)
    for spec, seen in [
        (BlockSpec(E, H, Span.full(40)), torch.ones(length, length, dtype=torch.bool)),
        (STREAM, chunked),
        (BlockSpec(E, H, Span(5, 2), window=(5, 2), bias=False), (relative >= -5) & (relative <= 2)),
    ]:
        module = drawn(spec)
        torch.testing.assert_close(module(x(length)), by_formula(module, x(length), seen))


def test_an_input_of_no_positions_gives_none() -> None:
    assert drawn(BlockSpec(E, H, Span.full(40)))(x(0)).shape == (2, 0, E)


@pytest.mark.parametrize("together", [1, 2, 3])
@torch.no_grad()
def test_a_stream_in_chunks_equals_the_whole(together: int) -> None:
    """One chunk at a time or several, the stream is the whole; the cache keeps its size."""
    module, given = drawn(STREAM), x(24)
    past: Any = module.empty_cache(2)
    chunks: list[torch.Tensor] = []
    for chunk in given.split(SIZE * together, dim=1):
        y, past = module(chunk, past=past)
        assert isinstance(past, ChunkCache)
        assert past.keys.shape == (2, H, SIZE * BEFORE, E // H)
        assert past.keys.is_contiguous()
        chunks.append(y)
    torch.testing.assert_close(torch.cat(chunks, 1), module(given))
    assert past.length == SIZE * BEFORE


@torch.no_grad()
def test_a_stream_stays_on_its_device() -> None:
    """Of the two that every machine has, neither computes with the other's arrays."""
    module = drawn(STREAM).to("meta")
    y, past = module(x(SIZE).to("meta"), past=module.empty_cache(2))
    assert {y.device.type, *(part.device.type for part in past)} == {"meta"}


@torch.no_grad()
def test_the_last_chunk_may_be_padded() -> None:
    module, given = drawn(STREAM), x(10)
    padded = torch.cat([given, torch.ones(2, 2, E, dtype=torch.float64)], 1)
    past: Any = module.empty_cache(2)
    chunks: list[torch.Tensor] = []
    for chunk in padded.split(SIZE, dim=1):
        there = torch.zeros(2, SIZE * BEFORE + SIZE, dtype=torch.bool)
        there[:, -2:] = len(chunks) == 2
        y, past = module(chunk, past=past, key_padding_mask=there)
        chunks.append(y)
    torch.testing.assert_close(torch.cat(chunks, 1)[:, :10], module(given))
    with pytest.raises(ValueError, match="`x` must be whole chunks of 4 positions with `past`, got 3: pad"):
        module(given[:, :3], past=past)


def test_dropout_and_gradients_reach_all_parameters() -> None:
    module = drawn(STREAM, dropout=0.5).train()
    torch.manual_seed(0)
    one, two = module(x(12)), module(x(12))
    assert (one - two).norm() > 1e-3
    one.square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert module.table_parameters() == [module.u, module.w]
    with torch.inference_mode():
        wanted = drawn(STREAM)(x(12))
    other = drawn(STREAM)  # sinusoids made during inference must be usable in training
    got = other(x(12))
    got.sum().backward()
    torch.testing.assert_close(got.detach(), wanted.clone())


def test_causal_ones_have_the_caches_of_others() -> None:
    module = drawn(BlockSpec(E, H, Span.causal(30), causal=True))
    past, steps = module.empty_cache(2, length=12), []
    with torch.no_grad():
        for step in x(12).split(1, dim=1):
            y, past = module(step, past=past)
            steps.append(y)
        torch.testing.assert_close(torch.cat(steps, 1), module(x(12)))


@pytest.mark.parametrize("names", ["espnet", "parakeet"])
def test_weights_of_espnet_and_parakeet_load(names: str) -> None:
    module = drawn(STREAM)
    theirs = {"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "out_proj": "linear_out"}
    theirs |= {"pos_proj": "linear_pos", "u": "pos_bias_u", "w": "pos_bias_v"}
    if names == "parakeet":
        theirs = {"out_proj": "o_proj", "pos_proj": "relative_k_proj", "u": "bias_u", "w": "bias_v"}
    state = {}
    for key, value in module.state_dict().items():
        first, dot, rest = key.partition(".")
        state[f"a.{theirs.get(first, first)}{dot}{rest}"] = value
    weights = conventions.load_conformer(state, num_heads=H, prefix="a.")
    assert weights.keys() == module.state_dict().keys()
    other = ConformerAttention(STREAM, dtype=torch.float64)
    other.load_state_dict(weights)
    torch.testing.assert_close(other(x(7)), module(x(7)))
    with pytest.raises(ValueError, match="`state` must have"):
        conventions.load_conformer({key: x for key, x in state.items() if "bias" not in key}, num_heads=H, prefix="a.")


def test_weights_of_speechbrain_load() -> None:
    """Projections packed by head, one bias of four, the scale of all heads, and sines of distances."""
    module = drawn(STREAM, direction="both")
    assert repr(module).count("direction='both'") == 1
    ours = module.state_dict()
    with torch.no_grad():
        ours["q_proj.bias"].zero_()
        ours["k_proj.bias"].zero_()
    packed = torch.stack([ours[f"{name}_proj.weight"].unflatten(0, (H, -1)) for name in "qkv"], dim=1)
    packed[:, 0] *= H**0.5
    state = {"in_proj_weight": packed.flatten(0, 2), "value_bias_weight": ours["v_proj.bias"]}
    state |= {"linear_pos.weight": ours["pos_proj.weight"]}
    state |= {f"pos_bias_{theirs}": H**0.5 * ours[name].reshape(E // H, H) for theirs, name in ("uu", "vw")}
    state |= {key: ours[key] for key in ("out_proj.weight", "out_proj.bias")}
    other = ConformerAttention(STREAM, direction="both", dtype=torch.float64)
    other.load_state_dict(conventions.load_conformer(state, num_heads=H))
    torch.testing.assert_close(other(x(7)), module(x(7)))
    del state["value_bias_weight"]
    assert not conventions.load_conformer(state, num_heads=H)["v_proj.bias"].any()
    ahead, back = (sinusoidal_table(Span.full(3), E, xp=torch, direction="both")[rows] for rows in ([3, 4], [1, 0]))
    torch.testing.assert_close(ahead, back, rtol=0, atol=0)
    with pytest.raises(ValueError, match="`direction` must be one of"):
        ConformerAttention(STREAM, direction="neither")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`state\['pos_bias_u'\]` must have shape \(D, H\)"):
        conventions.load_conformer({**state, "pos_bias_u": torch.ones(H, E // H, dtype=torch.float64)}, num_heads=H)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_nemos_transformer_load(bias: bool) -> None:
    """Packed one after the other; of several layers, the prefix that is missing is named."""
    module = drawn(STREAM)
    ours = module.state_dict()
    if not bias:
        for name in "qkv":
            ours[f"{name}_proj.bias"].zero_()
    state = {f"w_qkv.{part}": torch.cat([ours[f"{name}_proj.{part}"] for name in "qkv"]) for part in ("weight", "bias")}
    state |= {"linear_pos.weight": ours["pos_proj.weight"], "pos_bias_u": ours["u"], "pos_bias_v": ours["w"]}
    state |= {key: ours[key] for key in ("out_proj.weight", "out_proj.bias")}
    if not bias:
        del state["w_qkv.bias"]
    other = ConformerAttention(STREAM, dtype=torch.float64)
    other.load_state_dict(
        conventions.load_conformer({f"layers.0.attn.{key}": x for key, x in state.items()}, num_heads=H)
    )
    torch.testing.assert_close(other(x(7)), module(x(7)))
    two = {f"layers.{layer}.attn.{key}": x for layer in "01" for key, x in state.items()}
    with pytest.raises(ValueError, match=r"`prefix` must be one of .*'layers.0.attn.', 'layers.1.attn.'"):
        conventions.load_conformer(two, num_heads=H)
    with pytest.raises(ValueError, match=r"got q_norm\.weight"):
        conventions.load_conformer({**state, "q_norm.weight": ours["u"][0]}, num_heads=H)


def test_a_conformer_has_the_options_of_other_modules() -> None:
    module = ConformerAttention(STREAM, dropout=0.5, impl="portable", chunk_size=3)
    assert "dropout=0.5, impl='portable', chunk_size=3" in repr(module)


@pytest.mark.parametrize("unlike", ["rel_values", "rel_bias", "sinks", "cross"])
def test_specs_and_caches_that_do_not_fit_are_refused(unlike: str) -> None:
    options: dict[str, Any] = {unlike: True}
    with pytest.raises(ValueError, match="`spec` must have `rel_keys` alone"):
        ConformerAttention(BlockSpec(E, H, Span.full(4), **options))
    with pytest.raises(ValueError, match=r"`keep` must be None with `spec\.blocks_before`"):
        drawn(STREAM).empty_cache(1, keep=3)
    with pytest.raises(ValueError, match="a cache needs"):
        drawn(BlockSpec(E, H, Span.full(4))).empty_cache(1)
    with pytest.raises(TypeError, match="made of a spec"):
        ConformerAttention(64, 4)  # type: ignore[arg-type, call-arg]


class Step(torch.nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, chunk: Any, keys: Any, values: Any, length: Any) -> Any:
        y, past = self.attention(chunk, past=ChunkCache(keys, values, length))
        return y, past.keys, past.values, past.length


@pytest.mark.no_cover
@torch.no_grad()
def test_a_step_of_a_stream_exports_for_any_batch(tmp_path: Path) -> None:
    """A graph of one chunk and its cache, for any batch."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from onnx_sessions import opened
    from relskew_core.export import torch_to_onnx

    module = drawn(STREAM).float()
    given, past = x(5 * SIZE, 1).float(), module.empty_cache(2)
    vary = {"chunk": [0], "keys": [0], "values": [0], "length": []}
    torch_to_onnx(Step(module), (given[:, :SIZE].repeat(2, 1, 1), *past), tmp_path / "step.onnx", vary=vary)
    session = opened(tmp_path / "step.onnx")
    state = [part.numpy() for part in module.empty_cache(1)]
    chunks = []
    for chunk in given.split(SIZE, dim=1):
        feed = zip((value.name for value in session.get_inputs()), (chunk.numpy(), *state), strict=True)
        y, *state = session.run(None, dict(feed))
        chunks.append(torch.from_numpy(y))
    torch.testing.assert_close(torch.cat(chunks, 1), module(given), rtol=1e-4, atol=1e-5)


def test_a_conformer_equals_attention_with_a_projected_table() -> None:
    """The call that a table of projected sinusoids needs, of a longer span too."""
    module = drawn(BlockSpec(E, H, Span.full(40)))
    q, k, v = (
        getattr(module, name)(x(7)).unflatten(-1, (H, -1)).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj")
    )
    table = sinusoidal_table(Span.full(50), E, xp=torch, dtype=torch.float64, order="interleaved")
    rel_k = module.pos_proj(table).unflatten(-1, (H, -1)).transpose(0, 1)
    heads: Any = relative_attention(q + module.u[:, None], k, v, rel_k, Span.full(50), rel_q=q + module.w[:, None])
    torch.testing.assert_close(module(x(7)), module.out_proj(heads.transpose(1, 2).flatten(-2)))

"""Attention of Conformers: its formula, a stream of chunks, weights of other code bases, ONNX."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from relskew_core import BlockSpec, Span, conventions, sinusoidal_table
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


def test_sines_of_distances_are_the_same_on_both_sides() -> None:
    assert repr(drawn(STREAM, direction="both")).count("direction='both'") == 1
    ahead, back = (sinusoidal_table(Span.full(3), E, xp=torch, direction="both")[rows] for rows in ([3, 4], [1, 0]))
    torch.testing.assert_close(ahead, back, rtol=0, atol=0)
    with pytest.raises(ValueError, match="`direction` must be one of"):
        ConformerAttention(STREAM, direction="neither")  # type: ignore[arg-type]


def test_states_of_conformers_that_do_not_fit_are_refused() -> None:
    """The right ones are compared with the packages themselves, in tests/peers."""
    square, heads = torch.zeros(E, E), torch.zeros(H, E // H)
    load = partial(conventions.load_conformer, num_heads=H)
    nemo = {"w_qkv.weight": torch.zeros(3 * E, E), "linear_pos.weight": square, "out_proj.weight": square}
    nemo |= {"pos_bias_u": heads, "pos_bias_v": heads, "out_proj.bias": square[0]}
    assert not load({f"layers.0.attn.{key}": x for key, x in nemo.items()})["q_proj.bias"].any()
    brain = {**nemo, "in_proj_weight": nemo["w_qkv.weight"], "pos_bias_u": heads.mT, "pos_bias_v": heads.mT}
    del brain["w_qkv.weight"]
    assert not load(brain)["v_proj.bias"].any()
    two: dict[str, Any] = {f"layers.{layer}.attn.{key}": x for layer in "01" for key, x in nemo.items()}
    for state, message in [
        ({key: x for key, x in nemo.items() if "bias" not in key}, "`state` must have"),
        ({**brain, "pos_bias_u": heads}, r"`state\['pos_bias_u'\]` must have shape \(D, H\)"),
        (two, r"`prefix` must be one of .*'layers.0.attn.', 'layers.1.attn.'"),
        ({**nemo, "q_norm.weight": heads[0]}, r"got q_norm\.weight"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(state)


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


@pytest.mark.no_cover
@torch.no_grad()
def test_a_step_of_a_stream_exports_for_any_batch(tmp_path: Path) -> None:
    """A graph of one chunk and its cache, for any batch."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from onnx_sessions import opened
    from relskew_core.export import torch_to_onnx
    from torch_modules import of

    def step(self: Any, chunk: Any, keys: Any, values: Any, length: Any) -> Any:
        y, past = self.attention(chunk, past=ChunkCache(keys, values, length))
        return y, past.keys, past.values, past.length

    module = drawn(STREAM).float()
    given, past = x(5 * SIZE, 1).float(), module.empty_cache(2)
    vary = {"chunk": [0], "keys": [0], "values": [0], "length": []}
    chunks = of(step, attention=module)
    torch_to_onnx(chunks, (given[:, :SIZE].repeat(2, 1, 1), *past), tmp_path / "step.onnx", vary=vary)
    session = opened(tmp_path / "step.onnx")
    state = [part.numpy() for part in module.empty_cache(1)]
    outputs = []
    for chunk in given.split(SIZE, dim=1):
        feed = zip((value.name for value in session.get_inputs()), (chunk.numpy(), *state), strict=True)
        y, *state = session.run(None, dict(feed))
        outputs.append(torch.from_numpy(y))
    torch.testing.assert_close(torch.cat(outputs, 1), module(given), rtol=1e-4, atol=1e-5)

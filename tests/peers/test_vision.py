"""Vision models with random weights against the same numbers here."""

import math
from typing import Any

import pytest
import torch
from peers.common import alone, check, definitions, hf, join, made, peer, randn, randomised, split

from relskew_core import (
    Span,
    conventions,
    relative_attention,
    relative_attention_2d,
    relative_attention_nd,
    relative_logits_2d,
    resize_table,
    toeplitz_2d,
    toeplitz_nd,
)

GRIDS = [(1, 1), (2, 2), (3, 5), (6, 4)]


@pytest.mark.parametrize("window", [1, 2, 5])
def test_swin(window: int) -> None:
    theirs = made("swin.SwinAttention", "SwinConfig", 24, 3, window, qkv_bias=True)
    area = window * window
    x = randn(4, area, 24)  # two windows of two images
    shifted = torch.where(randn(2, area, area, seed=2) > 1, -100.0, 0.0).double()
    rel_bias, span_h, span_w = conventions.Swin(window=(window, window)).load(
        theirs.relative_position_bias.relative_position_bias_table
    )
    q, k, v = (split(linear(x), 3) for linear in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    for mask in (None, shifted):
        want, _ = theirs(x, attention_mask=mask)
        out: Any = relative_attention_2d(
            q, k, v, rel_bias=rel_bias, span_h=span_h, span_w=span_w, q_grid=(window, window), k_grid=(window, window),
            mask=None if mask is None else mask.repeat(2, 1, 1)[:, None],
        )  # fmt: skip
        check(theirs.o_proj(join(out)), want, 1e-6 if mask is None else 1e-5)  # its softmax is float32


def alone_in_a_list(module: Any) -> Any:
    """Return a module with random weights whose own ``eval`` returns nothing."""
    return randomised(torch.nn.ModuleList([module]))[0]


@pytest.mark.parametrize("stride", [1, 2])
def test_levit(stride: int) -> None:
    """One number for a distance along each side, the same to all sides; some layers leave out queries."""
    side, x = 5, randn(2, 25, 24)
    fewer = -(-side // stride)
    if stride == 1:
        theirs = alone_in_a_list(hf("levit.LevitAttention")(24, 4, 3, 2, side))
        q, k, v = theirs.queries_keys_values(x).unflatten(-1, (3, 16)).transpose(1, 2).split([4, 4, 8], -1)
    else:
        theirs = alone_in_a_list(hf("levit.LevitAttentionSubsample")(24, 12, 4, 3, 2, stride, side, fewer))
        q = split(theirs.queries(theirs.queries_subsample(x)), 3)
        k, v = theirs.keys_values(x).unflatten(-1, (3, 12)).transpose(1, 2).split([4, 8], -1)
    distances = torch.arange(1 - side, side).abs()
    rel_bias = theirs.attention_biases.unflatten(1, (side, side))[:, distances][..., distances]
    grid: Any = {"q_grid": (side, side), "k_grid": (side, side)}
    if stride == 1:
        out: Any = relative_attention_2d(q, k, v, rel_bias=rel_bias, **grid)
    else:
        matrix = toeplitz_2d(rel_bias, **grid).unflatten(1, (side, side))[:, ::stride, ::stride].flatten(1, 2)
        out = relative_attention(q, k, v, mask=matrix)
    check(theirs.projection(theirs.activation(join(out))), theirs(x))


@pytest.mark.parametrize(("trained", "window"), [((7, 7), (12, 12)), ((3, 3), (5, 2)), ((1, 1), (2, 2))])
def test_swin_for_larger_windows(trained: tuple[int, int], window: tuple[int, int]) -> None:
    rows, cells = [2 * side - 1 for side in window], math.prod(2 * side - 1 for side in trained)
    table = randn(cells, 3)
    theirs = definitions("timm", "layers/pos_embed_rel.py", "resize_rel_pos_bias_table_simple")
    rel_bias, *_ = conventions.Swin(window=trained).load(table)
    for axis in (-2, -1):
        rel_bias = resize_table(rel_bias, rows[axis], method="cubic", axis=axis)
    got = conventions.Swin(window=window).store(rel_bias, *map(Span.full, window))
    check(got, theirs(table, window, (math.prod(rows), 3)), 1e-6)  # theirs has the cubic's coefficients in float32


@pytest.mark.parametrize("window", [1, 2, 5])
def test_swin_v2(window: int) -> None:
    """Cosine attention: a scale for each head, and a bias that a small network makes."""
    theirs = made("swinv2.Swinv2SelfAttention", "Swinv2Config", 24, 3, window, qkv_bias=True)
    x = randn(4, window * window, 24)
    q, k, v = (split(linear(x), 3) for linear in (theirs.query, theirs.key, theirs.value))
    learned = theirs.continuous_position_bias_mlp(theirs.relative_coords_table).view(-1, 3)
    rel_bias, span_h, span_w = conventions.Swin(window=(window, window)).load(16 * torch.sigmoid(learned))
    unit_q, unit_k = (torch.nn.functional.normalize(y, dim=-1) for y in (q, k))
    out: Any = relative_attention_2d(
        unit_q, unit_k, v, rel_bias=rel_bias, span_h=span_h, span_w=span_w, q_grid=(window, window),
        k_grid=(window, window), scale=theirs.logit_scale[:, 0, 0].clamp(max=math.log(100)).exp(),
    )  # fmt: skip
    want, *_ = theirs(x)
    check(join(out), want)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("trained", GRIDS)
def test_beit(grid: tuple[int, int], trained: tuple[int, int]) -> None:
    """The class token's three numbers, and a table resized to another image."""
    sizes: dict[str, Any] = {"image_size": (trained[0] * 4, trained[1] * 4), "patch_size": 4}
    theirs = made("beit.BeitAttention", "BeitConfig", **sizes)
    positions = made("beit.BeitRelativePositionBias", "BeitConfig", seed=5, **sizes)
    if trained[0] != trained[1] and grid != trained:
        pytest.skip("it reads an oblong table as width by height when it resizes")
    table, index = positions.relative_position_bias_table, positions.generate_relative_position_index(trained)
    matrix = table[index].permute(2, 0, 1)
    bias = positions(grid) if trained[0] == trained[1] else matrix[None]
    x = randn(2, 1 + grid[0] * grid[1], 24)
    want, _ = theirs(x, attention_mask=bias)
    rel_bias, prefix_bias, *_ = conventions.BEiT(window=trained).load(table)
    check(toeplitz_2d(rel_bias, q_grid=trained, k_grid=trained), matrix[:, 1:, 1:])
    rel_bias = resize_table(resize_table(rel_bias, 2 * grid[0] - 1), 2 * grid[1] - 1, axis=-1)
    q, k, v = (split(linear(x), 3) for linear in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    out: Any = relative_attention_2d(
        q, k, v, rel_bias=rel_bias, prefix_bias=prefix_bias, prefix=(1, 1), q_grid=grid, k_grid=grid, chunk_size=3
    )
    check(theirs.o_proj(join(out)), want, 1e-6)  # its softmax is float32


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("trained", [(6, 6), (3, 5)])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_vitdet(grid: tuple[int, int], trained: tuple[int, int], chunk_size: int | None) -> None:
    theirs = made("vitdet.VitDetAttention", "VitDetConfig", trained, use_relative_position_embeddings=True)
    x = randn(2, *grid, 24)
    (want,) = theirs(x)
    q, k, v = (split(y, 3) for y in theirs.qkv(x.flatten(1, 2)).chunk(3, dim=-1))
    tables = [
        conventions.DISTANCE.load(resize_table(table, 2 * size - 1))[0]
        for table, size in ((theirs.rel_pos_h, grid[0]), (theirs.rel_pos_w, grid[1]))
    ]
    out: Any = relative_attention_2d(q, k, v, *tables, q_grid=grid, k_grid=grid, rel_scale=1.0, chunk_size=chunk_size)
    check(theirs.proj(join(out)).unflatten(1, grid), want)


@pytest.mark.parametrize("grid", GRIDS)
def test_bottleneck_transformer_pytorch(grid: tuple[int, int]) -> None:
    theirs = randomised(peer("bottleneck_transformer_pytorch.bottleneck_transformer_pytorch.RelPosEmb")(grid, 4))
    q = randn(2, 3, grid[0] * grid[1], 4)
    got = relative_logits_2d(q, theirs.rel_height, theirs.rel_width, q_grid=grid, k_grid=grid)
    check(got, theirs(q))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("scaled", [False, True])
def test_timm_bottleneck(size: int, scaled: bool) -> None:
    theirs = randomised(
        alone("timm.layers.bottleneck_attn.BottleneckAttn")(
            24, feat_size=(size, size), num_heads=3, scale_pos_embed=scaled
        )
    )
    x = randn(2, 24, size, size)
    want = theirs(x)
    q, k, v = (split(y.flatten(2).mT, 3) for y in theirs.qkv(x).split(24, dim=1))
    out: Any = relative_attention_2d(
        q, k, v, theirs.pos_embed.height_rel, theirs.pos_embed.width_rel, q_grid=(size, size), k_grid=(size, size),
        rel_scale=theirs.scale if scaled else 1.0,
    )  # fmt: skip
    check(join(out).mT.reshape(want.shape), want)


@pytest.mark.parametrize(("block", "halo"), [(2, 1), (3, 2), (4, 0), (1, 1)])
@pytest.mark.parametrize("scaled", [False, True])
def test_timm_halo(block: int, halo: int, scaled: bool) -> None:
    """A block of queries and the window around it: a small grid inside a larger one."""
    theirs = randomised(
        alone("timm.layers.halo_attn.HaloAttn")(
            24, num_heads=3, block_size=block, halo_size=halo, scale_pos_embed=scaled
        )
    )
    window, x = block + 2 * halo, randn(2, 24, 2 * block, 3 * block)
    want = theirs(x)

    # The same windows, cut as in the original: the zeros around the image are keys, too.
    def cells(y: torch.Tensor, side: int) -> torch.Tensor:
        blocks = y.unfold(2, side, block).unfold(3, side, block)  # (B, H · D, blocks, blocks, side, side)
        return blocks.unflatten(1, (3, -1)).permute(0, 3, 4, 1, 5, 6, 2).flatten(4, 5).flatten(1, 2)

    around = torch.nn.functional.pad(theirs.kv(x).unflatten(1, (3, -1)), [halo] * 4)
    k, v = around.chunk(2, dim=2)
    q, k, v = cells(theirs.q(x), block), cells(k.flatten(1, 2), window), cells(v.flatten(1, 2), window)
    # The original's tables start where the window starts; here the window starts `halo` before the block.
    span = Span(window - 1 + halo, window - 1 - halo)
    out: Any = relative_attention_2d(
        q, k, v, theirs.pos_embed.height_rel, theirs.pos_embed.width_rel, span_h=span, span_w=span,
        q_grid=(block, block), k_grid=(window, window), offset=(halo, halo), rel_scale=theirs.scale if scaled else 1.0,
    )  # fmt: skip
    folded = out.unflatten(1, (2, 3)).unflatten(4, (block, block))  # (B, 2, 3, H, b, b, D)
    check(folded.permute(0, 3, 6, 1, 4, 2, 5).reshape(want.shape), want)


@pytest.mark.parametrize(("q_grid", "k_grid"), [((6, 4), (6, 4)), ((8, 6), (4, 3)), ((4, 3), (8, 9)), ((8, 4), (2, 4))])
def test_mvit(q_grid: tuple[int, int], k_grid: tuple[int, int]) -> None:
    """Queries and keys pooled by different factors, and a class token."""
    lengths = [1 + h * w for h, w in (q_grid, k_grid)]
    q, k, v = (randn(2, 3, length, 8, seed=seed) for seed, length in enumerate([lengths[0], lengths[1], lengths[1]]))
    tables = [randn(2 * max(a, b) - 1, 8, seed=5 + a) for a, b in zip(q_grid, k_grid, strict=True)]
    theirs = definitions("timm", "models/mvitv2.py", "cal_rel_pos_type", register_notrace_function=lambda made: made)
    logits = theirs(8**-0.5 * q @ k.mT, q, True, q_grid, k_grid, *tables)
    want = logits.softmax(-1) @ v
    q_step, k_step = ((max(y[0] // x[0], 1), max(y[1] // x[1], 1)) for x, y in ((q_grid, k_grid), (k_grid, q_grid)))
    reach = [(count - 1) * step for count, step in zip(k_grid, k_step, strict=True)]
    spans = [Span(len(table) - 1 - right, right) for table, right in zip(tables, reach, strict=True)]
    got = relative_attention_2d(
        q, k, v, *(table.flip(0) for table in tables), span_h=spans[0], span_w=spans[1], q_grid=q_grid, k_grid=k_grid,
        q_step=q_step, k_step=k_step, prefix=(1, 1), rel_scale=1.0,
    )  # fmt: skip
    check(got, want)


@pytest.mark.parametrize("window", [(2, 3, 2), (1, 2, 2), (3, 1, 4)])
@pytest.mark.parametrize("package", ["MONAI", "torchvision"])
def test_video_swin(package: str, window: tuple[int, int, int]) -> None:
    """One number for three axes together; the table has the distances of keys behind the query first."""
    size = math.prod(window)
    x = randn(2, size, 24)
    if package == "MONAI":
        theirs = randomised(
            definitions(
                "monai", "networks/nets/swin_unetr.py", "WindowAttention", trunc_normal_=torch.nn.init.trunc_normal_
            )(24, 3, window, qkv_bias=True)
        )
        want = theirs(x, None)
    else:
        theirs = peer("torchvision.models.video.swin_transformer.ShiftedWindowAttention3d")
        theirs = randomised(theirs(24, list(window), [0, 0, 0], 3))
        want = theirs(x.unflatten(1, window)).flatten(1, 3)
    rel_bias, *_ = conventions.Swin(window=window).load(theirs.relative_position_bias_table)
    q, k, v = (split(y, 3) for y in theirs.qkv(x).chunk(3, dim=-1))
    check(theirs.proj(join(relative_attention_nd(q, k, v, rel_bias=rel_bias, q_grid=window, k_grid=window))), want)
    logits = 8**-0.5 * q @ k.mT + toeplitz_nd(rel_bias, q_grid=window, k_grid=window)
    check(theirs.proj(join(logits.softmax(-1) @ v)), want)

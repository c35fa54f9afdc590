"""Functions on tables, lengths and offsets of every kind, exported from torch and run at other sizes."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import relskew_core as rs
from onnx_sessions import grown, opened
from relskew_core import Span, relative_attention
from relskew_core.export import torch_to_onnx, torch_translation_table
from torch_exports import VARY, agrees, assert_same, export, of, random, session

TABLE, NUMBERS, BY_HEAD = random(4, 6), random(4), random(4, 23, 6)
LONG, BOTH, CLIP, ZERO, FULL = random(4, 24, 6), random(23, 23), Span(2, 1, "clip"), Span(1, 2, "zero"), Span.full(12)
SQUARE = {0: VARY, 2: VARY}


def pieces(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    return random(batch, 4, queries, 6, seed=1), random(batch, 4, keys, 6, seed=2), torch.arange(batch) * 2


def test_pieces_of_attention_agree_at_every_end_of_a_table() -> None:
    """What a length decides elsewhere, nothing may decide here."""

    def forward(self: Any, q: Tensor, k: Tensor, offsets: Tensor) -> tuple[Any, ...]:
        n, m = q.shape[2], k.shape[2]
        weights: Any = rs.attention_weights(q, k, TABLE, CLIP, offset=0, sinks=NUMBERS)
        return (
            rs.relative_logits(q, BY_HEAD, FULL, n_keys=m, offset=0),
            rs.relative_logits(q, TABLE, ZERO, n_keys=m, offset=0, causal=True),
            rs.relative_logits(k, TABLE, CLIP, n_queries=n, offset=3, side="key"),
            rs.relative_logits(q, TABLE, CLIP, n_keys=m, offset=offsets),
            rs.toeplitz(NUMBERS, ZERO, n_queries=n, n_keys=m, offset=1, causal=True) + 0 * offsets[0],
            weights,
            rs.skew(rs.unskew(weights)),
            rs.relative_values(weights, BY_HEAD, FULL, offset=0),
            rs.relative_values(weights, TABLE, CLIP, offset=1, causal=True),
        )

    run = agrees(of(forward), pieces, {"q": SQUARE, "k": SQUARE, "offsets": {0: VARY}}, 18)
    past = run(*pieces(1, 13, 4))  # one row past a table with beyond="error": the results must be obviously wrong
    assert [bool(np.isnan(result).any()) for result in past] == [index in (0, 7) for index in range(9)]


def test_products_with_repeated_rows_agree_at_every_length() -> None:
    """Rows that are gathered from few are multiplied once, in the product of the queries and in that of the keys."""
    distances = torch.arange(-11, 12)
    near, signed, row = distances.abs() // 4, distances // 6 + 2, distances.abs() // 6
    rows = {"few": BY_HEAD[:, :7], "row": random(3, 6)}

    def forward(self: Any, q: Tensor, k: Tensor, offsets: Tensor) -> tuple[Any, ...]:
        first, second = self.few.index_select(1, near), self.few.index_select(-2, signed)
        values, bias, n = k * 2, NUMBERS[:, None].expand(4, 23), q.shape[2]
        local: dict[str, Any] = {"key_table": second, "span": FULL, "window": (5, 3)}
        return (
            relative_attention(q, k, values, first, FULL, offset=0),
            relative_attention(q, k, values, self.row.index_select(0, row), FULL, offset=0, rel_bias=bias),
            relative_attention(q, k, values, key_table=second, span=Span(11, 11, "clip"), offset=offsets),
            relative_attention(k[:, :, :n], k[:, :, :n], values[:, :, :n], first, **local),
            relative_attention(q, k, values, first, Span(22, 0, "zero"), offset=2, causal=True),
        )

    run = agrees(of(forward, **rows), pieces, {"q": SQUARE, "k": SQUARE, "offsets": {0: VARY}}, 18)
    past = run(*pieces(1, 13, 4))  # a row past the table: the first result must be obviously wrong
    assert np.isnan(past[0]).any()
    model = of(lambda self, q: relative_attention(q, q, q, self.few.index_select(1, near), FULL), **rows)
    graph = torch_to_onnx(model, random(2, 4, 9, 6), check=False).graph
    assert [node.op_type for node in graph.node].count("GatherElements") == 1


def test_rows_that_are_gathered_for_a_length_agree() -> None:
    """Neither how many there are nor how far they reach is known."""

    def forward(self: Any, q: Tensor, k: Tensor, offsets: Tensor) -> Any:
        n = q.shape[2]
        places = (torch.arange(1 - n, n).abs() // 4).clamp(max=6)
        return relative_attention(q, q, q, self.few.index_select(1, places), Span(n - 1, n - 1))

    agrees(of(forward, few=BY_HEAD[:, :7]), pieces, {"q": SQUARE, "k": SQUARE, "offsets": {0: VARY}}, 18)


def test_grids_agree_at_every_size() -> None:
    def forward(self: Any, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        grids: dict[str, Any] = {"q_grid": tuple(q.shape[2:4]), "k_grid": tuple(q.shape[2:4])}
        q, k = q.flatten(2, 3), k.flatten(2, 3)
        both: dict[str, Any] = {**grids, "rel_bias": BOTH, "window": ((1, 2), (0, None))}
        near: Any = rs.relative_attention_2d(q, k, k, *BY_HEAD[:2], **both, return_lse=True)
        shifted: Any = rs.relative_attention_2d(q, k, k, **grids, rel_bias=BOTH, neighborhood=(1, 1))
        deep: dict[str, Any] = {name: (1, *sides) for name, sides in grids.items()}
        of_three: Any = rs.relative_attention_nd(q, k, k, (None, *BY_HEAD[:2]), **deep, rel_bias=BOTH[..., None, :, :])
        return (*near, shifted, of_three)

    def grids(batch: int, *sides: int) -> tuple[Tensor, Tensor]:
        return random(batch, 4, *sides, 6, seed=1), random(batch, 2, *sides, 6, seed=2)

    vary = {0: VARY, 2: VARY, 3: VARY}
    agrees(of(forward), grids, {"q": vary, "k": vary}, 23, ((2, 2, 3), (1, 1, 1), (3, 5, 1), (1, 4, 12)))


@pytest.mark.parametrize("opset", [18, 23])
def test_offsets_that_are_arrays_agree(opset: int) -> None:
    def forward(self: Any, q: Any, k: Any, by_item: Any, of_all: Any) -> tuple[Any, ...]:
        return (
            relative_attention(q, k, k, TABLE, CLIP, rel_v=TABLE, offset=by_item),
            relative_attention(q, k, k, LONG, Span.causal(24), causal=True, offset=by_item),
            relative_attention(q, k, k, TABLE, CLIP, block_size=3, blocks_before=1, offset=of_all),
            relative_attention(q, k, k, LONG, Span.causal(24), causal=True, offset=of_all.int()),
        )

    def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
        return *pieces(batch, queries, keys)[:2], torch.arange(batch) * 2, torch.tensor(batch)

    vary: dict[str, Any] = {"q": SQUARE, "k": SQUARE, "by_item": {0: VARY}, "of_all": None}
    agrees(of(forward), inputs, vary, opset, ((2, 5, 7), (1, 1, 1), (3, 1, 8), (2, 12, 1)))


def test_a_table_of_integers_that_has_to_reach_is_refused() -> None:
    buckets = of(lambda self, x: rs.toeplitz(torch.arange(5), n_queries=x.shape[0], n_keys=x.shape[0]))
    with pytest.raises(ValueError, match="a table of integers with beyond='error'"):
        torch.export.export(buckets, (random(2),), dynamic_shapes={"x": {0: VARY}})


# Tables that have as many rows as the input requires


def of_a_fitted_length(self: Any, x: Any) -> tuple[Any, ...]:
    """As NeMo and ESPnet slice a long table, Transformer-XL projects sinusoids, and Swin v2 has a network's biases."""
    length = x.shape[-2]
    span, past, table = Span.full(length), Span(2 * length - 1, 0), self.encoding[100 - length : 99 + length]
    plain: Any = rs.sinusoidal_table(span, 4, xp=torch)
    ahead: Any = rs.sinusoidal_table(span, 4, xp=torch, order="interleaved", direction="future", base=100.0)
    keys = torch.cat([x.flip(-2), x], -2)

    def biases(left: int, right: int) -> Any:
        far = torch.arange(-left, right + 1, dtype=x.dtype, device=x.device)[:, None]
        return self.bias(far.sign() * far.abs().log1p()).mT

    return (
        relative_attention(x, x, x, table),
        relative_attention(x, x, x, table, span),
        relative_attention(x, x, x, self.project(plain), span, rel_v=ahead, causal=True),
        relative_attention(x, x, x, ahead, key_table=plain),
        relative_attention(x, x, x, rel_bias=biases(length - 1, length - 1)),
        relative_attention(x, keys, keys, rel_bias=biases(2 * length - 1, 0), span=past, causal=True, offset=length),
        relative_attention(
            x, x, x, rel_bias=rs.proximal_bias(span, like=x) + cast(Any, rs.alibi_bias(2, span, like=x))
        ),
    )


def fitted() -> nn.Module:
    torch.manual_seed(0)
    bias = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
    return of(of_a_fitted_length, encoding=random(199, 4), project=nn.Linear(4, 4), bias=bias).eval()


def heads(batch: int, length: int) -> tuple[Tensor, ...]:
    return (random(batch, 2, length, 4, seed=length),)


@torch.no_grad()
def test_tables_as_long_as_the_input_agree_in_graphs() -> None:
    model, sizes = fitted(), ((2, 7), (3, 60), (1, 2), (1, 1))
    made = opened(torch_to_onnx(model, heads(2, 7), opset=18))
    plain = session(export(model, heads(2, 7), {"x": SQUARE}, 18, optimize=False))
    for size in sizes:
        assert_same(made.run(None, {"x": heads(*size)[0].numpy()}), model, *heads(*size), gate=1e-5)
        assert_same(plain(*heads(*size)), model, *heads(*size), gate=1e-5)


@torch.no_grad()
@pytest.mark.no_cover
def test_tables_as_long_as_the_input_agree_in_programs() -> None:
    model = fitted()
    program = torch.export.export(model, heads(2, 7), dynamic_shapes=(SQUARE,)).module()
    for size in [(3, 60), (1, 2)]:
        for got, want in zip(program(*heads(*size)), model(*heads(*size)), strict=True):
            torch.testing.assert_close(got, want)


def test_buckets_of_a_length_that_varies_are_refused() -> None:
    options: dict[str, Any] = {"num_buckets": 8, "max_distance": 9, "bidirectional": True}
    bucketed = of(lambda self, x: torch.tensor(rs.t5_buckets(Span.full(x.shape[-2]), **options)) + x.sum())
    with pytest.raises(ValueError, match=r"^`span` must have ints, .* got lengths that vary in torch.export: use"):
        torch.export.export(bucketed, heads(2, 7), dynamic_shapes=({2: VARY},), strict=False)


@torch.no_grad()
def test_a_program_compares_rows_chosen_by_values_with_the_lengths() -> None:
    def forward(self: Any, x: Any, table: Any, chosen: Any) -> Tensor:
        spans = (None, Span.full(x.shape[-2]))
        return torch.stack([cast(Any, relative_attention(x, x, x, table[chosen], span)) for span in spans])

    model, table, chosen = of(forward), random(30, 4), torch.arange(30) < 13
    shapes: Any = (SQUARE, None, None)
    program = torch.export.export(model, (*heads(2, 7), table, chosen), dynamic_shapes=shapes).module()
    for given in ((*heads(3, 7), table, chosen), (*heads(1, 9), table, torch.arange(30) < 17)):
        torch.testing.assert_close(program(*given), model(*given))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        program(*heads(2, 9), table, chosen)


# Chunks of queries

FAR, NOTHING, REACH = Span(6, 6, "clip"), Span(6, 6, "zero"), Span(15, 0)


def masked(batch: int, length: int) -> tuple[Tensor, Tensor]:
    mask = torch.rand(batch, 1, 1, length, generator=torch.Generator().manual_seed(length)) > 0.3
    mask[..., 0] = True
    return random(batch, 2, length, 4), mask


def of_every_kind(self: Any, x: Any, mask: Any) -> tuple[Any, ...]:
    """What bounds the keys and what does not, masks that are given and that are added, tables of all kinds."""
    hidden, table, bias = torch.where(mask, 0.0, torch.finfo(x.dtype).min), self.table, self.bias
    half: Any = torch.arange(x.shape[-2], dtype=torch.int64, device=x.device) // 2
    two: Any = torch.stack([x, x + 1], 1)
    return (
        relative_attention(x, x, x, rel_bias=bias, span=FAR, mask=mask),
        relative_attention(two, two, two, table, FAR, mask=mask[:, None]),
        relative_attention(x[0], x[0], x[0], table, FAR),
        relative_attention(x, x, x, table, NOTHING, rel_bias=bias, causal=True, mask=hidden, segments=half),
        relative_attention(x, x, x, table, FAR, rel_v=table, window=(7, 3), softcap=3.0),
        relative_attention(x, x, x, table, FAR, positions=(half, half), rel_q=x + 1),
        relative_attention(x, x[..., :5, :], x[..., :5, :], table, FAR, offset=2, window=(1, None)),
        relative_attention(x, x, x, table, FAR, key_table=table, causal=True),
    )


def with_a_bias(self: Any, x: Any, mask: Any) -> tuple[Any, ...]:
    """Items without any visible key, bounds on one side, other lengths of keys, values with a table, key heads."""
    given: dict[str, Any] = {"rel_bias": self.bias, "span": FAR}
    shown = mask & (torch.arange(len(x), device=x.device) > 0)[:, None, None, None]
    keys, few = x[..., :5, :], shown[..., :5]
    return (
        relative_attention(x, x, x, **given, mask=shown),
        relative_attention(x, x, x, **given, mask=shown, causal=True),
        relative_attention(x, x[:, :1], x[:, :1], **given, mask=shown, scale=0.3),
        relative_attention(x, x, x, **given, mask=shown, scale=0.0),
        relative_attention(x, x, x, **given, mask=shown, scale=-0.3),
        relative_attention(x, keys, keys, **given, mask=few, offset=2),
        relative_attention(x, x, x, **given, mask=shown, rel_v=self.table),
        relative_attention(x, x, x, **given, window=(None, 2)),
        relative_attention(x[0], x[0], x[0], **given, mask=shown[-1]),
        relative_attention(x, x, x, **given, mask=shown, softcap=2.0),
    )


def of_labels_and_shapes(self: Any, x: Any, mask: Any) -> tuple[Any, ...]:
    """Positions and segments of items and of all, other lengths of keys, numbers by query, fewer axes and more."""
    table, n = self.table, x.shape[-2]
    half: Any = torch.arange(n, dtype=torch.int64, device=x.device) // 2
    of_items: Any = half + torch.arange(len(x), device=x.device)[:, None]
    keys, own = torch.cat([x, x.flip(-2)], -2), (of_items, torch.cat([of_items, of_items], -1))
    two: dict[str, Any] = {"span": FAR, "segments": (of_items[None], half)}
    return (
        relative_attention(x, x, x, table, FAR, positions=(half, of_items), segments=(of_items, half), causal=True),
        relative_attention(x, keys, keys, table, FAR, positions=own, rel_v=table, sinks=x[..., 0]),
        *cast(Any, relative_attention(x, keys, keys, table, FAR, offset=-2, sinks=x[..., 0], return_lse=True)),
        relative_attention(x, keys, keys, key_table=table, span=FAR, offset=1, segments=own, scale=self.bias[:, 0]),
        relative_attention(x[None] * 2, x[None], x[None], table, **two, softcap=3.0, rel_scale=self.bias[0, 0]),
        relative_attention(x[0, 0], x[0, 0], x[0, 0], table[0], FAR, mask=mask[0, 0]),
        relative_attention(x, x[:, :1], x[:, :1], table, FAR, block_size=3, blocks_before=1, positions=(half, half)),
    )


@pytest.mark.no_cover
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("forward", [of_every_kind, with_a_bias, of_labels_and_shapes])
def test_chunks_agree_at_any_length(forward: Any, opset: int) -> None:
    """Chunks share the logits of a bias, and hide keys in their products."""
    model = of(forward, table=random(2, 13, 4, seed=1), bias=random(2, 13, seed=3)).eval()
    table: Any = torch_translation_table(opset, chunk_size=4)
    vary: Any = ({0: VARY, 2: VARY}, {0: VARY, 3: VARY})
    program = export(model, masked(2, 9), vary, opset, custom_translation_table=table)
    onnx.checker.check_model(program.model_proto, full_check=True)
    run = session(program)
    for shape in [(3, 5), (1, 8), (2, 21), (2, 4), (2, 6)]:
        assert_same(run(*masked(*shape)), model, *masked(*shape), gate=1e-5)


def test_nothing_but_products_and_a_part_of_a_bias_is_in_chunks_of_an_encoder() -> None:
    def forward(self: Any, x: Any, m: Any) -> Any:
        return relative_attention(x, x, x, rel_bias=self.bias, span=FAR, mask=m)

    model = of(forward, bias=random(2, 13, seed=3)).eval()
    made = torch_to_onnx(model, dict(zip("xm", masked(2, 9), strict=True)), chunk_size=4)
    graph = next(node for node in made.graph.node if node.op_type == "If").attribute
    loop = next(node for branch in graph for node in branch.g.node if node.op_type == "Loop")
    names = {node.op_type for node in loop.attribute[0].g.node}
    assert names == {"Identity", "Mul", "Min", "Add", "Sub", "Slice", "Attention"}


def test_chunks_past_a_table_fail(tmp_path: Any) -> None:
    table = random(16, 4, seed=2)
    model = of(lambda self, x: relative_attention(x, x, x, self.table, REACH, causal=True), table=table).eval()
    made = torch_to_onnx(model, random(2, 2, 9, 4), tmp_path / "ends.onnx", chunk_size=4)
    names = [node.name for node in made.graph.node]
    assert len(set(names)) == len(names)
    assert not any("relskew" in name for name in names)
    run = opened(tmp_path / "ends.onnx")
    for length in (1, 4, 16):
        x = random(1, 2, length, 4)
        assert_same(run.run(None, {"x": x.numpy()}), model, x, gate=1e-5)
    with pytest.raises(Exception, match=r"rel_k|GuardFailed|Slice|Gather|Reshape|Add|bound"):
        run.run(None, {"x": random(1, 2, 17, 4).numpy()})


@pytest.mark.parametrize(
    ("options", "branches"), [({"device": "cpu"}, 1), ({"device": "cuda"}, 0), ({"opset": 18}, 0)], ids=str
)
def test_chunks_are_chosen_where_longer_inputs_are_faster_so(options: dict[str, Any], branches: int) -> None:
    """Not with few queries, a ``key_table``, runtimes without control flow, or on CUDA."""

    def forward(self: Any, x: Any) -> tuple[Any, ...]:
        return (
            relative_attention(x, x, x, self.table, FAR),
            relative_attention(x[..., 3:, :], x, x, self.table, FAR, offset=3),
            relative_attention(x, x, x, self.table, FAR, key_table=self.table),
            relative_attention(x, x, x, self.short, Span(255, 0), causal=True),
        )

    several = of(forward, table=random(13, 4), short=random(256, 4))
    made = torch_to_onnx(several, random(1, 2, 9, 4), check=False, **options)
    assert sum(node.op_type in ("If", "Loop") for node in made.graph.node) == branches


def test_onnxruntime_leaves_sums_and_layer_norms_apart(tmp_path: Path) -> None:
    """Its node for both takes longer than the two of them on CPUs."""
    model = of(lambda self, x, y: self.norm(x + y), norm=nn.LayerNorm(16)).eval()
    torch_to_onnx(model, {"x": random(2, 5, 16), "y": random(2, 5, 16, seed=1)}, tmp_path / "norm.onnx")
    opened(tmp_path / "norm.onnx", optimized_model_filepath=str(tmp_path / "optimised.onnx"))
    kinds = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert kinds == {"Sum", "LayerNormalization"}


def test_memory_of_chunks() -> None:
    """At 4096 positions less than a tenth of one tensor of logits, of which a graph without chunks has several."""

    def forward(self: Any, x: Any, shown: Any) -> Any:
        bias = torch.linspace(-1, 1, 13).expand(12, 13)
        return relative_attention(x, x, x, rel_bias=bias, span=FAR, mask=shown[:, None, None])

    run = opened(torch_to_onnx(of(forward), {"x": random(2, 12, 9, 4), "shown": torch.ones(2, 9, dtype=torch.bool)}))
    given = {"x": random(1, 12, 4096, 4).numpy(), "shown": np.ones((1, 4096), dtype=np.bool_)}
    found = grown(lambda: run.run(None, given))
    if found is None:
        pytest.skip("only Linux counts the peak of one call")
    assert found < 12 * 4096**2 * 4 / 10


def test_a_chunk_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="`chunk_size` must be"):
        torch_translation_table(chunk_size=0)

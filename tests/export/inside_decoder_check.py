"""The inputs of a decoder's check, and the errors of a graph that it finds; how it runs a file."""

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import small_decoder
from relskew_core.export import save
from relskew_core.export._models import compare
from relskew_core.export._models.compare import check_decoder, check_full
from relskew_core.export._models.convert import Flat

NAMES = ["logits", "present.0.key", "present.0.value"]
INPUTS = ["input_ids", *(f"past_key_values.{name}" for name in small_decoder.CACHES)]


class Summing(nn.Module):
    """The logits are sums of all tokens so far; it supports a number of positions, of tokens at once and of rows."""

    def __init__(self, most: int = 1000, heads: int = 1, at_once: int = 1000, rows: int = 1000) -> None:
        super().__init__()
        self.most, self.heads, self.at_once, self.rows = most, heads, at_once, rows
        embedding = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).repeat(1, heads)
        self.embedding = nn.Parameter(embedding, requires_grad=False)

    def forward(self, tokens: Tensor, past: Any) -> tuple[Tensor, Any]:
        ((keys, values),) = past
        if len(tokens) > self.rows or tokens.shape[1] > self.at_once:
            raise IndexError(f"{self.rows} rows and {self.at_once} tokens at once are the most")
        x = self.embedding[tokens].unflatten(-1, (self.heads, 4)).transpose(1, 2)
        keys, values = torch.cat([keys, x], 2), torch.cat([values, x * 2], 2)
        if keys.shape[2] > self.most:
            raise IndexError(f"{keys.shape[2]} positions are too many")
        sums = (keys * values).cumsum(2)[:, :, -tokens.shape[1] :]
        return sums.transpose(1, 2).flatten(2) @ self.embedding.T, ((keys, values),)

    def flat(self) -> Flat:
        shown = torch.zeros(2, self.heads, 3, 4, dtype=self.embedding.dtype)
        return Flat(self, (torch.zeros(2, 2, dtype=torch.int64), [(shown, shown)]), {})


Case = tuple[int, int, int]  # rows, tokens, and how many are past


class Graph:
    """Behaves like a model except for a planted error; records its inputs."""

    def __init__(self, model: Summing, *, end: int | None = None, wrong: Collection[Case] = ()) -> None:
        self.flat, self.end, self.wrong = model.flat(), end, wrong
        self.cases, self.seen, self.told = list[Case](), list[list[Any]](), list[str]()

    def __call__(self, inputs: Any, told: str) -> list[Any]:
        tokens, keys, values = inputs
        assert [x.dtype for x in inputs] == [x.dtype for x in self.flat.inputs()]
        assert tokens.shape[0] == keys.shape[0] == values.shape[0]
        case = (*tokens.shape, keys.shape[2])
        self.cases.append(case)
        self.seen.append([x.tolist() for x in inputs])
        self.told.append(told)
        if self.end is not None and tokens.shape[1] + keys.shape[2] > self.end:
            raise RuntimeError("past the end")
        results = [x.numpy().copy() for x in compare.results_of(self.flat, inputs)]
        if case in self.wrong:
            results[0][-1, -1] *= 1.01
        return results

    def check(self, reach: int | None = None, tolerance: float | None = None) -> None:
        check_decoder(self.flat, self, NAMES, lambda rows: [], checks=[], reach=reach, tolerance=tolerance)


@pytest.mark.parametrize(("reach", "most", "cases"), [
    (None, 1000, [(1, 1, 0), (3, 40, 0), (3, 20, 0), (3, 1, 20), (3, 19, 21), (2, 1, 300)]),
    (12, 12, [(1, 1, 0), (3, 12, 0), (3, 6, 0), (3, 1, 6), (3, 5, 7), (2, 1, 11), (1, 1, 12)]),
    (5, 5, [(1, 1, 0), (3, 5, 0), (3, 2, 0), (3, 1, 2), (3, 2, 3), (2, 1, 4), (1, 1, 5)]),
    (100, 100, [(1, 1, 0), (3, 40, 0), (3, 20, 0), (3, 1, 20), (3, 19, 21), (2, 1, 99), (1, 1, 100)]),
    (None, 11, [(1, 1, 0), (3, 10, 0), (3, 5, 0), (3, 1, 5), (3, 4, 6)]),
])  # fmt: skip
def test_a_token_prompts_pieces_and_long_pasts_are_tried(reach: int | None, most: int, cases: list[Case]) -> None:
    graph = Graph(Summing(most), end=reach)
    graph.check(reach)
    assert graph.cases == cases
    for case in cases[:-1]:
        with pytest.raises(RuntimeError, match=r"does not do what `model` does: output '.*' for "):
            Graph(Summing(most), end=reach, wrong=[case]).check(reach)
    Graph(Summing(most), end=reach, wrong=cases).check(reach, tolerance=1.0)


def test_drawn_tokens_are_the_same_each_time_and_of_all_kinds() -> None:
    first, again, double = Graph(Summing()), Graph(Summing()), Graph(Summing().double())
    for graph in (first, again, double):
        graph.check()
    assert first.seen == again.seen
    assert {token for row in first.seen[1][0] for token in row} == set(range(9))


def test_shorter_prompts_are_tried_where_long_ones_cannot_be() -> None:
    graph = Graph(Summing(16, at_once=3), end=16)
    graph.check(16)
    assert graph.cases == [(1, 1, 0), (3, 2, 0), (3, 1, 0), (3, 1, 1), (2, 1, 15), (1, 1, 16)]


def test_the_case_that_differs_is_named() -> None:
    graph = Graph(Summing(9), end=9)
    graph.check(9)
    assert graph.told == [
        "one token", "a prompt of 9", *(f"positions {piece} of a prompt" for piece in ("0 … 3", "4 … 4", "5 … 8")),
        "one token after 8", "one token past the end",
    ]  # fmt: skip
    wrong = {"a prompt of 9": (3, 9, 0), "a prompt of 9 in pieces": (3, 4, 5), "one token after 8": (2, 1, 8)}
    for case, tried in wrong.items():
        with pytest.raises(RuntimeError, match=f"output 'logits' for {case} differs by"):
            Graph(Summing(9), end=9, wrong=[tried]).check(9)
    with pytest.raises(RuntimeError, match=r"gives numbers for position 9, although its tables or caches end after 9"):
        Graph(Summing()).check(9)


def test_an_error_of_the_model_itself_is_raised() -> None:
    with pytest.raises(IndexError, match="2 rows and 1000 tokens at once are the most"):
        Graph(Summing(rows=2)).check()
    with pytest.raises(IndexError, match="20 positions are too many"):
        Graph(Summing(12)).check(20)


def test_long_pasts_of_wide_caches_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a GiB and more: for a past, one more position and two rows of keys and of values."""
    tried = []
    for largest in (2 * 301 * 128 - 1, 2 * 301 * 128):
        monkeypatch.setattr("relskew_core.export._models.compare.LARGEST", largest)
        graph = Graph(Summing(heads=4))
        graph.check()
        tried.append(graph.cases[-1])
    assert tried == [(3, 19, 21), (2, 1, 300)]


def test_a_full_cache_must_fail() -> None:
    seen: dict[str, Any] = {}

    def never_fails(inputs: Any, case: str, length: int) -> list[Any]:
        seen.update(tokens=inputs[0].shape, filled=inputs[2].shape, length=length, case=case)
        return []

    with pytest.raises(RuntimeError, match="gives numbers for position 4, although its caches hold 4"):
        check_full(Summing().flat(), never_fails, lambda rows: [])
    case = "one token more than the caches hold"
    assert seen == {"tokens": (1, 1), "filled": (1, 1, 4, 4), "length": 4, "case": case}

    def fails(inputs: Any, case: str, length: int) -> list[Any]:
        raise RuntimeError(case)

    check_full(Summing().flat(), fails, lambda rows: [])


def test_the_comparison_sees_what_differs() -> None:
    right, one, f = torch.tensor([1.0, 2.0, torch.nan]), torch.ones(1), np.float32
    differs = "does not do what `model` does: output 'y' for x"
    cases: list[tuple[list[Any], list[Any], float | None, str]] = [
        ([np.array([1, 2, 7], f)], [right], None, ""),
        *(([np.array(found, f)], [right], None, differs) for found in ([1, 2.001, 7], [1, np.nan, 7], [1, 1])),
        ([np.array([1, 2.001, 7], f)], [right], 1e-3, ""),
        ([right.double().numpy()], [right], None, r"is float64 \(3,\), of torch float32 \(3,\)"),
        ([np.array([1, 2])], [torch.tensor([1, 3])], None, r"differs in 50\.0% of its numbers"),
        ([np.array([1.001], f)], [one], None, r"differs by 1\.0e-03 relative to its norm, more than 1e-04"),
        ([np.zeros(1, f)], [0 * one], None, ""),
        ([np.zeros(0, f)], [torch.zeros(0)], None, ""),
        # Relative to zero the largest difference counts; next to infinity, the norm gives no scale.
        ([np.array([0, -0.2], f)], [torch.zeros(2)], None, r"differs by 2\.0e-01"),
        ([np.array([1.01e-3, 1], f)], [torch.tensor([1e-3, torch.inf])], None, "output 'y'"),
        ([np.ones(1, f)], [one], 0.0, ""),
        ([np.array([1, 3]), np.zeros(1)], [torch.tensor([1, 3]), one.double()], 0.1, "output 'second'"),
        ([np.array([1.01], np.float16)], [one.half()], None, ""),
    ]
    for found, wanted, tolerance, told in cases:
        with pytest.raises(RuntimeError, match=told) if told else contextlib.nullcontext():
            compare.check_equal(["y", "second"][: len(found)], found, wanted, "x", tolerance, [])


def test_a_file_runs_as_it_is_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Growing, in place at a length of the graph's, and at any."""
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    nothing = [torch.zeros(2, small_decoder.HEADS, 0, small_decoder.WIDTH) for _ in small_decoder.CACHES]
    wanted = small_decoder.logits(torch.cat([tokens, tokens + 3], 1).numpy())
    run: Any
    for length in (0, 9, None):
        made = small_decoder.growing() if length == 0 else small_decoder.in_place(length)
        path = save(made, tmp_path / f"{length}.onnx")
        if length == 0:  # the file has no input on which no output depends
            run, dropped = compare.runner(path, [*INPUTS, "gone"]), [torch.ones(1)]
        else:
            run, dropped = compare.runner_in_place(path, INPUTS, length), []
        first, *past = run([tokens.T.contiguous().T, *nothing, *dropped], "one")
        second, *caches = run([tokens + 3, *map(torch.tensor, past), *dropped], "two")
        np.testing.assert_allclose(np.concatenate([first, second], 1), wanted, atol=1e-4)
        assert {cache.shape for cache in caches} == {(2, small_decoder.HEADS, 6, small_decoder.WIDTH)}
        for before, after in zip(past, caches, strict=True):
            assert np.array_equal(before, after[:, :, :3])
        with pytest.raises(RuntimeError, match="the exported graph fails where `model` does not, for three: "):
            run([tokens + 99, *nothing, *dropped], "three")
    with pytest.raises(RuntimeError, match="for four"):
        run([tokens, *nothing], "four", length=2)
    assert not capfd.readouterr().err  # expected failures print nothing


def test_a_graph_that_reads_behind_its_cache_differs(tmp_path: Path) -> None:
    model = small_decoder.in_place()
    model.graph.node[-1].output[0] = "right"
    sums = 'all = ReduceSum<keepdims = 0>("present.1.key") filled = ReduceSum<keepdims = 0>("present.1.key.filled")'
    added = "behind = Sub(all, filled) logits = Add(right, behind)"
    model.graph.node.extend(onnx.parser.parse_graph(f"g () => () {{{sums} {added}}}").node)
    run = compare.runner_in_place(save(model, tmp_path / "behind.onnx"), INPUTS, None)
    nothing = [torch.zeros(1, small_decoder.HEADS, 0, small_decoder.WIDTH) for _ in small_decoder.CACHES]
    tokens = [[1, 2, 3, 4, 5, 6]]
    (found, *_), wanted = run([torch.tensor(tokens), *nothing], "one"), small_decoder.logits(tokens)
    assert (np.abs(found - wanted) > 100).all()


def test_gives_numbers_is_false_for_nan_and_errors() -> None:
    given = [torch.ones(1)]
    for numbers, told in (([1.0, np.nan], True), ([np.nan, np.nan], False), ([np.inf], False)):
        assert compare.gives_numbers(lambda inputs, case, x=numbers: [np.array(x), np.ones(1)], given) is told  # type: ignore[misc]

    def fails(inputs: Any, case: str) -> list[Any]:
        raise RuntimeError(case)

    assert compare.gives_numbers(fails, given) is False

"""Tokens from the graph of a decoder, whoever made it: those of the formula, drawn as asked, refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import small_decoder
from onnx_sessions import opened
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import generate, save, to_onnx
from small_decoder import VOCABULARY, greedy, growing, in_place

PROMPT = [[1, 2, 3, 4], [9, 8, 7, 6], [5, 5, 5, 0]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(growing(**{"relskew.reach": "20"}), tmp_path_factory.mktemp("made") / "decoder.onnx")


@pytest.mark.parametrize("make", [growing, in_place, lambda: in_place(19)], ids=range(3))
@pytest.mark.parametrize("prompt", [PROMPT, np.asfortranarray(PROMPT, np.uint8), [[7]]], ids=range(3))
def test_tokens_are_those_of_the_formula(make: Callable[[], onnx.ModelProto], prompt: Any, tmp_path: Path) -> None:
    path, n = save(make(), tmp_path / "decoder.onnx"), 20 - len(prompt[0])
    got = generate(str(path), prompt, n)
    assert got.dtype == np.int64
    assert np.array_equal(got, greedy(prompt, n))
    session = opened(path)
    assert np.array_equal(generate(session, prompt[0], n, temperature=0), got[0])
    assert generate(session, prompt, 0).shape == (len(prompt), 0)
    assert generate(session, prompt[0], 0).shape == (0,)
    assert generate(session, prompt[0], 0).dtype == np.int64


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_generate_takes_caches_of_other_dtypes(dtype: Any, tmp_path: Path) -> None:
    assert np.array_equal(generate(save(growing(dtype), tmp_path / "decoder.onnx"), [[7]], 2), greedy([[7]], 2))


def test_a_stop_ends_rows_and_then_the_whole(made: Path) -> None:
    free = generate(made, PROMPT[:2], 12)
    first = next(place for place, token in enumerate(free[0]) if place > 1 and token not in free[1])
    stop = free[0, first]
    got = generate(made, PROMPT[:2], 12, stop=stop)
    assert np.array_equal(got, [np.where(np.arange(12) > first, stop, free[0]), free[1]])
    assert np.array_equal(generate(made, PROMPT[0], 12, stop=[29, stop]), free[0, : first + 1])
    assert [generate(made, PROMPT[:2], 12, stop=free[:, place].tolist()).shape[1] for place in (0, 2)] == [1, 3]


def test_stream_gets_each_token_as_it_comes(made: Path) -> None:
    told: list[Any] = []
    assert list(generate(made, [1, 2, 3], 4, stream=told.append)) == told
    assert {type(token) for token in told} == {int}
    told.clear()

    def spoil(tokens: Any) -> None:
        told.append(tokens.copy())
        tokens[:] = 0

    rows = generate(made, PROMPT, 4, stream=spoil)
    assert np.array_equal(np.stack(told, axis=1), rows)
    assert np.array_equal(rows, greedy(PROMPT, 4))


def test_draws_are_those_of_the_seed(made: Path) -> None:
    prompt = [[1, 2, 3]] * 200
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1}
    once, again = (generate(made, prompt, 2, **options) for _ in range(2))
    assert np.array_equal(once, again)
    for other in (2, 0, None):
        assert not np.array_equal(once, generate(made, prompt, 2, **{**options, "seed": other}))
    likeliest = generate(made, prompt[0], 1)[0]
    narrow: list[dict[str, Any]] = [{**options, "top_k": 1}, {**options, "top_p": 1e-6}, {"temperature": 1e-6}]
    assert all((generate(made, prompt, 1, **given) == likeliest).all() for given in narrow)


@pytest.mark.parametrize(
    "case", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_p": 1}, {"top_k": 4, "top_p": 0.8}, {"top_k": 2 * VOCABULARY}]
)
def test_draws_have_the_probabilities_of_the_logits(made: Path, case: dict[str, Any]) -> None:
    count, shares = 4000, np.exp(small_decoder.logits([[1, 2, 3]])[0, -1] / 3)
    order = np.argsort(-shares)
    kept = shares[order]
    kept[case.get("top_k", VOCABULARY) :] = 0
    kept /= kept.sum()
    kept[kept.cumsum() - kept >= case.get("top_p", 2)] = 0
    want = np.zeros(VOCABULARY)
    want[order] = kept / kept.sum()
    tokens = generate(made, [[1, 2, 3]] * count, 1, temperature=3.0, seed=0, **case)[:, 0]
    found = np.bincount(tokens, minlength=VOCABULARY) / count
    assert (np.abs(found - want) <= 5 * np.sqrt(want * (1 - want) / count)).all()


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"n": 19}, ValueError, "`n` must be at most 18 after a prompt of 3: .* tables reach 20 positions, got 19"),
    ({"prompt": [1] * 21}, ValueError, "`prompt` must be at most 20 tokens, .* model's tables reach, got 21"),
    ({"prompt": []}, ValueError, r"`prompt` must hold a token, got shape \(0,\)"),
    ({"prompt": [3, 30]}, ValueError, "`prompt` must hold tokens 0 … 29, got 3 … 30"),
    ({"prompt": [-1]}, ValueError, "`prompt` must hold tokens 0 … 29, got -1"),
    ({"prompt": [0.5]}, TypeError, r"`prompt` must be ints of shape \(length,\) or .*, got float64 \(1,\)"),
    ({"prompt": 3}, TypeError, r"`prompt` must be ints of shape \(length,\) or .*, got int64 \(\)"),
    ({"prompt": [[[3]]]}, TypeError, r"`prompt` must be ints .*, got int64 \(1, 1, 1\)"),
    ({"prompt": [[1, 2], [3]]}, ValueError, "`prompt` must hold rows of one length, got list of 2"),
    ({"n": -1}, ValueError, "`n` must be an int >= 0"),
    ({"temperature": -1.0}, ValueError, "`temperature` must be at least 0"),
    ({"temperature": np.inf}, ValueError, "`temperature` must be "),
    ({"temperature": "hot"}, TypeError, "`temperature` must be "),
    ({"top_k": 3}, ValueError, "`top_k` needs `temperature` above 0: .* got 3"),
    ({"top_p": 0.5}, ValueError, "`top_p` needs `temperature` above 0: .* got 0.5"),
    ({"seed": 1}, ValueError, "`seed` needs `temperature` above 0: .* got 1"),
    ({"temperature": 1, "top_p": 0.0}, ValueError, "`top_p` must be above 0"),
    ({"temperature": 1, "top_p": 1.5}, ValueError, "`top_p` must be above 0 and at most 1, got 1.5"),
    ({"temperature": 1, "top_p": "a"}, TypeError, "`top_p` must be "),
    ({"temperature": 1, "top_k": 0}, ValueError, "`top_k` must be an int >= 1"),
    ({"temperature": 1, "seed": -1}, ValueError, "`seed` must be an int >= 0"),
    ({"stop": "a"}, TypeError, "`stop` must be ints"),
    ({"stop": [[1]]}, TypeError, r"`stop` must be ints of shape \(length,\), got int64 \(1, 1\)"),
    ({"stream": 1}, TypeError, "`stream` must be a function of a token, got int 1"),
    ({"model": "nowhere.onnx"}, FileNotFoundError, "`model` must be a file, got 'nowhere.onnx'"),
    ({"model": __file__}, ValueError, "`model` must be a graph .* can open: .*[Pp]rotobuf.*, got '"),
    ({"providers": "CPUExecutionProvider"}, TypeError, "`providers` must be a list of names, got 'CPUExec"),
    ({"model": 3}, TypeError, "`model` must be a path or an onnxruntime.InferenceSession, got int 3"),
], ids=str)  # fmt: skip
def test_generate_refuses_what_does_not_fit(made: Path, changes: dict[str, Any], error: Any, message: str) -> None:
    arguments = {"model": made, "prompt": [1, 2, 3], "n": 2, **changes}
    with pytest.raises(error, match=message):
        generate(arguments.pop("model"), arguments.pop("prompt"), arguments.pop("n"), **arguments)


def test_the_nearer_end_of_tables_or_caches_counts(tmp_path: Path) -> None:
    for reach, room, what, end in ((9, 14, "tables reach", 9), (14, 9, "caches hold", 9)):
        path = save(in_place(room, **{"relskew.reach": f"{reach}"}), tmp_path / "ends.onnx", overwrite=True)
        assert np.array_equal(generate(path, PROMPT, end - 3), greedy(PROMPT, end - 3))
        assert generate(path, [1] * end, 1).shape == (1,)
        with pytest.raises(ValueError, match=f"`n` must be at most {end - 3} .* model's {what} {end} positions"):
            generate(path, PROMPT, end - 2)
        with pytest.raises(ValueError, match=f"at most {end} tokens, which the model's {what}, got {end + 1}"):
            generate(path, [1] * (end + 1), 0)


def renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    return model


def changed(model: onnx.ModelProto, kind: str | None = None) -> onnx.ModelProto:
    if kind is None:
        model.graph.input.append(helper.make_tensor_value_info("attention_mask", onnx.TensorProto.INT64, ["batch"]))
    helper.set_model_props(model, {} if kind is None else {"relskew.decoder": kind})
    return model


BLOCK = BlockSpec(4, 2, Span.causal(8), causal=True)
OTHER = r"`model` must be what decoder_to_onnx writes.* got inputs .* and outputs "


@pytest.mark.parametrize(("make", "message"), [
    (lambda: to_onnx(BLOCK, init_weights(BLOCK, seed=0)), OTHER),
    (lambda: changed(growing()), OTHER),
    (lambda: renamed(growing(), "input_ids", "tokens"), OTHER),
    (lambda: renamed(growing(), "logits", "scores"), OTHER),
    (lambda: renamed(growing(), "present.1.value", "present.1.values"), OTHER),
    (lambda: changed(growing(), "in_place"), OTHER),
    (lambda: changed(in_place(), "growing"), OTHER),
    (lambda: changed(growing(), "ring"), "caches that are 'growing' or 'in_place', got 'ring'"),
], ids=range(8))  # fmt: skip
def test_other_graphs_are_no_decoders(make: Callable[[], onnx.ModelProto], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        generate(save(make(), tmp_path / "other.onnx"), [1], 1)


def test_a_graph_without_a_vocabulary_takes_any_token(tmp_path: Path) -> None:
    model = growing()
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_param = "vocabulary"
    model.graph.node[-1].output[0] = "all"
    model.graph.node.append(helper.make_node("Compress", ["all", "known"], ["logits"], axis=2))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(VOCABULARY, bool), "known"))
    path = save(model, tmp_path / "free.onnx")
    assert np.array_equal(generate(path, PROMPT, 3), greedy(PROMPT, 3))
    with pytest.raises(ValueError, match="`prompt` must hold tokens of at least 0, got -2 … 3"):
        generate(path, [3, -2], 1)


def test_nan_logits_are_refused_when_they_come(tmp_path: Path) -> None:
    """It comes from the seventh position on, where a prompt of three has made four tokens."""
    model = growing()
    model.graph.node[-1].output[0] = "given"
    late = (
        'all = Shape<start = 2, end = 3>("present.0.key") six = Constant<value_ints = [6]>() late = Greater(all, six)'
    )
    nan = "zero = Sub(given, given) nan = Div(zero, zero) logits = Where(late, nan, given)"
    model.graph.node.extend(onnx.parser.parse_graph(f"g () => () {{{late} {nan}}}").node)
    path = save(model, tmp_path / "nan.onnx")
    assert np.array_equal(generate(path, PROMPT, 3), greedy(PROMPT, 3))
    with pytest.raises(ValueError, match="`model` gives NaN after 7 tokens"):
        generate(path, PROMPT, 5)

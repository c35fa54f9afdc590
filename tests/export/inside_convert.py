"""What happens before and after an export: names, drawn inputs, axes that were fixed, what layers share."""

import json
import logging
import tracemalloc
import warnings
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from onnx_sessions import opened
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.export import decoder_to_onnx, torch_to_onnx
from relskew_core.export._generate.encoded import Sampler
from relskew_core.export._models import convert, genai
from relskew_core.export._models.convert import Flat, checked_model, evaluating, varying
from relskew_core.export._models.decoder_calls import empty_past
from relskew_core.export._models.fixed import drawn, explained, fixed_by_chance
from relskew_core.export._models.from_torch import _cases, _lengths, _names
from relskew_core.export._models.names import SCOPES, name_lengths, name_nodes
from relskew_core.export._models.rewrites import store_once
from relskew_core.layers.torch import RelativeMultiheadAttention
from small_decoder import VOCABULARY, growing
from torch_exports import assert_same, of, random

sympy: Any = pytest.importorskip("sympy")  # a dependency of torch
ONE = torch.ones(1)
REACH = 20
Pair = namedtuple("Pair", "left right")


def gives(result: Any) -> nn.Module:

    def forward(self: Any, x: Any = None, y: Any = None, *more: Any, **others: Any) -> Any:
        return result

    return of(forward)


@pytest.mark.parametrize(("args", "kwargs", "names"), [
    ((ONE,), {}, ["x"]),
    ((3, ONE), {}, ["y"]),
    ((ONE,) * 4, {}, ["x", "y", "more", "others"]),
    ((ONE,) * 5, {}, ["x", "y", "more", "others", "input_4"]),
    (([ONE, (ONE, 2, ONE)],), {"y": {"b": ONE, "a": [ONE]}}, ["x_0", "x_1_0", "x_1_2", "y_b", "y_a_0"]),
    ((), {"shown": ONE, "kind": "all"}, ["shown"]),
])  # fmt: skip
def test_inputs_are_named_by_the_arguments_of_forward(args: Any, kwargs: Any, names: list[str]) -> None:
    flat = Flat(gives(ONE), args, kwargs)
    assert (flat.input_names, len(flat.inputs())) == (names, len(names))


@pytest.mark.parametrize(("result", "names"), [
    (ONE, ["output"]),
    ((ONE, 3, ONE), ["output_0", "output_2"]),
    ({"logits": ONE, "past": [(ONE, ONE)]}, ["logits", "past_0_0", "past_0_1"]),
    ([{"a": ONE}, None], ["output_0_a"]),
    (Pair(ONE, [ONE]), ["left", "right_0"]),
])  # fmt: skip
def test_outputs_are_named_by_the_keys_of_results(result: Any, names: list[str]) -> None:
    flat = Flat(gives(result), (ONE,), {})
    assert (len(flat(ONE)), flat.output_names) == (len(names), names)


def test_models_elsewhere_are_refused_by_the_name_of_a_weight() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    checked_model(model)
    model[1].register_buffer("lost", torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"`model` must be on the CPU: load its weights first, got '1\.lost' on meta"):
        checked_model(model)


def test_a_model_stays_in_the_mode_it_was_in() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).train()
    model[0].eval()
    with suppress(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == [True, False, True]


def test_varying_finds_free_axes_and_changes_no_setting() -> None:
    model = of(lambda self, x, y: x.reshape(-1, 3) + y.reshape(-1, 3)).train()  # of one width, and any batch
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    log.setLevel(logging.INFO)
    before = list(warnings.filters)
    found = varying(Flat(model, (torch.ones(2, 3), torch.ones(2, 3)), {}))
    assert (found.axes, [*found.never]) == ([{0: torch.export.Dim.DYNAMIC}] * 2, [])
    assert all(hasattr(found.frames[index, 1], "lineno") for index in (0, 1))
    assert (model.training, log.level, warnings.filters) == (True, logging.INFO, before)
    log.setLevel(logging.NOTSET)


def test_torch_prints_nothing_about_lengths_of_one(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch")
    log.addHandler(caplog.handler)
    try:
        assert varying(Flat(nn.Linear(4, 4), (torch.ones(1, 5, 4),), {})).axes == [{1: torch.export.Dim.DYNAMIC}]
    finally:
        log.removeHandler(caplog.handler)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_inputs_of_a_check() -> None:
    """The example first; then 1, one less and one more for all that varies, with numbers of the example."""
    a, b = sympy.symbols("s0 s1")
    leaves = [torch.arange(6).view(2, 3) + 10, torch.tensor([7, 8])]
    cases = list(_cases(leaves, [(a, b), (a,)]))
    assert [[tuple(x.shape) for x in case] for case in cases] == [
        [(2, 3), (2,)], [(1, 1), (1,)], [(1, 2), (1,)], [(3, 4), (3,)]
    ]  # fmt: skip
    assert all(torch.equal(x, leaf) and x is not leaf for x, leaf in zip(cases[0], leaves, strict=True))
    for case in cases[1:]:
        assert all({*x.flatten().tolist()} <= {*leaf.flatten().tolist()} for x, leaf in zip(case, leaves, strict=True))
    assert len(cases[3][0].unique()) > 3
    assert all(torch.equal(*pair) for pair in zip(cases[3], list(_cases(leaves, [(a, b), (a,)]))[3], strict=True))
    sums = list(_cases([torch.ones(2, 5), torch.ones(3)], [(a, a + b), (b,)]))
    assert [tuple(case[0].shape) for case in sums] == [(2, 5), (1, 2), (1, 3), (3, 7)]
    assert len(list(_cases(leaves, [(2, 3), (2,)]))) == 1
    ones = list(_cases([torch.ones(1)], [(a,)]))
    assert [tuple(case[0].shape) for case in ones] == [(1,), (1,), (1,), (2,)]


def test_given_names_are_kept_or_refused() -> None:
    assert _names("input_names", None, ["x"]) == ["x"]
    assert _names("input_names", ("a", "b"), ["x", "y"]) == ["a", "b"]
    of_two, empty = r"be 2 different names, for \['x', 'y'\], got ", "be names, strings that are not empty, got "
    told: dict[str, list[Any]] = {of_two: ["ab", ["a"], ["a", "a"], ["a", "b", "c"]], empty: [["a", ""], ["a", 3]]}
    for said, wrong in ((said, wrong) for said, every in told.items() for wrong in every):
        with pytest.raises(ValueError, match=f"`input_names` must {said}"):
            _names("input_names", wrong, ["x", "y"])
    assert _names("output_names", None, ["x", "y", "output_y"], ["x", "z"]) == ["output_x", "y", "output_y"]
    assert _names("output_names", None, ["y", "output_y", "y"], ["y"]) == ["output_y", "output_y_2", "output_y_3"]
    assert _names("output_names", ["y"], ["x"], ["x"]) == ["y"]
    with pytest.raises(ValueError, match=r"`output_names` must differ from the names of the inputs, .*, got \['x'\]"):
        _names("output_names", ["y", "x"], ["a", "b"], ["x", "z"])
    symbols = [("s0", "s1"), ("s2",), ("s0", 4, "s1", "s3")]
    assert _lengths(["x", "y", "z"], symbols) == {
        (0, 0): "batch", (0, 1): "x_length", (1, 0): "y_length", (2, 2): "z_axis_2", (2, 3): "z_axis_3"
    }  # fmt: skip
    assert _lengths(["x", "y"], [(), ("s0", 3)]) == {(1, 0): "y_length"}


def test_the_caches_of_a_model_that_has_none_of_its_own() -> None:
    """Of every attention that is causal and of one sequence, in order."""
    causal = [BlockSpec(8, heads, Span.causal(9), causal=True) for heads in (2, 4)]
    others = [BlockSpec(8, 2, Span.full(9)), BlockSpec(8, 2, Span.clipped(3), cross=True)]
    model = nn.ModuleList(map(RelativeMultiheadAttention, (causal[0], *others, causal[1])))
    caches = empty_past(model, None)(3)
    assert [tuple(x.shape) for pair in caches for x in pair] == [(3, 2, 0, 4)] * 2 + [(3, 4, 0, 2)] * 2
    with pytest.raises(ValueError, match="`past` must be given because the model has no `empty_cache` and no causal"):
        empty_past(nn.ModuleList([model[1]]), None)
    own: Any = len
    assert empty_past(model, own) is own


class Answers(nn.Module):
    def __init__(self, logits: Any, past: Any) -> None:
        super().__init__()
        self.logits, self.past = logits, past

    def empty_cache(self, batch: int) -> Any:
        return [(torch.zeros(batch, 2, 0, 4), torch.zeros(batch, 2, 0, 4))]

    def forward(self, tokens: Tensor, past: Any) -> Any:
        return self.logits, self.past


LOGITS, GROWN = torch.zeros(2, 3, 9), torch.zeros(2, 2, 3, 4)


@pytest.mark.parametrize(("logits", "past", "error", "message"), [
    (torch.zeros(2, 9), [(GROWN, GROWN)], ValueError, r"logits \(batch, length, vocabulary\), got .* for tokens"),
    (torch.zeros(3, 3, 9), [(GROWN, GROWN)], ValueError, r"logits \(batch, length, vocabulary\)"),
    (LOGITS.long(), [(GROWN, GROWN)], ValueError, r"logits \(batch, length, vocabulary\)"),
    (None, [(GROWN, GROWN)], TypeError, r"`model` must return \(logits, past\), got tuple of 2"),
    (LOGITS, [(GROWN, GROWN[:, :1])], ValueError, "as many caches as it is given, with the same heads and widths"),
    (LOGITS, [(GROWN, GROWN)] * 2, ValueError, "as many caches as it is given, with the same heads and widths"),
    (LOGITS, [GROWN], TypeError, r"the past that `model` returns must be a list with one pair .* got list of 1"),
    (LOGITS, [(GROWN,) * 3], TypeError, r"the past that `model` returns must be a list with one pair"),
    (LOGITS, [], TypeError, r"the past that `model` returns must be a list with one pair"),
    (LOGITS, [(GROWN, GROWN[0])], ValueError, r"must hold tensors \(batch, heads, positions, D\), of 2 and 3 pos"),
    (LOGITS, [(GROWN, GROWN[:1])], ValueError, r"must hold tensors .* of 2 and 3 positions here, got Tensor"),
    (LOGITS, [(GROWN, GROWN[:, :, :2])], ValueError, r"must hold tensors .* of 2 and 3 positions here"),
    (LOGITS, [(GROWN, 3)], ValueError, r"must hold tensors .* got int 3"),
], ids=range(13))  # fmt: skip
def test_wrong_logits_or_caches_are_refused(logits: Any, past: Any, error: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        decoder_to_onnx(Answers(logits, past), tmp_path / "decoder.onnx")
    assert not list(tmp_path.iterdir())


def test_a_decoder_without_a_past_is_refused(tmp_path: Path) -> None:
    model = of(lambda self, tokens: (LOGITS, [(GROWN, GROWN)]), empty_cache=Answers(None, None).empty_cache)
    called: list[tuple[str, dict[str, Any]]] = [("tokens, past", {}), ("tokens, past, memory", {"memory": LOGITS})]
    for arguments, given in called:
        told = rf"^`model` must be called as model\({arguments}\), got Module: too many"
        with pytest.raises(TypeError, match=told):
            decoder_to_onnx(model, tmp_path / "decoder.onnx", **given)


def test_genai_takes_caches_of_one_kind() -> None:
    made = [onnx.helper.make_tensor_value_info(f"past_key_values.{n}.key", 1, ["b", 1 + n, "p", 4]) for n in range(2)]
    model = onnx.helper.make_model(onnx.helper.make_graph([], "graph", made, []))
    with pytest.raises(ValueError, match=r"`genai` requires caches of one number .* got \[\(1, 4\), \(2, 4\)\]"):
        genai.config_text("decoder.onnx", model, {"eos_token_id": 0}, None)


def test_contents_are_never_held_at_once() -> None:
    arrays = [np.full((512, 512), number, np.float32) for number in range(20)]
    stored = [onnx.numpy_helper.from_array(array, f"tensor_{number}") for number, array in enumerate(arrays)]
    model = onnx.helper.make_model(onnx.helper.make_graph([], "graph", [], [], stored))
    tracemalloc.start()
    store_once(model)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 5 * arrays[0].nbytes


def test_the_config_of_genai(tmp_path: Path) -> None:
    text = genai.config_text("decoder.onnx", growing(), {"eos_token_id": 7}, REACH)
    names = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    presents = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    decoder = {
        "filename": "decoder.onnx", "session_options": {}, "head_size": 4, "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "inputs": {"input_ids": "input_ids", **names},
        "outputs": {"logits": "logits", **presents},
    }  # fmt: skip
    model = {
        "type": "llama", "vocab_size": VOCABULARY, "context_length": REACH, "bos_token_id": 0, "eos_token_id": 7,
        "pad_token_id": 0, "decoder": decoder,
    }  # fmt: skip
    search = {"do_sample": False, "max_length": REACH, "past_present_share_buffer": False}
    assert json.loads(text) == {"model": model, "search": search}
    assert '\n    "decoder": {\n      "filename": "decoder.onnx",\n' in text  # people edit this file
    assert '"num_hidden_layers": 2,' in text
    for ends in (2, [2], [7, 0]):  # one token, or any of some
        genai.check_config(tmp_path, {"eos_token_id": ends}, False)
        endless = json.loads(genai.config_text("decoder.onnx", growing(), {"eos_token_id": ends}, None))
        assert endless["model"]["context_length"] == endless["search"]["max_length"] == 2**20
        assert endless["model"]["eos_token_id"] == ends
    given = {"eos_token_id": 7, "context_length": 9}
    assert genai.config_text("decoder.onnx", growing(), given, None).count(": 9,") == 2
    for beyond in (VOCABULARY, [1, VOCABULARY]):
        with pytest.raises(ValueError, match=f"`genai` must have an `eos_token_id` below {VOCABULARY}, the model's"):
            genai.config_text("decoder.onnx", growing(), {"eos_token_id": beyond}, None)


def test_the_first_of_equal_tokens_is_the_likeliest() -> None:
    """And what stays of `top_p` is enough where it is reached to the point."""
    equal = np.zeros((200, 100), np.float32)
    assert not Sampler.of(1.0, 1, None, 0)(equal).any()
    assert set(Sampler.of(1.0, None, 0.5, 0)(equal[:, :4])) == {0, 1}


SUM = of(lambda self, x, y: self.width(x) + y, width=nn.Linear(4, 4))
"""It takes any batch and length, of the two alike, and one width."""


def apart(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Take any length of one, and three rows of the other."""
    assert len(y) == 3
    return x + y.sum()


PRODUCT, PAIR = of(lambda self, x, y: x @ y), of(lambda self, x, y, z: (x + y, z))


@pytest.mark.parametrize(("model", "shapes", "known", "groups"), [
    (SUM, [(2, 3, 4), (2, 3, 4)], [(2, 3, 4), (2, 3, 4)], [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]),
    (SUM, [(2, 3, 4), (2, 3, 4)], [("b", 3, 4), ("b", 3, 4)], [[(0, 1), (1, 1)]]),
    (SUM, [(1, 3, 4), (1, 3, 4)], [(1, "n", 4), (1, "n", 4)], []),
    (PRODUCT, [(2, 5), (5, 7)], [("a", 5), (5, "b")], [[(0, 1), (1, 0)]]),
    (of(apart), [(3,), (3,)], [(3,), (3,)], [[(0, 0)]]),
    (of(apart), [(4, 0), (3,)], [(4, 0), (3,)], [[(0, 0)]]),
    (PAIR, [(2,), (2,), (5,)], [(2,), (2,), (5,)], [[(0, 0), (1, 0)], [(2, 0)]]),
])  # fmt: skip
def test_axes_that_the_model_takes_longer_are_found_in_groups(model: Any, shapes: Any, known: Any, groups: Any) -> None:
    flat = Flat(model.train(), [torch.randn(shape) for shape in shapes], {})
    assert fixed_by_chance(flat, known, frozenset()) == groups
    assert fixed_by_chance(flat, known, frozenset(axis for group in groups for axis in group)) == []
    assert model.training


def test_drawn_numbers_are_those_of_the_example() -> None:
    rows, places = torch.randn(5, 4), torch.tensor([4, 0])
    flat = Flat(of(lambda self, x, y: x[y].sum(0)), (rows, places), {})
    assert fixed_by_chance(flat, [("n", "d"), (2,)], frozenset()) == [[(1, 0)]]
    longer = drawn(places, [9], torch.Generator("cpu").manual_seed(0))
    assert set(longer.tolist()) == {0, 4}
    assert drawn(places[:0], [2], torch.Generator("cpu")).tolist() == [0, 0]
    with torch.device("meta"):
        assert drawn(places, [9], torch.Generator("cpu").manual_seed(0)).equal(longer)


def test_the_warning_names_the_line_that_fixed_an_axis() -> None:
    leaves = (torch.zeros(2, 3), torch.zeros(2, 5))
    lines = {(0, 0): (torch.nn.functional.__file__, "inside"), (1, 0): ("model.py", "n = len(y)")}
    frames: Any = {axis: SimpleNamespace(filename=x, lineno=7, line=line) for axis, (x, line) in lines.items()}
    both, one = explained([[(0, 0), (1, 0)], [(0, 1)]], ["x", "y"], leaves, frames)
    assert "for axis 0 of 'x' and axis 0 of 'y' of length 2 alone" in both
    assert "torch fixed it, by `n = len(y)` in model.py:7. If `vary` names" in both
    assert "for axis 1 of 'x' of length 3 alone" in one
    assert "torch fixed it. If `vary` names this axis and all others" in one


# What layers share, compared with the same graph in which every layer computes its own

FAR = Span(6, 6, "clip")


@pytest.mark.parametrize("chunk_size", ["auto", None])
def test_layers_compute_once_what_they_share(chunk_size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as from nodes in each layer, for few queries and for many, and of rows that see no key."""

    def forward(self: Any, x: Any, shown: Any) -> Any:
        hidden = torch.where(shown[:, None, None], 0.0, -torch.inf)
        for _ in range(3):
            x = x + relative_attention(x, x, x, rel_bias=self.bias, span=FAR, mask=hidden)
            x = x + relative_attention(x, x, x, mask=hidden)
        return x

    def shown(batch: int, length: int) -> Tensor:
        return torch.arange(length) < torch.arange(batch)[:, None] * 3

    def pads(made: Any) -> int:
        first = [one.attribute[0].g for one in made.graph.node if one.op_type == "If"]
        return sum(node.op_type == "Pad" for graph in (made.graph, *first) for node in graph.node)

    model = of(forward, bias=random(2, 13)).eval()
    given = {"x": random(2, 2, 9, 4), "shown": shown(2, 9)}
    made = torch_to_onnx(model, given, chunk_size=chunk_size, check=False)
    monkeypatch.setattr(convert, "share", lambda model: None)
    before = torch_to_onnx(model, given, chunk_size=chunk_size, check=False)
    assert (pads(made), pads(before)) == (1, 3)
    runs = opened(made), opened(before)
    for batch, length in [(1, 1), (3, 7), (2, 300), (2, 1100)]:
        feeds = {"x": random(batch, 2, length, 4).numpy(), "shown": shown(batch, length).numpy()}
        one, other = (run.run(None, feeds)[0] for run in runs)
        assert one.tobytes() == other.tobytes()
        assert_same([one], model, *map(torch.from_numpy, feeds.values()), gate=1e-5)


def test_what_one_branch_has_is_no_buffer_of_the_other() -> None:
    """The declared shape of a shared value must not be that of a later one: runtimes then use its memory again."""

    def forward(self: Any, x: Any) -> Any:
        for _ in range(3):
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (x, x / 2, x / 3))
            x = relative_attention(q, k, v, self.rel_k, FAR, rel_v=self.rel_v).transpose(1, 2).flatten(2)
        return x

    model = of(forward, rel_k=random(13, 4), rel_v=random(13, 4)).eval()
    made = torch_to_onnx(model, random(2, 9, 8), check=False)
    assert any(len(node.output) > 1 for node in made.graph.node if node.op_type == "If")
    for length in (5, 300, 1100):
        x = random(1, length, 8)
        assert_same(opened(made).run(None, {"x": x.numpy()}), model, x, gate=1e-5)


# Names in graphs that torch's exporter made: who made a node and what for, and nothing of the machine


def node(op_type: str, inputs: str, output: str, scopes: list[str] | None, name: str = "", **more: Any) -> Any:
    made = helper.make_node(op_type, inputs.split(), output.split(), name=name or f"node_{output}", **more)
    if scopes is not None:
        made.metadata_props.add(key=SCOPES, value=repr(scopes))
    made.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/somebody/model.py")
    return made


def made() -> Any:
    """Return what torch's exporter leaves of ``model`` with layers ``a`` and ``b``; ``b`` attends twice."""
    a, b = ["", "model.a", "aten"], ["", "model", "model.b", "call"]
    inner = helper.make_graph(
        [node("Neg", "x", "val_9", a)], "branch", [], [helper.make_tensor_value_info("val_9", TensorProto.FLOAT, None)]
    )
    nodes = [
        node("Add", "x model.a.weight", "val_0", a),
        node("Add", "val_0 val_1", "val_2", a),
        node("Softmax", "val_2", "val_3", ["", "model.a", "x"], "relskew/compute/attention_1/skew/rows"),
        node("Split", "val_3", "val_4 val_5", b, "relskew/shape/attention_2/split"),
        node("Mul", "val_4 val_5", "val_6", b, "relskew/compute/attention_3/out"),
        node("If", "flag", "val_7", None, then_branch=inner, else_branch=inner),
        node("Mul", "val_6 val_7", "val_8", ["", "other.c", "x"], "relskew/compute/attention_4/out"),
        node("Relu", "val_8", "val_10", ["model.a", "x"], "relskew/shape/attention_1/rest"),
        node("Neg", "val_10", "val_11", ["x"]),
        node("Abs", "val_11", "y", ["", "model.a", "x"], "strange/relskew/compute/attention_1/out"),
    ]
    tensor = helper.make_tensor_value_info
    stored = [helper.make_tensor(name, TensorProto.FLOAT, [1], [0.0]) for name in ("model.a.weight", "val_1", "loose")]
    graph = helper.make_graph(
        nodes, "g", [tensor("x", TensorProto.FLOAT, ["s0"]), tensor("flag", TensorProto.BOOL, [])],
        [tensor("y", TensorProto.FLOAT, ["s0"])], stored,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model.metadata_props.add(key="torch", value="/home/somebody")
    model.graph.metadata_props.add(key="torch", value="/home/somebody")
    return onnx_ir.serde.deserialize_model(model)


def test_nodes_are_named_by_module_and_purpose() -> None:
    model = made()
    name_nodes(model, "model.")
    text = onnx_ir.serde.serialize_model(model)
    assert [(node.name, list(node.output)) for node in text.graph.node] == [
        ("a/Add", ["a/Add"]), ("a/Add_2", ["a/Add_2"]), ("a/skew/rows", ["a/skew/rows"]),
        ("b/attention_2/split", ["b/attention_2/split", "b/attention_2/split/1"]),
        ("b/attention_3/out", ["b/attention_3/out"]), ("If", ["If"]), ("attention_4/out", ["attention_4/out"]),
        ("a/rest", ["a/rest"]), ("Neg", ["Neg"]), ("a/Abs", ["y"]),
    ]  # fmt: skip
    branches = [attribute.g for node in text.graph.node for attribute in node.attribute if attribute.HasField("g")]
    assert [[node.name for node in branch.node] for branch in branches] == [["a/Neg"], ["a/Neg_2"]]
    assert {tensor.name for tensor in text.graph.initializer} == {"a.weight", "a/Add_2/constant", "loose"}
    assert list(text.graph.node[0].input) == ["x", "a.weight"]
    assert list(text.graph.node[1].input) == ["a/Add", "a/Add_2/constant"]
    assert "somebody" not in str(text)
    onnx.checker.check_model(text)


def test_a_name_that_a_tensor_of_the_model_has_is_taken() -> None:
    model = made()
    model.graph.inputs[0].name = "a/Add"
    model.graph.outputs[0].name = "If"
    name_nodes(model, "model.")
    assert [node.name for node in model.graph][:2] == ["a/Add_2", "a/Add_3"]
    assert [node.name for node in model.graph][5] == "If_2"


def test_lengths_have_names() -> None:
    sizes: list[Any] = ["s0", "s1 + u2", "u2 + s1", "s3", "s1", "s1*(s1 + s0)", 5, None, "s10"]
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["z"]), helper.make_node("Neg", ["w"], ["y"])], "g",
        [tensor("x", TensorProto.FLOAT, sizes)], [tensor("y", TensorProto.FLOAT, ["s0", None])],
        [helper.make_tensor("w", TensorProto.FLOAT, [1, 1], [0.0])], value_info=[tensor("z", TensorProto.FLOAT, ["s0"])]
    )  # fmt: skip
    model = onnx_ir.serde.deserialize_model(helper.make_model(graph))
    name_lengths(model, {"s0": "batch", "s1": "length", "u2": "past", "length + past": "total", "s9": "none"})
    values = model.graph.inputs[0], model.graph.outputs[0], model.graph.node(0).outputs[0]
    x, y, z = ([getattr(size, "value", size) for size in value.shape or ()] for value in values)
    assert x == ["batch", "total", "total", "s3", "length", "length*(length + batch)", 5, None, "s10"]
    assert y == ["batch", None]
    assert z == ["batch"]

"""Models of torch as graphs with nodes for the operator library: the same results with it and without it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from onnx_sessions import opened, tokens_of_genai
from operator_runs import INPUTS, NAME, needs_library
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.export import (
    custom_ops_library,
    decoder_to_onnx,
    generate,
    save,
    torch_to_onnx,
    torch_translation_table,
    without_operator,
)
from relskew_core.layers.torch import RelativeMultiheadAttention
from torch_exports import VARY, export, of, random

pytestmark = needs_library


def nodes(model: onnx.ModelProto, kind: str = NAME) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


def calls(rows: int = 0, **options: Any) -> nn.Module:
    """Return one call, with queries, keys and values from one input, and with separate tables."""
    rel_k = random(4, rows, 8) if rows else None
    return of(lambda self, x: relative_attention(x, x[:, ::2], x[:, 1::2], self.rel_k, **options), rel_k=rel_k)


def table(rows: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(rows).standard_normal((4, rows)).astype(np.float32))


SPAN = Span.full(9)
CALLS: dict[str, dict[str, Any]] = {
    "full": {"rows": 17, "span": SPAN},
    "causal, clipped": {"rows": 4, "span": Span.causal(4, beyond="clip"), "causal": True},
    "window, scales": {"rows": 17, "span": SPAN, "window": (2, 3), "scale": 0.3, "rel_scale": -0.1},
    "bias, softcap, lse": {"span": SPAN, "rel_bias": table(17), "softcap": 2.0, "return_lse": True},
    "blocks": {"rows": 8, "span": Span.causal(8), "block_size": 4},
    "blocks of streams": {"rows": 17, "span": SPAN, "block_size": 2, "blocks_before": 1},
    "sinks": {"rows": 17, "span": SPAN, "sinks": torch.arange(4.0)},
    "no table": {"causal": True},
    "float16": {"rows": 17, "span": SPAN, "dtype": torch.float16},
    "float64": {"rows": 17, "span": SPAN, "dtype": torch.float64},
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_become_nodes_and_give_torchs_numbers(kind: str) -> None:
    """The check of the export runs the graph both ways, at other lengths too."""
    dtype, options = (
        CALLS[kind].get("dtype", torch.float32),
        {name: x for name, x in CALLS[kind].items() if name != "dtype"},
    )
    made = torch_to_onnx(calls(**options).to(dtype), random(2, 4, 6, 8).to(dtype), vary={"x": [0, 2]}, operator=True)
    assert (len(nodes(made)), len(made.functions)) == (1, 1)
    assert len(nodes(made, "Softmax")) == (kind == "sinks")  # it computes the share of the sinks
    onnx.checker.check_model(made)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks_and_documents_are_inputs_of_the_node(kind: str) -> None:
    masked = of(lambda self, x, mask, segments: relative_attention(x, x, x, mask=mask, segments=segments, causal=True))
    shown = torch.rand(2, 1, 6, 6) < 0.8
    mask = shown if kind == "boolean" else torch.where(shown, 0.5, -torch.inf)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1], [4, 4, 5, 5, 6, 6]])
    (node,) = nodes(torch_to_onnx(masked, (torch.randn(2, 4, 6, 8), mask, segments), vary={}, operator=True))
    assert node.input[8 if kind == "boolean" else 9]


def test_calls_of_one_kind_share_a_function() -> None:
    spec = BlockSpec(16, 4, Span.causal(40), causal=True)
    model = nn.Sequential(*(RelativeMultiheadAttention(spec) for _ in range(3)))
    made = torch_to_onnx(model, torch.randn(2, 6, 16), operator=True)
    assert (len(nodes(made)), len(made.functions)) == (3, 1)
    assert {node.op_type for node in made.graph.node} == {NAME, "MatMul", "Add"}


def test_torchs_own_exporter_writes_nodes() -> None:
    spec = BlockSpec(16, 4, Span.causal(40), causal=True, num_kv_heads=2)
    model, x, table = RelativeMultiheadAttention(spec).eval(), random(2, 6, 16), torch_translation_table(operator=True)
    vary: Any = ({0: VARY, 1: VARY},)
    made = table.model(export(model, (x,), vary, 23, custom_translation_table=table, optimize=True))
    onnx.checker.check_model(made, full_check=True)
    (node,) = nodes(made)
    assert node.overload == "call_1_q4x4_k2x4_v2x4_out4"
    for given in (x, torch.randn(1, 1, 16)):
        for library in (True, False):
            session = opened(made, library=library)
            found = session.run(None, {session.get_inputs()[0].name: given.numpy()})[0]
            np.testing.assert_allclose(found, model(given).detach().numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("operator", [False, True], ids=["plain", "operator"])
def test_opsets_that_torchs_exporter_does_not_write(operator: bool) -> None:
    """The check runs them in onnxruntime, which guarantees no more than 26."""
    made = torch_to_onnx(calls(17, span=SPAN), random(2, 4, 6, 8), opset=26, operator=operator)
    versions = [entry.version for part in (made, *made.functions) for entry in part.opset_import if not entry.domain]
    assert versions == [26] * (1 + operator)
    onnx.checker.check_model(made, full_check=True)


def test_tables_as_long_as_the_input_become_a_node() -> None:
    """But not heads without a batch."""

    def forward(self: Any, x: Any) -> Any:
        n = x.shape[-2]
        return relative_attention(x, x, x, torch.arange(1 - n, n).to(x.dtype)[:, None] * torch.linspace(0.1, 1, 8))

    made = torch_to_onnx(of(forward), random(2, 4, 6, 8), vary={"x": [0, 2]}, operator=True)
    (node,) = nodes(made)
    assert all(node.input[INPUTS.index(name)] for name in ("span_left", "span_right"))
    made = torch_to_onnx(of(forward), random(4, 6, 8), vary={"x": [1]}, operator=True)
    assert not [*nodes(made), *made.functions]


def same_tokens(made: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold a decoder to another one, with the library, without it, and without its nodes."""
    prompts = [[1, 2, 3], [4, 5, 6]]
    wanted = generate(plain, prompts, 12)
    np.testing.assert_array_equal(generate(made, prompts, 12), wanted)
    monkeypatch.setattr("relskew_core.export._generate.encoded.found_library", lambda: None)
    for path in (made, save(without_operator(made), made.with_name("without_nodes.onnx"))):
        np.testing.assert_array_equal(generate(path, prompts, 12), wanted)


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_decoders_with_a_bias_by_length(cache_dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ALiBi, made for the keys that there are."""

    def forward(self: Any, tokens: Tensor, past: Any) -> Any:
        x = self.embedding(tokens)
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.projections(x).chunk(3, -1))
        before = past[0][0].shape[2]
        k, v = (torch.cat(pair, 2) for pair in zip(past[0], (k, v), strict=True))
        bias: Any = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None] * torch.arange(1 - k.shape[2], 1)
        span = Span.causal(k.shape[2])
        out: Any = relative_attention(q, k, v, None, span, rel_bias=bias, causal=True, offset=before)
        return (x + out.transpose(1, 2).flatten(2)) @ self.embedding.weight.T, [[k, v]]

    torch.manual_seed(2)
    model = of(forward, embedding=nn.Embedding(10, 16), projections=nn.Linear(16, 48))
    given: dict[str, Any] = {"past": lambda batch: [[torch.zeros(batch, 4, 0, 4) for _ in "kv"]]}
    path = tmp_path / "sloped.onnx"
    decoder_to_onnx(model, path, operator=True, in_place=True, cache_dtype=cache_dtype, **given)
    graph = onnx.load(path)
    assert (len(nodes(graph)), len(nodes(graph, "TensorScatter"))) == (1, 0)
    same_tokens(path, decoder_to_onnx(model, tmp_path / "plain.onnx", check=False, **given), monkeypatch)


class Decoder(nn.Module):
    """Two layers of which each has a cache."""

    def __init__(self, heads: int = 2, rows: int = 24, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(10, 16)
        spec = BlockSpec(16, 4, Span.causal(rows), causal=True, num_kv_heads=heads, **options)
        self.layers = nn.ModuleList(RelativeMultiheadAttention(spec) for _ in range(2))

    def forward(self, tokens: Tensor, past: Any) -> Any:
        x, caches = self.embedding(tokens), []
        for layer, cache in zip(self.layers, past, strict=True):
            y, present = layer(x, past=cache)
            x = x + y
            caches.append(present)
        return x @ self.embedding.weight.T, caches


@pytest.mark.parametrize("options", [{}, {"in_place": True, "opset": 25}, {"in_place": True, "length": 20}], ids=str)
def test_decoders_give_the_same_tokens(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder()
    plain = decoder_to_onnx(model, tmp_path / "plain.onnx")
    made = decoder_to_onnx(model, tmp_path / "operator.onnx", operator=True, **options)
    graph = onnx.load(made)
    assert len(nodes(graph)) == 2
    assert not nodes(graph, "TensorScatter")  # the node writes its caches
    grows = not options  # and attention reads the present caches, with a heads axis
    turned = [node for node in nodes(graph, "Transpose") if node.name != "embedding.weight/transposed"]
    assert len(nodes(graph, "Reshape")) == len(turned) == 4 * grows
    same_tokens(made, plain, monkeypatch)


@pytest.mark.parametrize("options", [{}, {"length": 20}, {"dtype": "float16"}], ids=str)
def test_decoders_with_caches_in_int8(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decoder_to_onnx(
        Decoder(), tmp_path / "int8.onnx", operator=True, in_place=True, cache_dtype="int8", **options
    )
    graph = onnx.load(made).graph
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output)}
    for kind in ("key", "value"):
        for name in (f"past_key_values.1.{kind}", f"present.1.{kind}"):
            rows, scales = types[name], types[f"{name}_scale"]
            assert (rows.elem_type, scales.elem_type) == (onnx.TensorProto.INT8, onnx.TensorProto.FLOAT)
            assert list(scales.shape.dim) == list(rows.shape.dim)[:3]
    same_tokens(made, decoder_to_onnx(Decoder(), tmp_path / "plain.onnx", check=False), monkeypatch)


@pytest.mark.parametrize("options", [{}, {"cache_dtype": "int8", "in_place": True}], ids=str)
def test_decoders_with_tables_in_int8(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compares with torch; a table that another node reads stays."""
    model = Decoder(rows=100, rel_values=True)
    made = decoder_to_onnx(model, tmp_path / "int8.onnx", operator=True, weights="weights-8", **options)
    graph = onnx.load(made)
    types = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in graph.graph.initializer}
    for node in nodes(graph):
        for name in ("rel_k", "rel_v"):
            table, rows, scales = (node.input[INPUTS.index(f"{name}{end}")] for end in ("", "_int8", "_scale"))
            assert (table, types[rows]) == ("", (onnx.TensorProto.INT8, [4, 100, 4]))
            assert types[scales] == (onnx.TensorProto.FLOAT, [4, 100])
    ids, past = np.array([[3, 1, 4, 1, 5]]), np.zeros((1, 2, 0, 4), np.float32)

    def logits(path: Any, library: bool) -> Any:
        session = opened(path, library=library)
        given = {value.name: past for value in session.get_inputs()[1:]}
        return session.run(["logits"], {"input_ids": ids, **given})[0]

    if not options:
        inlined = save(without_operator(made), tmp_path / "inlined.onnx")
        whole = logits(decoder_to_onnx(model, tmp_path / "plain.onnx", check=False), False)
        first = logits(made, True)
        assert 1e-4 < np.linalg.norm(first - whole) / np.linalg.norm(whole) < 0.02
        for other in (logits(made, False), logits(inlined, False)):
            np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-5)
    same_tokens(made, made, monkeypatch)


def test_where_hosts_find_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime opens a path, and no name in the current folder; genai looks next to its configuration."""
    folder = tmp_path / "decoder"
    folder.mkdir()
    shutil.copy(custom_ops_library(), folder)
    monkeypatch.chdir(folder)
    by_name = "import onnxruntime; onnxruntime.SessionOptions().register_custom_ops_library('librelskew.so')"
    host = subprocess.run([sys.executable, "-c", by_name], capture_output=True, text=True)  # without relskew's own
    assert "cannot open shared object file" in host.stderr
    onnxruntime.SessionOptions().register_custom_ops_library("./librelskew.so")
    monkeypatch.chdir(tmp_path)
    path = decoder_to_onnx(Decoder(), folder / "decoder.onnx", operator=True, genai={"eos_token_id": 9}, check=False)
    settings = json.loads((folder / "genai_config.json").read_text())
    for name in ("librelskew.so", "missing.so"):
        settings["model"]["decoder"]["session_options"]["custom_ops_library"] = name
        (folder / "genai_config.json").write_text(json.dumps(settings))
        if name == "missing.so":
            with pytest.raises(RuntimeError, match=r"missing\.so"):
                tokens_of_genai(folder, [1, 2, 3], 12)
            continue
        assert tokens_of_genai(folder, [1, 2, 3], 12)[3:] == list(generate(path, [1, 2, 3], 9, stop=9))


class Shared(Decoder):
    """A decoder whose cache is read by more than attention."""

    def forward(self, tokens: Tensor, past: Any) -> Any:
        logits, caches = super().forward(tokens, past)
        return logits + caches[0][0][:, 0, :1, :1], caches


def test_a_cache_that_others_read_is_written_apart(tmp_path: Path) -> None:
    made = onnx.load(decoder_to_onnx(Shared(), tmp_path / "m.onnx", operator=True, in_place=True))
    assert len(nodes(made, "TensorScatter")) == 2
    assert len(made.functions) == 2


def test_caches_in_int8_need_the_operator(tmp_path: Path) -> None:
    options: dict[str, Any] = {"in_place": True, "operator": True}
    wrong: list[tuple[nn.Module, dict[str, Any], str]] = [
        (Decoder(), {"operator": False}, "requires .* `operator=True`, got in_place=True and operator=False"),
        (Decoder(), {"in_place": False}, "requires `in_place=True` .*, got in_place=False and operator=True"),
        (Decoder(), {"cache_dtype": "int4"}, "`cache_dtype` must be one of 'int8', got 'int4'"),
        (Shared(), {}, r"only a node relskew::RelativeAttention.*but present\.0\.key is read"),
    ]
    for model, other, match in wrong:
        with pytest.raises(ValueError, match=match):
            decoder_to_onnx(model, tmp_path / "wrong.onnx", **{**options, "cache_dtype": "int8", **other})
    assert not list(tmp_path.iterdir())


def test_a_program_of_another_kind_is_named() -> None:
    with pytest.raises(TypeError, match="`program` must be what torch"):
        torch_translation_table().model(onnx.ModelProto())

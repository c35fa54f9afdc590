"""Whole models of torch: exported in one call, checked against torch, decoded without it."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cli.commands import BLOCK, error_of
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import faults
from onnx_sessions import opened, shapes, tokens_of_genai
from relskew_core import BlockSpec, Span, __version__, relative_attention
from relskew_core.export import ExportReport, caches_in_place, decoder_to_onnx, generate, quantize, torch_to_onnx
from relskew_core.layers.torch import RelativeMultiheadAttention
from torch_exports import of, random

VOCABULARY = 30
REACH = 20


class Decoder(nn.Module):
    """A table by head, and one for all heads that clips; queries in groups, one layer with a window."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: Any = nn.ModuleList()
        clipped: dict[str, Any] = {"span": Span(3, 0, "clip"), "shared_table": True, "window": (6, None)}
        for options in ({"span": Span.causal(REACH)}, clipped):
            spec = BlockSpec(16, heads, causal=True, num_kv_heads=heads // 2, **options)
            parts = {"norm": nn.LayerNorm(16), "attention": RelativeMultiheadAttention(spec), "feed": nn.Linear(16, 16)}
            layers.append(nn.ModuleDict(parts))
        self.embedding, self.layers, self.head = nn.Embedding(VOCABULARY, 16), layers, nn.Linear(16, VOCABULARY)
        for x in self.parameters():  # so that every parameter matters
            nn.init.normal_(x, std=0.5, generator=torch.Generator().manual_seed(x.numel()))

    def forward(self, tokens: Tensor, past: Any) -> tuple[Tensor, list[Any]]:
        x, present = self.embedding(tokens), []
        for layer, cache in zip(self.layers, past, strict=True):
            y, cache = layer["attention"](layer["norm"](x), past=cache)
            x = torch.sin(layer["feed"](x + y))
            present.append(cache)
        return self.head(x), present


def greedy(model: nn.Module, caches: Callable[[int], Any], prompt: Any, n: int, *memory: Tensor) -> Tensor:
    """Return torch's tokens, without using a cache for more than one call."""
    tokens = torch.tensor(prompt)
    start = tokens.shape[1]
    with torch.no_grad():
        for _ in range(n):
            logits, _ = model(tokens, caches(len(tokens)), *memory)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[:, start:]


def caches_of(model: Decoder) -> Callable[[int], list[Any]]:
    return lambda batch: [layer["attention"].empty_cache(batch) for layer in model.layers]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Path]:
    model = Decoder().train()
    path = decoder_to_onnx(model, tmp_path_factory.mktemp("made") / "decoder.onnx", genai={"eos_token_id": 29})
    assert all(module.training for module in model.modules())
    return model.eval(), path


def test_a_decoders_graph_has_the_models_names(made: tuple[Decoder, Path]) -> None:
    model = onnx.load(made[1])
    graph = model.graph
    kinds = [f"{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    assert shapes(graph.input) == {
        "input_ids": ["batch", "length"],
        **{f"past_key_values.{kind}": ["batch", 2, "past_length", 4] for kind in kinds},
    }
    assert shapes(graph.output) == {
        "logits": ["batch", "length", VOCABULARY],
        **{f"present.{kind}": ["batch", 2, "total_length", 4] for kind in kinds},
    }
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    expected = "layers.0.attention.q_proj/MatMul layers.1.attention/Attention layers.1.norm/LayerNormalization"
    assert set(expected.split()) <= set(names)
    assert not any(part in name for name in names for part in ("relskew", "model.", "node_"))
    stored = {tensor.name for tensor in graph.initializer}
    assert {"embedding.weight", "layers.0.norm.weight", "head.bias"} <= stored
    assert not any(name.startswith("val_") for name in stored)
    assert {entry.key: entry.value for entry in model.metadata_props} == {
        "relskew.version": __version__, "relskew.decoder": "growing", "relskew.reach": f"{REACH}",
    }  # fmt: skip
    assert model.opset_import[0].version == 23
    assert os.fsencode(Path(__file__).parents[2]) not in made[1].read_bytes()


@pytest.fixture(scope="module", params=[{"length": 18}, {}], ids=str)
def fixed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Decoder, Path, int]:
    """Caches in place, and how many positions they or the tables take."""
    model, path = Decoder(heads=2), tmp_path_factory.mktemp("fixed") / "decoder.onnx"
    decoder_to_onnx(model, path, in_place=True, **request.param)
    return model.eval(), path, request.param.get("length", REACH)


def test_caches_in_place_give_the_tokens_of_torch(fixed: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model, path, end = fixed
    prompt = [[1, 2, 3, 4], [9, 8, 7, 6], [5, 5, 5, 0]]
    want = greedy(model, caches_of(model), prompt, end - 3)
    assert len(want.unique()) > 8
    session = onnxruntime.InferenceSession(path)
    assert np.array_equal(generate(session, prompt, end - 3), want.numpy())
    assert "copying" not in capfd.readouterr().err  # onnxruntime says so if it does not write in place
    what = "tables reach" if end == REACH else "caches hold"
    with pytest.raises(ValueError, match=f"`n` must be at most {end - 1} after a prompt of 2: .* {what} {end} pos"):
        generate(session, [1, 2], end)
    size = "cache_length" if end == REACH else end
    graph = onnx.load(path).graph
    interface = shapes((*graph.input, *graph.output))
    assert interface.pop("past_length") == [1]
    assert {tuple(shape) for name, shape in interface.items() if "." in name} == {("batch", 1, size, 8)}


def test_wrong_caches_in_place_do_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> onnx.ModelProto:
        model = caches_in_place(*args, **options)
        for node in model.graph.node:
            if node.op_type == "TensorScatter":
                del node.input[2]  # without it, the cache is written from its start
        return model

    monkeypatch.setattr("relskew_core.export._models.decoder.caches_in_place", wrong)
    with pytest.raises(RuntimeError, match="output 'logits' for a prompt of 12 in pieces differs by"):
        decoder_to_onnx(Bare(), tmp_path / "bare.onnx", in_place=True)
    assert not list(tmp_path.iterdir())


def test_tokens_are_those_of_torch(made: tuple[Decoder, Path]) -> None:
    model, path = made
    prompt = [[1, 2, 3, 4], [9, 8, 7, 6], [5, 5, 5, 0]]
    want = greedy(model, caches_of(model), prompt, REACH - 3)
    assert len(want.unique()) > 8
    assert np.array_equal(generate(path, prompt, REACH - 3), want.numpy())
    assert np.array_equal(generate(opened(path), range(1, 5), 5), want[0, :5].numpy())


def test_the_folder_runs_in_onnxruntime_genai(made: tuple[Decoder, Path]) -> None:
    prompt = [1, 2, 3, 4]
    got = tokens_of_genai(made[1].parent, prompt, REACH)
    assert got[:4] == prompt
    assert got[4:] == list(generate(made[1], prompt, REACH - 4, stop=29))
    config = json.loads((made[1].parent / "genai_config.json").read_text())
    assert (config["model"]["eos_token_id"], config["model"]["context_length"]) == (29, REACH)


class Bare(nn.Module):
    """Attention called as a function, twice with separate tables, and caches that the model makes."""

    def __init__(self, span: Span = Span.causal(12), wrong: bool = False) -> None:  # noqa: B008
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Parameter(torch.randn(VOCABULARY, 8)), nn.Parameter(torch.randn(8, VOCABULARY))
        self.tables = nn.Parameter(torch.randn(2, 2, span.rows, 4))
        self.span, self.wrong = span, wrong

    def empty_cache(self, batch: int) -> tuple[tuple[Tensor, Tensor]]:
        nothing = self.tables.new_zeros(batch, 2, 0, 4)
        return ((nothing, nothing),)  # the same tensor for both

    def forward(self, tokens: Tensor, past: Any) -> tuple[Tensor, Any]:
        ((keys, values),) = past
        q = self.embedding[tokens].unflatten(-1, (2, 4)).transpose(1, 2)
        keys, values = torch.cat([keys, q + 1], dim=2), torch.cat([values, q * 2], dim=2)
        offset = keys.shape[2] - q.shape[2]
        calls = ((q, keys, values, table, self.span) for table in self.tables)
        results: list[Any] = [relative_attention(*call, causal=True, offset=offset) for call in calls]
        y = torch.sin(2 * torch.stack(results).sum(0))
        if self.wrong and torch.onnx.is_in_onnx_export():
            y = y * 1.01
        return y.transpose(1, 2).flatten(2) @ self.head, ((keys, values),)


def test_a_decoder_of_bare_calls(tmp_path: Path) -> None:
    model = Bare()
    path = decoder_to_onnx(model, tmp_path / "bare.onnx", opset=18)
    assert np.array_equal(generate(path, [[3, 1]], 11), greedy(model, model.empty_cache, [[3, 1]], 11))
    names = [node.name for node in onnx.load(path).graph.node]
    assert {f"attention_{call}/skew/rows/rel_k_reaches_11_back" for call in (1, 2)} <= set(names)
    assert onnx.load(path).ir_version == 8
    with pytest.raises(ValueError, match="tables reach 12 positions, got 12"):
        generate(path, [1, 2], 12)


def test_a_clipped_decoder_goes_on_past_its_table(tmp_path: Path) -> None:
    model = Bare(Span(5, 0, "clip")).double()
    path = decoder_to_onnx(model, tmp_path / "bare.onnx", external_threshold=0)
    assert [file.suffix for file in sorted(tmp_path.iterdir())] == [".onnx", ".data"]
    got = generate(path, [[3, 1, 2], [0, 7, 7]], 50)
    assert np.array_equal(got, greedy(model, model.empty_cache, [[3, 1, 2], [0, 7, 7]], 50))
    assert len(np.unique(got)) > 4
    assert decoder_to_onnx(model, path, overwrite=True) == path


class Describing(nn.Module):
    """A decoder that attends to a padded memory too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.own = RelativeMultiheadAttention(BlockSpec(16, 2, Span.causal(REACH), causal=True))
        self.across = RelativeMultiheadAttention(BlockSpec(16, 2, Span.clipped(3), cross=True))
        for x in self.parameters():
            nn.init.normal_(x, std=0.5, generator=torch.Generator().manual_seed(x.numel()))

    def empty_cache(self, batch: int) -> list[Any]:
        return [self.own.empty_cache(batch)]

    def forward(self, tokens: Tensor, past: Any, memory: Tensor, seen: Tensor) -> tuple[Tensor, list[Any]]:
        x, (keys, values) = self.own(self.embedding(tokens), past=past[0])
        y = self.across(x, memory.sin(), mask=seen[:, None, None].bool(), offset=keys.shape[2] - x.shape[1])
        return self.head(torch.sin(3 * (x + y))), [(keys, values)]


@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"operator": True}], ids=str)
@torch.no_grad()
def test_a_memory_is_projected_once(options: dict[str, Any], tmp_path: Path) -> None:
    model, path = Describing().eval(), tmp_path / "decoder.onnx"
    states, seen = torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.int64)
    reports: list[ExportReport] = []
    decoder_to_onnx(model, path, memory=[states, seen], report=reports.append, **options)
    assert [graph.file for graph in reports[0].graphs] == ["decoder.onnx", "decoder_memory.onnx"]
    assert reports[0].graphs[1].inputs[0].fixed == {2: "`model` takes no other size"}
    assert {check.case for check in reports[0].checks} >= {"one token", "a prompt of 20"}
    first, later = onnx.load(tmp_path / "decoder_memory.onnx").graph, onnx.load(path).graph
    assert shapes(first.input) == {"memory": ["batch", "memory_length", 16], "seen": ["batch", "memory_length"]}
    crossing = [value.name for value in first.output]
    assert crossing == [value.name for value in later.input if value.name.startswith("memory.")]
    assert {"Sin", "MatMul"} <= {node.op_type for node in first.node}
    assert not any("k_proj" in node.name and "across" in node.name for node in later.node)
    states, seen = torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.int64)
    seen[1, 5:] = 0
    want = greedy(model, model.empty_cache, [[1, 2], [7, 8]], 12, states, seen)
    given: Any = (states.numpy(), seen.numpy())
    assert np.array_equal(generate(path, [[1, 2], [7, 8]], 12, memory=given), want)
    if options:
        return
    shorter = decoder_to_onnx(model, tmp_path / "int32.onnx", memory=[states, seen.int()], check=False)
    assert np.array_equal(generate(shorter, [[1, 2], [7, 8]], 12, memory=given), want)
    of_one = r"`memory` must be memory \('batch', 'memory_length', 16\), seen .*, of 1 rows"
    for prompt, wrong, said in [
        ([[1, 2], [7, 8]], (given[0][:, :0], given[1][:, :0]), "`memory` must be memory .* of 2 rows, got tuple"),
        ([[1, 2], [7, 8]], (given[0].astype(str), given[1]), "`memory` must be memory .* of 2 rows, got tuple"),
        ([[1, 2], [7, 8]], None, "`memory` must be given: the decoder attends to one"), ([1, 2], given, of_one),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            generate(path, prompt, 1, memory=wrong)
    with pytest.raises(TypeError, match="`model` must be a path with `memory`"):
        generate(opened(path), [[1, 2], [7, 8]], 1, memory=given)
    decoder_to_onnx(model, tmp_path / "other.onnx", memory=[states, seen], check=False, opset=24)
    (tmp_path / "other_memory.onnx").rename(tmp_path / "decoder_memory.onnx")
    with pytest.raises(ValueError, match=r"got 'decoder_memory\.onnx', written for another"):
        generate(path, [[1, 2], [7, 8]], 1, memory=given)
    (tmp_path / "decoder_memory.onnx").unlink()
    with pytest.raises(FileNotFoundError, match="must have the graph of its memory next to it"):
        generate(path, [[1, 2], [7, 8]], 1, memory=given)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_products_in_bfloat16_inside_a_model_are_refused(dtype: Any) -> None:
    factor = torch.tensor([[0.5, 2.0]]).bfloat16()
    model = of(lambda self, x: self.linear(x) + x[:, :1].bfloat16() @ factor, linear=nn.Linear(3, 2))
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"no MatMul on CPUs: its weights have another .* dtype= .* check=False"):
        torch_to_onnx(model, x, dtype=dtype)
    assert torch_to_onnx(model, x, dtype=dtype, check=False).graph.node


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_and_products_in_bfloat16_are_exact(dtype: str) -> None:
    """Falcon multiplies ALiBi's slopes so, which onnxruntime does not on CPUs."""

    def forward(self: Any, x: Tensor) -> list[Tensor]:
        a, b = x.bfloat16().unbind(1)
        return [(one + 0 * one).to(x.dtype) for one in (a + b, a - b, a * b, a / b)]

    model, x = of(forward), random(1000, 2).to(getattr(torch, dtype))
    made = torch_to_onnx(model, x)
    assert {node.op_type for node in made.graph.node} >= {"Add", "Sub", "Mul", "Div", "Cast"}
    for found, want in zip(opened(made).run(None, {"x": x.numpy()}), model(x), strict=True):
        assert np.array_equal(found, want.numpy())


@pytest.mark.filterwarnings("ignore:`torch.jit")  # raised by torch while it compiles
def test_a_model_is_cast_on_export(tmp_path: Path) -> None:
    """A model trained in bfloat16 stays so, and its graph computes in another type, with its own names."""
    model = Bare().bfloat16()
    compiled: Any = torch.compile(model)
    told = "`model` computes in bfloat16, for which onnxruntime has no "
    with pytest.raises(ValueError, match=f"{told}.*: give dtype='float16' or 'float32' to cast it on export, or "):
        decoder_to_onnx(compiled, tmp_path / "bare.onnx")
    assert not list(tmp_path.iterdir())
    graph = onnx.load(decoder_to_onnx(compiled, tmp_path / "bare.onnx", dtype=torch.float32)).graph
    assert {value.type.tensor_type.elem_type for value in graph.input[1:]} == {onnx.TensorProto.FLOAT}
    assert model.tables.dtype == torch.bfloat16
    assert not any("_orig_mod" in name for node in graph.node for name in (node.name, *node.input))
    want = greedy(model.float(), model.empty_cache, [[3, 1]], 10)
    assert np.array_equal(generate(tmp_path / "bare.onnx", [[3, 1]], 10), want)
    cast = torch_to_onnx(nn.Linear(3, 4), {"input": torch.ones(2, 3)}, dtype="float16")
    assert cast.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16


def test_nothing_appears_if_the_graph_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"not do what `model` does: output 'logits' for one token .* by 1\.0e-02"):
        decoder_to_onnx(Bare(wrong=True), tmp_path / "bare.onnx", genai={"eos_token_id": 29})
    assert not list(tmp_path.iterdir())


ENDLESS: list[Any] = [True, {}, {"eos_token_id": []}, {"eos_token_id": [2, -1]}, {"eos_token_id": "2"}]


@pytest.mark.parametrize(("model", "options", "error", "message"), [
    (Bare(), {"past": 3}, TypeError, "`past` must be a function that returns the caches of a batch, got int 3"),
    (Bare(), {"past": lambda batch: 0}, TypeError, r"what `past\(batch\)` returns must be a list with one pair"),
    (Bare(), {"past": lambda batch: [(torch.zeros(batch, 2, 1, 4),) * 2]}, ValueError,
     r"what `past\(batch\)` returns must hold tensors \(batch, heads, positions, D\), of 2 and 0 positions"),
    (Bare(), {"memory": []}, TypeError, r"`memory` must be a tensor .*, got list \[\]"),
    (3, {}, TypeError, "`model` must be a torch.nn.Module, got int 3"),
    (Bare(), {"genai": 1}, TypeError, "`genai` must be False or a mapping"),
    (Bare(), {"in_place": True, "genai": True}, ValueError, "`in_place=True` excludes `genai`: .* genai=bool True"),
    (Bare(), {"in_place": True, "opset": 23}, ValueError, "`in_place=True` requires `opset=24` or newer, .*got 23"),
    (Bare(), {"in_place": True, "length": 0}, ValueError, "`length` must be an int >= 1, got 0"),
    (Bare(), {"in_place": True, "length": 13}, ValueError, "`length` must be at most 12, .* tables reach, got 13"),
    (Bare(), {"in_place": 1}, TypeError, "`in_place` must be"),
    (Bare(), {"dtype": "int8"}, ValueError, "`dtype` must be one of 'float16', .* got 'int8'"),
    (Bare(), {"length": 9}, ValueError, "`length` requires `in_place=True`: .* got length=9"),
    # Without the end of a text, genai's runtime would end at token 0.
    *((Bare(), {"genai": given}, ValueError, "`genai` must have the token that ends a text, .*stops at token 0")
      for given in ENDLESS),
], ids=lambda x: x[:40] if isinstance(x, str) else f"{x}" if isinstance(x, dict) and "genai" in x else "")  # fmt: skip
def test_decoder_to_onnx_refuses(tmp_path: Path, model: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        decoder_to_onnx(model, tmp_path / "decoder.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"`path` has a genai_config\.json next to it"):
        decoder_to_onnx(Bare(), tmp_path / "decoder.onnx", genai={"eos_token_id": 29})
    (tmp_path / "decoder.onnx").write_text("mine")
    with pytest.raises(FileExistsError, match="`path` exists"):
        decoder_to_onnx(Bare(), tmp_path / "decoder.onnx")
    with pytest.raises(FileExistsError, match="`path` exists"):
        torch_to_onnx(Bare(), (), tmp_path / "decoder.onnx")
    assert {file.read_text() for file in tmp_path.iterdir()} == {"mine"}


def test_an_encoder_and_decoder_export_in_one_call(tmp_path: Path) -> None:
    """Whose inputs and outputs are mappings."""

    def forward(self: Any, source: Tensor, target: Tensor, scale: float, shown: Mapping[str, Tensor]) -> dict[str, Any]:
        memory = self.encoder(source, key_padding_mask=~shown["keys"])
        return {"memory": memory, "result": [self.across(target, memory) * scale, memory.shape[1]]}

    encoder = RelativeMultiheadAttention(BlockSpec(16, 4, Span.full(30), shared_table=True))
    across = RelativeMultiheadAttention(BlockSpec(16, 4, Span.clipped(3), cross=True, rel_values=True))
    model = of(forward, encoder=encoder, across=across).eval()
    source, target, shown = random(2, 7, 16), random(2, 5, 16), torch.arange(14).view(2, 7) != 5
    inputs = {"source": source, "target": target, "scale": 0.5, "shown": {"keys": shown}}
    made = torch_to_onnx(model, inputs, tmp_path / "translator.onnx")
    assert shapes(made.graph.input) == {
        "source": ["batch", "source_length", 16],
        "target": ["batch", "target_length", 16],
        "shown_keys": ["batch", "source_length"],
    }
    assert list(shapes(made.graph.output)) == ["memory", "result_0"]
    session, target = opened(tmp_path / "translator.onnx"), random(3, 2, 16)
    source, shown = random(3, 30, 16), torch.arange(30).expand(3, 30) >= 10  # as long as the table reaches
    got = session.run(None, {"source": source.numpy(), "target": target.numpy(), "shown_keys": shown.numpy()})
    with torch.no_grad():
        want = model(source, target, 0.5, {"keys": shown})
    for ours, theirs in zip(got, (want["memory"], want["result"][0]), strict=True):
        assert np.allclose(ours, theirs.numpy(), atol=1e-5)
    longer = {"source": random(3, 31, 16).numpy(), "target": target.numpy(), "shown_keys": np.ones((3, 31), bool)}
    with pytest.raises(Exception, match=r"encoder/skew/rows/rel_k_reaches_29_back_and_29_ahead"):
        session.run(None, longer)


def test_a_result_that_differs_for_one_position_is_refused() -> None:
    """A graph has only the result for others."""
    shortcut, one = of(lambda self, x, y: x + y if x.shape[1] > 1 else x - y), torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"for inputs of x \(1, 1\), y \(1, 1\) differs by"):
        torch_to_onnx(shortcut, (one, one))
    graph = torch_to_onnx(shortcut, (one, one), vary={"x": [0], "y": [-2]}, output_names=["sum"]).graph
    assert shapes((*graph.input, *graph.output)) == {"x": ["batch", 3], "y": ["batch", 3], "sum": ["batch", 3]}


class Comparing(Describing):
    """Attends to two memories of separate lengths."""

    def forward(self, tokens: Tensor, past: Any, one: Tensor, other: Tensor) -> tuple[Tensor, list[Any]]:
        x, (keys, values) = self.own(self.embedding(tokens), past=past[0])
        y = self.across(x, one, offset=keys.shape[2] - x.shape[1])
        z = self.across(x, other.sin(), offset=keys.shape[2] - x.shape[1])
        return self.head(torch.sin(3 * (x + y + z))), [(keys, values)]


@torch.no_grad()
def test_two_memories_have_separate_lengths(tmp_path: Path) -> None:
    model, path = Comparing().eval(), tmp_path / "decoder.onnx"
    decoder_to_onnx(model, path, memory=[torch.randn(2, 5, 16), torch.randn(2, 7, 16)])
    one, other = torch.randn(2, 3, 16), torch.randn(2, 8, 16)
    made = generate(path, [[1, 2], [7, 8]], 6, memory=(one.numpy(), other.numpy()))
    assert np.array_equal(made, greedy(model, model.empty_cache, [[1, 2], [7, 8]], 6, one, other))


def test_names_are_made_different_and_fixed_axes_are_warned_of() -> None:
    """Results and parameters have the names of arguments, and the size of the batch is read."""

    def forward(self: Any, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"y": len(x) * x * mask[..., None] * self.mask, "mask": mask[:, ::2]}

    model = of(forward, mask=torch.rand(4))
    given = {"x": torch.randn(2, 6, 4), "mask": torch.ones(2, 6)}
    told = (
        r"for axis 0 of 'x' and axis 0 of 'mask' of length 2 alone, though `model` takes others: torch fixed it, "
        r"by `return .*len\(x\).*` in .*test_whole\.py:\d+\. If `vary` names"
    )
    reports: list[ExportReport] = []
    with pytest.warns(UserWarning, match=told):
        graph = torch_to_onnx(model, given, report=reports.append).graph
    (report,) = reports
    x, mask = report.graphs[0].inputs
    assert (x.name, x.dtype, x.shape, x.varies) == ("x", "float32", (2, "x_length", 4), (1,))
    assert re.fullmatch("torch fixed it, by `return .*, though `model` takes others", x.fixed[0])
    assert x.fixed[2].startswith("`model` takes no other size")
    assert list(mask.fixed) == [0]
    assert {check.name for check in report.checks} == {"y", "output_mask"}
    assert all(check.error is not None and check.error <= check.gate for check in report.checks if check.gate)
    assert all(part in str(report) for part in (f"axis 0 is 2: {x.fixed[0]}", "worst error"))
    assert json.loads(report.to_json())["graphs"][0]["inputs"][0]["shape"] == [2, "x_length", 4]
    assert [value.name for value in (*graph.input, *graph.output)] == ["x", "mask", "y", "output_mask"]
    assert [tensor.name for tensor in graph.initializer if tensor.dims == [4]] == ["mask_2"]
    assert shapes(graph.input) == {"x": [2, "x_length", 4], "mask": [2, "x_length"]}
    with pytest.raises(ValueError, match=r"`output_names` must differ from the names of the inputs, .* got \['x'\]"):
        torch_to_onnx(model, given, output_names=["x", "kept"])


def test_heads_and_widths_do_not_vary() -> None:
    def forward(self: Any, q: Tensor, k: Tensor) -> Any:
        positioned = relative_attention(q, k, k, self.table, Span.full(20), offset=0)
        return positioned, relative_attention(q[..., :2], k[..., :2], k)

    model, given = of(forward, table=torch.randn(39, 4)), (torch.randn(2, 4, 5, 4), torch.randn(2, 2, 6, 4))
    reports: list[ExportReport] = []
    graph = torch_to_onnx(model, given, report=reports.append).graph  # without a warning
    assert reports[0].graphs[0].inputs[0].fixed[1] == "a number of heads, or a width of attention"
    assert shapes(graph.input) == {"q": ["batch", 4, "q_length", 4], "k": ["batch", 2, "k_length", 4]}


def test_a_length_that_only_the_model_refuses_is_warned_of() -> None:
    """But none that both refuse."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and len(x) > 3:  # which no graph can hold
            raise ValueError("too many")
        return x + 1

    choosy, reports = of(forward), list[ExportReport]()
    told = r"accepts inputs that `model` rejects, unchecked: inputs of x \(4,\) \(ValueError: too"
    with pytest.warns(UserWarning, match=told):
        torch_to_onnx(choosy, torch.randn(3))
    torch_to_onnx(choosy, torch.randn(3), vary={}, check=False, report=reports.append)
    assert str(reports[0]).splitlines()[1:] == [
        "  input x float32 (3)", "    axis 0 is 3: `vary` does not name it", "  output output float32 (3)",
        "not checked",
    ]  # fmt: skip
    torch_to_onnx(RelativeMultiheadAttention(BlockSpec(8, 2, Span.full(5))), torch.randn(2, 5, 8))  # without a warning


def test_a_length_that_is_refused_hides_no_other() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        """Take no single number, and add another one to four of them, which no graph can know."""
        if torch.compiler.is_exporting():
            return x + 1
        if len(x) == 1:
            raise ValueError("too few")
        return x + 1 + 0.01 * (len(x) == 4)

    with pytest.raises(RuntimeError, match=r"output 'output' for inputs of x \(4,\) differs by"):
        torch_to_onnx(of(forward), torch.rand(3))
    with pytest.warns(UserWarning, match=r"inputs of x \(1,\)"):
        torch_to_onnx(of(forward), torch.rand(3), tolerance=0.1)


@pytest.mark.parametrize(("model", "mask"), [
    (lambda mask: 1.0 - mask, torch.tensor([[0, 1], [1, 1]])),
    (lambda mask: 1 - mask, torch.tensor([[0, 1], [1, 1]])),
    (lambda mask: 0.1 - mask, torch.tensor([[0.0, 0.5], [1.0, 1.0]], dtype=torch.float64)),
    (lambda mask: torch.rsub(mask, 0.5, alpha=3), torch.tensor([[True, False], [True, True]]).byte()),
])  # fmt: skip
def test_masks_are_subtracted_from_a_number(model: Callable[[Tensor], Tensor], mask: Tensor) -> None:
    """XLNet and ProphetNet subtract integers from a float, where torch's exporter stops."""
    (got,) = opened(torch_to_onnx(of(lambda self, mask: model(mask)), mask)).run(None, {"mask": mask.numpy()})
    want = model(mask).numpy()
    assert got.dtype == want.dtype
    assert np.array_equal(got, want)


def test_torch_to_onnx_takes_names_and_thresholds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, x, path = nn.Linear(300, 4), torch.randn(2, 300), tmp_path / "linear.onnx"
    made = torch_to_onnx(model, x, path, input_names=["a"], output_names=["b"], external_threshold=0)
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".data", ".onnx"]
    assert shapes((*made.graph.input, *made.graph.output)) == {"a": ["batch", 300], "b": ["batch", 4]}
    assert [(entry.domain, entry.version) for entry in made.opset_import] == [("", 23)]
    assert {entry.key: entry.value for entry in made.metadata_props} == {"relskew.version": __version__}
    assert capfd.readouterr() == ("", "")
    with pytest.raises(FileExistsError):
        torch_to_onnx(model, x, path)
    assert torch_to_onnx(model, [x], path, opset=18, overwrite=True).opset_import[0].version == 18
    assert path.stat().st_size > model.weight.nbytes


def test_one_tensor_may_be_given_and_returned_twice() -> None:
    """torch alone would take the two inputs for one; the check at other lengths has other numbers in each."""

    def forward(self: Any, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        y, (keys, values) = self.attention(x, past=(keys, values))
        return y, keys, values, keys

    attention, past = RelativeMultiheadAttention(BlockSpec(8, 2, Span.causal(20), causal=True)), random(2, 2, 3, 4)
    graph = torch_to_onnx(of(forward, attention=attention), (random(2, 5, 8), past, past)).graph
    assert [len(shapes(values)) for values in (graph.input, graph.output)] == [3, 4]


@pytest.mark.parametrize(("inputs", "options", "error", "message"), [
    ((), {}, ValueError, "`inputs` must hold a tensor, got tuple "),
    (3, {}, TypeError, "`inputs` must be a tensor, a tuple of arguments or a mapping of names, got int 3"),
    (torch.zeros(2, 3), {"vary": {"y": [0]}}, ValueError, r"`vary` must name inputs, \['input'\], got \['y'\]"),
    (torch.zeros(2, 3), {"vary": {"input": [2]}}, ValueError, r"`vary\['input'\]` must be axes of Tensor .*\[2\]"),
    (torch.zeros(2, 3), {"vary": [0]}, TypeError, r"`vary` must be a mapping .* to axes, got list \[0\]"),
    (torch.zeros(2, 3), {"vary": {"input": 0}}, TypeError, r"`vary\['input'\]` must be a list of axes, got int 0"),
    (torch.zeros(2, 3), {"vary": {"input": [1.0]}}, TypeError, r"`vary\['input'\]` must be an int, got float 1.0"),
    (torch.zeros(2, 3), {"tolerance": -1}, ValueError, "`tolerance` must be at least 0, got -1"),
    (torch.zeros(2, 3), {"operator": 1}, TypeError, "`operator` must be "),
    (torch.zeros(2, 3), {"tolerance": "0.1"}, TypeError, "`tolerance` must be a Python int or float, got str '0.1'"),
    (torch.zeros(2, 3), {"report": "report.json"}, TypeError, "`report` must be a function of an ExportReport"),
    (torch.zeros(2, 3), {"path": "never.onnx", "overwrite": 1}, TypeError, "`overwrite` must be "),
    (torch.zeros(2, 3), {"opset": 17}, ValueError, "`opset` must be 18 … 28, got 17"),
], ids=str)  # fmt: skip
def test_torch_to_onnx_refuses_what_does_not_fit(inputs: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        torch_to_onnx(nn.Linear(3, 4), inputs, **options)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated, of a category that differs between releases
def test_models_without_results_and_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="`model` must return a tensor for `inputs`, got none"):
        torch_to_onnx(of(lambda self, x: None), torch.zeros(2))
    traced = torch.jit.trace(nn.Linear(3, 4), torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"`model` must be a module in Python: .*, got TopLevelTracedModule"):
        torch_to_onnx(traced, torch.zeros(2, 3))


def test_shared_weights_are_stored_once(tmp_path: Path) -> None:
    """Two layers with one table, and an embedding that is the head."""

    def forward(self: Any, tokens: Tensor, past: Any) -> tuple[Tensor, list[Any]]:
        x, first = self.first(self.embedding(tokens), past=past[0])
        y, second = self.second(x, past=past[1])
        return (x + y) @ self.embedding.weight.T, [first, second]

    one, two = (RelativeMultiheadAttention(BlockSpec(16, 2, Span.causal(REACH), causal=True)) for _ in range(2))
    two.rel_k = one.rel_k
    model = of(forward, embedding=nn.Embedding(VOCABULARY, 16), first=one, second=two)
    made = onnx.load(decoder_to_onnx(model, tmp_path / "tied.onnx"))
    sizes = [tuple(tensor.dims) for tensor in made.graph.initializer]
    assert sizes.count((2, REACH + 1, 8)) == 1
    assert [size for size in sizes if VOCABULARY in size] == [(VOCABULARY, 16)]
    assert next(node.name for node in made.graph.node if node.op_type == "Transpose") == "embedding.weight/transposed"
    # A tool that looks for stored factors still finds the head.
    quantize(made, tmp_path / "small.onnx", "weights-8")
    products = [node for node in onnx.load(tmp_path / "small.onnx").graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 9


@pytest.mark.parametrize(("opset", "error", "said", "told"), [
    (28, RuntimeError, "Opset 28 is under development and ... support for domain ai.onnx is till opset 26.",
     r"`opset` must be at most 26 for the check in onnxruntime .*, got 28"),
    (23, NotImplementedError, "Could not find an implementation for RandomUniformLike(22) node",
     r"^onnxruntime .* cannot open the exported graph, .*: Could not find"),
])  # fmt: skip
def test_a_graph_that_the_runtime_cannot_open_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opset: int, error: Any, said: str, told: str
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error(said)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises((ValueError, RuntimeError), match=told):
        torch_to_onnx(nn.Linear(3, 4), torch.ones(2, 3), tmp_path / "model.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


def test_stored_results_keep_their_names() -> None:
    first = torch.randn(16, 24)
    weights = nn.ParameterList([first, first.clone(), first.T.contiguous()])  # two of one content, and one turned
    model = of(lambda self, x: (x @ self.weights[0] @ self.weights[2], *self.weights), weights=weights)
    made = torch_to_onnx(model, torch.randn(2, 5, 16), output_names=["y", "one", "same", "turned"])
    assert [value.name for value in made.graph.output] == ["y", "one", "same", "turned"]
    assert {tensor.name for tensor in made.graph.initializer} >= {"one", "same", "turned"}
    read = {name for node in made.graph.node for name in node.input} | {value.name for value in made.graph.output}
    assert all(read & set(node.output) for node in made.graph.node)


@pytest.mark.filterwarnings("ignore:The tensor attribute self.model.weight was assigned during export")
@pytest.mark.parametrize("kind", ["weight norm", "complex"])
def test_a_cast_model_computes_what_the_model_does(kind: str) -> None:
    """An old weight norm keeps a product as an attribute that torch refuses to copy; complex numbers stay."""

    def turn(self: Any, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (8, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2).to(x.dtype)

    if kind == "complex":
        model = of(turn)
        model.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8.0)))
    else:
        with pytest.warns(FutureWarning, match="weight_norm"):
            model = nn.utils.weight_norm(nn.Linear(16, 8))
    y: Any
    x = torch.randn(2, 16)
    made = torch_to_onnx(model, x, dtype="float16")
    (y,) = ReferenceEvaluator(made).run(None, {made.graph.input[0].name: x.half().numpy()})
    assert y.dtype == np.float16
    assert np.abs(y - model(x).detach().numpy()).max() < 0.02
    assert {x.dtype for x in model.parameters()} <= {torch.float32}


def test_the_command_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "block.onnx"
    with faults.full_disk(3000):
        error = error_of(capsys, "export", str(path), *BLOCK, "--length", "500")
    assert error.endswith(f"{path}: `path` cannot be written: File too large\n")
    assert not list(tmp_path.iterdir())

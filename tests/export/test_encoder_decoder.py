"""Encoder–decoders as graphs, with a stand-in for transformers: names, files that appear together, tokens."""

import importlib
import io
import itertools
import os
import shutil
import subprocess
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import faults
from onnx_sessions import shapes
from operator_runs import needs_library
from relskew_core import Span, relative_attention
from relskew_core.export import ExportReport, encoder_decoder_to_onnx, generate, open_model, torch_to_onnx

HEADS, WIDTH, VOCABULARY = 2, 8, 20
FILES = ("encoder_model.onnx", "memory_model.onnx", "decoder_with_past_model.onnx", "decoder_model.onnx")


class DynamicCache:
    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if layer == len(self.layers):
            self.layers.append(types.SimpleNamespace(keys=keys, values=values))
        else:
            old = self.layers[layer]
            old.keys, old.values = torch.cat([old.keys, keys], -2), torch.cat([old.values, values], -2)
        return self.layers[layer].keys, self.layers[layer].values


class EncoderDecoderCache:
    def __init__(self, *caches: DynamicCache) -> None:
        self.self_attention_cache, self.cross_attention_cache = caches
        self.is_updated: dict[int, bool] = {}


@pytest.fixture(autouse=True)
def _transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("transformers.cache_utils")
    module.DynamicCache, module.EncoderDecoderCache = DynamicCache, EncoderDecoderCache
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", module)


def heads(x: Tensor) -> Any:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Model(nn.Module):
    """One layer on either side, called as transformers' are."""

    def __init__(self, wide: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config: Any = types.SimpleNamespace(
            is_encoder_decoder=True, decoder_start_token_id=3, vocab_size=VOCABULARY, d_model=WIDTH
        )
        self.dtype, self.wide = torch.float32, wide  # whether masks with four axes are added
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 9))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def get_encoder(self) -> Any:
        return self.encode

    def encode(self, input_ids: Any = None, inputs_embeds: Any = None, *, attention_mask: Tensor) -> tuple[Tensor]:
        x = self.shared(input_ids) if inputs_embeds is None else inputs_embeds
        mask: Any = attention_mask if attention_mask.ndim == 4 and self.wide else attention_mask[:, None, None].bool()
        q = heads(x)
        out: Any = relative_attention(q, q, q, rel_bias=self.bias, span=Span(4, 4, "clip"), mask=mask)
        return (x + out.transpose(1, 2).flatten(2),)

    def forward(
        self, *, decoder_input_ids: Tensor, attention_mask: Tensor, encoder_outputs: Any, past_key_values: Any, **_: Any
    ) -> Any:
        x, cache = self.shared(decoder_input_ids), past_key_values
        past = cache.self_attention_cache.layers[0].keys.shape[-2] if cache.self_attention_cache.layers else 0
        k, v = cache.self_attention_cache.update(heads(self.keys(x)), heads(self.values(x)), 0)
        q: Any = heads(x)
        out: Any = relative_attention(
            q, k, v, rel_bias=self.bias[:, :5], span=Span(4, 0, "clip"), causal=True, offset=past
        )
        x = x + out.transpose(1, 2).flatten(2)
        if cache.is_updated.get(0):
            of = cache.cross_attention_cache.layers[0]
            k, v = of.keys, of.values
        else:
            k, v = cache.cross_attention_cache.update(heads(encoder_outputs[0]), heads(encoder_outputs[0]), 0)
        mask: Any = attention_mask[:, None, None].bool()
        q = heads(x)
        out = relative_attention(q, k, v, mask=mask)
        return types.SimpleNamespace(logits=self.head(torch.sin(3 * (x + out.transpose(1, 2).flatten(2)))))


class Sounds(Model):
    def forward(self, *, input_features: Any = None, **given: Any) -> Any:
        return super().forward(**given)


def greedy(model: Any, source: Tensor, mask: Tensor, n: int) -> np.ndarray[Any, Any]:
    name = "inputs_embeds" if source.is_floating_point() else "input_ids"
    memory = model.encode(**{name: source}, attention_mask=mask)
    tokens = torch.full((len(source), 1), 3)
    with torch.no_grad():
        for _ in range(n):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            given = {"attention_mask": mask, "encoder_outputs": memory, "past_key_values": cache}
            tokens = torch.cat([tokens, model(decoder_input_ids=tokens, **given).logits[:, -1:].argmax(-1)], 1)
    return np.asarray(tokens[:, 1:])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    with pytest.MonkeyPatch.context() as patch:
        _transformers.__wrapped__(patch)  # type: ignore[attr-defined]
        model, folder = Model().train(), tmp_path_factory.mktemp("made") / "folder"
        assert (encoder_decoder_to_onnx(model, folder), model.training) == (folder, True)
    return model.eval(), folder


def test_graphs_have_the_names_of_optimum(made: tuple[Model, Path]) -> None:
    graphs, width = [onnx.load(made[1] / name) for name in FILES], WIDTH // HEADS
    text, memory = (["batch", HEADS, length, width] for length in ("length", "memory_length"))
    kinds = [f"0.{of}.{kind}" for of in ("decoder", "encoder") for kind in ("key", "value")]
    encoder, across, later, first = (model.graph for model in graphs)
    assert shapes(encoder.input) == {key: ["batch", "memory_length"] for key in ("input_ids", "attention_mask")}
    assert shapes(encoder.output) == {"last_hidden_state": ["batch", "memory_length", WIDTH]}
    assert shapes(first.input)["encoder_hidden_states"] == ["batch", "memory_length", WIDTH]
    assert shapes(across.input) == {"encoder_hidden_states": ["batch", "memory_length", WIDTH]}
    assert shapes(across.output) == {f"present.0.encoder.{kind}": memory for kind in ("key", "value")}
    assert {node.op_type for node in across.node} <= {"Reshape", "Transpose", "Shape", "Concat", "Identity"}
    assert list(shapes(first.output)) == ["logits", *(f"present.{kind}" for kind in kinds)]
    assert shapes(first.output)["present.0.decoder.key"] == text
    assert shapes(first.output)["present.0.encoder.value"] == memory
    assert list(shapes(later.input))[2:] == [f"past_key_values.{kind}" for kind in kinds]
    assert shapes(later.output)["present.0.decoder.value"] == ["batch", HEADS, "total_length", width]
    assert list(shapes(later.output)) == ["logits", "present.0.decoder.key", "present.0.decoder.value"]
    assert any(tensor.name == "shared.weight" for tensor in encoder.initializer)
    assert len({entry.value for model in graphs for entry in model.metadata_props if entry.key == "relskew.set"}) == 1


def test_generate_gives_the_tokens_of_the_model(made: tuple[Model, Path]) -> None:
    model, folder = made
    source = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 0, 0]])
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    want = greedy(model, source, mask, 40)
    assert len(np.unique(want)) > 4
    assert np.array_equal(generate(folder, source.numpy(), 40, mask=mask.numpy()), want)
    seen: list[int] = []
    one = generate(os.fspath(folder), [9, 8, 7], 40, stream=seen.append)
    assert np.array_equal(one, want[1])
    assert seen == one.tolist()
    assert generate(folder, [1], 0).shape == (0,)


@needs_library
def test_calls_as_nodes_give_the_same_tokens(made: tuple[Model, Path], tmp_path: Path) -> None:
    """Each call is a node and a function, checked both ways; ``generate`` registers the library."""
    reports: list[ExportReport] = []
    folder = encoder_decoder_to_onnx(made[0], tmp_path / "made", operator=True, report=reports.append)
    calls = {name: [node.op_type for node in onnx.load(folder / name).graph.node] for name in FILES}
    assert [found.count("RelativeAttention") for found in calls.values()] == [1, 0, 2, 2]
    compared = [(check.name, check.case) for check in reports[0].checks]
    half = len(compared) // 2
    assert compared[:half] == compared[half:] != []
    source, mask = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 0, 0]]), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    want = generate(made[1], source.numpy(), 40, mask=mask.numpy())
    assert np.array_equal(generate(folder, source.numpy(), 40, mask=mask.numpy()), want)


def test_a_model_of_features_takes_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sounds(wide=False).eval()
    reports: list[ExportReport] = []
    terminal = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(terminal, "isatty", lambda: True)
        patch.setattr(sys, "stderr", terminal)
        folder = encoder_decoder_to_onnx(model, tmp_path, report=reports.append)  # an existing directory
    *steps, last = terminal.getvalue().splitlines()
    outputs = ("last_hidden_state", "present.0.encoder.key, ", "logits, ", "logits, ")
    assert all(step.startswith(f"relskew: exporting {name}") for step, name in zip(steps, outputs, strict=True))
    assert last == "relskew: comparing with torch …"
    assert [graph.file for graph in reports[0].graphs] == list(FILES)
    assert dict(reports[0].graphs[2].inputs[2].fixed) == {1: "the heads of the layer", 3: "the width of a head"}
    assert {check.name for check in reports[0].checks} >= {"last_hidden_state", "logits", "present.0.encoder.key"}
    assert onnx.load(folder / "encoder_model.onnx").graph.input[0].name == "input_features"
    source = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    assert np.array_equal(generate(folder, source.numpy(), 10), greedy(model, source[None], torch.ones(1, 6), 10)[0])
    with pytest.raises(TypeError, match=r"`prompt` must be vectors \(length, width\)"):
        generate(folder, [1, 2], 3)


def test_files_appear_together_or_not_at_all(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = made
    graphs = itertools.cycle(map(onnx.load, (folder / name for name in FILES)))

    def converted(*part: Any, **how: Any) -> Any:
        graph = next(graphs)
        del graph.metadata_props[:]  # which are added once
        return types.SimpleNamespace(model=graph)

    monkeypatch.setattr("relskew_core.export._models.convert.convert", converted)
    with pytest.raises(RuntimeError, match=r"does not do what `model` does: output .* for (encoder|decoder)_model"):
        encoder_decoder_to_onnx(model, tmp_path / "new", tolerance=0.0)
    told = r"`path` cannot be written: File too large: '.*new/encoder_model\.onnx'"
    with faults.full_disk(1000), pytest.raises(OSError, match=told):
        encoder_decoder_to_onnx(model, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_replaced(made: tuple[Model, Path]) -> None:
    wrong: list[tuple[str, type[Exception], str]] = [
        (".", FileExistsError, "`path` exists"),
        ("encoder_model.onnx", NotADirectoryError, "`folder` must be a directory"),
        ("no/where", FileNotFoundError, "`folder` must lie in a directory that exists"),
        ("f" * 300, OSError, "`folder` cannot be written: File name too long"),
    ]
    for name, error, said in wrong:
        with pytest.raises(error, match=said):
            encoder_decoder_to_onnx(Model(), made[1] / name)


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    alone, no_start, no_tokens = Model(), Model(), Model()
    alone.config.is_encoder_decoder = False  # as an encoder that is made of the same config sets it
    no_start.config.decoder_start_token_id = None
    del no_tokens.config.vocab_size  # as that of Pix2Struct, which encodes pictures
    wrong: list[tuple[nn.Module, type[Exception], str]] = [
        (nn.Linear(2, 2), TypeError, "`model` must be an encoder–decoder of transformers"),
        (alone, TypeError, r"got Model with config\.is_encoder_decoder=False$"),
        (no_start, ValueError, "`model` must have a `decoder_start_token_id`"),
        (no_tokens, TypeError, r"`model` must encode tokens, of a `config\.vocab_size`, .*got Model without"),
    ]
    for model, error, said in wrong:
        with pytest.raises(error, match=said):
            encoder_decoder_to_onnx(model, tmp_path / "made")
    with pytest.raises(TypeError) as raised:
        torch_to_onnx(Model(), torch.zeros(2, 5, dtype=torch.int64))
    assert any("encoder_decoder_to_onnx(model, folder)" in note for note in raised.value.__notes__)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("prompt", "mask", "said"), [
    ([], None, "`prompt` must be ints"),
    ([[1], [1, 2]], None, "`prompt` must hold rows of one length"),
    ([1, VOCABULARY], None, "`prompt` must hold tokens 0 … 19, got 1 … 20"),
    ([1, 2], [1, 1, 1], "`mask` must be 1 where `prompt` counts"),
    ([1, 2], [1, 2], "`mask` must be 1 where `prompt` counts"),
])  # fmt: skip
def test_prompts_that_do_not_fit(made: tuple[Model, Path], prompt: Any, mask: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        generate(made[1], prompt, 3, mask=mask)


def test_folders_that_do_not_fit(made: tuple[Model, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`model` must be a folder with encoder_model\.onnx"):
        generate(tmp_path, [1], 1)
    odd = Path(shutil.copytree(made[1], tmp_path / "mixed")) / FILES[2]
    model = onnx.load(odd)
    onnx.helper.set_model_props(model, {"relskew.set": "another"})
    onnx.save(model, odd)
    with pytest.raises(ValueError, match="`model` must hold files that encoder_decoder_to_onnx wrote together"):
        generate(tmp_path / "mixed", [1], 1)
    with pytest.raises(ValueError, match="`model` must be what decoder_to_onnx writes"):
        generate(tmp_path / "mixed" / FILES[3], [1], 1, mask=[1])


def tied() -> Model:
    model = Model()
    model.shared, model.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
    model.head.weight = model.shared.weight
    model.keys, model.values = nn.Linear(64, 64), nn.Linear(64, 64)
    model.config.d_model = 64
    return model.eval()


def test_weights_are_stored_once(tmp_path: Path) -> None:
    """All graphs refer to one file, which has each matrix once, whatever each of them does with it."""
    model = tied()
    folder = encoder_decoder_to_onnx(model, tmp_path / "made")
    (data,) = folder.glob("*.data")
    content = data.read_bytes()
    for weight in (model.shared.weight, model.keys.weight, model.values.weight):
        matrix = weight.detach().numpy()
        assert content.count(matrix.tobytes()) + content.count(np.ascontiguousarray(matrix.T).tobytes()) == 1
    assert data.stat().st_size < 4 * (20 * 64 + 2 * 64 * 64) + 3 * 4096
    source = torch.tensor([[1, 2, 3, 4, 5]])
    assert np.array_equal(generate(folder, source.numpy(), 9), greedy(model, source, torch.ones(1, 5), 9))


@pytest.mark.parametrize("weights", ["weights-8", "dynamic"])
def test_weights_in_int8_are_stored_once(weights: Any, tmp_path: Path) -> None:
    """The embedding of both sides and the head are the same blocks; the graphs are checked before and after."""
    model, reports = tied(), list[ExportReport]()
    folder = encoder_decoder_to_onnx(model, tmp_path / "made", weights=weights, report=reports.append)
    (data,) = folder.glob("*.data")
    assert data.stat().st_size < 1.125 * (20 * 64 + 2 * 64 * 64) + 4 * 4096
    encoder, _, later, first = (onnx.load(folder / name, load_external_data=False).graph for name in FILES)
    places = []
    for graph in (encoder, later, first):
        stored = {tensor.name: tensor for tensor in graph.initializer}
        blocks = {name for name, tensor in stored.items() if list(tensor.dims) == [20, 1, 64]}
        (name,) = blocks & {node.input[0] for node in graph.node if node.op_type == "Gather"}
        places.append({entry.key: entry.value for entry in stored[name].external_data})
        if graph is not encoder:
            assert name in {node.input[1] for node in graph.node if node.op_type == "MatMulNBits"}
    assert places[0] == places[1] == places[2]
    assert {(check.gate or 0) < 1e-3 for check in reports[0].checks} == {True, False}
    assert all(not graph.in_float32 for graph in reports[0].graphs)
    assert generate(folder, [[1, 2, 3, 4, 5]], 9).shape == (1, 9)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tolerance": 1e-6}, RuntimeError, "more than 1e-06, the `tolerance`"),
        ({"weights": "static"}, ValueError, "must be one of 'weights-8', 'weights-4', 'dynamic', got 'static'"),
        ({"dtype": "float16", "check": False}, ValueError, r"`weights` requires a model in float32, .* of float16"),
    ]
    for given, error, said in wrong:
        with pytest.raises(error, match=said):
            encoder_decoder_to_onnx(model, tmp_path / "exact", **{"weights": "weights-8", **given})
        assert not (tmp_path / "exact").exists()


def test_the_next_call_opens_nothing(made: tuple[Model, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    library = importlib.import_module("relskew_core.export._generate.encoded")
    usual = library.open_session

    def opening(runtime: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(Path(path).name)
        return usual(runtime, path, *args, **kwargs)

    monkeypatch.setattr(library, "open_session", opening)
    one, two = (Path(shutil.copytree(made[1], tmp_path / name)) for name in ("one", "two"))
    want = generate(one, [9, 8, 7], 9)
    assert names == list(FILES[:3])
    first = next(iter(kept().values()))[1]
    assert np.array_equal(generate(os.fspath(one), [9, 8, 7], 9), want)
    held = weakref.ref(first)
    del first
    assert np.array_equal(generate(one, [[9, 8, 7]] * 2, 9), [want] * 2)
    assert len(names) == 3
    generate(two, [9, 8, 7], 9)  # another folder, for which the memory of the first one is freed
    assert len(names) == 6
    assert held() is None
    os.replace(shutil.copy(two / FILES[2], tmp_path / "new"), two / FILES[2])  # another file of the same content
    assert np.array_equal(generate(two, [9, 8, 7], 9), want)
    assert len(names) == 9
    opened = open_model(one)
    assert len(names) == 12
    assert np.array_equal(generate(opened, [9, 8, 7], 9), want)
    generate(two, [9, 8, 7], 9)
    with ThreadPoolExecutor(4) as pool:  # a call leaves nothing in an open model
        prompts = [[9, 8, 7], [1, 2]] * 4
        found = list(pool.map(lambda prompt: generate(opened, prompt, 9).tolist(), prompts))
    assert found == [want.tolist(), generate(opened, [1, 2], 9).tolist()] * 4
    assert len(names) == 12
    (two / FILES[0]).unlink()
    with pytest.raises(FileNotFoundError, match="`model` must be a folder with encoder_model"):
        generate(two, [9, 8, 7], 9)
    assert not kept()
    with pytest.raises(TypeError, match="`path` must be a str or a path-like object, got int 3"):
        open_model(3)  # type: ignore[arg-type]


def kept() -> Any:
    return importlib.import_module("relskew_core.export._generate.generate")._kept


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_process_opens_its_sessions(made: tuple[Model, Path]) -> None:
    """Those of its parent have no threads there, and onnxruntime crashes when they are closed."""
    code = """import os, sys
from relskew_core.export import generate
want = generate(sys.argv[1], [9, 8, 7], 9).tolist()
child = os.fork()
if not child:  # which ends as workers do
    os._exit(generate(sys.argv[1], [9, 8, 7], 9).tolist() != want)
sys.exit(os.waitpid(child, 0)[1] != 0)"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, made[1]], check=True, timeout=100)

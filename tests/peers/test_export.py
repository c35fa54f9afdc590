"""Whole models of every family compiled and as graphs: their numbers, the operator's nodes, what varies, and memory."""

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from peers.common import check, hf
from peers.families import FAMILIES
from peers.family import tokens
from peers.test_families_numbers import both, given, tensors
from torch import Tensor, nn

from onnx_sessions import grown, opened, shapes
from relskew_core.export import torch_to_onnx
from relskew_core.huggingface import register_attention, replace_attention
from torch_modules import of

OFTEN = ("T5 sdpa", "MPNet", "SAM sdpa", "Nemotron", "torchvision's Swin")
"""One family of each form; compiling or exporting all of them takes minutes."""
SHORT = ("Wav2Vec2-BERT relative", "Wav2Vec2-Conformer")
"""Their graphs reach as far as the model's table of sinusoids, here 20 positions."""
BREAKS = ("VITS", "Nemotron", "Phi-4", "NeMo Transformer", "Inkling 2 Loop")
"""Models whose own code breaks the graph: it draws with NumPy, logs, looks for the entries of a mask, has its mask
replaced, or copies layers of a cache."""


def families() -> list[Any]:
    return [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in FAMILIES]


def replaced(name: str) -> Any:
    """Return a model with a single layer of each kind."""
    model = FAMILIES[name].make().float()
    for part in model.modules():
        if isinstance(part, torch.nn.ModuleList) and len({type(x) for x in part}) == 1:
            del part[1:]
    return replace_attention(model)


@pytest.mark.parametrize("name", families())
def test_compiled_families_give_the_same_numbers(name: str) -> None:
    """Traced in one graph, with the shapes of the operators' results: what the backends of torch start from."""
    torch.compiler.reset()
    model = replaced(name)
    inputs = given(FAMILIES[name], FAMILIES[name].lengths[-1], model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=name not in BREAKS)
    want, got = (tensors(call(**copy.deepcopy(inputs))) for call in (model, compiled))
    check(got, want, 1e-5)


def exportable(model: Any) -> Any:
    """Return a model without what torch's exporter cannot write, whether attention is replaced or not."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    for part in model.modules():
        if hasattr(part, "use_clipped_linears"):  # the exporter merges clamps whose bounds are buffers
            part.use_clipped_linears = False
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    return model


@pytest.mark.parametrize("name", families())
def test_exported_families_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Any batch, and any length where it is one of a sequence: of two axes of images, torch follows no division."""
    family, model = FAMILIES[name], exportable(replaced(name))
    short, long = (7, 15) if name in SHORT else (family.lengths[-2], family.lengths[-1])
    inputs = given(family, long, model)
    # Phi-4 makes its masks with NumPy, and Funnel its positions in lists of Python.
    images = any(x.ndim == 4 for x in inputs.values() if isinstance(x, torch.Tensor))
    fixed = name == "Phi-4" or name.startswith("Funnel") or images
    vary = dict.fromkeys(inputs, (0,)) if fixed else None
    torch_to_onnx(model, inputs, tmp_path / "model.onnx", vary=vary, tolerance=1e-3)
    session = opened(tmp_path / "model.onnx")
    for length, batch in [(long, 1), (short, 2)]:
        some = {key: of_batch(x, batch) for key, x in given(family, length, model).items()}
        if fixed and length != long:
            continue
        found = session.run(None, {key: x.numpy() for key, x in named(some).items()})
        check(torch.from_numpy(found[0]), tensors(model(**some))[0], 1e-3)


def of_batch(x: Any, batch: int) -> Any:
    """Return the first items of an input; memories, in a list, have the batch on their second axis."""
    return [part[:, :batch] for part in x] if isinstance(x, list) else x[:batch]


def named(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    lists = {key: x for key, x in inputs.items() if isinstance(x, list)}
    parts = {f"{key}_{index}": part for key, x in lists.items() for index, part in enumerate(x)}
    return {key: x for key, x in inputs.items() if key not in lists} | parts


@pytest.mark.slow
def test_the_operator(tmp_path: Path) -> None:
    """DeBERTa with a node for the library: the export compares it with the library and without."""
    model = replaced("DeBERTa-v2")
    inputs = given(FAMILIES["DeBERTa-v2"], 30, model)
    path = tmp_path / "model.onnx"
    torch_to_onnx(model, inputs, path, operator=True, tolerance=1e-3)
    assert [node.domain for node in onnx.load(path).graph.node].count("relskew") == 1


def called(self: Any, ids: Tensor, mask: Tensor, *decoded: Tensor) -> list[Tensor]:
    """Call a model with ids, their mask and, if it has a decoder, the ids that were decoded."""
    more = {"decoder_input_ids": decoded[0], "use_cache": False} if decoded else {}
    return tensors(self.model(input_ids=ids, attention_mask=mask, **more))


@pytest.mark.parametrize("name", ["VITS", "T5 sdpa", pytest.param("T5", marks=pytest.mark.slow)])
def test_torchs_exporter_alone_makes_graphs_of_any_length(name: str) -> None:
    theirs, ours = (of(called, model=model.float()) for model in both(FAMILIES[name]))

    def arguments(batch: int, length: int, decoded: int) -> tuple[Tensor, ...]:
        more = [tokens(decoded)["input_ids"]] if name != "VITS" else []
        return tuple(x[:batch] for x in (*tokens(length).values(), *more))

    dynamic = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    shapes = (dynamic, dynamic, *[(dynamic,)] * (name != "VITS"))
    given = arguments(2, 7, 6)
    program = torch.onnx.export(ours.eval(), given, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    session = opened(program.model_proto)
    for sizes in [(2, 7, 6), (1, 1, 1), (1, 2, 9), (2, 4, 3), (2, 60, 30), (2, 5, 1)]:
        given = arguments(*sizes)
        feed = {value.name: x.numpy() for value, x in zip(session.get_inputs(), given, strict=True)}
        check(map(torch.from_numpy, session.run(None, feed)), theirs(*given), 1e-5)


HEADS = 12


def test_t5_in_one_call() -> None:
    """The encoder–decoder as it is, with its own arguments by name: every length and the results' names follow."""
    theirs, ours = (model.float() for model in both(FAMILIES["T5"]))

    def arguments(batch: int, length: int, decoded: int) -> dict[str, Tensor]:
        given = {**tokens(length), "decoder_input_ids": tokens(decoded)["input_ids"]}
        return {name: x[:batch] for name, x in given.items()}

    made = torch_to_onnx(ours, {**arguments(2, 7, 6), "use_cache": False})
    assert [value.name for value in made.graph.output] == ["logits", "encoder_last_hidden_state"]
    assert 'name: "decoder.block.0.layer.1.EncDecAttention/short/attention"' in str(made.graph)  # in a branch
    session = opened(made)
    for sizes in [(1, 1, 1), (1, 2, 9), (2, 40, 30), (2, 5, 1)]:
        given = arguments(*sizes)
        found, want = session.run(None, {name: x.numpy() for name, x in given.items()}), theirs(**given)
        check(map(torch.from_numpy, found), [want.logits, want.encoder_last_hidden_state], 1e-5)


@pytest.mark.parametrize("name", ["T5", "BERT with ALiBi"])
def test_memory(name: str) -> None:
    """At 4096 tokens less than a tenth of one tensor of logits, of which the original's graph has at least one."""

    def forward(self: Any, input_ids: Any, attention_mask: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]

    session = opened(torch_to_onnx(of(forward, model=encoder(name)), tokens(7), check=False))
    given = {key: x[:1].numpy() for key, x in tokens(4096).items()}
    found = grown(lambda: session.run(None, given))
    if found is None:
        pytest.skip("only Linux counts the peak of one call")
    assert found < HEADS * 4096**2 * 4 / 10


def encoder(name: str) -> Any:
    """Return a model of one layer with ``HEADS`` narrow heads."""
    shared: dict[str, Any] = {"vocab_size": 50}
    if name == "T5":
        config = hf("T5Config")(
            **shared, d_model=48, d_kv=4, d_ff=32, num_layers=1, num_heads=HEADS, attn_implementation="sdpa"
        )
        return replace_attention(hf("T5EncoderModel")(config))
    config = hf("BertConfig")(
        **shared, hidden_size=48, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=32,
        max_position_embeddings=4096, attn_implementation=register_attention("ALiBi of this test"),
    )  # fmt: skip
    return hf("BertModel")(config, add_pooling_layer=False)


@pytest.mark.parametrize(("name", "returned"), [("WavLM", []), ("Parakeet", ["output_attention_mask"])])
def test_encoders(name: str, returned: list[str]) -> None:
    """A warning, of what the graph fixes, would be an error here. Parakeet returns its mask under the input's name."""
    family = FAMILIES[name]
    given = {key: x.float() if x.is_floating_point() else x for key, x in family.given(30).items()}
    graph = torch_to_onnx(replace_attention(family.make().float()), given, tolerance=1e-3).graph
    assert all(isinstance(size, str) for shape in shapes(graph.input).values() for size in shape[:2])
    assert {shape[0] for shape in shapes(graph.input).values()} == {"batch"}
    onnx.checker.check_graph(graph, onnx.checker.DEFAULT_CONTEXT)
    assert [value.name for value in graph.output][1:] == returned


def test_pasts_in_lists_have_names_and_lengths() -> None:
    """Of a step of a decoder that gets the caches of its layers as tensors in lists."""

    def step(self: Any, ids: Tensor, past: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        q = ids[:, None, :, None].float().expand(-1, 3, -1, 8)
        return [nn.functional.scaled_dot_product_attention(q, keys, values) for keys, values in past]

    past = [(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)) for _ in range(2)]
    sizes = shapes(torch_to_onnx(of(step), (torch.randint(0, 50, (2, 3)), past)).graph.input)
    assert sizes["ids"] == ["batch", "ids_length"]
    for layer, kind in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert sizes[f"past_{layer}_{kind}"] == ["batch", 3, f"past_{layer}_0_length", 8]

"""The exporters of transformers on replaced models, compared with the untouched models and with their own files."""

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from peers import family
from peers.common import check, hf, installed, peer
from peers.families import FAMILIES

from benchmarks import jobs
from relskew_core.export import custom_ops_library, register_exporters
from relskew_core.huggingface import register_attention, replace_attention

if importlib.util.find_spec("transformers.exporters") is None:
    pytest.skip("transformers has exporters since 5.15", allow_module_level=True)

CELLS = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 32, "vocab_size": 50}


def encoder(kind: str = "T5EncoderModel") -> Any:
    torch.manual_seed(0)
    return hf(f"{kind}")(hf("T5Config")(num_layers=2, decoder_start_token_id=0, **CELLS)).eval()


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {name: x[-batch:] for name, x in family.tokens(length).items()}


def check_present(got: torch.Tensor, want: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
    keep = given["attention_mask"].bool()
    check(got[keep], want[keep], 1e-5)


def exported(model: Any, given: dict[str, Any], exporter: str = "Onnx", **options: Any) -> Any:
    config = peer(f"transformers.exporters.{exporter}Config")(dynamic=True, **options)
    return peer(f"transformers.exporters.{exporter}Exporter")().export(model, dict(given), config)


def nodes(made: Any) -> set[str]:
    """Return the kinds of nodes in a graph, in its branches and loops too."""
    return {node.op_type for node in made.program.graph.all_nodes()}


@pytest.fixture(scope="module")
def chunks() -> Any:
    register_exporters()
    return exported(replace_attention(encoder()), tokens(2, 30))


def test_the_graph_has_our_chunks_and_any_length(chunks: Any) -> None:
    theirs = encoder()
    assert chunks.program.opset_imports[""] == 23
    assert {"If", "Loop", "Attention"} <= nodes(chunks)
    for shape in [(1, 1), (2, 19), (2, 256), (2, 600)]:  # from 257 on in chunks
        given = tokens(*shape)
        check_present(chunks(**given).last_hidden_state, theirs(**given).last_hidden_state, given)


def test_a_model_without_relative_attention_is_exported_in_its_own_opset(chunks: Any) -> None:
    assert exported(encoder(), tokens(2, 30)).program.opset_imports[""] != chunks.program.opset_imports[""]


def test_the_operator() -> None:
    register_exporters(operator=True)
    try:
        made = exported(replace_attention(encoder()), tokens(2, 30))
    finally:
        register_exporters()
    assert "RelativeAttention" in nodes(made)
    assert "Loop" not in nodes(made)
    given = tokens(2, 40)
    want = encoder()(**given).last_hidden_state
    check_present(made(**given).last_hidden_state, want, given)  # by the functions of the model
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    check_present(made.to(session_options=options)(**given).last_hidden_state, want, given)


def alibi() -> Any:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16}
    config = hf("LlamaConfig")(vocab_size=50, **sizes)
    torch.manual_seed(0)
    return hf("LlamaForCausalLM")._from_config(config, attn_implementation=register_attention("alibi"))


@pytest.mark.parametrize("name", ["DeBERTa-v2", "Bloom", "ALiBi", "T5 fused"])
def test_other_models(name: str) -> None:
    register_exporters()
    make: Callable[[], Any] = {"ALiBi": alibi, "T5 fused": encoder}.get(name) or (lambda: FAMILIES[name].make())
    theirs = make().float().eval()
    example, other = ((FAMILIES[name].given(length) if name in FAMILIES else tokens(2, length)) for length in (30, 12))
    if name in ("Bloom", "ALiBi"):
        example, other = ({**x, "use_cache": False} for x in (example, other))
    ours = make().float().eval()
    ours = ours if name == "ALiBi" else replace_attention(ours)
    made = exported(ours, example, **({"ort_fusions": "cpu"} if name == "T5 fused" else {}))
    for given in (example, other):
        check_present(made(**given)[0], theirs(**given)[0], given)


def test_generation() -> None:
    register_exporters()
    kind = "T5ForConditionalGeneration"
    given, config = tokens(2, 12), peer("transformers.exporters.OnnxConfig")(dynamic=True)
    exporter = peer("transformers.exporters.OnnxExporter")()
    made = exporter.export_for_generation(replace_attention(encoder(kind)), dict(given), config)
    parts = peer("transformers.exporters.utils.decompose_for_generation")(encoder(kind), dict(given))
    assert made.components.keys() == parts.keys()
    assert "decode" in parts
    for name, (part, inputs) in parts.items():
        inputs = {key: value for key, value in inputs.items() if key in made.runners[name].metadata.kwargs}
        got = made.runners[name](**copy.deepcopy(inputs))
        check(got[0], part(**inputs)[0], 1e-5)


def test_openvino() -> None:
    installed("openvino")
    register_exporters()
    theirs = encoder()
    made = exported(replace_attention(encoder()), tokens(2, 30), "OpenVINO")
    made.to(config={"INFERENCE_PRECISION_HINT": "f32"})  # it computes in bfloat16 where the processor can
    for length in (30, 19):
        given = tokens(2, length)
        check_present(made(**given).last_hidden_state, theirs(**given).last_hidden_state, given)


def test_an_opset_without_translations() -> None:
    register_exporters()
    with pytest.raises(ValueError, match=r"^`opset` must be 18 … 24, got 17"):
        exported(replace_attention(encoder()), tokens(2, 30), opset_version=17)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^`chunk_size` must be an int >= 1, got 0"):
        register_exporters(chunk_size=0)
    with pytest.raises(TypeError, match=r"^`operator` must be"):
        register_exporters(operator=1)  # type: ignore[arg-type]  # the wrong type is refused
    monkeypatch.setitem(sys.modules, "transformers.exporters.utils", None)
    with pytest.raises(ImportError, match=r"needs transformers\.exporters"):
        register_exporters()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="needs transformers: pip install transformers"):
        register_exporters()


def test_whole_jobs_run_in_other_runtimes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed("ctranslate2")
    sizes: dict[str, Any] = {"num_layers": 1, "decoder_start_token_id": 0, **CELLS}
    job = jobs.of(jobs.T5, ((2, 9, 4),), (jobs.PLAIN, jobs.OPERATOR, jobs.INT8, jobs.CT2, jobs.CT2_INT8),
                  jobs.TRANSLATING, **sizes)  # fmt: skip
    monkeypatch.setattr(jobs, "JOBS", {"tiny": job})
    monkeypatch.setattr(jobs, "KEPT", tmp_path)
    (rows,) = jobs.Jobs().run("jobs", jobs.Jobs().cases(), 0.0)
    jobs.pair.cache_clear()
    assert {row.contender: row.skipped for row in rows} == dict.fromkeys((jobs.USUAL, jobs.REPLACED, *job.others))
    assert {row.error for row in rows if row.contender not in jobs.Jobs.unlike} == {None, 0.0}

"""Whole jobs on one thread: in transformers, with relskew, and in the runtimes that people deploy to.

Models have published sizes and random weights. What a job needs is made once under ``build/jobs``, graphs of relskew
for each state of its sources. optimum writes its graphs in a process with the older transformers that it requires.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.families import built, find
from benchmarks.graphs import open_session
from benchmarks.models import Attention, CausalModel, loss_of, step, with_module
from benchmarks.runner import ROOT, Benchmark, Call, Case, Record, as_memory, as_time, left_out
from benchmarks.runtimes import apart
from relskew_core._files import whole
from relskew_core.conventions import load_vits_encoder
from relskew_core.export import decoder_to_onnx, encoder_decoder_to_onnx, generate, open_model, torch_to_onnx
from relskew_core.huggingface import replace_attention

KEPT = ROOT / "build" / "jobs"
SOURCES = (path for each in ("relskew_core", "backends", "export") for path in sorted((ROOT / each).rglob("*.py")))
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:9]
OPTIMUM = apart("optimum", "2.3.0", "optimum-onnx==0.1.0", "transformers==4.57.6", "huggingface-hub==0.36.2",
                "tokenizers==0.22.2", "tqdm==4.70.1", "regex==2026.11.19")  # fmt: skip
HINTS = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}

USUAL, REPLACED, BASELINE, OPENVINO = "usual code", "relskew", "its graph in onnxruntime", "its graph in OpenVINO"
PLAIN, OPERATOR, INT8, ROWS = "relskew's graph", "with the operator", "with weights-8", "with dynamic"
CT2, CT2_INT8, IN_OPENVINO = "CTranslate2", "CTranslate2 in int8", "relskew's graph in OpenVINO"
EXPORTED: dict[str, Case] = {PLAIN: {}, OPERATOR: {"operator": True}, IN_OPENVINO: {"chunk_size": None}}
EXPORTED |= {kind: {"operator": True, "weights": kind.removeprefix("with ")} for kind in (INT8, ROWS)}
TRANSLATING, CONTINUING = "text2text-generation-with-past", "text-generation-with-past"
GRAPHS, DECODED = (BASELINE, OPENVINO, PLAIN, OPERATOR), (BASELINE, OPERATOR, CT2)
ENCODED = (*GRAPHS, IN_OPENVINO)
OF_RELSKEW, OTHERS = (REPLACED, PLAIN, OPERATOR, IN_OPENVINO, INT8, ROWS), (BASELINE, OPENVINO, CT2, CT2_INT8)
STEP = -1  # in place of a number of new tokens
SOUNDS: Any = "input_values", lambda batch, seconds: (batch, 16_000 * seconds)
IMAGES: Any = "pixel_values", lambda batch, size: (batch, 3, size, size)


class Job(NamedTuple):
    """A model, its cases by batch, size and new tokens, and contenders besides torch."""

    make: Callable[[], Any]
    cases: tuple[tuple[int, int, int], ...]
    others: tuple[str, ...] = GRAPHS
    task: str = "feature-extraction"  # as optimum calls it
    unit: str = "tokens"
    floats: Any = None  # the name and the shape of an input that is not tokens

    def given(self, batch: int, size: int) -> dict[str, Tensor]:
        if self.floats is not None:
            name, shape = self.floats
            return {name: torch.randn(shape(batch, size), generator=torch.Generator().manual_seed(0))}
        ids = torch.randint(3, 38, (batch, size), generator=torch.Generator().manual_seed(0))
        if self.unit == "phonemes":
            return {"x": ids, "x_lengths": torch.full((batch,), size)}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def of(
    name: str, cases: Any, others: Any = GRAPHS, task: str = "feature-extraction", unit: str = "tokens",
    floats: Any = None, **options: Any,
) -> Job:  # fmt: skip
    return Job(built(name, None, **options), cases, others, task, unit, floats)


def music(attention: Callable[[int], nn.Module]) -> CausalModel:
    return CausalModel(attention, 2048, layers=6).eval()


BASE: Case = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
WORDS: Case = {"vocab_size": 32128, "decoder_start_token_id": 0}
T5 = "T5ForConditionalGeneration"
JOBS = {
    "T5-small": of(T5, ((1, 128, 64), (1, 1024, 64), (8, 128, 64), (8, 512, STEP)),
                   (*GRAPHS, INT8, ROWS, CT2, CT2_INT8), TRANSLATING, d_model=512, d_ff=2048, num_layers=6, num_heads=8,
                   **WORDS),
    "T5-base": of(T5, ((1, 128, 64),), DECODED, TRANSLATING, d_model=768, d_ff=3072, num_layers=12, num_heads=12,
                  **WORDS),
    "DeBERTa-v3-small": of(
        "DebertaV2Model", ((1, 128, 0), (1, 512, 0)), ENCODED, num_hidden_layers=6, vocab_size=128100,
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0, **BASE),
    "MPNet-base": of("MPNetModel", ((1, 128, 0), (1, 384, 0), (1, 512, 0)), (*ENCODED, ROWS),
                     max_position_embeddings=514),
    "Music Transformer": Job(lambda: music(Attention), ((1, 1024, 256), (4, 1024, STEP)),
                             (PLAIN, OPERATOR, INT8), CONTINUING),
    "MPT-125M": of("MptForCausalLM", ((1, 1024, 32),), (BASELINE, OPERATOR), CONTINUING, d_model=768, n_heads=12,
                    n_layers=12, vocab_size=32000, use_cache=True),
    "Bloom-560m": of("BloomForCausalLM", ((1, 256, 32),), DECODED, CONTINUING, hidden_size=1024, n_head=16, n_layer=24,
                     vocab_size=32000),
    "Piper's encoder": Job(lambda: find("piper.train.vits.models.TextEncoder")(
        256, 192, 192, 768, 2, 6, 3, 0.1).eval(), ((1, 1190, 0),), (BASELINE, PLAIN, OPERATOR), unit="phonemes"),
    "WavLM-base": of("WavLMModel", ((1, 60, 0),), (BASELINE, OPERATOR), unit="s", floats=SOUNDS),
    "Wav2Vec2-Conformer-base": of(
        "Wav2Vec2ConformerModel", ((1, 60, 0),), (BASELINE, OPERATOR), unit="s", floats=SOUNDS,
        position_embeddings_type="relative", num_hidden_layers=12, **BASE),
    "SAM ViT-B": of("SamVisionModel", ((1, 1024, 0),), (BASELINE, OPERATOR), unit="pixels", floats=IMAGES),
    "Swin-T": of("SwinModel", ((1, 224, 0),), ENCODED, unit="pixels", floats=IMAGES),
    "VITS": of("VitsModel", ((1, 200, 0),), ()),
}  # fmt: skip


class Voice(nn.Module):
    """Takes and returns what the encoder of a voice of Piper does."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor, x_lengths: Tensor) -> Any:
        there = torch.arange(x.shape[1]) < x_lengths[:, None]
        y = self.encoder(x, padding_mask=there[..., None].float(), attention_mask=there)
        return y.last_hidden_state.mT, y.prior_means.mT, y.prior_log_variances.mT


@functools.lru_cache(maxsize=1)
def pair(name: str) -> tuple[Any, Any]:
    """Return a model, and the same with relskew."""
    torch.manual_seed(0)  # files are of the same weights
    model = JOBS[name].make()
    if hasattr(model, "config"):
        return model, replace_attention(copy.deepcopy(model))
    if isinstance(model, CausalModel):
        other = music(with_module)
        other.load_state_dict(model.state_dict())
        return model, other
    config, arrays = load_vits_encoder({f"enc_p.{key}": x for key, x in model.state_dict().items()})
    encoder = find("vits.VitsTextEncoder")(find("VitsConfig")(**config)).eval()
    encoder.load_state_dict({key: torch.as_tensor(x) for key, x in arrays.items()})
    return model, Voice(replace_attention(encoder))


def in_torch(model: Any, given: dict[str, Tensor], new: int) -> Call:
    if new == STEP:
        model, ids = copy.deepcopy(model).train(), given["input_ids"]
        causal = isinstance(model, CausalModel)
        return step(model, lambda: loss_of(model, ids) if causal else model(ids, labels=ids[:, :128].contiguous()).loss)

    @torch.inference_mode()
    def call() -> Any:
        torch.manual_seed(0)  # noise decides how long the speech of VITS is
        if not new:
            return model(**given)[0]
        return model.generate(**given, max_new_tokens=new, min_new_tokens=new, do_sample=False)[:, -new:]

    return call


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that is made once."""
    if not (path := KEPT / name).exists():
        with whole(path) as folder:
            folder.mkdir()
            make(folder)
    return path


def exported(name: str, contender: str, given: dict[str, Tensor]) -> Path:
    job = JOBS[name]
    options: Case = EXPORTED[contender] | {"check": False}  # the results are compared anyway

    def make(path: Path) -> None:
        model, file = pair(name)[1], path / "model.onnx"
        if job.task == TRANSLATING:
            encoder_decoder_to_onnx(model, path, **options)
        elif job.task == CONTINUING:
            caches: Case = {"cache_dtype": "int8"} if contender == INT8 else {}
            decoder_to_onnx(model, file, in_place=True, **caches, **options)
        elif job.unit == "pixels":
            torch_to_onnx(model, given, file, vary=dict.fromkeys(given, ()), **options)
        else:
            torch_to_onnx(model, job.given(2, 8 if job.unit == "s" else 300), file, **options)

    return kept(f"{name} {contender} {STATE}", make)


def baseline(name: str) -> Path:
    """Return the graphs of optimum, of Piper's own exporter, or of torch's for what optimum does not export."""
    model, job = pair(name)[0], JOBS[name]
    options: Any = {"no_post_process": True, "do_validation": False, "library_name": "transformers", "task": job.task}
    code = f"import sys; from optimum.exporters.onnx import main_export; main_export(*sys.argv[1:], **{options})"
    axes = {"x": {0: "batch", 1: "phonemes"}, "x_lengths": {0: "batch"}}
    plain: Any = {"dynamo": False, "input_names": [*axes], "dynamic_axes": axes, "opset_version": 15}

    def make(path: Path) -> None:
        if isinstance(model, find("SamVisionModel")):
            pixels: Any = {"dynamo": False, "input_names": ["pixel_values"], "opset_version": 17}
            torch.onnx.export(model, (*job.given(1, 1024).values(),), path / "model.onnx", **pixels)
        elif not hasattr(model, "config"):
            torch.onnx.export(model, (*job.given(1, 50).values(),), path / "model.onnx", **plain)
        elif failed := OPTIMUM.run("-c", code, stored(name), path):
            raise RuntimeError(failed)

    return kept(f"{name} in ONNX", make)


def stored(name: str) -> Path:
    """Return a model as transformers stores it, with the words that converters require."""

    def make(path: Path) -> None:
        (model := pair(name)[0]).save_pretrained(path)
        words = {f"t{i}": i for i in range(getattr(model.config, "vocab_size", None) or 3)}
        tokenizers, special = import_module("tokenizers"), {"pad_token": "t0", "eos_token": "t1", "unk_token": "t2"}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t2"))
        find("PreTrainedTokenizerFast")(tokenizer_object=made, bos_token="t1", **special).save_pretrained(path)

    return kept(name, make)


def in_ctranslate2(name: str, kind: str, ids: Any, new: int) -> Call:
    module, converters = import_module("ctranslate2"), import_module("ctranslate2.converters")
    convert = converters.TransformersConverter(str(stored(name))).convert
    path = kept(f"{name} in {kind}", lambda path: convert(str(path), quantization=kind, force=True))
    threads, words = {"inter_threads": 1, "intra_threads": 1}, [[f"t{i}" for i in row] for row in ids]
    if JOBS[name].task == TRANSLATING:
        run = module.Translator(str(path), compute_type=kind, **threads).translate_batch
        run = partial(run, min_decoding_length=new, max_decoding_length=new, max_input_length=0)
        return lambda: np.array([[int(word[1:]) for word in one.hypotheses[0]] for one in run(words, beam_size=1)])
    run = module.Generator(str(path), compute_type=kind, **threads).generate_batch
    run = partial(run, min_length=new, max_length=new, include_prompt_in_result=False)
    return lambda: np.array([one.sequences_ids[0] for one in run(words, beam_size=1)])


class Runnable:
    """A file in onnxruntime, or in OpenVINO, as a function of a mapping; results stay where they are."""

    def __init__(self, path: Path, contender: str) -> None:
        if contender in (OPENVINO, IN_OPENVINO):
            model = import_module("openvino").Core().compile_model(str(path), "CPU", HINTS)
            request = model.create_infer_request()
            self.value: Any = np.ascontiguousarray
            self.shapes: dict[str, Any] = {one.any_name: [] for one in model.inputs}
            run: Any = partial(request.infer, share_inputs=True)
            self.run: Any = lambda fed: {name: np.array(x) for one, x in run(fed).items() for name in one.names}
        else:
            session = open_session(str(path), contender == OPERATOR)
            self.shapes = {one.name: one.shape for one in session.get_inputs()}
            names, self.value = [one.name for one in session.get_outputs()], onnxruntime.OrtValue.ortvalue_from_numpy
            self.run = lambda fed: dict(zip(names, session.run_with_ort_values(None, fed), strict=True))

    def __call__(self, given: Case) -> Case:
        fed = {name: given[name] for name in self.shapes}
        return self.run({name: self.value(x) if isinstance(x, np.ndarray) else x for name, x in fed.items()})


def decoded(files: dict[str, Runnable], ids: Any, new: int) -> Iterator[Any]:
    """Yield greedy tokens of optimum's files, as :func:`generate` does with those of relskew."""
    fed, tokens, length = {"encoder_attention_mask": np.ones_like(ids)}, ids, 0
    first = files["model"] if "model" in files else files["decoder_model"]
    if "encoder_model" in files:
        out = files["encoder_model"]({"input_ids": ids, "attention_mask": np.ones_like(ids)})
        fed["encoder_hidden_states"], tokens = out["last_hidden_state"], np.zeros_like(ids[:, :1])
    for name in (name for name in first.shapes if name.startswith("past")):
        sizes = [size if isinstance(size, int) else 0 for size in first.shapes[name][1:]]
        fed[name] = np.zeros((len(ids), *sizes), np.float32)
    for graph in (first, *[files.get("decoder_with_past_model", first)] * (new - 1)):
        length += tokens.shape[1]
        places = np.arange(length)[None].repeat(len(ids), 0)
        fed |= {"input_ids": tokens, "attention_mask": np.ones_like(places)}
        fed |= {"position_ids": places[:, -tokens.shape[1] :]}
        fed |= {name.replace("present", "past_key_values"): x for name, x in graph(fed).items()}
        tokens = np.asarray(fed["logits"])[:, -1:].argmax(-1)
        yield tokens


def one_thread(kind: Any = onnxruntime.SessionOptions) -> Any:
    options = kind()
    options.intra_op_num_threads = 1
    return options


class Jobs(Benchmark):
    """Whole jobs; of training steps the memory too."""

    page = "whole-jobs.md"
    unlike = (INT8, ROWS, CT2_INT8)
    tolerance = 2e-3
    small: ClassVar[Case] = {"size": 64}
    seconds = 3.0
    fallible = True

    def cases(self) -> Iterator[Case]:
        for model, job in JOBS.items():
            yield from ({"model": model, "batch": batch, "size": size, "new": new} for batch, size, new in job.cases)

    def contenders(self, case: Case) -> Iterable[str]:
        return USUAL, REPLACED, *(JOBS[case["model"]].others if case["new"] != STEP else ())

    def measures_of(self, case: Case) -> set[str]:
        return {"time", "memory"} if case["new"] == STEP else {"time"}

    def prepare(self, case: Case, contender: str) -> Call:
        name, batch, size, new = case.values()
        given = JOBS[name].given(batch, size)
        arrays = {key: x.numpy() for key, x in given.items()}
        if contender in (USUAL, REPLACED):
            return in_torch(pair(name)[contender == REPLACED], given, new)
        if contender in (CT2, CT2_INT8):
            return in_ctranslate2(name, "int8" if contender == CT2_INT8 else "float32", arrays["input_ids"], new)
        path = exported(name, contender, given) if contender in EXPORTED else baseline(name)
        if new and contender in EXPORTED:
            with patch.object(onnxruntime, "SessionOptions", one_thread):
                model = open_model(path if JOBS[name].task == TRANSLATING else path / "model.onnx")
            return lambda: generate(model, arrays["input_ids"], new)
        files = {file.stem: Runnable(file, contender) for file in path.glob("*.onnx")}
        if new:
            return lambda: np.concatenate([*decoded(files, arrays["input_ids"], new)], 1)
        encode = partial(files["model"], arrays)
        encode()  # onnxruntime takes the memory of later calls in the second one
        return lambda: np.asarray(next(iter(encode().values())))

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        """Compare results, or the share of tokens that differ; dropout makes every training step another one."""
        if case["new"] > 0 and first is not None and contender not in self.unlike:
            return float(np.mean(np.asarray(result) != np.asarray(first)))
        return None if case["new"] else super().check(case, contender, result, first)

    def texts(self, record: Record) -> dict[str, str]:
        """Return the tables of a record, and of the newest one of the same models on another processor."""

        def is_of_another(other: Record) -> bool:
            return other.machine["cpu"] != record.machine["cpu"] and {x.case["model"] for x in other.rows} <= {*JOBS}

        if not record.rows:
            return {"": "Nothing was measured yet."}
        tables = {"": self.of_record(record)}
        if (elsewhere := Record.newest("jobs", is_of_another)).rows:
            tables["another processor"] = self.of_record(elsewhere)
        return tables

    def of_record(self, record: Record) -> str:
        missing = left_out(record.rows, lambda row: f"{labelled(row.case)}, {row.contender}")
        return "\n\n".join([super().texts(record)[""], *missing])

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            for name, row in rows.items():
                yield labelled(case), name, as_time(row.cpu or 0.0) if name == USUAL else f"{row.ratio or 0.0:.2f}"
                if row.bytes is not None:
                    yield f"{labelled(case)}, memory", name, as_memory(row.bytes)

    def order(self, cell: tuple[str, str, str]) -> int:
        return (USUAL, REPLACED, *ENCODED, INT8, ROWS, CT2, CT2_INT8).index(cell[1])


def labelled(case: Case) -> str:
    model, batch, size, new = case.values()
    if new == STEP:
        return f"{model}, a training step of {batch} × {size}"
    return f"{model}, {size} {JOBS[model].unit}{f' in, {new} out' * bool(new)}{f', batch {batch}' * (batch > 1)}"

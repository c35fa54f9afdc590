# Written by tests/support/stubs.py from the signatures that the functions have.

from collections.abc import Callable, Iterable, Mapping, Sequence
from numpy import ndarray
from onnx import ModelProto
from os import PathLike
from pathlib import Path
from torch import Tensor
from torch.nn import Module
from typing import Any, Literal
from relskew_core._block.spec import BlockSpec
from relskew_core.export._check.inspect import Check as Check, Report as Report
from relskew_core.export._generate.encoded import Opened
from relskew_core.export._models.exported import ExportReport as ExportReport, ExportedGraph as ExportedGraph, GraphTensor as GraphTensor
from relskew_core.export._quantise.quantise import Weights
from relskew_core.export._translate.translation import TranslationTable as TranslationTable

__all__ = [
    "Check",
    "ExportReport",
    "ExportedGraph",
    "GraphTensor",
    "Report",
    "TranslationTable",
    "caches_in_place",
    "custom_ops_library",
    "decoder_to_onnx",
    "encoder_decoder_to_onnx",
    "generate",
    "open_model",
    "quantize",
    "register_exporters",
    "save",
    "to_onnx",
    "torch_to_onnx",
    "torch_translation_table",
    "validate",
    "without_operator",
]

def caches_in_place(
    model: ModelProto,
    *,
    past: str = "past_key_values.",
    present: str = "present.",
    cache_dtype: str | None = None,
) -> ModelProto: ...
def custom_ops_library() -> Path: ...
def decoder_to_onnx(
    model: Module,
    path: str | PathLike[str],
    *,
    memory: Tensor | Sequence[Tensor] | None = None,
    past: Callable[[int], Any] | None = None,
    in_place: bool = False,
    length: int | None = None,
    cache_dtype: Literal["int8"] | None = None,
    genai: Literal[False] | Mapping[str, Any] = False,
    opset: int | None = None,
    dtype: Any = None,
    tolerance: float | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    operator: bool = False,
    weights: Weights | None = None,
    check: bool = True,
    report: Callable[[ExportReport], object] | None = None,
    overwrite: bool = False,
    external_threshold: int = 1073741824,
) -> Path: ...
def encoder_decoder_to_onnx(
    model: Module,
    folder: str | PathLike[str],
    *,
    chunk_size: int | Literal["auto"] | None = "auto",
    opset: int | None = None,
    dtype: Any = None,
    tolerance: float | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    operator: bool = False,
    weights: Weights | None = None,
    check: bool = True,
    report: Callable[[ExportReport], object] | None = None,
    overwrite: bool = False,
    external_threshold: int = 1073741824,
) -> Path: ...
def generate(
    model: Any,
    prompt: Any,
    n: int,
    *,
    mask: Any = None,
    memory: Any = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | Sequence[int] = (),
    stream: Callable[[Any], object] | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> ndarray[Any, Any]: ...
def open_model(path: str | PathLike[str], *, providers: Sequence[Any] = ("CPUExecutionProvider",)) -> Opened: ...
def quantize(
    model: ModelProto | str | PathLike[str],
    path: str | PathLike[str],
    kind: Literal["dynamic", "static", "weights-8", "weights-4"] = "weights-8",
    *,
    inputs: Sequence[Mapping[str, ndarray]] | None = None,
    overwrite: bool = False,
) -> Path: ...
def register_exporters(*, chunk_size: int | Literal["auto"] | None = "auto", operator: bool = False) -> None: ...
def save(
    model: ModelProto,
    path: str | PathLike[str],
    *,
    overwrite: bool = False,
    external_threshold: int = 1073741824,
) -> Path: ...
def to_onnx(
    spec: BlockSpec,
    weights: Mapping[str, Any],
    *,
    profile: Literal["ort", "portable", "trt"] = "ort",
    opset: int | None = None,
    dtype: Any = None,
    max_length: int | None = None,
    past: bool = False,
    mask: bool = False,
    chunk_size: int | Literal["auto"] | None = "auto",
    device: Literal["cpu", "cuda"] | None = None,
    projections: bool = True,
    in_place: bool = False,
    segments: bool = False,
    operator: bool = False,
    name: str = "relative_attention_block",
) -> ModelProto: ...
def torch_to_onnx(
    model: Module,
    inputs: Any,
    path: str | PathLike[str] | None = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    vary: Mapping[str, Iterable[int]] | None = None,
    chunk_size: int | Literal["auto"] | None = "auto",
    opset: int | None = None,
    dtype: Any = None,
    tolerance: float | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    operator: bool = False,
    weights: Weights | None = None,
    check: bool = True,
    report: Callable[[ExportReport], object] | None = None,
    overwrite: bool = False,
    external_threshold: int = 1073741824,
) -> ModelProto: ...
def torch_translation_table(
    opset: int = 23,
    *,
    chunk_size: int | Literal["auto"] | None = "auto",
    operator: bool = False,
) -> TranslationTable: ...
def validate(
    model_or_path: ModelProto | str | PathLike[str],
    spec: BlockSpec,
    weights: Mapping[str, Any],
    *,
    providers: Sequence[str | tuple[str, Mapping[str, Any]]] = ("CPUExecutionProvider",),
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    runtimes: Sequence[Literal["onnxruntime", "reference", "openvino"]] = ("onnxruntime",),
    atol: float | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    time_limit: float | None = None,
    memory_limit: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report: ...
def without_operator(model_or_path: ModelProto | str | PathLike[str]) -> ModelProto: ...

"""Graphs in onnxruntime on CUDA: the numbers, and that every node on data runs there."""

from typing import Any

import onnxruntime
import pytest

from export_forms import PROFILES, exported, valid

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        CUDA not in onnxruntime.get_available_providers(), reason=f"onnxruntime {onnxruntime.__version__} has no {CUDA}"
    ),
]
FORMS = ["full", "full, grouped", "causal", "cache, mask", "cross", "clip, values", "bias alone", "core: causal"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_validate_passes_on_cuda(form: Any, profile: Any, dtype: str) -> None:  # pragma: gpu only
    report = valid(*exported(form, profile=profile, dtype=dtype), providers=["cuda"], batches=(2,))
    assert any("use_tf32=0" in check.detail for check in report.checks if check.name == "placement")


@pytest.mark.parametrize("options", [{"chunk_size": 3}, {"past": True, "in_place": True}], ids=["chunks", "in place"])
def test_validate_passes_chunks_and_caches_on_cuda(options: dict[str, Any]) -> None:  # pragma: gpu only
    valid(*exported("causal", **options), providers=["cuda"], batches=(2,))

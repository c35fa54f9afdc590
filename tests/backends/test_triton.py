"""The fused kernels without a GPU: interpreted, compiled, and which calls they take."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relskew_core import Span, backends
from relskew_core._kernel.call import Arguments, Operands, Options
from relskew_core._kernel.problem import problem
from relskew_core._positions.visibility import Visibility
from relskew_core.backends._path import PORTABLE
from relskew_core.backends._torch.triton import choice

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize(("tests", "measured"), [("triton_kernels.py", False), ("triton_host.py", True)])
def test_interpreted(tests: str, measured: bool) -> None:
    """In a separate process, because importing triton decides whether kernels are interpreted.

    Coverage, which doubles the interpreter's time, is measured of what drives the kernels.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {name: x for name, x in os.environ.items() if measured or not name.startswith("COVERAGE_")}
    environment["TRITON_INTERPRET"] = "1"
    path = Path(__file__).parents[1] / "support" / tests
    result = subprocess.run([*command, path], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def operands(width: int = 8, dtype: torch.dtype = torch.float16, **others: Any) -> Operands:
    x = torch.empty((2, 3, 4, width), dtype=dtype, device="meta")
    return Operands(**{**dict.fromkeys(Operands._fields), **dict.fromkeys("qkv", x), **others})


@pytest.mark.parametrize(("dtype", "width"), list(choice.WIDEST.items()), ids=str)
def test_widths_are_those_of_the_launch_configurations(dtype: torch.dtype, width: int) -> None:
    from relskew_core.backends._torch.triton.call import tiles

    assert choice.refusal_of_operands(operands(width, dtype)) is None
    assert tiles(dtype, width) is not None
    assert tiles(dtype, width + 1) is None
    reason = choice.refusal_of_operands(operands(width + 1, dtype))
    assert reason == f"the fused kernels take heads of width {width} in {dtype}, not {width + 1}"


def test_tiles_fit_the_device() -> None:
    from relskew_core.backends._torch.triton.call import Tile, fitted

    tile = Tile(64, 8, 2)
    assert fitted(tile, 9, 227 * 2**10) == tile
    assert fitted(tile, 8, 163 * 2**10) == Tile(32, 4, 2)
    assert fitted(Tile(32, 8, 2), 8, 99 * 2**10) == Tile(32, 8, 1)


@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # the default changes with Triton 3.10
@pytest.mark.parametrize(
    ("dtype", "width", "terms", "capability"),
    [
        (torch.bfloat16, 64, "full", 90),
        (torch.bfloat16, 64, "full", 80),
        (torch.float16, 128, "full", 90),
        (torch.float32, 64, "full", 90),
        (torch.bfloat16, 128, "everything", 90),  # the two that need the most shared memory
        (torch.bfloat16, 256, "everything", 86),
    ],
    ids=str,
)
def test_kernels_compile_for_devices_that_are_not_here(
    dtype: torch.dtype, width: int, terms: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu_registers

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call = gpu_registers.call_of(dtype, width, terms, capability)
    for name, kernel, arguments in gpu_registers.launches(call):
        registers, spilled_bytes, shared_bytes = gpu_registers.compiled(kernel, arguments, capability)
        assert shared_bytes <= gpu_registers.SHARED_BYTES[capability]
        assert registers <= 255
        if name == "forward" and terms == "full":
            assert spilled_bytes == 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (operands(dtype=torch.float64), "float16, bfloat16 and float32, not torch.float64"),
        (operands(v=torch.empty((2, 3, 4, 300), device="meta")), "width 256 in torch.float16, not 300"),
        (operands(rel_q=torch.empty((2, 3, 4, 400), device="meta")), "width 256 in torch.float16, not 400"),
        (operands(q=torch.empty((2**13, 2**3, 4, 8), dtype=torch.float16, device="meta")), "together, not 65536"),
        (operands(k=torch.empty((1, 3, 2**24, 2**7), dtype=torch.float16, device="meta")), "in 32 bits"),
        (operands(mask=torch.empty((2**16, 2**15), dtype=torch.bool, device="meta")), "in 32 bits"),
        (operands(mask=torch.empty((2**16, 2**15), dtype=torch.bool, device="meta").mT), "in 32 bits"),
    ],
    ids=["dtype", "values", "rel_q", "heads", "length", "mask", "mask by columns"],
)
def test_refusals_say_why(given: Operands, reason: str) -> None:
    assert reason in str(choice.refusal_of_operands(given))


@pytest.mark.parametrize("offset", [-(2**30), 2**30])
def test_offsets_past_32_bits_are_refused(offset: int) -> None:
    def options(offset: int) -> Options:
        return Options(Span.clipped(2), Visibility(4, 4, offset), 1.0, 1.0)

    assert choice.refusal_of_options(options(offset // 2)) is None
    assert str(offset) in str(choice.refusal_of_options(options(offset)))


def test_refuses_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert choice._refusal_of_device(0) == "triton is not installed"


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch with CUDA")
@needs_triton
def test_refuses_where_torch_is_built_without_cuda() -> None:
    assert choice._refusal_of_device(0) == "the fused kernels are for CUDA, and this is another build of torch"


def test_native_never_falls_back_silently() -> None:
    x = torch.ones((1, 2, 3), device="meta")
    call = problem(Arguments(x, x, x))
    assert backends.path("attention", call, "auto") is PORTABLE
    with pytest.raises(ValueError, match="no native path for this call: torch has one for arrays on CPUs and CUDA"):
        backends.path("attention", call, "native")

"""The fused kernels without a GPU: interpreted, compiled, and which calls they take."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from relskew_core import Span
from relskew_core._kernel.call import Arguments, Operands, Options
from relskew_core._positions.visibility import Visibility
from relskew_core.backends._torch.triton import choice
from relskew_core.backends._torch.triton.call import Limits, Tile, fitted, tiles
from relskew_core.backends._torch.triton.kernels import shuffles

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what compiles kernels for devices that are not here, into a separate cache."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return importlib.import_module("triton_elsewhere")


@needs_triton
@pytest.mark.parametrize(("tests", "measured"), [("triton_kernels.py", False), ("triton_host.py", True)])
def test_kernels_in_the_interpreter_equal_the_formula(tests: str, measured: bool) -> None:
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
    assert choice.refusal_of_operands(operands(width, dtype)) is None
    for major in (8, 9):
        assert tiles(dtype, width, Limits(major, 2**18)) is not None
        assert tiles(dtype, width + 1, Limits(major, 2**18)) is None
    reason = choice.refusal_of_operands(operands(width + 1, dtype))
    assert reason == f"the fused kernels take heads of width {width} in {dtype}, not {width + 1}"


def test_tiles_fit_the_device() -> None:
    tile = Tile(64, 4, 2)
    assert fitted(tile, 64, Limits(9, 227 * 2**10)) == Tile(64, 4, 2, shuffles=True)
    assert fitted(tile, 64, Limits(9, 227 * 2**10, compiles=False)) == tile
    assert fitted(Tile(32, 8, 2), 256, Limits(8, 99 * 2**10)) == Tile(32, 8, 1)
    assert fitted(Tile(32, 4, 2), 128, Limits(12, 99 * 2**10)) == Tile(32, 4, 2)
    for device in (Limits(8, 163 * 2**10), Limits(10, 227 * 2**10)):  # only warpgroup products leave enough registers
        for dtype, width in choice.WIDEST.items():
            assert all(tile.size < 64 and not tile.shuffles for tile in tiles(dtype, width, device) or ())


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # the default changes with Triton 3.10
@pytest.mark.parametrize(("dtype", "width", "terms", "capability"), [
    (torch.bfloat16, 64, "full", 90), (torch.bfloat16, 64, "full", 80), (torch.float16, 128, "full", 90),
    (torch.float32, 64, "full", 90),
    # the three that need the most shared memory
    (torch.bfloat16, 128, "everything", 90), (torch.bfloat16, 256, "everything", 86),
    (torch.bfloat16, 128, "everything", 89),
    (torch.bfloat16, 64, "keys", 90), (torch.bfloat16, 64, "positions", 90),
    (torch.bfloat16, 128, "keys, positions", 89), (torch.bfloat16, 64, "full", 100), (torch.bfloat16, 64, "full", 120),
    (torch.bfloat16, 64, "full", "gfx942"), (torch.float32, 128, "everything", "gfx90a"),
    (torch.float16, 256, "everything", "gfx950"),
], ids=str)  # fmt: skip
def test_kernels_compile_for_devices_that_are_not_here(
    dtype: torch.dtype, width: int, terms: str, capability: int | str, elsewhere: Any
) -> None:
    queries, group = (1, 1) if terms == "full" else (3, 4)
    x, table = (torch.empty((*lead, 2 * group, 4096, width), dtype=dtype) for lead in ((2,), ()))
    few = Arguments(x[:, :, :queries], x[:, :2], x[:, :2], table, Span.causal(4096), rel_v=table, causal=True,
                    offset=4096 - queries)  # fmt: skip
    pool, places = torch.empty((512, 16, 2, width), dtype=dtype), torch.empty((2, 256), dtype=torch.int32)
    pages = (pool, pool, places, places[0, :2]) if terms == "full" else None
    launched = elsewhere.launches(few, capability, pages)
    launched |= elsewhere.launches(elsewhere.arguments_of(dtype, width, terms), capability)
    assert {"decoding", "forward", "delta", "keys", "queries"} <= set(launched)
    for name, (kernel, given) in launched.items():
        registers, spilled_bytes, shared_bytes = elsewhere.resources(elsewhere.compiled(kernel, given, capability))
        assert shared_bytes <= elsewhere.SHARED_BYTES[capability]
        assert registers <= (255 if isinstance(capability, int) else 512)
        if name in ("forward", "decoding") and terms == "full":
            assert spilled_bytes == 0


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_calls_of_other_lengths_need_no_other_programs(elsewhere: Any) -> None:
    """Of one and of several queries, after keys whose number is a multiple of 16 or not."""
    compiled, table = dict[str, set[str]](), torch.empty((4, 300, 64), dtype=torch.bfloat16)
    for keys, few in itertools.product((255, 256, 257), (True, False)):
        k = torch.empty((1, 2, keys, 64), dtype=torch.bfloat16)
        q = k.new_empty((1, 4, 1 if few else keys - 100, 64))
        call = Arguments(q, k, k, table, Span.causal(300), causal=True, offset=keys - q.shape[2])
        for name, (kernel, given) in elsewhere.launches(call, 90).items():
            if name in ("decoding", "forward"):
                compiled.setdefault(name, set()).add(elsewhere.compiled(kernel, given, 90).hash)
    assert {name: len(programs) for name, programs in compiled.items()} == {"decoding": 1, "forward": 1}


LAYOUT = "{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}"
"""The layout of a product of 64 × 64 by four warps, for which shuffles are written."""


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("given",
                         [{"rel_k": 2047}, {"rel_k": 1024, "causal": True, "softcap": 30.0}, {"rel_bias": 2047},
                          {"rel_bias": 2047, "mask": "additive"}, {"rel_v": 9, "span": Span.clipped(4)},
                          {"rel_k": 9, "rel_v": 9, "rel_bias": 9, "rel_q": True, "span": Span.clipped(4),
                           "block_size": 16},
                          {"rel_k": 9, "mask": "boolean", "span": Span.clipped(4), "window": (20, 3)},
                          {"rel_k": 2047, "key_table": 2047}, {"key_table": 9, "span": Span.clipped(4)}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (torch.float16, 40), (torch.bfloat16, 128)])
def test_shuffles_get_the_layout_that_they_are_written_for(
    given: dict[str, Any], dtype: torch.dtype, width: int, elsewhere: Any
) -> None:
    heads, length = 2, 1024
    x = torch.empty((1, heads, length, width), dtype=dtype)
    masks = {"additive": torch.empty((length, length), dtype=dtype), "boolean": torch.empty((length,)) > 0}
    arrays: dict[str, Any] = {
        name: torch.empty((heads, rows) if name == "rel_bias" else (heads, rows, width), dtype=dtype)
        for name, rows in given.items() if name in ("rel_k", "rel_v", "rel_bias", "key_table")
    }  # fmt: skip
    arrays |= {"rel_q": x} if "rel_q" in given else {}
    arrays |= {"mask": masks[given["mask"]]} if "mask" in given else {}
    launched = elsewhere.launches(Arguments(x, x, x, **{**given, **arrays}), 90)
    assert launched["forward"][1]["x"].SHUFFLES.value
    for name, (kernel, arguments) in launched.items():
        code = elsewhere.compiled(kernel, arguments, 90).asm["ttgir"]
        assert not overwritten(code)
        if name in ("delta", "merge", "tables"):
            continue
        layouts = dict(re.findall(r"^(#\w+) = #ttg\.nvidia_mma<(.*)>$", code, re.MULTILINE))
        used = re.findall(r"elementwise_inline_asm .*?\} %.*? : (.*?) loc\(", code, re.DOTALL)
        assert used
        assert {layouts[layout] for types in used for layout in re.findall(r"(#\w+)>", types)} == {LAYOUT}
        # and of all rows: Triton takes what elements are made of out of a row that repeats
        assert {shape for types in used for shape in re.findall(r"tensor<(\w+)x[fi]32", types)} == {"64x64"}


def overwritten(code: str) -> list[str]:
    """Return the buffers that a loop loads into while a product of warps, for which nothing waits, may read them.

    With several stages a buffer is for one stage, or has a place for each; those of one place are the dangerous ones.
    """
    buffers, views, read, found = set(), dict[str, str](), set[str](), []

    def buffer(name: str) -> str:
        return buffer(views[name]) if name in views else name

    for line in code.splitlines():
        if match := re.match(r"\s*(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x", line):
            buffers.add(match[1])
        elif match := re.match(r"\s*(%\S+) = ttg\.memdesc_\w+ (%[\w#]+)", line):
            views[match[1]] = match[2]
        elif "warp_group_dot_wait" in line:
            read = read if "pendings = 0" not in line else set()
        elif match := re.search(r"warp_group_dot (%[\w#]+), (%[\w#]+).*isAsync", line):
            read |= {buffer(name) for name in match.groups()} & buffers
        elif match := re.search(r"async_copy_global_to_local %[\w#]+, (%[\w#]+)", line):
            found += [buffer(match[1])] if buffer(match[1]) in read else []
    return found


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_check_of_buffers_finds_what_two_stages_of_keys_overwrite(elsewhere: Any) -> None:
    x, table = torch.empty((1, 2, 1024, 64), dtype=torch.bfloat16), torch.empty((2, 9, 64), dtype=torch.bfloat16)
    kernel, arguments = elsewhere.launches(Arguments(x, x, x, table, Span.clipped(4)), 90)["keys"]
    for stages in (1, 2):
        code = elsewhere.compiled(kernel, {**arguments, "num_stages": stages}, 90).asm["ttgir"]
        assert bool(overwritten(code)) == (stages == 2)


def test_shuffles_skew_and_unskew() -> None:
    lane, (earlier, later, tile) = np.arange(32), np.random.default_rng(0).random((3, 64, 64))
    i, c = np.arange(64)[:, None], np.arange(64)[None, :]
    turned = tile[i, (i + c) % 64]
    windows = np.where(i + c >= 64, turned, 0), np.where(i + c >= 64, 0, turned)
    skewed = np.concatenate([earlier, later], 1)[i, 64 + c - i]
    for warp in range(4):

        def held(name: str, x: Any, warp: int = warp) -> dict[str, Any]:
            rows = 16 * warp + lane // 4
            return {f"{name}{k}": x[rows + 8 * s, 8 * n + 2 * (lane % 4) + b] for k, n, s, b in shuffles.places()}

        read = {"%tid.x": lane + 32 * warp, "zero": np.zeros(32), **held("tile", tile), **held("earlier", earlier)}
        read |= held("later", later)
        for steps, results in ((shuffles.skew, held("out", skewed)),
                               (shuffles.unskew, held("earlier", windows[0]) | held("later", windows[1]))):  # fmt: skip
            found = executed((*shuffles.SETUP, *steps(warp)), dict(read))
            for name, expected in results.items():
                np.testing.assert_array_equal(found[name], expected)


def executed(steps: Iterable[Any], registers: dict[str, Any]) -> dict[str, Any]:
    """Execute instructions for the 32 threads of a warp."""
    functions: dict[str, Callable[..., Any]] = {
        "mov": lambda x: x, "and": np.bitwise_and, "or": np.bitwise_or, "shr": np.right_shift, "add": np.add,
        "sub": np.subtract, "setp.ne": np.not_equal, "setp.ge": np.greater_equal, "setp.lt": np.less,
        "selp": lambda x, y, which: np.where(which, x, y), "shfl": lambda x, sender: x[sender],
    }  # fmt: skip
    for name, target, sources in steps:
        given = (int(x) if x.isdigit() else registers[x] for x in sources)
        registers[target] = functions[name](*given)
    return registers


@pytest.mark.parametrize(("given", "reason"), [
    (operands(dtype=torch.float64), "float16, bfloat16 and float32, not torch.float64"),
    (operands(v=torch.empty((2, 3, 4, 300), device="meta")), "width 256 in torch.float16, not 300"),
    (operands(rel_q=torch.empty((2, 3, 4, 400), device="meta")), "width 256 in torch.float16, not 400"),
    (operands(q=torch.empty((2**13, 2**3, 4, 8), dtype=torch.float16, device="meta")), "together, not 65536"),
    (operands(k=torch.empty((1, 3, 2**24, 2**7), dtype=torch.float16, device="meta")), "in 32 bits"),
    (operands(mask=torch.empty((2**16, 2**15), dtype=torch.bool, device="meta")), "in 32 bits"),
    (operands(mask=torch.empty((2**16, 2**15), dtype=torch.bool, device="meta").mT), "in 32 bits"),
], ids=["dtype", "values", "rel_q", "heads", "length", "mask", "mask by columns"])  # fmt: skip
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


def test_refuses_devices_of_amd_for_which_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    for name in (*choice.AMD, "gfx1100"):
        properties = SimpleNamespace(gcnArchName=f"{name}:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, found=properties: found)
        reason = choice._refusal_of_device(0)
        assert (reason is None) == (name in choice.AMD)
    assert reason == "the fused kernels compile for gfx90a, gfx942, gfx950 of AMD, this device is gfx1100"


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch with CUDA")
@needs_triton
def test_refuses_where_torch_is_built_without_cuda() -> None:
    assert choice._refusal_of_device(0) == "the fused kernels are for CUDA and ROCm, and this is another build of torch"

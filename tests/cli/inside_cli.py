"""The command line from inside: errors in one line, missing extras, panels of help, tables that fit."""

import errno
import inspect
import io
import json
import platform
import re
import shlex
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import typer
from cli.commands import Capture, error_of, output_of, python, relskew
from rich.console import Console
from typer.main import get_command

from relskew_core._array.extras import compile_line, to_install
from relskew_core._reference import reference_block
from relskew_core.backends import _compiled
from relskew_core.cli import _draw, _layer, _verify
from relskew_core.cli._app import app
from relskew_core.cli._console import reason
from relskew_core.cli._export import advice
from relskew_core.cli._options import PANELS, BlockOptions
from relskew_core.cli._verify import Finding, Verification
from relskew_core.export import Check, Report


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:

    def raising() -> None:
        raise error

    monkeypatch.setattr("relskew_core.cli._libraries.gather", raising)


OF_EXPORT = f"relskew_core.export needs ml_dtypes: {to_install('onnx')}"


@pytest.mark.parametrize(("error", "told"), [
    (KeyError("two\nlines"), "KeyError: 'two\\nlines'\n"),
    (ModuleNotFoundError("No module", name="numpy.core"), f"this needs numpy: {to_install('numpy')}\n"),
    (ModuleNotFoundError(OF_EXPORT, name="ml_dtypes"), f"relskew: error: {OF_EXPORT}\n"),
], ids=["other", "no NumPy", "no extra"])  # fmt: skip
def test_an_error_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Any, told: str) -> None:
    fail(monkeypatch, error)
    assert error_of(capsys, "info").endswith(told)


@pytest.mark.parametrize(("error", "status"), [
    (KeyboardInterrupt(), 130), (typer.Abort(), 130), (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141),
], ids=repr)  # fmt: skip
def test_an_interruption_or_a_closed_pipe_ends_with_its_status_and_prints_nothing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # typer replaces both when a pipe is closed
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    fail(monkeypatch, error)
    assert relskew("info") == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_an_interrupted_import_of_the_commands_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("relskew_core.cli.importlib", SimpleNamespace(import_module=interrupted))
    assert relskew("info") == 130


@pytest.mark.parametrize(("part", "package", "extra"), [
    *(("export", package, "onnx") for package in ("onnx", "ml_dtypes", "numpy")),
    ("layers.torch", "torch", "torch"),
    *((f"layers.{name}", package, name) for name in ("flax", "equinox") for package in (name, "jax")),
    *((f"layers.{name}", name, name) for name in ("keras", "mlx")),
    ("huggingface", "torch", "torch"),
])  # fmt: skip
def test_importing_a_part_names_its_extra(part: str, package: str, extra: str) -> None:
    done = python("-c", f"import sys; sys.modules['{package}'] = None; import relskew_core.{part}")
    assert (
        done.stderr.splitlines()[-1] == f"ModuleNotFoundError: relskew_core.{part} needs {package}: {to_install(extra)}"
    )


def test_translations_alone_need_torch() -> None:
    missing = "sys.modules['torch'] = sys.modules['onnxscript'] = sys.modules['onnx_ir'] = None"
    done = python(
        "-c", f"import sys; {missing}; import relskew_core.export as e; print(1); e.torch_translation_table()"
    )
    assert (done.stdout, done.returncode) == ("1\n", 1)
    assert re.search(r"ModuleNotFoundError: .*(torch|onnxscript)", done.stderr)


def test_a_broken_export_is_not_called_a_missing_extra() -> None:
    done = python("-c", "import sys; sys.modules['relskew_core.export._form.plan'] = None; import relskew_core.export")
    assert (done.returncode, "pip install" in done.stderr) == (1, False)


def test_without_typer_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; from relskew_core.cli import main; sys.exit(main([]))"
    done, told = python("-c", program), f"relskew: error: the command line needs typer: {to_install('cli')}\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_without_rich_in_this_process(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "relskew_core.cli._app", raising=False)
    monkeypatch.delitem(sys.modules, "relskew_core.cli._console", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert f"rich.console: {to_install('cli')}" in error_of(capsys, "info")


def test_a_broken_installation_is_not_called_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "relskew_core.cli._app", None)
    with pytest.raises(ModuleNotFoundError, match="_app"):
        relskew("info")


def test_reasons_are_one_line_and_name_files() -> None:
    assert reason(FileNotFoundError(2, "No such file or directory", "a.npz")) == "a.npz: No such file or directory"
    assert reason(ValueError("two\n  lines")) == "two lines"
    assert reason(KeyError("name")) == "KeyError: 'name'"
    assert reason(AssertionError()) == "AssertionError"


@pytest.mark.parametrize(("levels", "told"), [
    (["base", "x86-64-v3"], "compiled kernels: for x86-64-v3, every floating dtype on CPUs\n"),
    (["base"], f"compiled kernels: for any {platform.machine()}, every floating dtype on CPUs\n"),
    (None, "compiled kernels: none: no C++ compiler served at installation, or relskew was made without them "
           "(RELSKEW_PURE=1, a wheel for every platform); with a compiler, "
           f"`{compile_line()}` in a clone of relskew compiles them\n"),
], ids=["one level", "base", "none"])  # fmt: skip
def test_info_names_kernels(capsys: Capture, monkeypatch: pytest.MonkeyPatch, levels: Any, told: str) -> None:
    module = None if levels is None else SimpleNamespace(LEVELS=levels, PROCESSOR=levels[-1])
    monkeypatch.setitem(sys.modules, "relskew_core.backends._compiled._kernels", module)
    assert told in output_of(capsys, "info")
    assert f"compiled kernels: {json.loads(output_of(capsys, 'info', '--json'))['kernels']}".startswith(told.strip())


def test_info_says_why_kernels_cannot_load(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / f"_kernels{EXTENSION_SUFFIXES[0]}").write_bytes(b"of another machine")
    monkeypatch.delitem(sys.modules, "relskew_core.backends._compiled._kernels", raising=False)
    monkeypatch.setattr(_compiled, "__path__", [str(tmp_path)])
    told = output_of(capsys, "info")
    assert "compiled kernels: none: what was compiled at installation cannot be loaded: " in told
    assert str(tmp_path) in told
    assert f"`{compile_line()}` in a clone of relskew compiles them anew\n" in told


def test_every_whole_number_of_the_command_line_has_a_limit() -> None:
    """Of these three, any number is used or rejected by the code behind them."""
    commands = [*app.registered_commands, *_draw.app.registered_commands]
    unbounded = set()
    for command in commands:
        for name, parameter in inspect.signature(command.callback or print, eval_str=True).parameters.items():
            kind, *about = get_args(parameter.annotation) or (None,)
            if kind in (int, int | None, list[int] | None) and about[0].max is None:
                unbounded.add(name)
    assert unbounded == {"seed", "opset", "head"}


def commands() -> dict[str, Any]:
    top = get_command(app)
    found: dict[str, Any] = {}
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {part}": each for part, each in inner.items()}
    return found


@pytest.mark.parametrize("name", commands())
def test_help_has_an_example_that_the_command_takes(name: str, capsys: Capture) -> None:
    command = commands()[name]
    prefix, _, arguments = command.epilog.partition(f"relskew {name} ")
    assert prefix == "Example: "
    context = command.make_context(name, shlex.split(arguments))
    assert any(value != option.default for option in command.params for value in [context.params[option.name]])
    told = output_of(capsys, *name.split(), "--help")
    assert command.epilog in told
    assert "<bool>" not in told.lower()


@pytest.mark.parametrize("name", ["export", "draw weights", "draw span", "draw call"])
def test_help_has_panels(name: str, capsys: Capture) -> None:
    told = output_of(capsys, *name.split(), "--help")
    tables, seen = told.index("─ Tables ─"), told.index("─ Which keys a query sees ─")
    assert tables < told.index("--length", tables) < seen < told.index("--causal ", seen)
    other = output_of(capsys, "validate", "--help")
    assert other.count("╭─") == other.count("─ Arguments ─") + 1  # in one list


def test_every_option_of_a_panel_exists() -> None:
    there = {option.name for command in commands().values() for option in command.params}
    assert {name for names in PANELS.values() for name in names} <= there


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_tables_fit_the_terminal(width: int) -> None:
    """And nothing in them is cut: columns that there is no room for are named below."""
    console = Console(file=io.StringIO(), width=width)
    findings = [
        Finding("onnxruntime", "1.31", "cuda", "bfloat16", case, 1.23e-4, 2e-2, 0.0123, True)
        for case in ("causal", "clip+values")
    ]
    _verify.show(Verification(findings, []), console, every=True)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, told.splitlines())) <= width
    assert "…" not in told
    assert width < 60 or told.count("1.2e-04") == 2
    assert ("cuda" in told) == ("more: device" not in " ".join(told.split())) == (width >= 100)


def options(**given: object) -> BlockOptions:
    return BlockOptions(embed_dim=8, num_heads=2, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [
    pytest.param({"length": 6, "causal": True}, id="causal"),
    pytest.param({"clip": 2, "rel_values": True, "rel_bias": True, "no_bias": True}, id="clip"),
    pytest.param({"length": 6, "causal": True, "num_kv_heads": 1, "sinks": True, "shared_table": True}, id="sinks"),
    pytest.param({"window": "2,1"}, id="window"),
    pytest.param({"length": 6, "cross": True}, id="cross"),
])  # fmt: skip
def test_the_weights_are_those_of_the_block(given: dict[str, object]) -> None:
    """They attend over the block's own values to what the reference in float64 gives."""
    spec, arrays, origin = _layer.block_of(options(**given), None, None, "", 3)
    assert origin == "random, seed 3"
    x, _ = _layer.read_input("input", None, spec, 5)
    memory = np.random.default_rng(1).standard_normal((6, 8)) if spec.cross else None
    weights = _layer.weights_of(spec, arrays, x, memory)
    assert weights.shape == (2, 5, 6 if spec.cross else 5)
    v = (x if memory is None else memory) @ arrays["v_proj.weight"].T + arrays.get("v_proj.bias", 0.0)
    v = v.reshape(len(v), spec.num_kv_heads, spec.head_dim).transpose(1, 0, 2)
    heads = weights @ np.repeat(v, 2 // spec.num_kv_heads, axis=0)
    if spec.rel_values:
        i, j = np.indices(weights.shape[1:])
        heads = heads + np.einsum("hij,hijd->hid", weights, arrays["rel_v"][:, np.clip(j - i, -2, 2) + 2])
    y = heads.transpose(1, 0, 2).reshape(5, -1) @ arrays["out_proj.weight"].T + arrays.get("out_proj.bias", 0.0)
    batched = None if memory is None else memory[None]
    np.testing.assert_allclose(y, reference_block(spec, arrays, x[None], batched)[0][0], atol=1e-12)


def test_advice_names_the_cause_before_its_consequences() -> None:
    def failing(*names: str) -> list[str]:
        return advice(Report(tuple(Check(name, "", "", "", False) for name in names)))

    assert failing() == []
    (line,) = failing("y", "optimiser off", "weights")
    assert line.startswith("weights: ")
    (line,) = failing("y")
    assert line.startswith("y: the weights are right")

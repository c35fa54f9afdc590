"""What people read of the command line: help in panels with examples, what to do about a mistake, tables that fit."""

from __future__ import annotations

import io
import shlex
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

from relskew_core.cli import _verify, main
from relskew_core.cli._app import app
from relskew_core.cli._options import PANELS
from relskew_core.cli._verify import Finding, Verification


def commands() -> dict[str, Any]:
    """Return all commands by the words that run them."""
    top = get_command(app)
    found: dict[str, Any] = {}
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {part}": each for part, each in inner.items()}
    return found


@pytest.mark.parametrize("name", commands())
def test_help_has_an_example_that_the_command_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = commands()[name]
    prefix, _, arguments = command.epilog.partition(f"relskew {name} ")
    assert prefix == "Example: "
    context = command.make_context(name, shlex.split(arguments))
    assert any(value != option.default for option in command.params for value in [context.params[option.name]])
    assert main([*name.split(), "--help"]) == 0
    told = capsys.readouterr().out
    assert command.epilog in told


@pytest.mark.parametrize("name", ["export", "draw weights", "draw span", "draw call"])
def test_help_has_panels(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    told = capsys.readouterr().out
    tables, seen = told.index("─ Tables ─"), told.index("─ Which keys a query sees ─")
    assert tables < told.index("--length", tables) < seen < told.index("--causal ", seen)


@pytest.mark.parametrize("name", ["validate"])
def test_options_of_other_commands_are_in_one_list(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert told.count("╭─") == told.count("─ Arguments ─") + 1


def test_every_option_of_a_panel_exists() -> None:
    there = {option.name for command in commands().values() for option in command.params}
    assert {name for names in PANELS.values() for name in names} <= there


@pytest.mark.parametrize(
    ("argv", "help_of"),
    [
        (["export", "x.onnx"], "relskew export --help"),
        (["export", "x.onnx", "--embed-dim", "8", "--num-heads", "2"], "relskew export --help"),
        (["draw"], "relskew draw --help"),
        (["draw", "span"], "relskew draw span --help"),
        (["draw", "spam"], "relskew draw --help"),
        (["validate"], "relskew validate --help"),
        (["nonsense"], "relskew --help"),
    ],
    ids=str,
)
def test_what_is_missing_points_to_the_help(argv: list[str], help_of: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.endswith(f"; see {help_of}\n")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_tables_fit_the_terminal(width: int) -> None:
    """And nothing in them is cut: columns that there is no room for are named below."""
    console = Console(file=io.StringIO(), width=width)
    findings = [
        Finding("onnxruntime", "1.31", "cuda", "bfloat16", case, 1.23e-4, 2e-2, 0.0123, 123 << 20, True)
        for case in ("causal", "clip+values")
    ]
    _verify.show(Verification(findings, []), console, every=True)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, told.splitlines())) <= width
    assert "…" not in told
    assert width < 60 or told.count("1.2e-04") == 2
    assert ("123.0 MiB" in told) == ("peak memory, device" not in " ".join(told.split())) == (width >= 100)

"""The commands and their options; each imports its implementation when it runs."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from relskew_core._array.extras import to_install
from relskew_core.cli import _draw
from relskew_core.cli._console import CliError, count, need, output, progress, reason
from relskew_core.cli._options import (
    LARGEST,
    BlockOptions,
    Command,
    Names,
    Prefix,
    Program,
    Seed,
    Weights,
    sized,
    takes,
)

app = typer.Typer(
    name="relskew",
    help="Attention with relative positions: verify this machine, export a block to ONNX, validate it and draw it.",
    cls=Program,
    pretty_exceptions_enable=False,
)
app.add_typer(_draw.app, name="draw")
EXTRAS = ("numpy", "torch", "onnx", "onnxruntime")
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def run(argv: list[str]) -> int:
    command = typer.main.get_command(app)
    if isinstance(sys.stdout, io.TextIOWrapper):  # "…" and "−" do not exist in every encoding
        sys.stdout.reconfigure(errors="replace")
    try:
        status = command.main(args=argv, prog_name="relskew", standalone_mode=False)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer's status is 1, which means that a check failed
            return 141
        raise
    except typer.Abort:
        print("relskew: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        line = f"this needs {package}: {to_install(package) if package in EXTRAS else f'pip install {package}'}"
        print(f"relskew: error: {reason(error) if 'pip install' in str(error) else line}", file=sys.stderr)
        return 2
    except Exception as error:
        # A usage error adds the option to its formatted message.
        message: Callable[[], str] | None = getattr(error, "format_message", None)
        line = " ".join((reason(error) if message is None else message()).split())
        if message is not None or line.endswith("must be given"):
            line = f"{line.removesuffix('.')}; see {_help_of(command, argv)}"
        print(f"relskew: error: {line}", file=sys.stderr)
        return 2
    return int(status or 0)


def _help_of(command: Any, argv: list[str]) -> str:
    words = ["relskew"]
    for word in argv:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        words.append(word)
    return " ".join((*words, "--help"))


@app.callback(invoke_without_command=True)
def about(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Print the help, or the version."""
    if version:
        from relskew_core import __version__

        print(f"relskew {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command(cls=Command, epilog="Example: relskew info --json")
def info(as_json: Json = False) -> int:
    """Show versions, array libraries, devices, native paths and ONNX runtimes."""
    from relskew_core.cli import _libraries

    facts = _libraries.gather()
    if as_json:
        _print_json(facts)
    else:
        _libraries.show_facts(facts, output())
    return 0


@app.command(cls=Command, epilog="Example: relskew verify --library torch --dtype float16")
def verify(
    library: Annotated[Names, typer.Option(help="Only this library or runtime; can be repeated.")] = None,
    dtype: Annotated[Names, typer.Option(help="Only this dtype, with every case; can be repeated.")] = None,
    case: Annotated[Names, typer.Option(help="Only this case; can be repeated.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every case in every dtype, each on a separate line.")] = False,
    as_json: Json = False,
) -> int:
    """Run a block on every installed array library and ONNX runtime, and compare it with float64."""
    from relskew_core.cli import _verify

    what = _verify.plan(tuple(library or ()), tuple(dtype or ()), tuple(case or ()), every=every)
    with progress("verify") as advance:
        found = _verify.verify(what, advance)
    if as_json:
        _print_json(found.to_dict())
    else:
        _verify.show(found, output(), every=every or bool(case))
    return 0 if found.ok else 1


@app.command(cls=Command, epilog="Example: relskew export block.onnx --embed-dim 64 --num-heads 4 --length 256")
@takes(BlockOptions)
def export(
    block: BlockOptions,
    path: Annotated[Path, typer.Argument(help="Where to write the model.")],
    weights: Weights = None,
    prefix: Prefix = "",
    seed: Seed = None,
    profile: Annotated[str, typer.Option(help="Runtimes that the graph is for: ort, portable or trt.")] = "ort",
    opset: Annotated[int | None, typer.Option(help="ONNX opset; by default that of the profile.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float16, bfloat16, float32 or float64; by default that of the weights.")
    ] = None,
    max_length: Annotated[int | None, sized("Trim the table to inputs up to this length.")] = None,
    past: Annotated[bool, typer.Option("--past", help="With a cache of keys and values, for decoding.")] = False,
    in_place: Annotated[bool, typer.Option("--in-place", help="With --past: a cache of one length, opset 24.")] = False,
    mask: Annotated[bool, typer.Option("--mask", help="With a boolean mask as an input.")] = False,
    segments: Annotated[
        bool, typer.Option("--segments", help="With segments as an input: documents in one row do not see each other.")
    ] = False,
    no_projections: Annotated[
        bool, typer.Option("--no-projections", help="Export attention of q, k and v, without projections.")
    ] = False,
    chunk_size: Annotated[int | None, sized("Process this many queries in each step of a loop.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where the model will run; cuda takes no loop over chunks of queries.")
    ] = None,
    operator: Annotated[
        bool,
        typer.Option(
            "--operator",
            help="Write attention as one node of the operator library, with a function for other runtimes.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> int:
    """Write an attention block as an ONNX model."""
    need("onnx", "onnx", "exporting")
    from relskew_core.cli import _export
    from relskew_core.cli._export import chosen_weights, load_weights
    from relskew_core.export import save, to_onnx

    whole = not no_projections
    written_for: Any = profile
    spec = block.spec(load_weights(weights, prefix, projections=whole) if weights else None)
    arrays, origin = chosen_weights(spec, weights, prefix, seed, projections=whole)
    model = to_onnx(
        spec, arrays, profile=written_for, opset=opset, dtype=dtype, max_length=max_length, past=past, mask=mask,
        chunk_size="auto" if chunk_size is None else chunk_size, device=_export.checked_device(device),
        projections=whole, in_place=in_place, segments=segments, operator=operator,
    )  # fmt: skip
    try:
        written = save(model, path, overwrite=overwrite)
    except FileExistsError as error:
        raise CliError(f"{path} exists already: pass --overwrite to replace it") from error
    chosen = ["--weights", str(weights)] if weights else ["--seed", str(seed)] if seed else []
    chosen += ["--prefix", prefix] if prefix else []
    where = _export.where_to_validate(model, device)
    command = ["relskew", "validate", str(written), *chosen, *where]
    if as_json:
        _print_json(_export.written(written, model, spec, origin, command))
        return 0
    console = output()
    _export.show_export(written, model, spec, origin, console)
    console.print(f"next     {shlex.join(command)}", soft_wrap=True)
    if where:
        console.print(f"         {_export.ADVICE_BFLOAT16}", soft_wrap=True)
    return 0


@app.command(cls=Command, epilog="Example: relskew validate block.onnx --length 100 --runtime onnxruntime")
def validate(
    path: Annotated[Path, typer.Argument(help="A model that relskew exported.")],
    weights: Weights = None,
    prefix: Prefix = "",
    seed: Seed = None,
    provider: Annotated[Names, typer.Option(help="onnxruntime provider: cpu, cuda …; can be repeated.")] = None,
    device: Annotated[str | None, typer.Option(help="The same for one provider: cpu or cuda.")] = None,
    runtime: Annotated[Names, typer.Option(help="onnxruntime, reference or openvino; can be repeated.")] = None,
    length: Annotated[list[int] | None, sized("Only this length; can be repeated.", least=1)] = None,
    batch: Annotated[list[int] | None, sized("Only this batch size; can be repeated.", least=1)] = None,
    atol: Annotated[float | None, typer.Option(help="Allow this absolute error on top of the tolerances.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Allow this relative error, for a quantised model.")] = None,
    as_json: Json = False,
) -> int:
    """Run a model over a sweep of inputs and compare it with float64."""
    from relskew_core.cli import _export
    from relskew_core.cli._export import chosen_weights

    if (positions := max(length or [1]) * max(batch or [1])) > LARGEST:
        raise CliError(f"--length times --batch must be {LARGEST} at most, got {positions}")
    providers = _export.providers_of(provider, device)
    spec, projections, dtype = _export.spec_of_model(path)
    arrays, origin = chosen_weights(spec, weights, prefix, seed, projections=projections)
    from relskew_core.export import validate as validate_model

    runtimes: Any = tuple(runtime or ("onnxruntime",))
    with progress(f"validate {path.name}") as advance:
        report = validate_model(
            path, spec, arrays, providers=providers, runtimes=runtimes, lengths=length, batches=batch, atol=atol,
            tolerance=tolerance, progress=advance,
        )  # fmt: skip
    if as_json:
        print(report.to_json())
    else:
        console = output()
        console.print(f"{path}: {_export.describe_block(spec)}; weights {origin}", soft_wrap=True)
        _export.show_report(report, console)
        failed = f"not ok: {len(report.failures)} of {count(len(report.checks), 'check')} failed"
        console.print("ok" if report.ok else failed, style="bold green" if report.ok else "bold red")
        for line in _export.advice(report, dtype):
            console.print(line, soft_wrap=True)
    return 0 if report.ok else 1


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, indent=2, allow_nan=False))


__all__ = ["CliError", "app", "run"]

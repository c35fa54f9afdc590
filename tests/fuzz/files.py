"""Broken files: models for ``validate`` and the command line, weights for the command line."""

import contextlib
import io
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import numpy_helper
from safetensors.numpy import save_file

from fuzz.engine import Target, WrongError
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.cli import main
from relskew_core.export import save, to_onnx, validate

SPEC = BlockSpec(4, 2, Span.causal(8), causal=True)
BLOCK = ["--embed-dim", "4", "--num-heads", "2", "--length", "8", "--causal"]
SECONDS, GRACE = 20.0, 20.0  # what a validation may take, and what a busy machine adds
WORDS = ["", "0", "-1", "1e99", "NaN", "null", "[]", "{}", "ort", "9" * 400, "[" * 5000, "\x00", "é", "True"]
FIELDS = [*SPEC.to_dict(), "left", "right", "beyond"]


class Change(NamedTuple):
    kind: str
    place: float  # as a share of the file's length
    data: bytes

    def of(self, content: bytes) -> bytes:
        at = int(self.place * len(content))
        inserted = b"" if self.kind in ("truncate", "delete") else self.data
        rest = {"truncate": len(content), "insert": at}.get(self.kind, at + len(self.data))
        return content[:at] + inserted + content[rest:]


kinds = st.sampled_from(["replace", "replace", "insert", "delete", "truncate"])
change = st.builds(Change, kinds, st.floats(0, 1), st.binary(min_size=1, max_size=8))
changes = st.lists(change, min_size=1, max_size=4)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS)
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), scalars, max_size=3)


@dataclass(frozen=True)
class Example:
    file: str  # one of FILES
    changes: list[Change]
    metadata: dict[str, str]

    def __str__(self) -> str:
        return f"# a broken {self.file}\n{self.changes if self.file in BYTES else self.metadata}"


def said(fields: dict[str, Any]) -> str:
    """Write a spec as its metadata do, with other fields."""
    spec = SPEC.to_dict()
    spec["span"] |= {name: value for name, value in fields.items() if name in spec["span"]}
    return json.dumps(spec | {name: value for name, value in fields.items() if name not in spec["span"]})


metadata = st.fixed_dictionaries({}, optional={
    "spec": st.dictionaries(st.sampled_from(FIELDS), values, max_size=3).map(said) | st.sampled_from(WORDS),
    "profile": st.sampled_from([*WORDS, "portable", "trt"]),
    "max_length": st.sampled_from(WORDS) | st.integers().map(str),
    "chunk_size": st.sampled_from(WORDS) | st.integers().map(str),
    "dtype": st.sampled_from(WORDS),
})  # fmt: skip


@cache
def good_bytes(kind: str) -> bytes:
    weights = init_weights(SPEC, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"good.{kind}"
        if kind == "npz":
            np.savez(path, **weights)
        elif kind == "safetensors":
            save_file(weights, path)
        elif kind == "pt":
            import torch

            torch.save({name: torch.from_numpy(x) for name, x in weights.items()}, path)
        else:
            save(to_onnx(SPEC, weights), path)
        return path.read_bytes()


def mutated(content: bytes, changes: list[Change]) -> bytes:
    return reduce(lambda content, change: change.of(content), changes, content)


def try_model(example: Example, folder: Path) -> None:
    (path := folder / "model.onnx").write_bytes(mutated(good_bytes("onnx"), example.changes))
    judge(path)


def try_metadata(example: Example, folder: Path) -> None:
    """Validate a model that says strange things of itself, and let the command line do so."""
    path = folder / "model.onnx"
    model = onnx.load_from_string(good_bytes("onnx"))
    for entry in model.metadata_props:
        entry.value = example.metadata.get(entry.key.removeprefix("relskew."), entry.value)
    if "chunk_size" in example.metadata:
        model.metadata_props.add(key="relskew.chunk_size", value=example.metadata["chunk_size"])
    onnx.save(model, path)
    judge(path)
    command(["validate", str(path), "--runtime", "nowhere"], (1, 2))


def try_external(example: Example, folder: Path) -> None:
    """Validate a model whose weights, in a separate file, are changed or cut."""
    path = folder / "model.onnx"
    spec = BlockSpec(16, 2, Span.causal(40), causal=True)
    save(to_onnx(spec, init_weights(spec, seed=0)), path, external_threshold=1024)
    (data,) = (file for file in folder.iterdir() if file != path)
    data.write_bytes(mutated(data.read_bytes(), example.changes))
    judge(path, spec)


def judge(path: Path, spec: BlockSpec = SPEC) -> None:
    """Validate a file, which must end in time and raise nothing; a valid one has the right weights."""
    start, weights = time.monotonic(), init_weights(spec, seed=0)
    report = validate(path, spec, weights, lengths=[2], batches=[1], time_limit=SECONDS)
    taken = time.monotonic() - start
    if taken > SECONDS + GRACE:
        raise WrongError(f"validate took {taken:.1f} s, its time limit is {SECONDS} s")
    if not report.checks or (not report.ok and not all(check.detail or check.error for check in report.failures)):
        raise WrongError(f"a report without a reason: {report}")
    json.loads(report.to_json())
    if report.ok:
        stored, wanted = (
            {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in weights}
            for model in (onnx.load(path), to_onnx(spec, weights))
        )
        if any(stored[name].tobytes() != wanted[name].tobytes() for name in wanted):
            raise WrongError("other weights than they should be, yet the report is ok")


def try_weights(example: Example, folder: Path) -> None:
    (path := folder / f"weights.{example.file}").write_bytes(mutated(good_bytes(example.file), example.changes))
    export(path)


def try_array(example: Example, folder: Path) -> None:
    """Export with weights of which one is changed inside a sound archive."""
    path = folder / "weights.npz"
    with zipfile.ZipFile(path, "w") as archive, zipfile.ZipFile(io.BytesIO(good_bytes("npz"))) as good:
        for name in good.namelist():
            content = good.read(name)
            archive.writestr(name, mutated(content, example.changes) if name == "rel_k.npy" else content)
    export(path)


def export(weights: Path) -> None:
    command(["export", str(weights.parent / "out.onnx"), *BLOCK, "--weights", str(weights)], (0, 2))


def command(arguments: list[str], wanted: tuple[int, ...]) -> None:
    """Run a command, which ends with a status that is wanted; an error is one line."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(arguments)
    lines = errors.getvalue().splitlines()
    if status not in wanted:
        raise WrongError(f"{arguments[0]} ended with {status}: {errors.getvalue()}{out.getvalue()}")
    if status == 2 and (len(lines) != 1 or not lines[0].startswith("relskew: error: ")):
        raise WrongError(f"{arguments[0]} said {lines}")


BYTES: dict[str, Callable[[Example, Path], None]] = {
    "model": try_model,
    "external data": try_external,
    **dict.fromkeys(("npz", "safetensors", "pt"), try_weights),
    "array of an npz": try_array,
}
FILES = {**BYTES, "metadata": try_metadata}
# A validation takes a second, reading weights a hundredth of it.
files = st.sampled_from([*FILES, *("npz", "safetensors", "pt", "array of an npz") * 3])


def check(example: Example) -> None:
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        FILES[example.file](example, Path(os.path.realpath(folder)))


TARGET = Target("files", 10, st.builds(Example, files, changes, metadata), check)

"""Graphs of every form in old and other runtimes: small blocks, each in a process of a release."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnx

from benchmarks.runner import ROOT, Benchmark, Call, Case, Record, Row, pivot
from benchmarks.trial import BEYOND
from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core.export import to_onnx

PLACES = ROOT / ".venv-runtimes"
TRIAL = Path(__file__).with_name("trial.py")
FULL, CAUSAL = Span.full(9), Span.causal(9)

FORMS: dict[str, tuple[BlockSpec, dict[str, Any]]] = {
    "full": (BlockSpec(8, 2, FULL), {}),
    "causal": (BlockSpec(8, 2, CAUSAL, causal=True), {}),
    "cache": (BlockSpec(8, 2, CAUSAL, causal=True), {"past": True}),
    "clip": (BlockSpec(8, 2, Span.clipped(3)), {}),
    "values": (BlockSpec(8, 2, FULL, rel_values=True), {}),
    "bias": (BlockSpec(8, 2, FULL, rel_keys=False, rel_bias=True), {}),
    "cross": (BlockSpec(8, 2, FULL, cross=True), {}),
    "grouped": (BlockSpec(8, 4, CAUSAL, causal=True, num_kv_heads=2), {}),
    "mask": (BlockSpec(8, 2, FULL), {"mask": True}),
    "blocks": (BlockSpec(8, 2, Span.causal(6), causal=True, block_size=3), {}),
    "sinks": (BlockSpec(8, 2, CAUSAL, causal=True, sinks=True), {}),
    "chunks": (BlockSpec(8, 2, CAUSAL, causal=True), {"chunk_size": 2}),
}
LENGTHS = (1, 5, 9)


class Graph(NamedTuple):
    """A form in a profile: its graph, and inputs with their outputs at several lengths."""

    name: str
    model: onnx.ModelProto
    calls: list[Any]  # inputs and outputs
    beyond: dict[str, Any]  # inputs that the graph must refuse, if any

    def save(self, folder: Path) -> None:
        """Write the graph and the calls for a process that has neither onnx nor this library."""
        (folder / f"{self.name}.onnx").write_bytes(self.model.SerializeToString())
        arrays: dict[str, Any] = {f"beyond/in/{name}": x for name, x in self.beyond.items()}
        for index, (inputs, outputs) in enumerate(self.calls):
            arrays |= {f"{index}/in/{name}": x for name, x in inputs.items()}
            arrays |= {f"{index}/out/{place}": x for place, x in enumerate(outputs)}
        np.savez(folder / f"{self.name}.npz", **arrays)


def graphs(profile: Any, opset: int | None = None, dtype: Any = "float32") -> Iterator[Graph]:
    for name, (spec, options) in FORMS.items():
        weights = {key: np.asarray(x) for key, x in init_weights(spec, seed=1).items()}
        model = to_onnx(spec, weights, profile=profile, opset=opset, dtype=dtype, **{"chunk_size": None, **options})
        calls = [_call(spec, weights, options, length, dtype) for length in LENGTHS]
        refuses = spec.span.beyond == "error" and not spec.cross and not spec.block_size
        yield Graph(name, model, calls, _feeds(spec, options, 10, dtype) if refuses else {})


def _feeds(spec: BlockSpec, options: dict[str, Any], length: int, dtype: str) -> dict[str, Any]:
    generator = np.random.default_rng(length)

    def normal(*shape: int) -> Any:
        return generator.standard_normal(shape).astype(dtype)

    feeds = {"x": normal(2, length, 8)}
    if spec.cross:
        feeds["memory"] = normal(2, 10 - length, 8)
    if "mask" in options:
        feeds["mask"] = np.tri(length, k=-1, dtype=bool)[None, None]  # the first query sees nothing
    if "past" in options:
        shape = (2, spec.num_kv_heads, max(9 - length, 0), spec.head_dim)
        feeds |= {name: normal(*shape) for name in ("past_key", "past_value")}
    return feeds


def _call(spec: BlockSpec, weights: dict[str, Any], options: dict[str, Any], length: int, dtype: str) -> Any:
    """Draw inputs, and return them with their outputs."""
    feeds = _feeds(spec, options, length, dtype)
    given = {name: x if x.dtype == bool else x.astype(np.float32) for name, x in feeds.items()}
    past = tuple(given.pop(name) for name in ("past_key", "past_value") if name in given)
    result: Any = attention_block(given.pop("x"), weights, spec, past=past or None, **given)
    return feeds, [x.astype(dtype) for x in ([result[0], *result[1]] if past else [result])]


class Release(NamedTuple):
    """A release of a runtime, and the packages that pip or npm install for it into a separate folder, if any."""

    runtime: str
    version: str
    packages: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.runtime} {self.version}"

    @property
    def place(self) -> Path:
        return PLACES / f"{self.runtime}-{self.version}"

    def install(self) -> None:
        if self.place.exists() or not self.packages:
            return
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]
        if self.runtime != "onnxruntime-web":
            pip = "-m pip install --quiet --disable-pip-version-check --no-deps --target"
            install = [sys.executable, *pip.split()]
        subprocess.run([*install, str(self.place), *self.packages], check=True)

    def run(self, *arguments: object) -> str:
        """Run Python with the packages; return how the process ended, or nothing if it succeeded."""
        self.install()
        command = [sys.executable, "-P", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(self.place), "RUST_BACKTRACE": "0"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [line for line in ended.stderr.splitlines() if "panicked" not in line and line.strip()] or [""]
        line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        return f"the process ends with {ended.returncode}: {line}" if ended.returncode else ""


def _here(package: str) -> Release:
    return Release(package, version(package), ())


def apart(package: str, release: str, *more: str) -> Release:
    return Release(package, release, (f"{package}=={release}", *more))


RELEASES = (
    apart("onnxruntime", "1.17.3", "numpy==1.26.4"),
    *(apart("onnxruntime", release) for release in ("1.20.1", "1.23.2", "1.25.0", "1.27.0")),
    *map(_here, ("onnxruntime", "openvino")),
    Release("onnxruntime-web", "1.30.0", ("onnxruntime-web@1.30.0",)),
    apart("opencv-python-headless", "5.0.0.93"), apart("MNN", "3.6.1"),
    apart("iree-base-compiler", "3.13.0", "iree-base-runtime==3.13.0"),
    apart("tract", "0.23.9"), apart("onnx2torch", "1.5.15"),
    _here("onnxscript"), apart("onnxsim", "0.8.1"), apart("onnxslim", "0.1.98"),
)  # fmt: skip
HERE = ("onnxruntime", "openvino")  # are tried with every opset
PROFILES = {"ort": range(23, 29), "portable": range(18, 29), "trt": range(23, 29)}  # with their opsets
DTYPES = ("float32", "float16")


class Runtimes(Benchmark):
    """Every profile in every release, and with every opset in the installed ones."""

    page = "runtimes.md"
    measures = frozenset[str]()

    def cases(self) -> Iterator[Case]:
        yield from ({"profile": profile, "opset": None, "dtype": dtype} for dtype in DTYPES for profile in PROFILES)
        opsets = ((profile, opset) for profile, opsets in PROFILES.items() for opset in opsets)
        yield from ({"profile": profile, "opset": opset, "dtype": "float32"} for profile, opset in opsets)

    def contenders(self, case: Case) -> Iterable[str]:
        return [release.name for release in _releases(case)]

    def prepare(self, case: Case, contender: str) -> Call:
        (release,) = (release for release in _releases(case) if release.name == contender)

        def call() -> dict[str, str]:
            with TemporaryDirectory() as temporary:
                for graph in graphs(case["profile"], case["opset"], case["dtype"]):
                    graph.save(Path(temporary))
                return dict(results(release, Path(temporary)))

        return call

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        failed = {form: reason for form, reason in result.items() if reason not in ("", BEYOND)}
        return {"failed": failed, "beyond": [form for form, reason in result.items() if reason == BEYOND]}

    def texts(self, record: Record) -> dict[str, str]:
        own = [row for row in record.rows if row.case["opset"] is None]
        names = list(dict.fromkeys(row.contender for row in own))
        own.sort(key=lambda row: names.index(row.contender))
        released = [(row.contender, _column(row), _cell(row)) for row in own]
        others = (row for row in record.rows if row.case["opset"] is not None)
        opsets = [("`{profile}`, opset {opset}".format(**row.case), row.contender, _cell(row)) for row in others]
        about = f"Forms: {', '.join(FORMS)}. Python {record.machine['python']}."
        failing = "\n".join(["The error of each form that fails:", "", *reasons(own)])
        silent = {f"- {row.contender}, {_column(row)}": row.facts["beyond"] for row in own if row.facts["beyond"]}
        lines = (f"{which}: {', '.join(forms)}" for which, forms in silent.items())
        beyond = "\n".join(["Numbers instead of an error beyond the table:", "", *lines])
        return {"": "\n\n".join([about, pivot(released), failing, beyond, pivot(opsets)])}


def _releases(case: Case) -> Sequence[Release]:
    if case["opset"] is None:
        return RELEASES
    return [release for release in RELEASES if release.runtime in HERE and not release.packages]


def reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line for every form that runs in part, with the runtime's message; wrong numbers come first."""
    failures: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        failed = sorted(row.facts["failed"].items(), key=lambda each: not each[1].startswith("wrong"))
        for form, why in failed[:1]:
            failures.setdefault((row.contender, f"{form}: {why}"), []).append(_column(row))
    yield from (f"- {name}, {' and '.join(where)}, {what}" for (name, what), where in failures.items())


def _column(row: Row) -> str:
    return f"`{row.case['profile']}`" + (" float16" if row.case["dtype"] == "float16" else "")


def _cell(row: Row) -> str:
    failed = list(row.facts["failed"])
    ran = [form for form in sorted(FORMS) if form not in failed]
    if not failed or not ran:
        return "none" if failed else "all"
    return f"all but {', '.join(failed)}" if len(failed) <= len(ran) else ", ".join(ran)


def results(release: Release, folder: Path) -> Iterator[tuple[str, str]]:
    """Run the graphs of a folder in one process, or each in a separate one if that dies."""
    paths = sorted(folder.glob("*.onnx"))
    if not (ended := release.run(TRIAL, release.runtime, folder)):
        for form, why in json.loads((folder / "results.json").read_text("utf-8")).items():
            yield form, clean(why)
    elif len(paths) == 1:
        yield paths[0].stem, clean(ended)
    else:
        for path in paths:
            with TemporaryDirectory() as alone:
                for each in (path, path.with_suffix(".npz")):
                    os.link(each, Path(alone) / each.name)
                yield from results(release, Path(alone))


def clean(reason: str) -> str:
    """Return a message without the paths and addresses of one build."""
    noise = (
        r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ :|\S*/\S+|\S*::\S*\([^)]*\)|Load model from|failed:|Error .*Diagnostics:"
    )
    without = re.sub(noise, " ", reason).replace("|", "/").replace("<", "‹").replace(">", "›")
    return " ".join(without.split())[:200]

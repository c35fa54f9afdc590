"""How `validate` loads models in runtimes, and runs files in a separate process."""

import hashlib
import importlib
import json
import os
import pickle
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import FORMS, exported, random_weights, valid
from operator_runs import needs_library
from relskew_core import BlockSpec, Span
from relskew_core.export import Check, Report, custom_ops_library, save, to_onnx, validate
from relskew_core.export._check import isolated, runtimes
from relskew_core.export._check.questions import Request

CAUSAL = FORMS["causal"][0]
# the package exports a function of the same name
module = importlib.import_module("relskew_core.export._check.validate")


def opened(
    monkeypatch: pytest.MonkeyPatch, provider: Any, placed: Any, used: Any = None, path: Any = "model.onnx"
) -> tuple[Any, runtimes.Runner]:
    """Open a model in a stand-in for onnxruntime with every provider, which places nodes as it is told."""
    levels = SimpleNamespace(ORT_ENABLE_ALL="all", ORT_DISABLE_ALL="none")
    fake: Any = SimpleNamespace(__version__="9.9", GraphOptimizationLevel=levels, sessions=[], preloaded=[])
    every = ["CUDAExecutionProvider", "CPUExecutionProvider", "TensorrtExecutionProvider"]
    fake.get_available_providers = lambda: every
    fake.preload_dlls = lambda: fake.preloaded.append(print("what is missing"))

    def options() -> Any:
        entries: dict[str, str] = {}
        return SimpleNamespace(entries=entries, add_session_config_entry=entries.__setitem__)

    def session(content: Any, settings: Any, providers: Any) -> Any:
        level = settings.graph_optimization_level
        fake.sessions.append((content, level, settings.log_severity_level, providers))
        assert settings.entries == {"session.record_ep_graph_assignment_info": "1"}
        nodes = [(where, SimpleNamespace(name=x, op_type="MatMul")) for where, names in placed.items() for x in names]
        parts = [SimpleNamespace(ep_name=where, get_nodes=lambda node=node: [node]) for where, node in nodes]
        return SimpleNamespace(
            run=lambda names, feeds: [level, names, feeds],
            get_provider_options=lambda: {"CUDAExecutionProvider": used or {}},
            get_provider_graph_assignment_info=lambda: parts,
        )

    fake.SessionOptions, fake.InferenceSession = options, session
    monkeypatch.setattr(runtimes, "_import", {"onnxruntime": fake}.__getitem__)
    return fake, runtimes.open_onnxruntime(runtimes.Source(onnx.ModelProto(ir_version=9), path), provider)


def test_onnxruntime_runs_with_and_without_its_optimiser(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, runner = opened(monkeypatch, "cpu", {"CPUExecutionProvider": ["a", "b"]})
    providers: list[Any] = [("CPUExecutionProvider", {})]
    assert fake.sessions == [("model.onnx", level, 4, providers) for level in ("all", "none")]
    assert (fake.preloaded, runner.runtime, runner.provider) == ([], "onnxruntime 9.9", "CPUExecutionProvider")
    assert (runner.misplaced, runner.detail) == ((), "2 nodes on CPUExecutionProvider")
    feeds = {"x": np.zeros(2, np.float32)}
    assert runner.unoptimised is not None
    assert runner.run(feeds) == ["all", None, feeds]
    assert runner.unoptimised(feeds) == ["none", None, feeds]
    fake, _ = opened(monkeypatch, "cpu", {}, path=None)
    assert onnx.ModelProto.FromString(fake.sessions[0][0]).ir_version == 9


def test_cuda_computes_in_single_precision(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the options request TF32; the report says which is used."""
    given: dict[str, str]
    for given, used in ({}, "0"), ({"use_tf32": "1", "device_id": "2"}, "1"):
        before, placed = dict(given), {"CUDAExecutionProvider": ["a"]}
        fake, runner = opened(monkeypatch, ("cuda", given), placed, {"use_tf32": used, "device_id": "0"})
        assert given == before
        assert fake.sessions[0][3] == [("CUDAExecutionProvider", {"use_tf32": "0", **given})]
        assert len(fake.preloaded) == 1
        assert runner.detail == f"1 nodes on CUDAExecutionProvider; use_tf32={used}"
    written = capsys.readouterr()
    assert (written.out, written.err) == ("", "what is missing\n" * 2)
    fake, _ = opened(monkeypatch, ("tensorrt", {"trt_fp16_enable": True}), {})
    assert fake.sessions[0][3] == [("TensorrtExecutionProvider", {"trt_fp16_enable": True})]
    assert not fake.preloaded


def test_nodes_on_another_provider_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = {
        "CUDAExecutionProvider": ["relskew/compute/q"],
        "CPUExecutionProvider": ["relskew/shape/n", "f_relskew/shape/m", "relskew/compute/attention", ""],
    }
    _, runner = opened(monkeypatch, "cuda", placed)
    assert runner.misplaced == ("relskew/compute/attention on CPUExecutionProvider", "MatMul on CPUExecutionProvider")
    assert runner.detail == "1 nodes on CUDAExecutionProvider, 4 nodes on CPUExecutionProvider"
    _, runner = opened(monkeypatch, "cuda", {"CPUExecutionProvider": ["relskew/shape/n"]})
    assert runner.misplaced == ("no node on CUDAExecutionProvider",)


def test_a_runtime_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str) -> Any:
        if name in ("openvino", "onnxruntime"):
            raise ImportError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    for name in ("openvino", "onnxruntime"):
        report = validate(*exported(CAUSAL), runtimes=[name])
        provider = "CPUExecutionProvider" if name == "onnxruntime" else ""
        told = f"{name} is not installed here (No module named {name!r})"
        assert report.failures == (Check("loads", name, provider, "", False, detail=told),)


def test_openvino_is_imported_without_its_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def imported(name: str) -> str:
        seen.append((name, dict(sys.modules)))
        return name

    monkeypatch.setattr(importlib, "import_module", imported)
    for name in ("openvino", "openvino_telemetry"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert runtimes._import("openvino") == "openvino"
    ((name, modules),) = seen
    assert (name, modules["openvino_telemetry"]) == ("openvino", None)
    assert "openvino_telemetry" not in sys.modules
    for name in ("openvino", "openvino_telemetry"):  # modules that the caller has imported stay
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, SimpleNamespace())
            assert runtimes.import_openvino() == "openvino"
            assert ("openvino_telemetry" in sys.modules) == (name == "openvino_telemetry")
            assert seen[-1][0] == "openvino"
            assert seen[-1][1].get("openvino_telemetry", ...) is not None


def source(text: str) -> runtimes.Source:
    return runtimes.Source(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> {text}'), None)


def test_the_reference_evaluator_computes_infinities_without_a_warning() -> None:
    """Like other runtimes, for any setting of NumPy's warnings."""
    runner = runtimes.open_reference(source("log (float[n] x) => (float[n] y) {y = Log(x)}"), "")
    with np.errstate(all="raise"):
        (y,) = runner.run({"x": np.zeros(2, np.float32)})
    np.testing.assert_array_equal(y, [-np.inf, -np.inf])


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_arrays_of_every_type_pass_through_a_runtime(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU kernel of onnxruntime multiplies bfloat16, so these are reshapes; OpenVINO is told to keep float32."""
    made = source(
        "turn (bfloat16[a,b] x, bool[a,b] mask, float[a,b] z) => (bfloat16[b,a] y, bool[b,a] turned, float[b,a] last)"
        " {last = Transpose<perm = [1, 0]>(z) y = Transpose<perm = [1, 0]>(x) turned = Transpose<perm = [1, 0]>(mask)}"
    )
    numbers = np.arange(12.0).reshape(2, 6)
    feeds = {"x": numbers.astype(runtimes.BFLOAT16), "mask": numbers % 2 == 0, "z": numbers.astype(np.float32)}
    feeds = {name: x[::-1, 1:4] for name, x in feeds.items()}  # with gaps
    core, told = importlib.import_module("openvino").Core, list[Any]()
    compiled = core.compile_model

    def compile_model(*given: Any) -> Any:
        told.append(given[2:])
        return compiled(*given)

    monkeypatch.setattr(core, "compile_model", compile_model)
    runner = runtimes.OPENERS[runtime](made, "cpu")
    assert told == ([("CPU", {"INFERENCE_PRECISION_HINT": "f32"})] if runtime == "openvino" else [])
    assert runner.runtime.partition(" ")[0].lower() == runtime
    assert (runner.unoptimised is None) == (runtime == "openvino")
    for run in filter(None, (runner.run, runner.unoptimised)):
        for found, given in zip(run(feeds), feeds.values(), strict=True):
            assert found.dtype == given.dtype
            np.testing.assert_array_equal(found.astype(np.float32), given.T.astype(np.float32))


def request(**changes: Any) -> Request:
    given = dict.fromkeys(("lengths", "batches", "atol", "tolerance", "model_or_path"), None)
    own = {"providers": ("cpu",), "runtimes": ("onnxruntime",), "weights": random_weights(CAUSAL), "seed": 0}
    return Request(**{**given, **own, "spec": CAUSAL, **changes})


def ran(monkeypatch: pytest.MonkeyPatch, model: Any, **options: Any) -> tuple[Any, ...] | None:
    """Return the request of a validation to another process; ``None`` if it stays in this one."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "run_isolated", lambda *given: asked.append(given))
    monkeypatch.setattr(module, "run", lambda *given: None)
    assert not validate(model, CAUSAL, random_weights(CAUSAL), **options).failures
    return asked[0] if asked else None


def test_a_file_has_limits_and_a_model_those_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = to_onnx(CAUSAL, random_weights(CAUSAL))
    path = save(made, tmp_path / "block.onnx")
    size = 2**33 + 16 * sum(array.nbytes for array in random_weights(CAUSAL).values())
    assert ran(monkeypatch, made) is None
    asked: Any
    for model, options, limits in (
        (path, {}, (600.0, size)),
        (os.fspath(path), {"time_limit": 3}, (3.0, size)),
        (os.fsencode(path), {"memory_limit": 1}, (600.0, 1)),
        (path, {"providers": ["cpu", ("CPUExecutionProvider", {})]}, (600.0, size)),
        (path, {"providers": ["cpu", "cuda"]}, (600.0, None)),
        (made, {"time_limit": 3}, (3.0, size)),
        (made, {"memory_limit": 5, "providers": ["cuda"]}, (600.0, 5)),
    ):
        asked = ran(monkeypatch, model, **options)
        assert asked[1:3] == limits
        assert asked[0].model_or_path == (os.fspath(path) if model is not made else made)


@pytest.mark.parametrize(("name", "value", "told"), [
    ("lengths", [3, 0], "ValueError: `lengths` must be ints >= 1, got [3, 0]"),
    ("lengths", [], "ValueError: `lengths` must be ints >= 1, got []"),
    ("batches", [-1], "ValueError: `batches` must be ints >= 1, got [-1]"),
    ("batches", 3, ""),
    ("runtimes", None, ""),
    ("seed", -1, "ValueError: `seed` must be an int >= 0, got -1"),
    ("atol", 0.0, "ValueError: `atol` must be "),
    ("tolerance", 0.0, "ValueError: `tolerance` must be "),
    ("time_limit", 0, "ValueError: `time_limit` must be "),
    ("time_limit", "1", "TypeError: `time_limit` must be "),
    ("memory_limit", 0, "ValueError: `memory_limit` must be an int >= 1, got 0"),
])  # fmt: skip
def test_an_argument_that_does_not_fit_is_named_in_the_report(name: str, value: Any, told: str) -> None:
    (check,) = validate(*exported(CAUSAL), **{name: value}).failures
    assert (check.name, check.runtime, check.provider, check.case, check.ok) == ("validation", "", "", "", False)
    assert check.detail.startswith(told)


def test_weights_of_another_kind_are_named(tmp_path: Path) -> None:
    model, _, weights = exported(CAUSAL)
    path = save(model, tmp_path / "block.onnx")
    for table in ("table", [1.0], weights["rel_k"].astype(np.int32)):
        (check,) = validate(path, CAUSAL, {**weights, "rel_k": table}).checks
        assert check.detail.startswith("TypeError: `weights['rel_k']` must have one of the dtypes ")
    (check,) = validate(path, "causal", weights).checks  # type: ignore[arg-type]
    assert "`spec` must be a BlockSpec" in check.detail


def test_a_path_to_something_else_than_a_file_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of a pipe waits for its writer, and some devices never end."""
    kinds = {"S_IFDIR": "a directory", "S_IFIFO": "a named pipe", "S_IFSOCK": "a socket"}
    kinds |= {"S_IFCHR": "a device", "S_IFBLK": "a device"}
    for mode, kind in kinds.items():
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", lambda path, mode=mode: SimpleNamespace(st_mode=getattr(stat, mode)))
            report = validate("there", CAUSAL, {}, seed=3)
        told = f"must be a regular file, got {kind}: there"
        assert report == Report((Check("file", "", "", "", False, detail=told),), 3)
    (check,) = validate("nowhere", CAUSAL, {}).checks
    assert check.detail == "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere'"


def test_a_seed_follows_from_the_computation_or_from_the_file(tmp_path: Path) -> None:
    """Not from the weights; of a file, from its first MiB and its size."""
    spec = BlockSpec(8, 2, Span.full(9))
    made = [to_onnx(spec, random_weights(spec, seed)) for seed in range(2)]
    seeds = [validate(model, "none", {}).seed for model in made]  # type: ignore[arg-type]
    assert seeds[0] == seeds[1]
    digest = hashlib.sha256(b"".join(node.SerializeToString(deterministic=True) for node in made[0].graph.node))
    assert seeds[0] == int.from_bytes(digest.digest()[:4], "big")
    path = tmp_path / "any"
    path.write_bytes(b"a" * 2**20 + b"b" * 10)
    digest = hashlib.sha256(b"a" * 2**20 + str(2**20 + 10).encode())
    assert validate(path, "none", {}).seed == int.from_bytes(digest.digest()[:4], "big")  # type: ignore[arg-type]


def told(monkeypatch: pytest.MonkeyPatch, lines: str, seconds: float = 60) -> tuple[list[Check], list[str]]:
    """Let a process with this code answer a request."""
    monkeypatch.setattr(isolated, "_CHILD", f"import os, sys, time, json; {lines}")
    checks, steps, large = list[Check](), list[str](), {"large": np.zeros(10**6)}  # larger than a pipe's buffer
    isolated.run_isolated(request(weights=large), seconds, None, checks.append, steps.append)
    return checks, steps


def test_checks_and_steps_of_another_process_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    check = '{"check": {"name": "y", "runtime": "r", "provider": "p", "case": "c", "ok": true, "error": 0.5}}'
    step, done = '{"progress": "load"}', '{"done": true}'
    say = "; ".join(f"print({line!r}, flush=True)" for line in (step, check, done))
    assert told(monkeypatch, say) == ([Check("y", "r", "p", "c", True, 0.5)], ["load"])
    early = told(monkeypatch, f"print({step!r}); print({done!r}); print({step!r})")
    assert early[0] == [Check("validation", "", "", "", False, detail="ended with status 0, at: load")]


@pytest.mark.parametrize(("lines", "detail"), [
    ("os.kill(os.getpid(), 9)", "ended by SIGKILL, at: start"),
    ("os.kill(os.getpid(), 11)", "ended by SIGSEGV, at: start"),
    ("sys.exit(3)", "ended with status 3, at: start"),
    ("sys.exit('so\\n  it is')", "ended with status 1 (so it is), at: start"),
    ("print(json.dumps(dict(progress='here'))); sys.exit(2)", "ended with status 2, at: here"),
    ("sys.exit('x' * 400)", f"ended with status 1 ({'x' * 300}), at: start"),
    ("os.write(2, b'\\xff'); sys.exit(1)", "ended with status 1 (\ufffd), at: start"),
])  # fmt: skip
def test_the_end_of_another_process_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, lines: str, detail: str) -> None:
    assert told(monkeypatch, lines)[0] == [Check("validation", "", "", "", False, detail=detail)]


def test_another_process_is_stopped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.perf_counter()
    checks, _ = told(monkeypatch, "time.sleep(60)", 0.5)
    assert time.perf_counter() - start < 30
    assert checks == [Check("validation", "", "", "", False, detail="stopped after 0.5 s, `time_limit`, at: start")]


def test_an_interrupted_validation_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*given: Any, **options: Any) -> Any:
        started.append(real(*given, **options))
        return started[-1]

    def interrupt(step: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(isolated, "_CHILD", 'import time; print(\'{"progress": "x"}\', flush=True); time.sleep(60)')
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        isolated.run_isolated(request(), 60, None, lambda check: None, interrupt)
    assert (started[0].returncode, started[0].stdin.closed, started[0].stdout.closed) == (-9, True, True)
    deadline = time.perf_counter() + 10
    while threading.active_count() > threads and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads  # the timer thread has ended, too


@pytest.mark.parametrize(
    ("memory", "hard", "expected"),
    [(100, -1, (100, -1)), (100, 50, (50, 50)), (100, 200, (100, 200)), (None, -1, None)],
)
def test_memory_is_limited_on_linux(monkeypatch: pytest.MonkeyPatch, memory: Any, hard: int, expected: Any) -> None:
    resource = pytest.importorskip("resource")
    assert resource.RLIM_INFINITY == -1
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_DATA: (1, hard)}.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append((kind, both)))
    monkeypatch.setattr(sys, "platform", "darwin")
    isolated._limit_memory(memory)
    assert not limits
    monkeypatch.setattr(sys, "platform", "linux")
    isolated._limit_memory(memory)
    assert limits == ([] if expected is None else [(resource.RLIMIT_DATA, expected)])


def child(monkeypatch: pytest.MonkeyPatch, load: str) -> list[str]:
    """Let the process that validates load models otherwise; return how it is started."""
    start, _, end = isolated._CHILD.rpartition("; ")
    change = f"import onnx; real = onnx.load; onnx.load = lambda path, **options: {load}"
    monkeypatch.setattr(isolated, "_CHILD", f"{start}; {change}; {end}")
    return [sys.executable, "-c", isolated._CHILD, json.dumps(sys.path)]


def test_the_limit_of_memory_holds_where_the_model_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if sys.platform != "linux" or limit != resource.RLIM_INFINITY:
        pytest.skip("memory cannot be limited here")
    model, _, weights = exported(CAUSAL)
    path = save(model, tmp_path / "block.onnx")
    child(monkeypatch, "1 / 0 if __import__('resource').getrlimit(2)[0] == 2**33 + 1 else real(path, **options)")
    (check,) = validate(path, CAUSAL, weights, memory_limit=2**33 + 1).checks
    assert check.detail == "ZeroDivisionError: division by zero"


def test_a_validation_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = save(exported(CAUSAL)[0], tmp_path / "block.onnx")
    command = child(monkeypatch, "print('reading', file=sys.stderr, flush=True) or __import__('time').sleep(60)")
    process: Any
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1) as process:
        pickle.dump((request(model_or_path=os.fspath(path)), None), process.stdin)
        process.stdin.flush()
        assert process.stderr.readline() == b"reading\n"
        process.stdin.close()  # as the end of the parent process would
        assert process.wait(30) == 1


def test_lines_that_a_model_prints_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the validation writes to its parent; the rest goes to where errors go."""
    model, _, weights = exported(CAUSAL)
    path = save(model, tmp_path / "block.onnx")
    child(monkeypatch, "print('noise', flush=True) or real(path, **options)")
    report = valid(path, CAUSAL, weights, runtimes=["reference"], lengths=[2], batches=[1])
    assert [check.name for check in report.checks][-3:] == ["y", "y", "too long fails"]


@needs_library
def test_a_missing_operator_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeError("there is no operator library here")

    monkeypatch.setattr(runtimes, "custom_ops_library", missing)
    (failed,) = validate(*exported(CAUSAL, operator=True), batches=(1,), lengths=[3]).failures
    assert (failed.name, failed.runtime) == ("loads", runtimes.WITH_OPERATOR)
    assert "there is no operator library here" in failed.detail
    assert custom_ops_library().is_file()

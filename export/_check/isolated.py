"""A validation in a separate process: files are untrusted, and may need unlimited time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from relskew_core.export._check.inspect import Check
from relskew_core.export._check.questions import Request, run

# The child gets the parent's sys.path, so that it imports the same modules.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from relskew_core.export._check.isolated import answer; answer()"
)


def run_isolated(
    request: Request, seconds: float, memory: int | None, report: Callable[[Check], None],
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path)]
    step, done, late = "start", False, threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        given, answers = process.stdin, process.stdout
        assert given is not None
        assert answers is not None
        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended early, and its output says why
                pickle.dump((request, memory), given)
                given.flush()
            for line in answers:
                ((kind, value),) = json.loads(line).items()
                if kind == "check":
                    report(Check(**value))
                elif kind == "progress":
                    step = value
                    progress(step)
                done = kind == "done"
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            for pipe in (given, answers):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if not done:
            why = f"stopped after {seconds:g} s, `time_limit`" if late.is_set() else _ending(process.returncode, errors)
            report(Check("validation", "", "", "", False, detail=f"{why}, at: {step}"))


def _ending(status: int, errors: IO[bytes]) -> str:
    errors.seek(0)
    last = " ".join(errors.read().decode(errors="replace").split())[-300:]
    how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"{how} ({last})" if last else how


def answer() -> None:
    """Answer the parent's request, in the child: one line of JSON per check, because the parent trusts nothing else."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the output of runtimes is not part of the answer
    request, memory = pickle.load(sys.stdin.buffer)
    _limit_memory(memory)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def send(kind: str, value: Any) -> None:
        lines.write(json.dumps({kind: value}) + "\n")
        lines.flush()

    run(request, lambda check: send("check", asdict(check)), lambda step: send("progress", step))
    send("done", True)


def _limit_memory(memory: int | None) -> None:
    if memory is None or sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _end_with_parent() -> None:
    """Wait for the end of the parent's pipe, which means that the parent has ended."""
    os.read(0, 1)
    os._exit(1)

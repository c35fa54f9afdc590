"""What has not been verified on a GPU, in a few minutes: ``make gpu``, or ``python -m benchmarks.unverified``.

Each row of the table "Not verified yet" in ``docs/development/gpu.md`` runs for as long as it says. After each, the
results so far are written to the page, and with the ends of the outputs to ``unverified.json`` and ``unverified.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.runner import ROOT, machine, markdown, put

PAGE = ROOT / "docs" / "development" / "gpu.md"
MARKS = "<!-- results of make gpu -->", "<!-- end of results -->"


def rows(page: str) -> Iterator[tuple[str, list[str], int]]:
    """Yield the rows of the table that have a command for one device: what it is, the command, and seconds."""
    table = page.partition("## Not verified yet")[2].partition("\n## ")[0]
    for what, command, seconds in re.findall(r"^\| (.*?) \| `python -m (.*?)` \| (\d+) \|", table, re.MULTILINE):
        yield what, [sys.executable, "-m", *shlex.split(command)], int(seconds)


def run(command: list[str], limit: float) -> tuple[str, str]:
    """Return how a command ended, in words, and the end of what it printed."""
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=limit, check=False)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return f"cut off after {limit:.0f} s", (error.stdout or b"").decode(errors="replace")[-4000:]
    last = (done.stdout.strip().splitlines() or [""])[-1].strip("= ") if "pytest" in command else ""
    return f"{'failed' if done.returncode else 'passed'}{f': {last}' * bool(last)}", done.stdout[-4000:]


def main(arguments: list[str] | None = None) -> int:
    """Run the rows; return 1 if one failed."""
    parser = argparse.ArgumentParser("python -m benchmarks.unverified", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--out", type=Path, default=ROOT, help="the folder of unverified.json and unverified.md")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=360, help="for everything together")
    options = parser.parse_args(arguments)
    about = machine(options.device)
    record: dict[str, object] = {"machine": about}
    lines, ends = list[tuple[str, str, str]](), time.monotonic() + options.seconds
    for what, command, seconds in rows(options.page.read_text(encoding="utf-8")):
        left = ends - (began := time.monotonic())
        result, printed = run(command, min(seconds, left)) if left > 1 else ("not run: no time was left", "")
        lines.append((what, result, f"{time.monotonic() - began:.0f}"))
        record[what] = {"result": result, "printed": printed}
        table = f"{about['device']}, commit {about['commit']}:\n\n{markdown(('what', 'result', 'seconds'), lines)}"
        print(lines[-1], flush=True)
        (options.out / "unverified.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        (options.out / "unverified.md").write_text(table + "\n", encoding="utf-8")
        put(options.page, MARKS[0], table, MARKS[1])
    return int(any(not result.startswith("passed") for _, result, _ in lines))


if __name__ == "__main__":
    sys.exit(main())

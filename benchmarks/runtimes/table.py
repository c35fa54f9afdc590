"""What ran where, as tables between the marks of ``docs/runtimes.md``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import Table, markdown, put

Results = Mapping[str, str]
"""Why a form's graph failed, by form; nothing where its numbers are right."""


def release_table(record: Mapping[str, Any]) -> Table:
    """Return a line for every release, and for every profile what runs."""
    profiles = list(next(iter(record["releases"].values())))
    rows = [(name, *(_cell(found[profile]) for profile in profiles)) for name, found in record["releases"].items()]
    return Table("Releases", ("", *(f"`{profile}`" for profile in profiles)), rows)


def opset_table(record: Mapping[str, Any]) -> Table:
    """Return a line for every opset of every profile, and for the newest releases what runs."""
    names = list(record["opsets"])
    keys = [(profile, opset) for profile, found in record["opsets"][names[0]].items() for opset in found]
    rows = [
        (f"`{profile}`, opset {opset}", *(_cell(record["opsets"][name][profile][opset]) for name in names))
        for profile, opset in keys
    ]
    return Table("Opsets", ("", *names), rows)


def reasons(record: Mapping[str, Any]) -> list[str]:
    """Return a line for everything that runs in part: what a runtime says to a form that fails, wrong numbers first."""
    lines = []
    for name, profiles in record["releases"].items():
        told: dict[str, list[str]] = {}
        for profile, found in profiles.items():
            failed = [each for each in found.items() if each[1]]
            failed.sort(key=lambda each: not each[1].startswith("wrong"))
            for form, reason in failed[:1]:
                told.setdefault(f"{form}: {reason}", []).append(f"`{profile}`")
        lines += [f"- {name}, {' and '.join(where)}, {what}" for what, where in told.items()]
    return lines


def write(record: Mapping[str, Any], page: Path) -> None:
    """Put the tables into the page."""
    forms = ", ".join(record["forms"])
    text = "\n\n".join(
        [
            f"Forms: {forms}. Python {record['python']}.",
            markdown(release_table(record)),
            "What a runtime says to a form that fails:",
            "\n".join(reasons(record)),
            markdown(opset_table(record)),
        ]
    )
    put(page, "benchmarks.runtimes", text)


def _cell(found: Results) -> str:
    failed = [form for form, reason in found.items() if reason]
    if not failed:
        return "all"
    if len(failed) == len(found):
        return "none"
    ran = [form for form, reason in found.items() if not reason]
    return f"all but {', '.join(failed)}" if len(failed) <= len(ran) else ", ".join(ran)


def clean(reason: str) -> str:
    """Return what a reason says, without the paths and the places of one build."""
    without = re.sub(
        r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ :|\S*/\S+|\S*::\S*\([^)]*\)|Load model from|failed:", " ", reason
    )
    without = without.replace("|", "/").replace("<", "‹").replace(">", "›")
    return " ".join(without.split())[:200]

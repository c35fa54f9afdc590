"""The results of a validation: one check per question and case."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a model, and its result.

    Parameters
    ----------
    name : str
        The question: ``"y"``, ``"present_key"``, ``"too long fails"``, ``"placement"`` …
    runtime, provider : str
        The library that ran the check, with its version, and its execution provider or device.
    case : str
        Lengths and batch of the input; empty if there was none.
    ok : bool
        Whether the answer is right.
    error, gate : float or None
        Relative L2 error and its bound, if numbers were compared.
    detail : str
        What was seen, in words.

    See Also
    --------
    Report : all checks of a model.
    """

    name: str
    runtime: str
    provider: str
    case: str
    ok: bool
    error: float | None = None
    gate: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one validation.

    Parameters
    ----------
    checks : tuple of Check
        In the order in which they were made.
    seed : int or None
        The seed of the lengths and batches drawn in addition to the sweep: ``validate(…, seed=report.seed)`` repeats
        them.

    See Also
    --------
    validate : returns the report.
    Check : one of its checks.

    Examples
    --------
    >>> report = Report(
    ...     (Check("y", "onnxruntime 1.31.1", "CPU", "batch 1", True, 1e-7, 2e-6),)
    ... )
    >>> report.ok, len(report.failures)
    (True, 0)
    >>> print(report.table())
    check  runtime             provider  cases  worst error  gate   result
    y      onnxruntime 1.31.1  CPU           1      1.0e-07  2e-06  ok
    """

    checks: tuple[Check, ...]
    seed: int | None = None

    @property
    def ok(self) -> bool:
        """Whether anything was checked and every check passed."""
        return bool(self.checks) and not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if not check.ok)

    def table(self) -> str:
        """Return one line per question and runtime, then one line per failure."""
        header = ("check", "runtime", "provider", "cases", "worst error", "gate", "result")
        rows: list[tuple[str, ...]] = [header]
        order = list(dict.fromkeys((check.runtime, check.provider, check.name) for check in self.checks))
        ordered = sorted(self.checks, key=lambda check: order.index((check.runtime, check.provider, check.name)))
        for (runtime, provider, name), grouped in groupby(ordered, key=lambda c: (c.runtime, c.provider, c.name)):
            group = list(grouped)
            errors = [check.error for check in group if check.error is not None]
            gates = [check.gate for check in group if check.gate is not None]
            wrong = sum(not check.ok for check in group)
            rows.append(
                (
                    name,
                    runtime,
                    provider,
                    str(len(group)),
                    # NaN counts as the largest error.
                    f"{max(errors, key=lambda error: (error != error, error)):.1e}" if errors else "",
                    f"{min(gates):.0e}" if gates else "",
                    f"{wrong} wrong" if wrong else "ok",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        right = (3, 4)
        lines = [
            "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines += [f"FAILED {_sentence(check)}" for check in self.failures]
        if self.failures and self.seed is not None:
            lines.append(f"drawn from seed {self.seed}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return a JSON object with ``ok``, ``seed``, ``checks`` and ``failures``; errors of NaN and inf are null."""
        checks = [
            {key: value if _writable(value) else None for key, value in asdict(check).items()} for check in self.checks
        ]
        failures = [check for check in checks if not check["ok"]]
        whole = {"ok": self.ok, "seed": self.seed, "checks": checks, "failures": failures}
        return json.dumps(whole, indent=2, allow_nan=False)


def _writable(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _sentence(check: Check) -> str:
    where = ", ".join(part for part in (check.runtime, check.provider, check.case) if part)
    numbers = "" if check.error is None else f": error {check.error:.2e}, gate {check.gate or 0:.0e}"
    detail = f": {check.detail}" if check.detail else ""
    return f"{check.name} ({where}){numbers}{detail}"

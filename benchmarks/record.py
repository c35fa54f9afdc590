"""Records: what a run measured, as JSON that can be read back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs import Shape
from benchmarks.sections import Row


@dataclass(frozen=True, slots=True)
class Record:
    """A machine and its rows."""

    machine: dict[str, Any]
    rows: list[Row]

    def save(self, path: Path) -> None:
        """Write a line for every row, so that records can be compared."""
        rows = ",\n".join(
            "  " + json.dumps({k: v for k, v in asdict(row).items() if v is not None}) for row in self.rows
        )
        machine = json.dumps(self.machine, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"machine": {machine},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record back."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(stored["machine"], [Row(**(row | {"shape": Shape(**row["shape"])})) for row in stored["rows"]])

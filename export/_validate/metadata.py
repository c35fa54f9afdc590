"""A model's metadata about its export, read as untrusted input: all mistakes in it are reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx

from relskew_core._block.spec import BlockSpec
from relskew_core.export._profiles import PROFILES


@dataclass(frozen=True, slots=True)
class Metadata:
    """The arguments of the export in the metadata; ``None`` for missing ones."""

    spec: BlockSpec | None = None
    profile: str | None = None
    max_length: int | None = None
    chunk_size: int | None = None


def read_metadata(model: onnx.ModelProto) -> tuple[Metadata, str]:
    """Return the readable arguments, and messages about the others."""
    written = {entry.key: entry.value for entry in model.metadata_props}
    problems: list[str] = []

    def read(name: str, parse: Callable[[str], Any]) -> Any:
        text = written.get(f"relskew.{name}") or ""
        try:
            return parse(text) if text else None
        except Exception as error:  # a file may contain anything
            problems.append(f"relskew.{name} is {text[:60]!r} ({type(error).__name__}: {str(error)[:100]})")
            return None

    found = Metadata(
        read("spec", lambda text: BlockSpec.from_dict(json.loads(text))),
        read("profile", _known_profile),
        read("max_length", _positive),
        read("chunk_size", _positive),
    )
    return found, "; ".join(problems)


def _known_profile(text: str) -> str:
    if text not in PROFILES:
        raise ValueError(f"must be one of {', '.join(PROFILES)}")
    return text


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError("must be at least 1")
    return int(text)

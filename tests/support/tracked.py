"""The project's own files: those of git, or in an unpacked sdist those that it brought."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
IN_GIT = (ROOT / ".git").exists()
PACKED = ("PKG-INFO", "relskew_core.egg-info/", "setup.cfg")  # what packing adds to an sdist, by how the names start


def tracked() -> list[str]:
    """Return every file of the project that is there, links included, relative to its root."""
    if IN_GIT:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        names = listed.stdout.split("\0")
    else:
        names = (ROOT / "relskew_core.egg-info" / "SOURCES.txt").read_text().splitlines()
    there = ((name, ROOT / name) for name in names if name and not name.startswith(PACKED))
    return [name for name, path in there if path.is_file() or path.is_symlink()]

"""The project's own files: those of git, or in an unpacked sdist those that it brought."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
IN_GIT = (ROOT / ".git").exists()
PACKED = ("PKG-INFO", "relskew_core.egg-info/", "setup.cfg")
"""What packing adds to an sdist, by how the names start."""


def tracked() -> list[str]:
    """Return every file of the project that is there, links included, relative to its root."""
    if IN_GIT:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        names = listed.stdout.split("\0")
    else:
        names = (ROOT / "relskew_core.egg-info" / "SOURCES.txt").read_text().splitlines()
    return [name for name in names if name and not name.startswith(PACKED) and _is_there(ROOT / name)]


def _is_there(path: Path) -> bool:
    return path.is_file() or path.is_symlink()

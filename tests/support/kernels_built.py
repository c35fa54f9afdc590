"""The compiled kernels, made anew beside those that are installed: in the shape that they have on other processors."""

from __future__ import annotations

import ast
import functools
import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "backends" / "_compiled" / "source"


def asked_for(name: str) -> Any:
    """Return a constant of setup.py."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return eval(ast.unparse(node.value))
    raise AssertionError(name)


FLAGS, LEVELS = asked_for("FLAGS"), asked_for("LEVELS")
"""What the compiler is asked for: of every source, and more of some."""

COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)

ARM = ("-DHIGH_ROWS=12", "-DPOISON")
"""Vectors of 4 numbers and products of 12 rows, as on ARM; fresh memory is full of NaN."""


@functools.cache
def built(*flags: str) -> ModuleType:
    """Compile the kernels for the least of this kind of processors, quickly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "_kernels.so")
        given = [*FLAGS, "-O1", "-fPIC", "-shared"]
        if sysconfig.get_platform().startswith("macosx"):
            given += ["-undefined", "dynamic_lookup"]
        sources = [str(SOURCE / name) for name in ("module.cpp", "base.cpp")]
        include = f"-I{sysconfig.get_path('include')}"
        subprocess.run([str(COMPILER), *given, include, *flags, *sources, "-o", str(path)], check=True)
        found = importlib.util.spec_from_file_location("_kernels", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    return module

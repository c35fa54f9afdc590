"""The compiled kernels, made anew beside those that are installed: in the shape that they have on other processors."""

import ast
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from once import once
from relskew_core.backends import _compiled

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "backends" / "_compiled" / "source"


def asked_for(name: str) -> Any:
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return eval(ast.unparse(node.value), globals())
    raise AssertionError(name)


FLAGS, FAST, AVX512, SSE2, WINDOWS = map(asked_for, ("FLAGS", "FAST", "AVX512", "SSE2", "WINDOWS"))
LEVELS, ON_ARM, STORED, OF_BFLOAT16 = map(asked_for, ("LEVELS", "ON_ARM", "STORED", "OF_BFLOAT16"))
OF_LIBRARY = asked_for("OF_LIBRARY")


class Unit(NamedTuple):
    source: Path
    level: str | None
    flags: list[str]

    def __str__(self) -> str:
        return " ".join([self.source.name, *(flag for flag in self.flags if flag.startswith("-D"))])


UNITS = [
    Unit(SOURCE / "module.cpp", None, [*FLAGS, f"-I{sysconfig.get_path('include')}"]),
    *(Unit(SOURCE / name, None, [*FLAGS]) for name in ("integers.cpp", "tasks.cpp", "threads.cpp", *OF_LIBRARY)),
    *(
        Unit(SOURCE / "level.cpp", level, [*FLAGS, *FAST, *LEVELS[level], f"-DLEVEL={level}", f"-DSTORED={stored}"])
        for level in LEVELS
        for stored in STORED
        if level not in OF_BFLOAT16 or stored == "BFloat16"
    ),
]


def warnings(compiler: str, target: str = "") -> list[str]:
    """Return those that nothing may give rise to, beside the ones that installing shows.

    Sizes are signed numbers here, and memory is asked for in unsigned ones: with 32 bits on some machines, where
    ``memory`` refuses what is larger. An argument may have the name of a field: GCC can be asked to look at other
    variables alone, Clang cannot.
    """
    conversions = ["-Wno-psabi"] if target.startswith(("arm", "i686")) else ["-Wconversion", "-Wno-sign-conversion"]
    return [*conversions, *([] if "clang" in compiler else ["-Wshadow=local"])]


def _names(made: Path, *options: str) -> list[str]:
    told = subprocess.run(["nm", *options, str(made)], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in told.stdout.splitlines() if line.strip()]


def linked_names(made: Path) -> list[str]:
    """Return the names of functions and data by which other objects can use what is in one."""
    return _names(made, "--extern-only", "--defined-only")


def undefined_names(made: Path) -> list[str]:
    """Return the names of what a linked file takes from others, with versions such as ``expf@GLIBC_2.27``."""
    return _names(made, "--dynamic", "--undefined-only", "--with-symbol-versions")


FOUND = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
COMPILER = os.environ.get("KERNELS_COMPILER", FOUND) or None
"""What ``KERNELS_COMPILER`` names, where it is set: nothing, where what is compiled here could not be loaded."""

ARM = ("-DHIGH_ROWS=12", "-DPOISON", *os.environ.get("KERNELS_FLAGS", "").split())
"""Vectors as short and products as high as on ARM; fresh memory is full of NaN. `make sanitize` asks for more."""


WARNED_OF = [
    unit
    for place, unit in enumerate(UNITS)
    if unit.level not in ("v3", "v4") or place % 3 == 0 or "-DSTORED=double" in unit.flags
] + [
    Unit(SOURCE / "level.cpp", level, [*FLAGS, *FAST, *flags, f"-DLEVEL={level}", "-DSTORED=BFloat16"])
    for level, flags in ON_ARM.items()
]
"""Every source, with its levels for every dtype at the least one. At the others, double has branches of its own."""


IN_SOFTWARE = Path(__file__).parent / "in_software"

OTHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ARM": (ARM, ()),
    "pairs in software": (ARM, ("-DEMULATED", f"-I{IN_SOFTWARE}", "-Wno-psabi")),
    "tiles in software": (ARM, ("-DEMULATED", "-DAMX", f"-I{IN_SOFTWARE}", "-Wno-psabi")),
}
"""Processors that this one need not be: flags for all kernels, and more for those of bfloat16.

Products of pairs (AVX512-BF16) and of tiles (AMX) are computed in C++ then.
"""


def made(name: str, what: Sequence[str], sources: Sequence[Path]) -> Path:
    """Return a file that a command of the compiler makes, once until the command or a source changes."""

    def make(folder: Path) -> None:
        subprocess.run([str(COMPILER), *what, "-o", str(folder / name)], check=True)

    of_all = repr((COMPILER, what, [path.read_bytes() for path in sources]))
    return once(ROOT / "build" / "kernels" / hashlib.sha256(of_all.encode()).hexdigest()[:16], make) / name


@functools.cache
def built(flags: tuple[str, ...], of_bfloat16: tuple[str, ...] = ()) -> ModuleType:
    """Compile the kernels for the least of this kind of processors, quickly."""
    sources = [path for folder in (SOURCE, IN_SOFTWARE) for path in sorted(folder.iterdir())]
    objects = []
    for unit in UNITS:
        if unit.level in (None, "base") and unit.source.name not in OF_LIBRARY:
            more = [*flags, *(of_bfloat16 if "-DSTORED=BFloat16" in unit.flags else ())]
            objects.append(made("unit.o", [*unit.flags, "-O1", "-fPIC", *more, "-c", str(unit.source)], sources))
    linking = ["-undefined", "dynamic_lookup"] if sysconfig.get_platform().startswith("macosx") else []
    linked = made("_kernels.so", ["-shared", *flags, *linking, *map(str, objects)], objects)
    found = importlib.util.spec_from_file_location("_kernels", linked)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@contextmanager
def at(level: str) -> Iterator[str]:
    """Work as on an older processor, or on another one, such as ``"ARM"``."""
    kernels = _compiled.kernels
    if level in OTHERS:
        if COMPILER is None:
            pytest.skip("no compiler is here")
        _compiled.kernels = built(*OTHERS[level])
    else:
        kernels.use(level)
    try:
        yield level
    finally:
        _compiled.kernels = kernels
        kernels.use(kernels.LEVELS[-1])

"""Compiles the kernels of `backends/_compiled`, where there is a compiler; everything else is in pyproject.toml.

RELSKEW_PURE=1 leaves them out. RELSKEW_PURE=0 makes a failed compilation an error, for people who build wheels.
RELSKEW_LEVELS says for which processors: `native`, for this one, as well as for any; `all`, for wheels; or names of
`LEVELS` and `ON_ARM`, such as `v3,v4`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import CompileError

SOURCE = Path("backends/_compiled/source")
FLAGS = [
    "-std=c++17", "-O2", "-Wall", "-Wextra", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-g0",
    # On ARM, GCC 12 orders loads so early that sums of products leave their registers. Clang has no such flag.
    "-fno-schedule-insns", "-Wno-ignored-optimization-argument",
]  # fmt: skip
FAST = ["-fvect-cost-model", "-fpeel-loops", "-funswitch-loops"]
"""What makes kernels as fast as with -O3, in two thirds of the time and of the size."""

WINDOWS = ["-fms-runtime-lib=static", "-D_HAS_EXCEPTIONS=0"]
"""For Clang with Microsoft's headers: what is linked needs no run-time library of C++."""

SSE2 = ["-msse2", "-mfpmath=sse"]
"""Without these, 32-bit x86 computes in more digits than it stores; NumPy needs the same processors."""

AVX512 = [*(f"-mavx512{part}" for part in ("f", "dq", "bw", "vl")), "-mfma", "-mf16c", "-mprefer-vector-width=512"]
LEVELS = {
    "base": [],
    "v3": ["-mavx2", "-mfma", "-mf16c"],
    "v4": AVX512,
    "v4_bf16": [*AVX512, "-mavx512bf16"],
    "v4_amx": [*AVX512, "-mavx512bf16", "-DAMX"],
}
"""The flags of each kind of processor: any of a platform, and on x86-64 those that levels.hpp names.

Older compilers support them too.
"""

ON_ARM = {"v8_bf16": ["-march=armv8.2-a+bf16"]}
"""A level that is compiled on request alone, until it has been measured on such a processor."""

NATIVE = {
    "v3": {"__AVX2__", "__FMA__", "__F16C__"},
    "v4": {"__AVX512F__", "__AVX512DQ__", "__AVX512BW__", "__AVX512VL__", "__F16C__"},
    "v4_bf16": {"__AVX512BF16__", "__AVX512VL__"},
    "v4_amx": {"__AMX_BF16__", "__AVX512BF16__"},
}
"""The macros by which compilers say what this processor has."""

OF_BFLOAT16 = ("v4_bf16", "v4_amx", "v8_bf16")
"""Levels that differ from the one before only in products of bfloat16; the last two exist only on Linux."""

WITHOUT_LEVEL = ("module.cpp", "host.cpp", "onnx_operator.cpp", "integers.cpp", "tasks.cpp", "threads.cpp")
OF_MODULE = ("module.cpp",)
OF_LIBRARY = ("host.cpp", "onnx_operator.cpp")
"""The sources of the module only, and those of the library for hosts without Python only."""

LIBRARY = "librelskew.so"  # next to the module

LINKED_WHOLE = {
    "darwin": [],
    "win32": ["-Wl,-export:relskew_attention", "-Wl,-export:RegisterCustomOps"],
}.get(sys.platform, ["-Wl,-z,defs", "-Wl,-z,nodelete", "-Wl,-Bsymbolic"])
"""Flags for a library that needs neither Python nor a runtime of C++ from the program that opens it.

It also stays loaded, and calls its own functions even if another copy is loaded.
"""

STORED = ("float", "double", "Float16", "BFloat16")
"""The types of the numbers in arrays."""

OBJECTS = Path("build/objects")
"""What was compiled, by sources, flags and compiler: the next build of this folder only links it."""

SECONDS = 5
"""The usual time for the kernels of a level and a dtype, on one core."""


KEPT = 30 * 86400
"""The seconds after which an unused object is removed."""


class Unit(NamedTuple):
    """A source, the level and the dtype that it is compiled for if it has kernels, and the flags."""

    source: str
    of: str
    flags: list[str]

    def place(self, compiler: str) -> Path:
        """Return the file of the object, which is named after all that it is made from."""
        read: dict[Path, bytes] = {}
        left = [SOURCE / self.source]
        while left:
            path = left.pop()
            if path not in read and path.exists():  # only tests have some
                read[path] = path.read_bytes()
                left += [path.parent / name.decode() for name in re.findall(rb'^#include "(.+)"', read[path], re.M)]
        key = sha256(repr((compiler, self.flags, sorted(read.items()))).encode()).hexdigest()[:16]
        return OBJECTS / "-".join(filter(None, (Path(self.source).stem, self.of, f"{key}.o")))


def output_of(command: list[str]) -> str:
    """Return what a command prints, nothing if it fails: compiling has the better message then."""
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout
    return ""


def clang_for_windows() -> list[str]:
    """Return Clang, which finds Microsoft's headers and libraries: their own compiler has no vectors of any length."""
    name, usual = os.environ.get("CC", "clang-cl"), os.environ.get("PROGRAMFILES", "")
    found = shutil.which(name) or shutil.which(name, path=str(Path(usual, "LLVM", "bin")))
    machine = {"win-amd64": "x86_64", "win-arm64": "aarch64"}.get(platform)
    if found is None or machine is None:
        raise CompileError(f"the kernels need Clang for 64-bit Windows, such as LLVM's: there is no {name} in PATH")
    return [found, "--driver-mode=g++", f"--target={machine}-pc-windows-msvc"]


class Build(build_ext):
    """Compile the kernels for each kind of processors and each dtype, as many at the same time as there are cores."""

    def build_extension(self, extension: Extension) -> None:
        """Compile and link; if that fails, no older module remains."""
        module = Path(self.get_ext_fullpath(extension.name))
        library = module.with_name(LIBRARY)
        try:
            if sys.platform == "win32":
                self.compiler.compiler_so = clang_for_windows()
            objects = self._objects(self._levels())
            self._link(objects, OF_MODULE, library, LINKED_WHOLE)
            if sys.platform.startswith("linux"):  # the module finds the library next to it
                near = [f"-L{library.parent}", f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
                self._link(objects, (*OF_LIBRARY, "level.cpp"), module, near)
            else:
                self._link(objects, OF_LIBRARY, module, [])
        except Exception:
            for old in (module, library, *SOURCE.parent.glob("*.so"), *SOURCE.parent.glob("*.pyd")):
                old.unlink(missing_ok=True)
            if extension.optional:
                self.warn("no kernels are compiled: everything works without them, calls on CPUs at less speed")
            raise

    def get_outputs(self) -> list[str]:
        """Return the files of a wheel: the modules, and the library next to each."""
        modules = super().get_outputs()
        return [*modules, *(str(Path(path).with_name(LIBRARY)) for path in modules)]

    def copy_extensions_to_source(self) -> None:
        """Copy the compiled files to the folder of the sources."""
        super().copy_extensions_to_source()
        for extension in self.extensions:
            pair = self._get_inplace_equivalent(self.get_finalized_command("build_py"), extension)
            to, made = (Path(path).with_name(LIBRARY) for path in pair)
            if made.exists():
                self.copy_file(str(made), str(to))

    def _levels(self) -> list[str]:
        """Return the levels to compile, in ascending order."""
        every = [level for level in LEVELS if level != "v4_amx" or sys.platform.startswith("linux")]
        names = asked_levels.replace(",", " ").split()
        if not platform.endswith(("x86_64", "amd64")):
            return ["base", *(level for level in ON_ARM if level in names and platform == "linux-aarch64")]
        if names == ["native"]:
            command = [*self.compiler.compiler_so, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
            macros = set(output_of(command).split())
            names = [level for level, own in NATIVE.items() if own <= macros][-1:] if macros else ["all"]
        if names == ["all"]:
            return every
        with_v4 = {"v4"} if set(names) & set(OF_BFLOAT16) else set()
        return [level for level in every if level in {"base", *names, *with_v4}]

    def _units(self, levels: list[str]) -> Iterator[Unit]:
        """List the sources with their flags; the kernels that take longest are first, and linked last."""
        for level, stored in product(levels, STORED):
            if level not in OF_BFLOAT16 or stored == "BFloat16":
                fast = FAST if level != "base" or asked_levels == "all" or {"base", *ON_ARM} >= {*levels} else []
                flags = [*FLAGS, *fast, *(LEVELS | ON_ARM)[level], f"-DLEVEL={level}", f"-DSTORED={stored}"]
                yield Unit("level.cpp", f"{level}-{stored}", flags)
        for source in WITHOUT_LEVEL:
            include = [f"-I{folder}" for folder in self.include_dirs] if source in OF_MODULE else []
            include += [] if stable else ["-DPy_GIL_DISABLED=1"]  # on Windows, no header of Python says so
            yield Unit(source, "", [*FLAGS, *include, *(f"-DWITH_{level}" for level in levels)])

    def _objects(self, levels: list[str]) -> dict[Path, str]:
        """Compile what is not there; return the files and their sources, in the order in which they are linked.

        If several objects define a function, the linker takes that of the oldest processor.
        """
        commands = [getattr(self.compiler, name, []) for name in ("compiler_so", "compiler_so_cxx")]
        settings = [os.environ.get(name) for name in ("MACOSX_DEPLOYMENT_TARGET", "SDKROOT")]
        compiler = repr((commands, settings, [output_of([*each, "--version"]) for each in commands if each]))
        OBJECTS.mkdir(parents=True, exist_ok=True)
        units = {unit.place(compiler): unit for unit in self._units(levels)}
        missing = [(unit, path) for path, unit in units.items() if not path.exists()]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(min(cores, 8)) as threads:
            if missing:
                seconds = SECONDS * sum(bool(unit.of) for unit, _ in missing) / min(cores, 8) + 2
                whom, count = " and ".join(levels), f"{len(missing)} of {len(units)} files"
                print(f"relskew: compiling kernels for {whom}, {count}: usually {seconds:.0f} seconds", flush=True)
            list(threads.map(self._compile, *zip(*missing, strict=True)) if missing else ())
        for path in units:
            path.touch()
        for path in OBJECTS.glob("*.o"):
            with suppress(FileNotFoundError):  # another build may remove it
                if path.stat().st_mtime < time.time() - KEPT:
                    path.unlink()
        return {path: unit.source for path, unit in sorted(units.items(), key=lambda each: bool(each[1].of))}

    def _compile(self, unit: Unit, to: Path) -> None:
        with TemporaryDirectory(dir=OBJECTS) as folder:
            source, made = str(SOURCE / unit.source), str(Path(folder, to.name))
            if sys.platform == "win32":
                self.spawn([*self.compiler.compiler_so, *unit.flags, "-c", source, "-o", made])
            else:
                (made,) = self.compiler.compile([source], folder, extra_postargs=unit.flags)
            os.replace(made, to)  # whole: another build may look for it

    def _link(self, objects: dict[Path, str], without: tuple[str, ...], to: Path, flags: list[str]) -> None:
        given = [str(path) for path, source in objects.items() if source not in without]
        if sys.platform == "win32":
            folders, imported = [f"-L{folder}" for folder in self.library_dirs], OBJECTS / f"{to.stem}.lib"
            flags = [*flags, *folders, f"-Wl,-implib:{imported}", "-o", str(to)]
            self.spawn([*self.compiler.compiler_so, "-shared", "-fuse-ld=lld", "-Wl,-Brepro", *given, *flags])
        else:
            self.compiler.link_shared_object(given, str(to), libraries=["m", "pthread"], extra_postargs=flags)


class Editable(editable_wheel):
    """Install the folder as a path if it has its links, because type checkers and editors follow no import hooks."""

    def finalize_options(self) -> None:
        """Choose between the path and the hook, which needs no links."""
        super().finalize_options()
        if all(Path("relskew_core", name).is_dir() for name in ("backends", "export")):
            self.package_dir = {"": "."}


pure = os.environ.get("RELSKEW_PURE", "")
if pure not in ("", "0", "1"):
    raise SystemExit(f"RELSKEW_PURE must be 0 or 1, got {pure!r}")

asked_levels = os.environ.get("RELSKEW_LEVELS") or "native"
if asked_levels not in ("all", "native") and not {*asked_levels.replace(",", " ").split()} <= {*LEVELS, *ON_ARM}:
    names = ", ".join((*LEVELS, *ON_ARM))
    raise SystemExit(f"RELSKEW_LEVELS must be all, native, or some of {names}, got {asked_levels!r}")

platform = sysconfig.get_platform()
FLAGS += SSE2 if platform.endswith(("i386", "i586", "i686")) else WINDOWS if sys.platform == "win32" else []
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")  # a Python without the GIL has no limited API
kernels = Extension(
    "relskew_core.backends._compiled._kernels",
    [str(SOURCE / name) for name in (*WITHOUT_LEVEL, "level.cpp")],
    py_limited_api=stable,
    optional=pure != "0",
)

setup(
    ext_modules=[] if pure == "1" else [kernels],
    cmdclass={"build_ext": Build, "editable_wheel": Editable},
    options={} if pure == "1" or not stable else {"bdist_wheel": {"py_limited_api": "cp311"}},
)

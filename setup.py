"""Compiles the kernels of `backends/_compiled`, where there is a compiler; everything else is in pyproject.toml.

RELSKEW_PURE=1 leaves them out. RELSKEW_PURE=0 makes a failed compilation an error, for people who build wheels.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel

SOURCE = Path("backends/_compiled/source")
FLAGS = [
    "-std=c++17", "-O3", "-Wall", "-Wextra", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-g0",
    # On ARM, GCC 12 orders loads so early that sums of products leave their registers. Clang has no such flag.
    "-fno-schedule-insns", "-Wno-ignored-optimization-argument",
]  # fmt: skip
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

OF_BFLOAT16 = ("v4_bf16", "v4_amx")
"""Levels that differ from the one before them only in products of bfloat16; the last exists only on Linux."""

WITHOUT_LEVEL = ("module.cpp", "host.cpp", "onnx_operator.cpp", "tasks.cpp", "threads.cpp")
OF_MODULE = ("module.cpp",)
OF_LIBRARY = ("host.cpp", "onnx_operator.cpp")
"""The sources of the module only, and those of the library for hosts without Python only."""

LIBRARY = "librelskew.so"  # next to the module

LINKED_WHOLE = [] if sys.platform == "darwin" else ["-Wl,-z,defs", "-Wl,-z,nodelete"]
"""Flags for a library that needs neither Python nor a runtime of C++ from the program that opens it.

It also stays loaded.
"""

STORED = ("float", "double", "Float16", "BFloat16")
"""The types of the numbers in arrays."""


class Build(build_ext):
    """Compile the kernels for each kind of processors and each dtype, all at the same time."""

    def build_extension(self, extension: Extension) -> None:
        """Compile and link; if that fails, no older module remains."""
        target = Path(self.get_ext_fullpath(extension.name))
        try:
            with ThreadPoolExecutor() as threads:
                # In this order: if several objects define a function, the linker takes that of the oldest processor.
                own = {name: threads.submit(self._compile, name, extension.define_macros, []) for name in WITHOUT_LEVEL}
                made = []
                for level, stored in product(levels, STORED):
                    if level in OF_BFLOAT16 and stored != "BFloat16":
                        continue
                    macros = [("LEVEL", level), ("STORED", stored)]
                    made.append(threads.submit(self._compile, "level.cpp", macros, LEVELS[level]))
                objects = [path for each in made for path in each.result()]
            for file, others in ((target, OF_LIBRARY), (target.with_name(LIBRARY), OF_MODULE)):
                first = [path for name, each in own.items() if name not in others for path in each.result()]
                whole = LINKED_WHOLE if file != target else []
                self.compiler.link_shared_object(
                    [*first, *objects], str(file), libraries=["m", "pthread"], extra_postargs=whole
                )
        except Exception:
            for old in (target, target.with_name(LIBRARY), *SOURCE.parent.glob("*.so")):
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

    def _compile(self, source: str, macros: list[tuple[str, str]], flags: list[str]) -> list[str]:
        folder = Path(self.build_temp, *(value for _, value in macros))
        objects: list[str] = self.compiler.compile(
            [str(SOURCE / source)],
            output_dir=str(folder),
            macros=macros,
            include_dirs=self.include_dirs,
            extra_postargs=[*FLAGS, *flags],
        )
        return objects


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

platform = sysconfig.get_platform()
levels = list(LEVELS) if platform.endswith(("x86_64", "amd64")) else ["base"]
if not platform.startswith("linux"):
    levels = [level for level in levels if level != "v4_amx"]
FLAGS += SSE2 if platform.endswith(("i386", "i586", "i686")) else []
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")  # a Python without the GIL has no limited API
kernels = Extension(
    "relskew_core.backends._compiled._kernels",
    [str(SOURCE / name) for name in (*WITHOUT_LEVEL, "level.cpp")],
    define_macros=[("LEVELS_OF_X86_64", "1")] if len(levels) > 1 else [],
    depends=[str(path) for path in sorted(SOURCE.parent.rglob("*.h*"))],
    py_limited_api=stable,
    optional=pure != "0",
)
without = pure == "1" or sys.platform == "win32"  # whose compiler has other flags

setup(
    ext_modules=[] if without else [kernels],
    cmdclass={"build_ext": Build, "editable_wheel": Editable},
    options={} if without or not stable else {"bdist_wheel": {"py_limited_api": "cp311"}},
)

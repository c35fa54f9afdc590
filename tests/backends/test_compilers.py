"""No compiler warns of anything in the kernels: this machine's, older and newer ones, and those for other machines.

`make test-compilers` tries every compiler that is installed, and `make test-clang-cl` Clang in place of Microsoft's
compiler; otherwise it is this machine's GCC and Clang.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import kernels_built
from kernels_built import LEVELS, SSE2

COMPILERS = os.environ.get("KERNELS_COMPILERS", "g++ clang++").split()
MSVC_HEADERS = os.environ.get("MSVC_HEADERS", "").split()
"""The folders of the headers of Microsoft's C++ library, of its C library and of Windows."""

WITH_LEVELS = [f"-DWITH_{level}" for level in LEVELS]

HEADERS = Path(sysconfig.get_path("include"))

PYCONFIG = """
#define SIZEOF_SHORT __SIZEOF_SHORT__
#define SIZEOF_INT __SIZEOF_INT__
#define SIZEOF_LONG __SIZEOF_LONG__
#define SIZEOF_LONG_LONG __SIZEOF_LONG_LONG__
#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define SIZEOF_VOID_P __SIZEOF_POINTER__
#define SIZEOF_WCHAR_T __SIZEOF_WCHAR_T__
#define HAVE_STDARG_PROTOTYPES 1
#ifdef _WIN32
#define MS_WINDOWS
#define MS_WIN64
typedef __INTPTR_TYPE__ Py_ssize_t;
#define HAVE_PY_SSIZE_T 1
#define PY_SSIZE_T_MAX __INTPTR_MAX__
#else
#define HAVE_UNISTD_H 1
#define HAVE_SYS_TYPES_H 1
#endif
"""
"""What Python's headers ask about a machine, answered by the compiler: those of this one are about this one."""


def machine(compiler: str) -> str:
    """Return what a compiler compiles for, such as ``x86_64-linux-gnu``."""
    return subprocess.run([compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout.strip()


def is_x86_64(target: str) -> bool:
    return target.startswith(("x86_64", "amd64"))


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Python's headers for a machine that is not this one."""
    folder = tmp_path_factory.mktemp("headers")
    for path in HEADERS.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "Python.h").unlink()
    (folder / "pyconfig.h").unlink()
    # The compiler looks for a header next to the file that includes it.
    shutil.copy(HEADERS / "Python.h", folder)
    (folder / "pyconfig.h").write_text(PYCONFIG)
    return folder


AS_CL = {
    "-std=c++17": ["/std:c++17"],
    "-O2": ["/O2"],
    "-Wall": ["/W4"],  # here -Wall means every warning there is
    "-Wextra": [],
    "-fno-exceptions": ["/EHs-c-", "-D_HAS_EXCEPTIONS=0"],
    "-fno-rtti": ["/GR-"],
    "-fvisibility=hidden": [],  # the default of Windows
    "-g0": [],
}
"""The flags of Microsoft's compiler in the place of others; further ones are passed on by ``/clang:``."""


def as_cl(flag: str) -> list[str]:
    return AS_CL.get(flag, [f"/clang:{flag}" if flag.startswith(("-f", "-m")) else flag])


@pytest.mark.skipif(not MSVC_HEADERS, reason="no headers of Windows: make test-clang-cl")
@pytest.mark.parametrize("unit", kernels_built.WARNED_OF, ids=str)
def test_clang_cl_compiles_without_warnings(unit: kernels_built.Unit, headers: Path, tmp_path: Path) -> None:
    found = [part for folder in MSVC_HEADERS for part in ("-imsvc", folder)]
    given = [part for flag in (*unit.flags, *kernels_built.warnings("clang-cl")) for part in as_cl(flag)]
    command = ["clang", "--driver-mode=cl", "--target=x86_64-pc-windows-msvc", *found, f"-I{headers}", *given]
    made = tmp_path / "made.obj"
    command += [*WITH_LEVELS, "/WX", "/c", f"/Fo{made}", "--", str(unit.source)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert made.read_bytes()[:2] == b"\x64\x86"  # an object for x86-64
    assert not ended.stderr


MINGW, WINE = "x86_64-w64-mingw32-g++-posix", shutil.which("wine64") or shutil.which("wine")


@pytest.mark.skipif(shutil.which(MINGW) is None or WINE is None, reason="needs MinGW and Wine")
def test_a_program_of_windows_attends_on_several_threads(tmp_path: Path) -> None:
    units = [unit for unit in kernels_built.UNITS if unit.level in (None, "base") and unit.source.name != "module.cpp"]
    flags = [flag for flag in units[0].flags if flag != "-O2"]
    program = tmp_path / "host.exe"
    objects = [tmp_path / f"{place}.o" for place in range(len(units))]
    for unit, made in zip(units, objects, strict=True):
        subprocess.run([MINGW, *unit.flags, "-O1", "-c", str(unit.source), "-o", str(made)], check=True)
    include = f"-I{kernels_built.SOURCE.parent / 'include'}"
    host = str(kernels_built.ROOT / "tests" / "support" / "windows_host.cpp")
    subprocess.run([MINGW, *flags, "-O1", include, host, *map(str, objects), "-static", "-o", str(program)], check=True)
    ended = subprocess.run([str(WINE), str(program)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("unit", kernels_built.WARNED_OF, ids=str)
def test_compilers_warn_of_nothing(compiler: str, unit: kernels_built.Unit, headers: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} is here")
    target = machine(compiler)
    if unit.level not in (None, "base") and not is_x86_64(target):
        pytest.skip("for another kind of processors")
    here = machine("cc") if shutil.which("cc") else None
    own = [*([] if target == here else [f"-I{headers}"]), *(SSE2 if target.startswith("i686") else [])]
    levels = WITH_LEVELS if is_x86_64(target) else []
    flags = [*own, *unit.flags, *levels, *kernels_built.warnings(compiler, target), "-Werror", "-fsyntax-only"]
    ended = subprocess.run([compiler, *flags, unit.source], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr

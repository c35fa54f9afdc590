"""What compilers make of the kernels: loops that stay in registers, and no code that processors share by mistake."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kernels_built
from kernels_built import FAST, FLAGS, LEVELS, ON_ARM, SOURCE


class Compiler(NamedTuple):
    """A compiler, which of its code is read by `objdump`, and of which the sums of a product have names in it."""

    command: tuple[str, ...]
    level: str = "base"
    objdump: str = "objdump"

    def __str__(self) -> str:
        return " ".join((*self.command, self.level))

    def missing(self) -> str | None:
        """Return what is missing: a Clang for another processor needs headers, which come with a compiler for it."""
        wanted = ("aarch64-linux-gnu-g++",) if "aarch64" in str(self) else ()
        names = [name for name in (self.command[0], *wanted, self.objdump) if shutil.which(name) is None]
        return f"no {' and no '.join(names)} is here" if names else None


ARM = "aarch64-linux-gnu-objdump"
COMPILERS = [
    Compiler(("g++",), "v3"), Compiler(("g++",), "v4"), Compiler(("clang++",), "v3"), Compiler(("clang++",), "v4"),
    Compiler(("aarch64-linux-gnu-g++",), objdump=ARM), Compiler(("clang++", "--target=aarch64-linux-gnu"), objdump=ARM),
]  # fmt: skip


class Loop(NamedTuple):
    """The instructions of an innermost loop, each with what it works on."""

    body: list[tuple[str, str]]

    def count(self, *names: str) -> int:
        return sum(name.startswith(names) for name, _ in self.body)

    def stored_on_the_stack(self) -> list[str]:
        """Return the instructions that write there: on x86-64 the destination is last, on ARM the names differ."""
        return [
            f"{name} {of}"
            for name, of in self.body
            if (re.search(r"\(%[re]?[sb]p\)$", of) and not name.startswith("cmp"))
            or (name.startswith("st") and re.search(r"\[(sp|x29)", of))
        ]


def innermost_loops(listing: str) -> Iterator[Loop]:
    """Find jumps backwards over which no other one jumps back."""
    code = [
        (int(match[1], 16), match[2], match[3])
        for line in listing.splitlines()
        if (match := re.match(r"\s+([0-9a-f]+):\s+(\S+)\s*(.*)", line))
    ]
    end_of_last = -1
    for at, name, of in code:
        target = re.search(r"\b([0-9a-f]+) <", of)
        if name[0] in "bj" and target and end_of_last < int(target[1], 16) <= at:
            end_of_last = at
            yield Loop([(other, its) for where, other, its in code if int(target[1], 16) <= where <= at])


def listing(compiler: Compiler, flags: list[str], names: str, made: Path) -> str:
    """Compile what has names, and return its instructions."""
    if missing := compiler.missing():
        pytest.skip(missing)
    command = [*compiler.command, *FLAGS, *FAST, *flags, f"-I{SOURCE}", "-c", "-x", "c++", "-", "-o", str(made)]
    subprocess.run(command, input=f'#include "tile.hpp"\n[[gnu::used]] auto {names};\n', text=True, check=True)
    return subprocess.check_output([compiler.objdump, "--disassemble", "--no-show-raw-insn", made], text=True)


@pytest.mark.parametrize("stored", ["float", "double"])
@pytest.mark.parametrize("compiler", COMPILERS, ids=str)
def test_the_sums_of_a_product_stay_in_registers(compiler: Compiler, stored: str, tmp_path: Path) -> None:
    """One multiplication of a step for each of 24 sums, 12 where there are 16 registers, and none through memory."""
    names = "matrix = product<HIGH, 2, false>, transposed = product<HIGH, 2, true>"
    code = listing(compiler, [*LEVELS[compiler.level], f"-DSTORED={stored}"], names, tmp_path / "inner.o")
    sums = 12 if compiler.level == "v3" else 24
    found = [loop for loop in innermost_loops(code) if loop.count("fmla", "vfmadd") >= sums]
    unrolled = compiler.level == "v3"
    wanted = (2, 4) if unrolled else (2,)  # with a matrix and with a transposed one, and the rest of unrolled loops
    assert len(found) in wanted
    for loop in found:
        steps, rest = divmod(loop.count("fmla", "vfmadd"), sums)
        assert steps in ((1, 4) if unrolled else (1,)), loop.body
        assert rest == 0, loop.body
        assert not loop.stored_on_the_stack()
        assert loop.count("st") == 0, loop.body
        assert loop.count("ld") <= 14 * steps, loop.body  # one number for each row, and a pair of vectors


@pytest.mark.parametrize("compiler", COMPILERS[-2:], ids=str)
def test_arm_multiplies_pairs_of_bfloat16_by_one_instruction(compiler: Compiler, tmp_path: Path) -> None:
    flags = [*ON_ARM["v8_bf16"], "-DSTORED=BFloat16"]
    code = listing(compiler, flags, "pairs = product_of<HIGH, 2, Paired>", tmp_path / "pairs.o")
    (loop,) = (each for each in innermost_loops(code) if each.count("bfdot"))
    assert loop.count("bfdot") == 24
    assert not loop.stored_on_the_stack()


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++ is here")
def test_no_older_processor_can_be_given_what_clang_makes_for_a_newer_one(tmp_path: Path) -> None:
    """Of the compiler that installs, `tests/project/test_packaging.py` looks at everything."""
    unit, target = kernels_built.UNITS[-1], tmp_path / "level.o"
    subprocess.run(
        ["clang++", "--target=x86_64-linux-gnu", *unit.flags, "-O1", "-c", unit.source, "-o", target], check=True
    )
    names = kernels_built.linked_names(target)
    assert len(names) >= 2
    assert not [name for name in names if not name.startswith(f"_ZN{len(str(unit.level))}{unit.level}")]

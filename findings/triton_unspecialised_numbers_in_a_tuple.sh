#!/usr/bin/env bash
# triton 3.9.0: do_not_specialize=["n"] holds for an integer and not for the integers of a tuple n, which are specialised
# all the same: a program for multiples of 16, one for 1, and one for the rest. A kernel that takes its lengths in a
# tuple, and is declared not to depend on them, is compiled again at the first length that is a multiple of 16, while
# others wait. A guess would be that the declaration holds for what the argument contains. Compiled here for a device
# that is not there; nothing is run.
# Output seen: of 64 lengths, as an integer: 1 program; in a tuple: 3 programs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check triton==3.9.0 2> /dev/null
cat > "$folder/run.py" << 'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Elsewhere:
    """What Triton asks of a device in order to compile for it."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@triton.jit(do_not_specialize=["n"])
def of_integer(out, n):
    tl.store(out, n)


@triton.jit(do_not_specialize=["n"])
def of_tuple(out, n):
    tl.store(out, n[0])


driver.set_active(Elsewhere())
lengths, out = range(1, 65), triton.MockTensor(tl.int32)
programs = {
    "as an integer": len({of_integer.warmup(out, n, grid=(1,)).hash for n in lengths}),
    "in a tuple": len({of_tuple.warmup(out, (n,), grid=(1,)).hash for n in lengths}),
}
print(f"triton {triton.__version__}:", ", ".join(f"{how}: {count}" for how, count in programs.items()))
assert programs == {"as an integer": 1, "in a tuple": 3}
PYTHON
"$folder/venv/bin/python" "$folder/run.py"

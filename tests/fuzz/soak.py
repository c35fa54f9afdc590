"""``make soak``: random calls on many threads for an hour, with refusals, interrupts and forks, which leave nothing.

In each round, threads of Python make calls, gradients and wrong calls that the targets draw, and hold them to the
targets' own formulas. Meanwhile the process forks, as servers do, and interrupts long calls, as a person does. Caches
and pools of threads fill in the first third of the rounds. From the second third to the last, what the process holds
between rounds may not grow: memory in use by one percent, the pages that it lies on by five, and threads and open files
not at all. The allocator of C counts the memory in use, Python's objects included (``PYTHONMALLOC=malloc``): how many
pages it is scattered over varies by several percent.
"""

import argparse
import ctypes
import faulthandler
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from conftest import empty_caches, psutil

from fuzz import arguments, calls, gradients
from fuzz.engine import Target, turn
from relskew_core import backends, relative_attention
from relskew_core.backends._numpy import compiled

THREADS, FORKS = 8, 2
LIBRARIES = ("numpy", "torch", "jax")
EXAMPLES = {"calls": 60, "gradients": 30, "arguments": 60}
"""How many a round draws of each target."""
GROWTH = {"memory": 0.01, "pages": 0.05}
"""By which share there may be more in the last third."""
Attempt = tuple[Target, Any]


class Allocated(ctypes.Structure):
    """What ``mallinfo2`` of glibc 2.33 returns: numbers of bytes and of chunks."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def held() -> Counter[str]:
    """Count bytes of memory, open files, processes that this one has started, and the threads of each name."""
    empty_caches()
    count = ctypes.CDLL(None).mallinfo2
    count.restype = Allocated
    memory, process = count(), psutil.Process()
    pages = process.memory_info()  # without those of files, which come and go
    found = Counter(files=process.num_fds(), children=len(process.children()))
    found.update(memory=memory.uordblks + memory.hblkhd, pages=pages.rss - pages.shared)
    for thread in process.threads():
        with suppress(OSError):  # it has ended
            found["threads " + Path(f"/proc/self/task/{thread.id}/comm").read_text().strip()] += 1
    return found


def grown(rounds: Sequence[Counter[str]]) -> list[str]:
    """Return what there is more of in the last third than in the second, by medians, in words."""
    third = len(rounds) // 3
    parts = rounds[third : 2 * third], rounds[-third:]
    names = sorted({name for one in rounds for name in one})
    medians = {name: [median(one[name] for one in part) for part in parts] for name in names}
    return [
        f"{name} grew from {a:.0f} to {b:.0f}" for name, (a, b) in medians.items() if b > a * (1 + GROWTH.get(name, 0))
    ]


def drawn(seed: int) -> list[Attempt]:
    """Draw the examples of a round."""
    found: list[Attempt] = []
    for target in (calls.TARGET, gradients.TARGET, arguments.TARGET):
        examples: list[Any] = []
        turn(replace(target, check=examples.append), seed, EXAMPLES[target.name])
        found += [(target, example) for example in examples]
    random.Random(seed).shuffle(found)
    return found


def attempt(one: Attempt) -> str | None:
    """Try an example; return what is wrong, in full."""
    target, example = one
    try:
        target.check(example)
    except Exception:
        return f"{target.name}: {example}\n{traceback.format_exc()}"
    return None


def fork(attempts: Iterable[Attempt]) -> int:
    """Try examples in a forked process, with one thread of torch; return its number. It ends where a call hangs."""
    if child := os.fork():
        return child
    faulthandler.dump_traceback_later(120, exit=True)
    torch.set_num_threads(1)  # OpenMP's threads did not come along
    failures = [told for one in attempts if (told := attempt(one))]
    os.write(2, "\n".join(failures).encode())
    os._exit(bool(failures))


def interrupt() -> None:
    """End a call of minutes in its middle."""
    x = np.ones((1, 100_000, 16), np.float32)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.05, 2)  # again if the first was raised in a callback, and ignored
        relative_attention(x, x, x, causal=True)
    signal.setitimer(signal.ITIMER_REAL, 0)


def play(seed: int, forks: int = FORKS) -> list[str]:
    """Make the calls of a round; return what is wrong."""
    attempts = drawn(seed)
    # neither JAX nor the threads of autograd work after a fork
    forkable = [one for one in attempts if one[0] is calls.TARGET and calls.ROWS[one[1].row].module != "jax"]
    with ThreadPoolExecutor(THREADS) as threads:
        failures = threads.map(attempt, attempts)
        children = [fork(forkable[number::forks]) for number in range(forks)]
        interrupt()
        wrong = [told for told in failures if told]
    for child in children:
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            wrong.append(f"a fork ended with {status}, see above")
    return wrong


def settle() -> None:
    """Draw calls of the three libraries, and let short calls be shared by two threads."""
    calls.ROWS = {name: row for name, row in calls.ROWS.items() if row.module in LIBRARIES}
    gradients.ROWS = {name: row for name, row in gradients.ROWS.items() if row.module in LIBRARIES}
    calls.QUICK = [name for name in calls.QUICK if name in calls.ROWS]
    backends.set_numpy_threads(2)
    torch.set_num_threads(2)
    compiled.NUMPY = compiled.NUMPY._replace(shared=0)
    warnings.filterwarnings("ignore", message=".*fork")  # JAX and newer Pythons warn of what is done here on purpose


def main(argv: list[str] | None = None) -> int:
    """Play rounds until the time is over; return 1 if something is wrong or left."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args(argv)
    settle()
    print(f"seed {asked.seed}", flush=True)
    start = time.monotonic()
    rounds: list[Counter[str]] = []
    while len(rounds) < 3 or time.monotonic() - start < asked.seconds:
        # a fork while another thread imports, as in first calls, keeps that module locked
        if wrong := play(asked.seed + len(rounds), FORKS if rounds else 0):
            print("\n".join(wrong), f"\nagain: make soak SEED={asked.seed + len(rounds)}")
            return 1
        rounds.append(held())
        print(f"{time.monotonic() - start:7.0f} s, round {len(rounds)}: {dict(rounds[-1])}", flush=True)
    left = grown(rounds)
    print("\n".join(left) or "nothing is left")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())

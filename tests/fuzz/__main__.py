"""The command: targets in turn until the time is over, each at least once, then one table."""

import argparse
import importlib
import importlib.util
import sys
import time
from dataclasses import dataclass

from fuzz.engine import Target, turn


@dataclass
class Row:
    target: Target
    first_seed: int | None = None
    examples: int = 0
    seconds: float = 0.0
    failed: bool = False


def main(argv: list[str] | None = None) -> int:
    targets = load_targets()
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", action="append", choices=[target.name for target in targets])
    asked = parser.parse_args(argv)
    print(f"seed {asked.seed}", flush=True)
    rows = [Row(target) for target in targets if asked.only is None or target.name in asked.only]
    seed, end = asked.seed, time.monotonic() + asked.seconds
    while going := [row for row in rows if not row.failed and (row.first_seed is None or time.monotonic() < end)]:
        row, start = min(going, key=lambda row: row.seconds), time.monotonic()
        result, name = turn(row.target, seed), row.target.name
        row.first_seed = seed if row.first_seed is None else row.first_seed
        row.seconds += time.monotonic() - start
        row.examples += result.examples
        row.failed = result.failure is not None
        if row.failed:
            print(f"\n{name}: {result.failure}\nagain: make fuzz SEED={seed} ONLY={name}\n", flush=True)
        seed += 1
    for row in rows:
        print(f"{row.target.name:10}{row.examples:8} examples{row.seconds:8.1f} s", end="")
        print(f"  first seed {row.first_seed}  {'FAILED' if row.failed else 'ok'}")
    return int(any(row.failed for row in rows))


def load_targets() -> list[Target]:
    """Import everything at once: Hypothesis draws constants from loaded modules, so seeds depend on them."""
    jax = importlib.import_module("jax") if importlib.util.find_spec("jax") is not None else None
    if jax is not None:
        jax.config.update("jax_enable_x64", True)
    from fuzz import arguments, caches, calls, exports, files, forms, gradients, grids, lives, threads, transforms

    parts = [calls, gradients, exports, files, arguments, grids, forms, transforms, threads, lives, caches]
    return [part.TARGET for part in parts] + ([importlib.import_module("fuzz.traces").TARGET] if jax else [])


if __name__ == "__main__":
    if sys.flags.hash_randomization:
        sys.exit("`make fuzz` runs this with PYTHONHASHSEED=0: a seed gives other examples without")
    sys.exit(main())

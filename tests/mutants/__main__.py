"""The command: mutants of some modules or of all, compared with the record of those that no test can notice."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from mutants import ROOT
from mutants.record import Mutant, compared, recorded


def _modules(folder: str, names: str = "") -> tuple[str, ...]:
    found = tuple(f"relskew_core/{folder}{name}" for name in names.split() or [""])
    assert all((ROOT / path).exists() or (ROOT / f"{path}.py").exists() for path in found), found
    return found


def _tests(names: str, folder: str = "export") -> tuple[str, ...]:
    found = {name: [f"tests/{folder}/{kind}_{name}.py" for kind in ("inside", "test")] for name in names.split()}
    there = {name: [path for path in paths if (ROOT / path).exists()] for name, paths in found.items()}
    assert all(there.values()), f"tests/{folder} has no test_ or inside_ of {[x for x in there if not there[x]]}"
    return tuple(path for paths in there.values() for path in paths)


# the modules of each suite, each module in the first suite that lists it, and the tests that should notice their
# mutants
SUITES = {
    "kernels": (
        _modules("backends/_", "compiled numpy ragged threads torch/cpu") + _modules("_functions/prepared"),
        _tests("compiled grids numpy prepared torch_operator torch_padding way_of_a_call without_kernels",
               "backends") + _tests("hidden traps", "core"),
    ),
    "core": (_modules("_", "array functions kernel positions"), ("tests/core", *_tests("grids prepared", "backends"))),
    "layers": (
        _modules("", "_block conventions layers/torch"),
        # not the tests of JAX's layers, which start its threads when they are collected
        _tests("caches conformer kept lives multihead torch torch_arguments training whole_models", "layers")
        + _tests("byte_order conventions errors state_dicts", "core"),
    ),
    "families": (
        _modules("huggingface"),
        ("tests/huggingface", *_tests("families_caches families_numbers families_registered families_local", "peers")),
    ),
    "saving": (_modules("export/_files"), _tests("opening save")),
    "validation": (_modules("export/_check"), _tests("caches inspect opening quantise questions validate")),
    "graphs": (_modules("export/_", "block form nodes"), _tests("caches forms model operator_library")),
    "changes": (_modules("export/_", "models/caches quantise"), _tests("caches forms quantise")),
    "models": (
        _modules("export/_", "generate models"),
        _tests("convert decoder_check encoder_decoder generate whole"),
    ),
    "translation": (_modules("export/_translate"), _tests("translation")),
}  # fmt: skip
# the tests of these use torch; tests of models take a second or more for each mutant: try a sample
TORCH = ("kernels", "layers", "families", "models")
# and the tests of these run the models of other packages
PEERS = ("families",)
RECORD = Path(__file__).with_name("survivors.md")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", action="append", help="a folder or a module, as relskew_core/_positions/skew")
    parser.add_argument("--sample", type=int, help="try so many of each suite")
    parser.add_argument("--again", action="store_true", help="only those that the record names")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--patience", type=float, default=8.0, help="seconds of tests for a mutant")
    asked = parser.parse_args(argv)
    from mutants.stage import build  # mutmut is not there where the names below are tested

    known = recorded(RECORD.read_text())
    tried: list[tuple[Mutant, str]] = []
    modules: set[str] = set()
    print(f"seed {asked.seed}")
    for name, (folders, _) in SUITES.items():
        parts = [part.removesuffix(".py") for part in asked.only or folders if part.startswith(folders)]
        if parts:
            stage = ROOT / ".mutants" / name
            mutants = [mutant for mutant in build(stage, parts) if mutant.module not in modules]
            modules.update(mutant.module for mutant in mutants)
            if asked.sample:
                mutants = random.Random(asked.seed).sample(mutants, min(asked.sample, len(mutants)))
            elif asked.again:
                mutants = [mutant for mutant in mutants if mutant.line in known]
            tried += run(stage, mutants, name, asked) if mutants else []
    print(", ".join(f"{number} {verdict}" for verdict, number in Counter(verdict for _, verdict in tried).items()))
    new, noticed = compared(tried, known)
    place = RECORD.relative_to(ROOT)
    print(f"not in {place}:" if new else "every survivor has a reason", *new, sep="\n")
    if noticed:
        print(f"noticed, but in {place}:", *noticed, sep="\n")
    return int(bool(new))


def run(stage: Path, mutants: list[Mutant], suite: str, asked: argparse.Namespace) -> list[tuple[Mutant, str]]:
    how = {"torch": suite in TORCH, "workers": asked.workers, "patience": asked.patience}
    (stage / "mutants.json").write_text(json.dumps({"mutants": [asdict(mutant) for mutant in mutants], **how}))
    command = [sys.executable, "-m", "pytest", "-p", "mutants.loop", "-p", "no:cacheprovider", "-p", "no:xdist", "-sq"]
    command += ["--tb=native", *(["-p", "no:anyio", "-m", "not slow"] if suite in PEERS else [])]
    paths = [*(str(stage / folder) for folder in (".", "tests", "tests/support")), os.environ["PYTHONPATH"]]
    paths += [str(ROOT / ".venv-peers")] if suite in PEERS else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, *SUITES[suite][1]], cwd=stage, env=env)
    (stage / "verdicts").touch()
    verdicts = dict(json.loads(line) for line in (stage / "verdicts").read_text().splitlines())
    if done.returncode not in (0, 5) or len(verdicts) < len(mutants):  # 5: no test ran in the forking process
        sys.exit(f"ended early, with status {done.returncode}")
    return [(mutant, verdicts[mutant.name]) for mutant in mutants]


if __name__ == "__main__":
    sys.exit(main())

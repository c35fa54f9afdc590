#!/usr/bin/env bash
# cubed 0.27.0: `concat` refuses a negative axis of arrays whose lengths differ along it. Before it concatenates, it
# compares the shapes on every axis but `axis`, and counts these axes from 0, so that -1 excludes none. Arrays of equal
# shapes pass the comparison, and axis=1 works. The array API standard allows negative axes, and a guess would be that
# -1 is the last axis, as in cubed's own `stack` and `sum`.
# Output seen: axis=1: (2, 7), axis=-1 of equal shapes: (2, 12), axis=-1: ValueError all the input array dimensions
# except for the concatenation axis must match exactly: [(2, 1), (2, 6)].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check cubed==0.27.0 numpy==2.4.0 2> /dev/null
cat > "$folder/run.py" << 'PYTHON'
import importlib.metadata

import cubed.array_api as xp
import numpy as np

narrow, wide = xp.asarray(np.ones((2, 1))), xp.asarray(np.ones((2, 6)))
assert xp.stack([wide, wide], axis=-1).shape == (2, 6, 2) and xp.sum(wide, axis=-1).shape == (2,)
front, equal = xp.concat([narrow, wide], axis=1), xp.concat([wide, wide], axis=-1)
try:
    refused = f"a result of {xp.concat([narrow, wide], axis=-1).shape}"
except ValueError as error:
    refused = f"ValueError {error}"
print(f"cubed {importlib.metadata.version('cubed')}: axis=1: {front.shape}, axis=-1 of equal shapes: {equal.shape}, "
      f"axis=-1: {refused}")
assert front.shape == (2, 7) and equal.shape == (2, 12) and "must match exactly: [(2, 1), (2, 6)]" in refused
PYTHON
"$folder/venv/bin/python" "$folder/run.py"

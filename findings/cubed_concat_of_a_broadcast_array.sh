#!/usr/bin/env bash
# cubed 0.27.0: `concat` returns wrong numbers, without an error, for an array that was broadcast along the axis. The
# broadcast array has a chunk for each entry, all of them in memory of one entry, and `concat` reads this memory at the
# places that the entries would have. With a second such array it raises an error of NumPy. The broadcast array alone is
# right, and so is `concat` after `rechunk`. A guess would be that what is right alone is right when it is joined.
# Output seen: "alone: 0.0, joined: wrong by 16.0, joined after rechunk: 0.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check cubed==0.27.0 numpy==2.4.0 2> /dev/null
cat > "$folder/run.py" << 'PYTHON'
import cubed.array_api as xp
import numpy as np

column, ones = np.arange(18.0).reshape(2, 9, 1), np.ones((2, 9, 4))
wide = xp.broadcast_to(xp.asarray(column), (2, 9, 3))
expected = np.concatenate([np.broadcast_to(column, (2, 9, 3)), ones], axis=2)


def error(found, expected):
    return float(np.abs(found.compute() - expected).max())


alone = error(wide, expected[:, :, :3])
joined = error(xp.concat([wide, xp.asarray(ones)], axis=2), expected)
after = error(xp.concat([wide.rechunk(wide.shape), xp.asarray(ones)], axis=2), expected)
print(f"alone: {alone}, joined: wrong by {joined}, joined after rechunk: {after}")
assert alone == after == 0 and joined > 1
PYTHON
"$folder/venv/bin/python" "$folder/run.py"

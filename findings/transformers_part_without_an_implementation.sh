#!/usr/bin/env bash
# transformers 5.24.0: a part of a model that is made from a configuration, such as VitsTextEncoder(VitsConfig()), to load
# the weights of another code base into it, ignores its attention mask without a word. Only the constructors of whole
# models choose an attention implementation; without one, create_bidirectional_mask returns None, and padding is attended
# to. With "sdpa", which VitsModel would refuse, the part makes a mask of booleans and adds it to its logits. With
# attn_implementation="eager" in the configuration, a padded item equals the same item alone. A guess would be that a
# module whose forward takes an attention mask uses it.
# Output seen: "None: differs", "sdpa: differs", "eager: equal".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 numpy==2.4.0 2> /dev/null
cat > "$folder/run.py" << 'PYTHON'
import torch
from transformers import VitsConfig
from transformers.models.vits.modeling_vits import VitsTextEncoder

ids = torch.arange(18).reshape(2, 9)
mask = torch.arange(9) < torch.tensor([[9], [6]])
found = {}
for implementation in (None, "sdpa", "eager"):
    torch.manual_seed(0)
    given = {} if implementation is None else {"attn_implementation": implementation}
    encoder = VitsTextEncoder(VitsConfig(num_hidden_layers=2, **given)).double().eval()

    def run(ids, mask):
        with torch.no_grad():
            return encoder(ids, padding_mask=mask[..., None].double(), attention_mask=mask).last_hidden_state

    padded, alone = run(ids, mask)[1:, :6], run(ids[1:, :6], mask[1:, :6])
    found[implementation] = "equal" if torch.allclose(padded, alone, atol=1e-12) else "differs"
print(", ".join(f"{name}: {result}" for name, result in found.items()))
assert found == {None: "differs", "sdpa": "differs", "eager": "equal"}
PYTHON
"$folder/venv/bin/python" "$folder/run.py"

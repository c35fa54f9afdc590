#!/usr/bin/env bash
# onnx 1.23.2 and onnxruntime 1.32.0: version_converter turns a model of opset 15 with RandomNormalLike, as voices of
# text-to-speech (VITS) have it, into one of opset 23 that the checker accepts, and onnxruntime refuses to open it:
# opset 22 raised the version of the random operators, and onnxruntime has kernels of version 1 alone. Converted to
# opset 21, the same model runs. A guess would be that a runtime which opens opset 23 opens every standard operator of it.
# Output seen: "opset 21: runs", "opset 22: NotImplemented", "opset 23: NotImplemented".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.0 2> /dev/null
cat > "$folder/run.py" << 'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, version_converter

x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
graph = helper.make_graph([helper.make_node("RandomNormalLike", ["x"], ["y"], seed=1.0)], "noise", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def run(opset):
    converted = version_converter.convert_version(model, opset)
    onnx.checker.check_model(converted)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            converted.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        return type(error).__name__
    session.run(None, {"x": np.zeros(5, np.float32)})
    return "runs"


found = {opset: run(opset) for opset in (21, 22, 23)}
print(", ".join(f"opset {opset}: {result}" for opset, result in found.items()))
assert found == {21: "runs", 22: "NotImplemented", 23: "NotImplemented"}
PYTHON
"$folder/venv/bin/python" "$folder/run.py"

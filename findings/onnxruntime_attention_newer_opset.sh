#!/usr/bin/env bash
# onnxruntime 1.32.0, CPU: the operator Attention of ONNX runs as one fused kernel where a model declares opset 23 or
# 24. The same node in a model of opset 25 to 28 is expanded into 71 nodes when the session is created, because the
# kernel is registered for versions 23 and 24 alone, and version 25 of the operator (opset 25 added windows) has a
# function body. The numbers agree; the time and the memory are those of another program, which materialises the
# logits. A guess would be that the newest opset that a runtime loads is its best one: for attention, opset 24 is.
# Output seen: "23: 1 node, 24: 1 node, 25: 71 nodes, 26: 71 nodes, 27: 71 nodes, 28: 71 nodes; largest difference < 1e-6".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.0 2> /dev/null
cat > "$folder/run.py" << 'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

rng = np.random.default_rng(0)
arrays = {name: rng.standard_normal((1, 2, 6, 8)).astype(np.float32) for name in "qkv"}


def run(opset):
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 6, 8]) for name in arrays]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 6, 8])
    node = helper.make_node("Attention", list(arrays), ["y"], is_causal=1)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = f"{sys.argv[1]}/{opset}.onnx"
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, arrays)
    return y, len(onnx.load(options.optimized_model_filepath).graph.node)


results = {opset: run(opset) for opset in range(23, 29)}
print(", ".join(f"{opset}: {count} node{'s' * (count > 1)}" for opset, (_, count) in results.items()))
difference = max(float(np.abs(y - results[23][0]).max()) for y, _ in results.values())
print(f"largest difference {difference:.1e}")
assert [count for _, count in results.values()] == [1, 1, 71, 71, 71, 71]
assert difference < 1e-6
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder"

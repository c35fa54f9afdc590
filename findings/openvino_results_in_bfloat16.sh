#!/usr/bin/env bash
# openvino 2026.4.1 with onnx 1.23.2: a model whose result is bfloat16 returns, in Python, an array of the type float16
# with the bits of bfloat16, so its numbers are others: 1, 2, 3.5 come out as 1.875, 2, 2.188. The port of the result says
# bfloat16, and the same bits read as bfloat16 are right. NumPy has no bfloat16 of its own; a guess would be an error, the
# unsigned integers that hold the bits, or the numbers in float32.
# Output seen: "bf16 as float16: 1.875 2 2.1875", "the same bits: 1 2 3.5".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnx==1.23.2 numpy==2.4.0 ml-dtypes==0.5.4 2> /dev/null
cat > "$folder/run.py" << 'PYTHON'
import ml_dtypes
import numpy as np
import onnx
import openvino
from onnx import TensorProto, helper

x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
y = helper.make_tensor_value_info("y", TensorProto.BFLOAT16, ["n"])
graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)], "rounded", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
onnx.checker.check_model(model)
onnx.save(model, "rounded.onnx")
compiled = openvino.Core().compile_model("rounded.onnx", "CPU")
(found,) = compiled(np.array([1, 2, 3.5], np.float32)).values()
port = compiled.output(0).element_type.get_type_name()
numbers, bits = ([float(number) for number in array] for array in (found, found.view(ml_dtypes.bfloat16)))
print(f"{port} as {found.dtype}:", *map("{:g}".format, numbers))
print("the same bits:", *map("{:g}".format, bits))
assert (port, str(found.dtype), numbers, bits) == ("bf16", "float16", [1.875, 2, 2.1875], [1, 2, 3.5])
PYTHON
cd "$folder" && "$folder/venv/bin/python" run.py

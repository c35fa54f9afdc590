#!/usr/bin/env bash
# onnx 1.23.2 and onnxruntime 1.32.0: a product of integers whose rows have separate scales (MatMulInteger, Cast, Mul by
# the product of a scale for each row and one for each column, Add of a bias) loses its bias in onnxruntime at the default
# level of optimisation. The four nodes become one MatMulIntegerToFloat, which adds a bias only if the scale of the rows is
# one number. Without the bias, and without optimisation, the result is right. A guess would be that a fusion that accepts
# the form computes it, or that it leaves the form alone.
# Output seen: "without bias: 0, 0", "with bias: 0, 1" (the share of entries that are wrong, without and with optimisation).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.0 2> /dev/null
cat > "$folder/run.py" << 'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

rng = np.random.default_rng(0)
x, weight = rng.integers(1, 255, (5, 32), dtype=np.uint8), rng.integers(-63, 64, (32, 48), dtype=np.int8)
rows, columns, bias = (rng.uniform(0.5, 1, shape).astype(np.float32) for shape in ((5, 1), (48,), (48,)))
bias += 1000


def share_of_wrong_entries(with_bias, level):
    nodes = [
        helper.make_node("MatMulInteger", ["x", "weight", "zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["rows", "columns"], ["scales"]),
        helper.make_node("Mul", ["numbers", "scales"], ["product" if with_bias else "y"]),
    ]
    nodes += [helper.make_node("Add", ["product", "bias"], ["y"])] * with_bias
    stored = {"weight": weight, "zero": np.array(128, np.uint8), "columns": columns, "bias": bias}
    graph = helper.make_graph(
        nodes,
        "product",
        [
            helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 32]),
            helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", 1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 48])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x, "rows": rows})
    wanted = ((x.astype(int) - 128) @ weight.astype(int)) * (rows * columns) + with_bias * bias
    return float(np.mean(~np.isclose(y, wanted, rtol=1e-4, atol=0.1)))


levels = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
found = {kind: [share_of_wrong_entries(kind == "with bias", level) for level in levels] for kind in ("without bias", "with bias")}
print(", ".join(f"{kind}: {plain:g}, {optimised:g}" for kind, (plain, optimised) in found.items()))
assert found == {"without bias": [0, 0], "with bias": [0, 1]}
PYTHON
"$folder/venv/bin/python" "$folder/run.py"

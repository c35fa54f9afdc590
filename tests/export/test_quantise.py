"""Models in fewer bits: stored weights, results, and masks that still hide keys."""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from export_forms import change, valid
from onnx_sessions import opened
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import quantize, save, to_onnx, torch_to_onnx, validate
from torch_exports import of, random

SPEC = BlockSpec(64, 2, Span.causal(64), causal=True)
WEIGHTS = {key: np.asarray(x) for key, x in init_weights(SPEC, seed=0).items()}
TOLERANCES = {"dynamic": 0.1, "static": 0.3, "weights-8": 0.03, "weights-4": 0.4}


def graph_of(text: str, opset: int = 21, /, **stored: np.ndarray) -> onnx.ModelProto:
    """Return a graph in onnx's syntax whose nodes have no names, and what it stores, with shapes as torch declares."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    for name, x in stored.items():
        model.graph.initializer.append(numpy_helper.from_array(x, name))
        kind = helper.np_dtype_to_tensor_dtype(x.dtype)
        model.graph.value_info.append(helper.make_tensor_value_info(name, kind, x.shape))
    return model


def inputs(factor: float = 1.0) -> list[dict[str, np.ndarray]]:
    return [{"x": (factor * np.random.default_rng(0).standard_normal((2, 64, 64))).astype(np.float32)}]


def run(path: Path, x: np.ndarray) -> np.ndarray:
    return np.asarray(opened(path).run(None, {"x": x})[0])


@pytest.mark.parametrize("profile", ["ort", "portable"])
@pytest.mark.parametrize("kind", TOLERANCES)
def test_every_kind_is_smaller_and_within_its_tolerance(kind: Any, profile: Any, tmp_path: Path) -> None:
    model = to_onnx(SPEC, WEIGHTS, profile=profile)
    before = model.SerializeToString()
    given = inputs() if kind == "static" else None
    path = quantize(model, tmp_path / "quantised.onnx", kind, inputs=given)
    assert model.SerializeToString() == before
    with pytest.raises(FileExistsError):
        quantize(model, path, kind, inputs=given)
    assert path.stat().st_size < 0.55 * save(model, tmp_path / "whole.onnx").stat().st_size
    made = onnx.load(path)
    assert not any(tensor.data_type == 1 and np.prod(tensor.dims) > 512 for tensor in made.graph.initializer)
    if kind.startswith("weights"):  # blocks with one scale each, and nothing else
        products = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
        assert {len(node.input) for node in products} == {3}
        sizes = {one.i for node in products for one in node.attribute if one.name == "block_size"}
        assert sizes == {64 if kind == "weights-8" else 32}
    valid(made, SPEC, WEIGHTS, lengths=[1, 7, 64], batches=(2,), tolerance=TOLERANCES[kind])
    for tolerance in (None, 1e-4):
        wrong = validate(made, SPEC, WEIGHTS, lengths=[7], batches=(2,), tolerance=tolerance)
        assert "y" in {check.name for check in wrong.failures}


@pytest.mark.parametrize("profile", ["ort", "portable"])
def test_tables_in_branches_and_loops_are_quantised(profile: Any, tmp_path: Path) -> None:
    model = to_onnx(SPEC, WEIGHTS, profile=profile, chunk_size=16)
    made = onnx.load(quantize(model, tmp_path / "chunks.onnx", "weights-8"))
    assert "rel_k_int8" in {tensor.name for tensor in made.graph.initializer}
    valid(made, SPEC, WEIGHTS, lengths=[7, 40], batches=(2,), tolerance=0.03)


@pytest.mark.parametrize(("kind", "products"), [("weights-8", 1), ("dynamic", 5)])
def test_a_row_is_rounded_by_itself(kind: Any, products: int, tmp_path: Path) -> None:
    """Large numbers elsewhere do not affect its precision, and a row of zeros causes no division by 0."""
    path = quantize(to_onnx(SPEC, WEIGHTS), tmp_path / "rounded.onnx", kind)
    x = inputs()[0]["x"]
    x[:, 3] = 0
    other = x.copy()
    other[:, -1] *= 1e4
    first, second = run(path, x), run(path, other)
    assert [node.op_type for node in onnx.load(path).graph.node].count("MatMulInteger") == products
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first[:, :-1], second[:, :-1])


def products_with_a_table(*results: str) -> onnx.ModelProto:
    """Return products of queries with rows of a table, which may be a result, too."""
    given = "float[b,2,n,32] q, int64[1] end"
    more = "".join(f", float{list(WEIGHTS[name].shape)} {name}" for name in results)
    return graph_of(
        f"products ({given}) => (float[b,2,n,m] y{more}) {{rows = Slice(rel_k, zero, end, axis)"
        " columns = Transpose<perm = [0, 2, 1]>(rows) y = MatMul(q, columns)}",
        rel_k=WEIGHTS["rel_k"], zero=np.array([0]), axis=np.array([1]),
    )  # fmt: skip


def products_with_a_weight() -> onnx.ModelProto:
    """Return products that share rows, one of them in a branch, and of an opset whose maximum has axes as attribute."""
    return graph_of(
        "products (float[b,2,n,32] q, int64[1] end) => (float[b,2,n,64] y) {other = MatMul(q, weight)"
        " all = ReduceSum(end) some = Cast<to = 9>(all) mine = If(some) <then_branch = yes () => (float[b,2,n,64] a)"
        " {a = MatMul(q, weight)}, else_branch = no () => (float[b,2,n,64] c) {c = Identity(other)}>"
        " y = Add(mine, other)}",
        13, weight=WEIGHTS["rel_k"][0].T.copy(),
    )  # fmt: skip


@pytest.mark.parametrize("place", [0, 5, 31])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", ["table", "weight"])
def test_a_row_that_is_not_finite_gives_nan(operand: str, number: float, place: int, tmp_path: Path) -> None:
    model = products_with_a_table() if operand == "table" else products_with_a_weight()
    path = quantize(model, tmp_path / "products.onnx", "dynamic")
    assert "MatMulInteger" in {node.op_type for node in onnx.load(path).graph.node}
    q = np.random.default_rng(0).standard_normal((1, 2, 3, 32)).astype(np.float32)
    wrong = q.copy()
    wrong[0, 0, 1, place] = number
    session = opened(path)
    first, second = (session.run(None, {"q": x, "end": np.array([40])})[0] for x in (q, wrong))
    assert np.isnan(second[0, 0, 1]).all()
    second[0, 0, 1] = first[0, 0, 1]
    np.testing.assert_array_equal(first, second)
    wanted = q @ WEIGHTS["rel_k"][:, :40].mT if operand == "table" else 2 * q @ WEIGHTS["rel_k"][0].T
    assert np.linalg.norm(first - wanted) < 0.03 * np.linalg.norm(wanted)


def static_products(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Quantise with queries that are large, and few rows of the table."""
    q = np.random.default_rng(1).standard_normal((1, 2, 3, 32)).astype(np.float32)
    return onnx.load(quantize(model, path, "static", inputs=[{"q": 5 * q, "end": np.array([10])}]))


def test_a_static_table_is_rounded_once_and_as_a_whole(tmp_path: Path) -> None:
    """Its columns are sliced in 8 bits, and rows that no representative input reads are not clipped."""
    model = products_with_a_table()
    table = np.where(np.arange(64)[:, None] < 20, WEIGHTS["rel_k"], 4 * WEIGHTS["rel_k"])
    change(model, "rel_k", lambda _: table)
    made = static_products(model, tmp_path / "static.onnx")
    stored = {tensor.name: tensor for tensor in made.graph.initializer}
    assert "rel_k" not in stored
    assert (stored["rel_k_uint8"].data_type, list(stored["rel_k_uint8"].dims)) == (TensorProto.UINT8, [2, 32, 64])
    assert "Transpose" not in {node.op_type for node in made.graph.node}
    (cut,) = (node for node in made.graph.node if node.op_type == "Slice")
    assert [node.op_type for node in made.graph.node if cut.output[0] in node.input] == ["DequantizeLinear"]
    q = np.random.default_rng(0).standard_normal((1, 2, 3, 32)).astype(np.float32)
    session = opened(tmp_path / "static.onnx")
    y, wanted = session.run(None, {"q": q, "end": np.array([64])})[0], q @ table.swapaxes(1, 2)
    assert np.linalg.norm(y - wanted) < 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize("shared", [False, True])
def test_static_tables_of_values_and_of_all_heads(shared: bool, tmp_path: Path) -> None:
    spec = BlockSpec(64, 2, Span.causal(64), causal=True, rel_values=True, shared_table=shared)
    weights = init_weights(spec, seed=0)
    path = quantize(to_onnx(spec, weights), tmp_path / "static.onnx", "static", inputs=inputs())
    shapes = {tensor.name: list(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    heads = [] if shared else [2]
    assert (shapes["rel_k_uint8"], shapes["rel_v_uint8"]) == ([*heads, 32, 65], [*heads, 65, 32])
    valid(path, spec, weights, lengths=[1, 7, 64], batches=(2,), tolerance=TOLERANCES["static"])


@pytest.mark.filterwarnings("ignore:.*keeps weights in float32")
@pytest.mark.parametrize("other", ["Neg", "Transpose", "result"])
def test_static_tables_with_other_readers_stay(other: str, tmp_path: Path) -> None:
    """One that is read in another way; a part of it may be a result, too."""
    model, table = products_with_a_table(), WEIGHTS["rel_k"]
    wanted = {"Neg": -table, "Transpose": table.T, "result": table[:, :10].swapaxes(1, 2)}[other]
    name, sizes = ("columns", (2, 32, "m")) if other == "result" else ("other", wanted.shape)
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))
    if other != "result":
        model.graph.node.append(helper.make_node(other, ["rel_k"], ["other"], name="other"))
    made = static_products(model, tmp_path / "static.onnx")
    session, q = opened(tmp_path / "static.onnx"), np.ones((1, 2, 3, 32), np.float32)
    y, second = session.run(None, {"q": q, "end": np.array([10])})
    assert np.linalg.norm(second - wanted) < 0.02 * np.linalg.norm(wanted)
    assert np.linalg.norm(y - q @ table[:, :10].swapaxes(1, 2)) < 0.5 * np.linalg.norm(y)
    assert ("rel_k_zero" in {tensor.name for tensor in made.graph.initializer}) == (other == "result")


@pytest.mark.filterwarnings("ignore:.*keeps weights in float32")
@pytest.mark.parametrize("kind", ["weights-8", "dynamic"])
def test_a_table_that_is_a_result_stays(kind: Any, tmp_path: Path) -> None:
    session = opened(quantize(products_with_a_table("rel_k"), tmp_path / "products.onnx", kind))
    q = np.ones((1, 2, 3, 32), np.float32)
    y, table = session.run(None, {"q": q, "end": np.array([40])})
    np.testing.assert_array_equal(table, WEIGHTS["rel_k"])
    np.testing.assert_allclose(y, q @ WEIGHTS["rel_k"][:, :40].swapaxes(1, 2), atol=1e-5)


@pytest.mark.parametrize("kind", TOLERANCES)
def test_matrices_in_a_batch_are_int8_unless_static(kind: Any, tmp_path: Path) -> None:
    """onnxruntime's static form has no scale for each column of them."""
    draw = np.random.default_rng(0)
    weights, x = (draw.standard_normal(shape).astype(np.float32) for shape in ((2, 32, 40), (1, 2, 3, 32)))
    model = graph_of("graph (float[b,2,n,32] x) => (float[b,2,n,40] y) {y = MatMul(x, weights)}", weights=weights)
    left = pytest.warns(UserWarning, match="keeps weights in float32, .*: 0.0098 MiB of MatMul")
    with left if kind == "static" else nullcontext():
        path = quantize(model, tmp_path / "batch.onnx", kind, inputs=[{"x": x}] if kind == "static" else None)
    error = np.linalg.norm(run(path, x) - x @ weights) / np.linalg.norm(x @ weights)
    assert error < 1e-6 if kind == "static" else 1e-3 < error < 0.02


CONVOLUTIONS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], bool]] = {
    "kernel of 1": ("Conv", (64, 32, 1), {}, True),
    "kernel of 1 × 1": ("Conv", (64, 32, 1, 1), {"strides": [1, 1], "pads": [0] * 4}, True),
    "padded kernel of 1": ("Conv", (64, 32, 1), {"pads": [1, 1]}, False),
    "kernel of 1 in steps": ("Conv", (64, 32, 1), {"strides": [2]}, False),
    "kernel of 1 in groups": ("Conv", (64, 16, 1), {"group": 2}, False),
    "kernel of 3": ("Conv", (64, 32, 3), {"pads": [1, 1]}, False),
    "transposed": ("ConvTranspose", (32, 24, 4), {"strides": [2]}, False),
    "transposed in groups": ("ConvTranspose", (32, 24, 4), {"group": 2}, False),
    "classifier": ("Gemm", (32, 64), {}, True),
    "classifier, transposed": ("Gemm", (64, 32), {"transB": 1}, True),
}
"""The operator, the shape of its weight, its attributes, and whether it is written as a product."""


@pytest.mark.parametrize("form", CONVOLUTIONS)
@pytest.mark.parametrize("kind", TOLERANCES)
def test_weights_of_convolutions_and_classifiers_are_quantised(kind: Any, form: str, tmp_path: Path) -> None:
    op, shape, options, product = CONVOLUTIONS[form]
    draw = np.random.default_rng(0)
    weight = draw.standard_normal(shape).astype("f")
    width = {"Gemm": 64, "Conv": shape[0], "ConvTranspose": shape[1] * options.get("group", 1)}[op]
    bias = draw.standard_normal(width).astype("f")
    sizes = (5, 32) if op == "Gemm" else (2, 32, *[9] * (len(shape) - 2))
    x = draw.standard_normal(sizes).astype("f")
    type_of, said = f"float[{','.join('abcd'[: len(sizes)])}]", ", ".join(f"{key} = {x}" for key, x in options.items())
    text = f"graph ({type_of} x) => ({type_of} y) {{y = {op}{f'<{said}>' if said else ''}(x, weight, bias)}}"
    model = graph_of(text, weight=weight, bias=bias)
    wanted = run(save(model, tmp_path / "whole.onnx"), x)
    given: Any = [{"x": torch.from_numpy(x)}] if kind == "static" else None  # arrays of any library
    path = quantize(model, tmp_path / "small.onnx", kind, inputs=given)
    assert np.linalg.norm(run(path, x) - wanted) < TOLERANCES[kind] / 2 * np.linalg.norm(wanted)
    made = onnx.load(path).graph
    assert all(np.prod(tensor.dims) < 1024 for tensor in made.initializer if tensor.data_type == TensorProto.FLOAT)
    assert ("DequantizeLinear" in {node.op_type for node in made.node}) == (kind == "static" or not product)


def test_weights_that_stay_in_float32_are_named(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    stored = {"w": (1, 96, 32), "r": (1, 96, 32), "taken": (40, 32)}
    model = graph_of(
        "graph (float[2,5,32] x) => (float[1,5,32] last, float[40,5,2] y)"
        ' {"", last = GRU<hidden_size = 32>(x, w, r) turned = Transpose(x) y = MatMul(taken, turned)}',
        **{name: draw.standard_normal(shape).astype("f") for name, shape in stored.items()},
    )
    with pytest.warns(UserWarning, match=r"keeps weights in float32, .*: 0\.023 MiB of GRU, 0\.0049 MiB of MatMul$"):
        quantize(model, tmp_path / "small.onnx")


@pytest.mark.parametrize("window", [None, (9, None)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("profile", "opset"), [("ort", 23), ("trt", 23), ("portable", 21)])
def test_static_models_hide_masked_keys(profile: Any, opset: int, masked: bool, window: Any, tmp_path: Path) -> None:
    """Masked logits before a softmax or an ``Attention`` get no range, and onnxruntime loads the rest."""
    spec = BlockSpec(64, 2, Span.causal(64), causal=True, window=window)
    model = to_onnx(spec, WEIGHTS, profile=profile, opset=opset, mask=masked)
    for node in model.graph.node if profile == "portable" else ():  # nodes need no names
        node.name = ""
    given = inputs()[0] | ({"mask": np.arange(64).reshape(1, 1, 1, 64) < 50} if masked else {})
    path = quantize(model, tmp_path / "static.onnx", "static", inputs=[given])
    valid(path, spec, WEIGHTS, lengths=[1, 7, 64], batches=(2,), tolerance=TOLERANCES["static"])
    in_bits = {node.input[0] for node in onnx.load(path).graph.node if node.op_type == "QuantizeLinear"}
    assert {f"relskew/compute/{name}_proj" for name in "qkv"} <= in_bits  # all except the logits


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_columns_of_a_weight_have_their_own_scales(kind: Any, tmp_path: Path) -> None:
    given = inputs() if kind == "static" else None
    made = onnx.load(quantize(to_onnx(SPEC, WEIGHTS), tmp_path / "columns.onnx", kind, inputs=given))
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    assert all(stored[f"{name}_proj.weight_scale"].size == 64 for name in "qkv")
    for name in ("q", "k", "v", "out"):  # no processor overflows: 16 bits hold two products of uint8 and 7 bits
        weight = stored[f"{name}_proj.weight_{'quantized' if kind == 'static' else 'int8'}"]
        assert weight.dtype == np.int8
        assert 2 * 255 * np.abs(weight.astype(int)).max() < 2**15
    scaled = {node.input[2] for node in made.graph.node if node.op_type == "QuantizeLinear" and len(node.input) == 3}
    assert all(stored[name].dtype == np.uint8 for name in scaled)


@pytest.mark.parametrize("factor", [1.0, 20.0])
def test_masks_hide_large_logits_behind_scales(factor: float, tmp_path: Path) -> None:
    model = to_onnx(SPEC, WEIGHTS, profile="portable")
    path = quantize(model, tmp_path / "static.onnx", "static", inputs=inputs(factor))
    x = inputs(factor)[0]["x"]
    other = x.copy()
    other[:, 32:] = other[:, 32:][:, ::-1]
    first, second = run(path, x), run(path, other)
    assert np.array_equal(first[:, :32], second[:, :32])
    assert not np.array_equal(first[:, 32:], second[:, 32:])


@pytest.mark.filterwarnings("ignore:.*keeps weights in float32")
def test_tables_that_are_looked_up_are_quantised_by_column(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = {
        "embedding": rng.standard_normal((100, 16)) * np.logspace(-3, 3, 16),
        "least": rng.standard_normal((64, 16)),
        "both": rng.standard_normal((100, 16)),  # another node reads the whole table
        "small": rng.standard_normal((100, 2)),
        "zeros": np.zeros((100, 16)),
        "crossed": rng.standard_normal((64, 64)),  # read along all axes
        "wide": rng.standard_normal((16, 100)) * np.logspace(-3, 3, 16)[:, None],
        "given": rng.standard_normal((100, 16)),  # a result of the graph
        "turned": rng.standard_normal((16, 100)),  # transposed, as torch stores it
        "packed": rng.standard_normal(1600),
    }
    tables: dict[str, np.ndarray] = stored | {
        "table": stored["turned"].T,
        "unpacked": stored["packed"].reshape(100, 16),
    }
    read = [name for name in tables if name not in ("turned", "packed", "given")]
    along = {"wide": "<axis = -1>", "least": "<axis = -2>"}
    shapes: dict[str, Any] = {"given": (100, 16), "whole": (100, 16), "row": (1, 1600)}
    outputs = [*(f"{name}_read" for name in read), "whole", "given", "row", "columns"]
    model = graph_of(
        "lookups (int64[batch, length] tokens) => () {table = Transpose<perm = [1, 0]>(turned)"
        " shape = Constant<value = int64[2] {100, 16}>() first = Constant<value_ints = [0]>()"
        " row = Unsqueeze(packed, first) one = Reshape(packed, shape) two = Transpose<perm = [1, 0]>(one)"
        " unpacked = Transpose<perm = [1, 0]>(two) whole = Exp(both) columns = Gather<axis = 1>(crossed, tokens) "
        + " ".join(f"{name}_read = Gather{along.get(name, '')}({name}, tokens)" for name in read) + "}",
        13, **{name: array.astype(np.float32) for name, array in stored.items()},
    )  # fmt: skip
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes.get(name, [None] * 3)) for name in outputs
    )
    model.opset_import[0].domain = "ai.onnx"
    onnx.save(model, tmp_path / "lookups.onnx")
    path = quantize(tmp_path / "lookups.onnx", tmp_path / "int8.onnx", "dynamic")
    made = onnx.load(path).graph
    kept = {tensor.name for tensor in made.initializer if tensor.name[-6:] != "_scale"}
    in_bits = {f"{name}_int8" for name in ("embedding", "least", "zeros", "wide", "table", "unpacked")}
    assert kept - {"shape"} == in_bits | {"both", "small", "given", "packed", "crossed"}
    assert all(node.name for node in made.node)
    tokens = rng.integers(0, 64, (3, 5))
    found = dict(zip(outputs, opened(path).run(None, {"tokens": tokens}), strict=True))
    for name in read:  # each column has a separate scale, or each row if columns are looked up
        axis = 1 if name == "wide" else 0
        bound = np.max(np.abs(tables[name]), axis=axis, keepdims=True) / 250 + 1e-6
        bound = bound[..., None] if name == "wide" else bound
        assert np.all(np.abs(found[f"{name}_read"] - np.take(tables[name], tokens, axis)) <= bound), name
    assert np.array_equal(found["given"], stored["given"].astype(np.float32))


@pytest.mark.parametrize(("kind", "given", "message"), [
    ("int8", None, "`kind` must be one of 'dynamic'"),
    ("static", None, "`inputs` must be given for kind='static', got NoneType None"),
    ("dynamic", inputs(), "`inputs` are only for kind='static'"),
    ("static", [], "`inputs` must have at least one entry"),
])  # fmt: skip
def test_wrong_arguments_are_refused(kind: Any, given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(to_onnx(SPEC, WEIGHTS), tmp_path / "none.onnx", kind, inputs=given)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_refused(tmp_path: Path) -> None:
    told = r"`model` must be one file, got the folder '.*': encoder_decoder_to_onnx takes"
    with pytest.raises(IsADirectoryError, match=told):
        quantize(tmp_path, tmp_path / "none.onnx")


def test_older_operators_have_no_scales_along_an_axis(tmp_path: Path) -> None:
    model = to_onnx(SPEC, WEIGHTS, profile="portable")
    for domain, version, named in (("", 12, 12), ("other", 18, 0)):
        model.opset_import[0].CopyFrom(helper.make_opsetid(domain, version))
        with pytest.raises(ValueError, match=f"`model` must have opset 13, .*, got {named}"):
            quantize(model, tmp_path / "old.onnx")


def test_logging_stays_as_it_was(tmp_path: Path) -> None:
    before = logging.root.level, list(logging.root.handlers), logging.root.manager.disable
    quantize(to_onnx(SPEC, WEIGHTS), tmp_path / "block.onnx")
    assert before == (logging.root.level, list(logging.root.handlers), logging.root.manager.disable)


def test_columns_of_a_table_need_not_be_turned_as_here(tmp_path: Path) -> None:
    """``Transpose`` without ``perm`` turns all axes around: such a table is cut as int8."""
    table = np.random.default_rng(0).standard_normal((2, 64, 16)).astype(np.float32)
    model = graph_of(
        "turned (float[16,n,5] x, int64[1] end) => (float[16,n,2] y)"
        " {rows = Slice(table, first, end, axis) turned = Transpose(rows) y = MatMul(x, turned)}",
        18, first=np.array([3]), axis=np.array([1]), table=table,
    )  # fmt: skip
    session = opened(quantize(model, tmp_path / "turned.onnx", "dynamic"))
    x = np.random.default_rng(1).standard_normal((16, 3, 5)).astype(np.float32)
    (found,) = session.run(None, {"x": x, "end": np.array([8])})
    assert np.abs(found - x @ table[:, 3:8].T).max() < 0.2


def test_the_exporter_quantises_and_reports_what_stays(tmp_path: Path) -> None:
    """A convolution of one entry as a product, another in int8, and a matrix on the left in float32."""
    parts: dict[str, Any] = {"one": nn.Conv1d(32, 64, 1), "three": nn.Conv1d(64, 32, 3)}
    parts |= {"experts": random(2, 32, 40), "mix": random(160, 7)}
    model = of(lambda self, x: self.mix @ (self.three(self.one(x)).mT[:, None] @ self.experts), **parts)
    x, reports, path = random(3, 32, 9), list[Any](), tmp_path / "small.onnx"
    with pytest.warns(UserWarning, match=r"keeps weights in float32, .*: 0\.0043 MiB of MatMul$"):
        made = torch_to_onnx(model, x, path, weights="weights-8", report=reports.append)
    assert reports[0].graphs[0].in_float32 == "0.0043 MiB of MatMul"
    assert "  weights in float32: 0.0043 MiB of MatMul" in str(reports[0]).split("\n")
    ops = [node.op_type for node in made.graph.node]
    assert "MatMulNBits" in ops
    assert ops.count("Conv") == 1
    assert made.graph.node == onnx.load(path).graph.node
    (y,) = opened(path).run(None, {made.graph.input[0].name: x.numpy()})
    wanted = model(x).detach().numpy()
    assert 0 < np.linalg.norm(y - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", ["weights-8", "dynamic"])
def test_an_embedding_and_a_head_are_the_same_blocks(kind: Any, tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    model = graph_of(
        "graph (int64[b,n] t) => (float[b,n,64] x, float[b,n,40] y)"
        " {x = Gather(table, t) turned = Transpose<perm = [1, 0]>(table) y = MatMul(x, turned)}",
        table=table,
    )
    path = quantize(model, tmp_path / "small.onnx", kind)
    stored = [tensor for tensor in onnx.load(path).graph.initializer if np.prod(tensor.dims) > 1]
    assert [list(tensor.dims) for tensor in stored] == [[40, 1, 64], [40, 1]]
    tokens = np.array([[1, 5, 39], [0, 2, 2]])
    rows = table[tokens]
    for found, wanted in zip(opened(path).run(None, {"t": tokens}), (rows, rows @ table.T), strict=True):
        assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)

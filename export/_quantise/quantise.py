"""Graphs in fewer bits: weights, tables and, if requested, activations."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from relskew_core._array.checks import check_choice, describe, explains
from relskew_core._array.extras import warn_caller
from relskew_core._array.namespace import check_plain
from relskew_core._files import writing
from relskew_core.export._files.save import save
from relskew_core.export._nodes import functions
from relskew_core.export._nodes.operator import DOMAIN, INPUTS, NAME
from relskew_core.export._nodes.operator_nodes import drop_unused, tables_in_int8
from relskew_core.export._quantise import table_products as table_products
from relskew_core.export._quantise.embeddings import looks_up, store_in_blocks
from relskew_core.export._quantise.row_products import is_large, multiply_rows
from relskew_core.export._quantise.table_products import round_tables

Kind = Literal["dynamic", "static", "weights-8", "weights-4"]
KINDS = get_args(Kind)
Weights = Literal["weights-8", "weights-4", "dynamic"]
"""The kinds that need no inputs."""
TOLERANCES = {"weights-8": 0.1, "weights-4": 0.5, "dynamic": 0.3}
"""The allowed relative errors of models: those of trained ones are a quarter to a half of it."""
MOVED = ("Concat", "Reshape", "Slice", "Transpose", "Unsqueeze")
"""Operators that torch's exporter leaves between a stored weight or table and its reader."""
OLDEST = 13
LEAST = 1024  # the number of entries from which a table is quantised
BLOCKS = {8: (128, 64, 32), 4: (32,)}
"""How many rows of a weight share a scale: the first number that divides all rows, or the last."""
INT8_PRODUCTS = 4
"""``accuracy_level`` of ``MatMulNBits``: without it onnxruntime unpacks all weights of 8 bits for every call."""


@explains
def quantize(
    model: onnx.ModelProto | str | os.PathLike[str],
    path: str | os.PathLike[str],
    kind: Kind = "weights-8",
    *,
    inputs: Sequence[Mapping[str, np.ndarray]] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model with its weights, its tables and, for two kinds, its activations in fewer bits.

    onnxruntime's tools quantise the products with weights, and this function adds or excludes what they would miss or
    damage. Tables of relative positions and embeddings, which these tools skip, become int8 with a scale for each head
    or column; with ``"weights-8"``, an embedding has the blocks of a product, so that a head with the same weights
    shares them. Convolutions become products if their kernel is 1, and have int8 weights with a scale for each channel
    otherwise. A warning names the operators that keep large weights in float32.

    ``Attention`` is not quantised, because no runtime loads a quantised one. Nothing is quantised between a mask and
    its softmax, because the mask's -1e30 would leave no bits for the logits.

    Parameters
    ----------
    model : onnx.ModelProto, str or path-like
        A float32 model of :func:`to_onnx`, of torch or of anything else.
    path : str or path-like
        Where to write, as :func:`save` does.
    kind : {"dynamic", "static", "weights-8", "weights-4"}, default "weights-8"
        ``"weights-8"`` and ``"weights-4"``: weights in blocks of 128 and 32 with a scale each, for onnxruntime's
        ``MatMulNBits``, which rounds activations to int8 within its products. ``"dynamic"``: weights in 7 bits of an
        int8, with a scale for each column, and activations in uint8, whose scales are computed in each call, one for
        each row; it is twice as fast as ``"weights-8"`` for many rows, and rounds more. ``"static"``:
        ``QuantizeLinear`` and ``DequantizeLinear`` with scales from ``inputs``, as accelerators need them, with weights
        in 7 bits of an int8.
    inputs : sequence of mapping of str to array, optional
        Representative inputs, with their names as keys, required for ``"static"`` and only for it.
    overwrite : bool, default False
        Whether an existing file may be replaced.

    Returns
    -------
    pathlib.Path
        The file.

    Examples
    --------
    >>> import tempfile
    >>> from relskew_core import BlockSpec, Span, init_weights
    >>> from relskew_core.export import quantize, to_onnx, validate
    >>> spec = BlockSpec(64, 4, Span.causal(256), causal=True)
    >>> weights = init_weights(spec, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = quantize(to_onnx(spec, weights), f"{folder}/block-8.onnx", "weights-8")
    ...     validate(path, spec, weights, batches=(2,), tolerance=0.02).ok
    True
    """
    check_choice("kind", kind, KINDS)
    if (inputs is not None) != (kind == "static"):
        rule = "must be given for" if inputs is None else "are only for"
        raise ValueError(f"`inputs` {rule} kind='static', got {describe(inputs)} and kind={kind!r}")
    if inputs is not None and not len(inputs):
        raise ValueError("`inputs` must have at least one entry, got none: ranges are computed from them")
    if not isinstance(model, onnx.ModelProto) and Path(model).is_dir():
        raise IsADirectoryError(
            f"`model` must be one file, got the folder {os.fspath(model)!r}: encoder_decoder_to_onnx takes `weights`"
        )
    given = copy.deepcopy(model) if isinstance(model, onnx.ModelProto) else onnx.load(os.fspath(model))
    if (opset := functions.opset_of(given)) < OLDEST:
        raise ValueError(f"`model` must have opset {OLDEST}, which has scales along an axis, got {opset}")
    made, left = quantised(given, kind, inputs)
    warn_left(left)
    return save(made, path, overwrite=overwrite)


def warn_left(left: str) -> None:
    if left:
        warn_caller(f"`model` keeps weights in float32, which `quantize` has no smaller form for: {left}")


def quantised(
    given: onnx.ModelProto, kind: Kind, inputs: Sequence[Mapping[str, np.ndarray]] | None = None
) -> tuple[onnx.ModelProto, str]:
    """Return a model in fewer bits, for which the given one is changed, and what keeps large weights in float32."""
    nodes = (node for part in functions.all_graphs(given.graph) for node in part.node)
    for index, node in enumerate(nodes):  # quantisation tools look for names of nodes
        node.name = node.name or f"unnamed_{index}"
    _move(given)
    if kind == "static":
        with _quietly():
            made = _static(given, inputs or ())
        round_tables(made, LEAST)
    else:
        _write_as_products(given)
        with _quietly():
            made = _weights(given, 4 if kind == "weights-4" else 8, heads_alone=kind == "dynamic")
        multiply_rows(made, LEAST)
        table_products.multiply_in_bits(made, LEAST)
    _tables(made)
    _tables_of_operators(made)
    _convolutions(made)
    return made, _left(made)


def _move(model: onnx.ModelProto) -> None:
    """Store tensors that nodes only rearrange in the form in which they are read."""
    graph = model.graph
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    nodes = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            known[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        constant = node.op_type in MOVED and not node.domain and all(name in known for name in node.input if name)
        if not constant or node.output[0] in outputs:
            nodes.append(node)
            continue
        given = {name: known[name] for name in node.input if name}
        results: Any = ReferenceEvaluator(node).run(None, given)
        known[node.output[0]] = results[0]
        graph.initializer.append(numpy_helper.from_array(results[0], node.output[0]))
    functions.refill(graph.node, nodes)
    _drop_unread(graph)
    # The tools transpose weights in place, and then reject a shape that was declared before.
    functions.refill(graph.value_info, [value for value in graph.value_info if value.name not in known])


def _write_as_products(model: onnx.ModelProto) -> None:
    """Write convolutions whose kernel is one entry, and products of matrices with a bias, as ``MatMul``."""
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for part in functions.all_graphs(graph):
        nodes: list[onnx.NodeProto] = []
        for node in part.node:
            weight = stored.get(node.input[1]) if node.op_type in ("Conv", "Gemm") and not node.domain else None
            matrix = None if weight is None else _matrix(node, weight)
            if weight is None or matrix is None:
                nodes.append(node)
                continue
            name, (x, _, *bias), (y,) = f"{weight.name}/{node.op_type}", node.input, node.output
            if name not in stored:
                stored[name] = numpy_helper.from_array(np.ascontiguousarray(matrix), name)
                graph.initializer.append(stored[name])
            rank = len(weight.dims)
            steps: list[tuple[str, list[str], dict[str, Any]]] = [("MatMul", [name], {})]
            if bias and bias[0]:
                steps.append(("Add", bias[:1], {}))
            if node.op_type == "Conv":  # channels are the second axis
                turns = [0, *range(2, rank), 1], [0, rank - 1, *range(1, rank - 1)]
                steps = [("Transpose", [], {"perm": turns[0]}), *steps, ("Transpose", [], {"perm": turns[1]})]
            for index, (op, others, options) in enumerate(steps):
                made = y if index == len(steps) - 1 else f"{y}/{index}"
                nodes.append(helper.make_node(op, [x, *others], [made], f"{node.name}/{index}", **options))
                x = made
        functions.refill(part.node, nodes)
    _drop_unread(graph)


def _matrix(node: onnx.NodeProto, weight: onnx.TensorProto) -> np.ndarray | None:
    """Return the matrix by which a node multiplies its first input, if it does nothing else but add."""
    own = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if not is_large(weight, LEAST):
        return None
    if node.op_type == "Gemm":
        plain = own.get("alpha", 1) == own.get("beta", 1) == 1 and not own.get("transA", 0)
        matrix = numpy_helper.to_array(weight)
        return None if not plain else matrix.T if own.get("transB", 0) else matrix
    moves = [*(size - 1 for size in weight.dims[2:]), *own.get("pads", ()), *(n - 1 for n in own.get("strides", ()))]
    if any(moves) or own.get("group", 1) != 1:
        return None
    return numpy_helper.to_array(weight).reshape(weight.dims[:2]).T


def _drop_unread(graph: onnx.GraphProto) -> None:
    read = {*functions.readers_of(graph), *(value.name for value in graph.output)}
    functions.refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])


def _convolutions(model: onnx.ModelProto) -> None:
    graph = model.graph
    axes = {"Conv": 0, "ConvTranspose": 1}
    readers = functions.readers_of(graph)
    results = functions.results_of(graph)
    for tensor in list(graph.initializer):
        found = {node.op_type if tensor.name in node.input[1:2] else "" for node in readers.get(tensor.name, ())}
        if is_large(tensor, LEAST) and tensor.name not in results and len(found) == 1 and (op := found.pop()) in axes:
            names, path = _store_as_int8(graph, tensor, [axes[op]]), f"{tensor.name}/dequantize"
            node = helper.make_node("DequantizeLinear", names, [tensor.name], path, axis=axes[op])
            functions.refill(graph.node, [node, *graph.node])


def _store_as_int8(graph: onnx.GraphProto, tensor: onnx.TensorProto, axes: Sequence[int]) -> list[str]:
    """Replace a tensor by int8 and scales along some axes; return their names."""
    table = numpy_helper.to_array(tensor)
    others = tuple({*range(table.ndim)} - {axis % table.ndim for axis in axes})
    scale = np.maximum(np.max(np.abs(table), axis=others, keepdims=True) / 127, np.float32(1e-30))
    made = [f"{tensor.name}_int8", f"{tensor.name}_scale"]
    graph.initializer.remove(tensor)
    graph.initializer.append(numpy_helper.from_array(np.rint(table / scale).astype(np.int8), made[0]))
    graph.initializer.append(numpy_helper.from_array(np.squeeze(scale, others).astype(np.float32), made[1]))
    return made


def _left(model: onnx.ModelProto) -> str:
    """Return what reads large weights in float32, and their size; nothing if there are none."""
    readers = functions.readers_of(model.graph)
    sizes: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if is_large(tensor, LEAST) and len(tensor.dims) > 1 and not tensor.name.endswith(("_scale", "_scales")):
            found = sorted({node.op_type for node in readers.get(tensor.name, ())})
            key = " and ".join(found) or "no node"
            sizes[key] = sizes.get(key, 0) + 4 * int(np.prod(tensor.dims))
    return ", ".join(f"{size / 2**20:.2g} MiB of {op}" for op, size in sizes.items())


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep onnxruntime's tools from logging every node, and from configuring the program's logging."""
    root, disabled = logging.getLogger(), logging.root.manager.disable
    level, handlers = root.level, list(root.handlers)
    logging.disable(logging.WARNING)
    try:
        with np.errstate(invalid="ignore"):  # ranges with infinities, for which there is no quantised form
            yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers


def _weights(model: onnx.ModelProto, bits: int, *, heads_alone: bool) -> onnx.ModelProto:
    """Store embeddings and weights in blocks, of the weights perhaps only those that an embedding shares."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    sizes = {tensor.name: tensor.dims[-2] for tensor in model.graph.initializer if len(tensor.dims) > 1}
    if heads_alone:
        sizes = {name: rows for name, rows in sizes.items() if name in set(_of_embeddings(model.graph))}
    for block in BLOCKS[bits]:
        fitting = {name for name, rows in sizes.items() if rows % block == 0 or block == BLOCKS[bits][-1]}
        nodes = (node for part in functions.all_graphs(model.graph) for node in part.node if node.op_type == "MatMul")
        excluded = [node.name for node in nodes if node.input[1] not in fitting]
        tool = MatMulNBitsQuantizer(
            model, bits=bits, block_size=block, is_symmetric=True, accuracy_level=INT8_PRODUCTS,
            nodes_to_exclude=excluded,
        )  # fmt: skip
        tool.process()
        model = tool.model.model
        # The tool stores a weight for each of its readers.
        functions.refill(model.graph.initializer, {tensor.name: tensor for tensor in model.graph.initializer}.values())
        if bits == 8:
            store_in_blocks(model, tool.node_quantizer, block, LEAST)
    return model


def _of_embeddings(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of matrices that are transposed embeddings."""
    looked_up = {node.input[0] for part in functions.all_graphs(graph) for node in part.node if looks_up(node)}
    tables = [numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name in looked_up]
    for tensor in graph.initializer:
        same = [table for table in tables if [*table.shape] == [*tensor.dims][::-1] and table.ndim == 2]
        if same and any(np.array_equal(table.T, numpy_helper.to_array(tensor)) for table in same):
            yield tensor.name


def _static(model: onnx.ModelProto, inputs: Sequence[Mapping[str, np.ndarray]]) -> onnx.ModelProto:
    """Quantise activations, too, with ranges from inputs.

    Pairs of products of uint8 and int8 overflow 16 bits on processors of x86-64 without VNNI, and onnxruntime says
    nothing. Those of int8 that keep to 7 bits do not, whose zero is 0 for accelerators.
    """
    from onnxruntime.quantization import QuantType, quantize_static

    excluded = [*_excluded(model), *_masked(model)]
    kinds: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "reduce_range": True}
    with TemporaryDirectory() as folder, writing(Path(folder), "TMPDIR"):
        source, target = Path(folder) / "model.onnx", Path(folder) / "quantised.onnx"
        onnx.save(model, source)
        quantize_static(source, target, _reader(inputs), nodes_to_exclude=excluded, per_channel=True, **kinds)
        made = onnx.load(target)
    _sort(made.graph)
    return made


def _excluded(model: onnx.ModelProto) -> Iterator[str]:
    """Return the names of nodes that onnxruntime's tools fail on, or that no runtime has with scales by column.

    The former are transposed convolutions in groups, the latter products with stored matrices in a batch.
    """
    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    for part in functions.all_graphs(model.graph):
        for node in part.node:
            batched = node.op_type == "MatMul" and any(ranks.get(name, 0) > 2 for name in node.input)
            grouped = any(attribute.name == "group" and attribute.i > 1 for attribute in node.attribute)
            if batched or (node.op_type == "ConvTranspose" and grouped):
                yield node.name


def _sort(graph: onnx.GraphProto) -> None:
    """Put each node behind what it and its branches read: onnxruntime's tool sorts nodes by what they read alone."""
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output}
    read = {
        index: [makers[name] for name in functions.names_read([node]) if name in makers]
        for index, node in enumerate(graph.node)
    }
    functions.refill(graph.node, [graph.node[index] for index in TopologicalSorter(read).static_order()])


def _reader(inputs: Sequence[Mapping[str, np.ndarray]]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
        def __init__(self) -> None:
            self._left = iter(inputs)

        def get_next(self) -> dict[str, np.ndarray] | None:
            plain = ({name: check_plain(f"inputs[{name!r}]", x) for name, x in feeds.items()} for feeds in self._left)
            return next(({name: np.asarray(x) for name, x in feeds.items()} for feeds in plain), None)

    return Reader()


def _masked(model: onnx.ModelProto) -> Iterator[str]:
    """Return the names of the nodes between products and softmax, of whole attentions, and of those for masks.

    What only moves a product about is as good as the product. From opset 21 on onnxruntime cannot load it otherwise.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    todo = [node for node in model.graph.node if node.op_type in ("Softmax", "Attention")]
    seen = set()

    def of_product(node: onnx.NodeProto | None) -> bool:
        while node is not None and node.op_type in MOVED[1:]:  # Concat may combine hidden entries with others
            node = makers.get(node.input[0])
        return node is not None and node.op_type == "MatMul"

    while todo:
        node = todo.pop()
        if node.name not in seen and not of_product(node):
            seen.add(node.name)
            yield node.name
            read = node.input[3:] if node.op_type == "Attention" else node.input
            todo += [makers[name] for name in read if name in makers]


def _tables(model: onnx.ModelProto) -> None:
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    vectors = functions.vectors_of(graph)
    readers = functions.readers_of(graph)
    results = functions.results_of(graph)
    cut: dict[str, int] = {}
    for name, tensor in stored.items():
        found, rank = [_axes(node, vectors) for node in readers.get(name, ())], len(tensor.dims)
        if name not in results and is_large(tensor, LEAST) and found and all(found):
            axes = {axis % rank for one in found for axis in one}
            if whole := {0, rank - 1} - axes:  # the axes along which scales may vary
                cut[name] = 0 if 0 in whole else -1
    for part in functions.all_graphs(graph):
        _cut_as_int8(part, cut)
    for name, axis in cut.items():
        _store_as_int8(graph, stored[name], [axis])


def _tables_of_operators(model: onnx.ModelProto) -> None:
    """Store the tables that only the operator's nodes read in int8, with a scale for each row."""
    graph = model.graph
    readers, results = functions.readers_of(graph), functions.results_of(graph)
    places = {name: INPUTS.index(name) for name in ("rel_k", "rel_v")}
    stored: dict[str, list[str]] = {}
    for tensor in list(graph.initializer):
        found = [(node.domain, node.op_type, place) for node in readers.get(tensor.name, ())
                 for place, name in enumerate(node.input) if name == tensor.name]  # fmt: skip
        own = found and all(one[:2] == (DOMAIN, NAME) and one[2] in places.values() for one in found)
        if own and tensor.name not in results and is_large(tensor, LEAST):
            stored[tensor.name] = _store_as_int8(graph, tensor, range(len(tensor.dims) - 1))
    for node in graph.node:
        if (node.domain, node.op_type) == (DOMAIN, NAME):
            read = {name: node.input[place] for name, place in places.items() if place < len(node.input)}
            if tables := {name: stored[table] for name, table in read.items() if table in stored}:
                tables_in_int8(model, node, tables)
    drop_unused(model)


def _cut_as_int8(graph: onnx.GraphProto, cut: Mapping[str, int]) -> None:
    """Let nodes read the int8 tables, and dequantise their results; ``cut`` has the axis of the scales."""
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.input and (name := node.input[0]) in cut:
            made, whole = node.output[0], f"{node.output[0]}_int8"
            node.input[0], node.output[0] = f"{name}_int8", whole
            scaled, path = [whole, f"{name}_scale"], f"{node.name}/dequantize"
            nodes.append(helper.make_node("DequantizeLinear", scaled, [made], path, axis=cut[name]))
    functions.refill(graph.node, nodes)


def _axes(node: onnx.NodeProto, vectors: Mapping[str, np.ndarray]) -> list[int]:
    """Return the axes along which a node slices or gathers its first input; none if it does anything else."""
    if node.op_type == "Gather" and not node.domain:
        return [next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)]
    return functions.cut_axes(node, vectors)

"""Arrays that are more than their numbers, with units, masks or labels: refused by name wherever arrays come in."""

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch

import relskew_core as relskew
from relskew_core import BlockSpec, Span, conventions, draw, export, init_weights


class Quantity(np.ndarray):
    """An array with a unit, as those of astropy and unyt."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*map(np.asarray, inputs), **options)


class Labelled(np.ndarray):
    """An array that passes on labels, as those of astropy's tables."""

    def __array_finalize__(self, other: Any) -> None:
        self.labels = getattr(other, "labels", None)


class Wrapped:
    """A wrapper of an array, as pint's quantities and the arrays of xarray and pandas."""

    def __init__(self, x: Any) -> None:
        self.x, self.shape, self.dtype, self.ndim = x, x.shape, x.dtype, x.ndim

    def __array__(self, *given: Any, **options: Any) -> Any:
        return np.asarray(self.x)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return NotImplemented

    def __len__(self) -> int:
        return len(self.x)


in_dask: Any = da.from_array  # its functions have no types
KINDS: dict[str, Callable[[Any], Any]] = {
    "unit": lambda x: x.view(Quantity),
    "labels": lambda x: x.view(Labelled),
    "wrapped": Wrapped,
    "mask": lambda x: np.ma.masked_array(x, np.zeros(x.shape, bool)),
    "mask in dask": lambda x: in_dask(np.ma.masked_array(x, np.zeros(x.shape, bool))),
}

RNG = np.random.default_rng(0)
Q, TABLE, BIAS = (RNG.standard_normal(shape) for shape in ((1, 2, 5, 4), (9, 4), (2, 9)))
GRID: dict[str, Any] = {"q_grid": (2, 2), "k_grid": (2, 2)}
CELLS = {name: RNG.standard_normal((1, 2, 4, 4)) for name in "qkv"}
ALL = {
    "q": Q, "k": Q, "v": Q, "rel_k": TABLE, "rel_v": TABLE, "rel_bias": BIAS, "rel_q": Q, "key_table": TABLE,
    "mask": np.zeros((5, 5)), "scale": np.ones(2), "rel_scale": np.ones(2), "sinks": np.ones(2),
}  # fmt: skip
SPEC = BlockSpec(8, 2, Span.causal(8), causal=True)
WEIGHTS = init_weights(SPEC, seed=0)
X = RNG.standard_normal((1, 5, 8)).astype("float32")
CACHE = {"past[0]": np.zeros((1, 2, 3, 4), "float32"), "past[1]": np.zeros((1, 2, 3, 4), "float32")}


def module(framework: str) -> Any:
    layers: Any = pytest.importorskip(f"relskew_core.layers.{framework}")
    return layers.RelativeMultiheadAttention


def stepped(framework: str) -> Callable[..., Any]:
    """Return a call of a module with a cache whose parts are arrays of NumPy."""

    def call(**parts: Any) -> Any:
        attention = module(framework).from_weights(WEIGHTS, SPEC)
        cache = attention.empty_cache(1, length=8)
        return attention(X, past=type(cache)(*parts.values()))

    return call


PARTS = {"past.keys": np.zeros((1, 2, 8, 4), "float32"), "past.values": np.zeros((1, 2, 8, 4), "float32"),
         "past.length": np.zeros(1, "int32")}  # fmt: skip
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (relskew.relative_attention, ALL),
    "gradients": (relskew.relative_attention_vjp, {"d_out": Q, **ALL}),
    "segments": (lambda **x: relskew.relative_attention(Q, Q, Q, **x), {"segments": np.zeros(5, int)}),
    "offset": (lambda **x: relskew.relative_attention(Q, Q, Q, **x), {"offset": np.zeros(1, int)}),
    "seed": (lambda **x: relskew.relative_attention(Q, Q, Q, dropout=0.5, **x), {"seed": np.asarray(3)}),
    "grid": (lambda **x: relskew.relative_attention_2d(**x, **GRID), {
        **CELLS, "table_h": TABLE[:3], "table_w": TABLE[:3], "rel_bias": np.ones((2, 3, 3)), "scale": np.ones(2)}),
    "logits": (lambda **x: relskew.relative_logits(**x, n_keys=5), {"q": Q, "table": TABLE}),
    "bias": (lambda **x: relskew.toeplitz(**x, n_queries=5, n_keys=5), {"bias": BIAS}),
    "skew": (relskew.skew, {"x": np.ones((5, 9))}),
    "resized": (lambda **x: relskew.resize_table(**x, rows=5), {"table": TABLE}),
    "alibi": (lambda **x: relskew.alibi_bias(2, Span.causal(3), **x), {"like": Q}),
    "swin": (lambda **x: conventions.Swin(window=(2, 2)).load(**x), {"table": np.ones((9, 2))}),
    "block": (lambda **x: relskew.attention_block(x.pop("x"), x, SPEC), {"x": X, **WEIGHTS}),
    "cache": (lambda **x: relskew.attention_block(X, WEIGHTS, SPEC, past=tuple(x.values())), CACHE),
    "to_onnx": (lambda **x: export.to_onnx(SPEC, x), WEIGHTS),
    "drawn": (draw.draw_weights, {"weights": np.ones((2, 5, 5))}),
    "flax": (lambda **x: module("flax").from_weights(x, SPEC), WEIGHTS),
    "equinox": (lambda **x: module("equinox").from_weights(x, SPEC), WEIGHTS),
    "mlx": (lambda **x: module("mlx").from_weights(x, SPEC), WEIGHTS),
    "flax, called": (lambda **x: module("flax").from_weights(WEIGHTS, SPEC)(**x), {"x": X}),
    "equinox, cache": (stepped("equinox"), PARTS),
}  # fmt: skip


REFUSED = "must be an array of numbers alone, .* because results would lose|`seed` must be of the array library"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_arrays_with_units_masks_or_labels_are_refused_by_name(case: str, kind: str) -> None:
    function, arrays = CASES[case]
    function(**arrays)
    for name, x in arrays.items():
        with pytest.raises(TypeError, match=REFUSED) as error:
            function(**{**arrays, name: KINDS[kind](x)})
        assert name in str(error.value)


@pytest.mark.parametrize("case", [case for case in CASES if "," not in case])
def test_arrays_in_files_are_arrays(case: str) -> None:
    def mapped(x: Any) -> Any:
        with tempfile.TemporaryFile() as file:
            found = np.memmap(file, x.dtype, "w+", shape=x.shape or 1)
        found[...] = x
        return found if x.shape else x

    function, arrays = CASES[case]
    expected, found = function(**arrays), function(**{name: mapped(x) for name, x in arrays.items()})
    if isinstance(expected, np.ndarray):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_validate_reports_weights_with_units() -> None:
    model = export.to_onnx(SPEC, WEIGHTS)
    report = export.validate(model, SPEC, {**WEIGHTS, "rel_k": WEIGHTS["rel_k"].view(Quantity)})
    assert not report.ok
    assert "numbers alone" in report.table()


class Unit(torch.Tensor):
    """A quantity: torch's functions return quantities."""


class Own(torch.Tensor):
    """The same, written out."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handle: Any = super().__torch_function__
        return handle(func, types, args, kwargs or {})


def masked(x: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        return torch.masked.masked_tensor(x, x > 0)


NUMBERS, LOST = ["attention", "gradients", "grid", "block", "swin"], ["drawn", "to_onnx", "flax", "equinox", "mlx"]
LOSSES: list[tuple[str, Callable[[Any], Any], str]] = [
    *((case, lambda x: x.as_subclass(Own), r"such as `x.as_subclass\(torch.Tensor\)`, .* got Own") for case in LOST),
    *((case, masked, r"such as `x.get_data\(\)`") for case in NUMBERS + LOST),
]


@pytest.mark.parametrize(("case", "made", "way_out"), LOSSES)
def test_what_a_class_of_tensors_adds_is_refused_where_it_would_be_lost(case: str, made: Any, way_out: str) -> None:
    function, arrays = CASES[case]
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    function(**tensors)
    for name, x in tensors.items():
        with pytest.raises(TypeError, match=rf"must be a tensor of numbers alone, {way_out}") as error:
            function(**{**tensors, name: made(x)})
        assert name in str(error.value)


def test_parameters_are_numbers_alone() -> None:
    export.to_onnx(SPEC, {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in WEIGHTS.items()})


@pytest.mark.parametrize("kind", [Unit, Own])
def test_other_classes_are_carried(kind: Any) -> None:
    x, weights = torch.ones(2, 5, 8), {name: torch.from_numpy(weight) for name, weight in WEIGHTS.items()}
    for place in range(3):
        given: list[Any] = [x.as_subclass(kind) if at == place else x for at in range(3)]
        assert type(relskew.relative_attention(*given)) is kind
    assert type(relskew.attention_block(x.as_subclass(kind), weights, SPEC)) is kind
    assert type(relskew.skew(torch.ones(3, 5).as_subclass(kind))) is kind


def sparse_tensor(x: Any) -> Any:
    return torch.tensor(x).to_sparse()


def rows_that_data_choose(x: Any) -> Any:
    dask: Any = da
    return dask.from_array(x)[:, dask.ones(x.shape[1]) > 0]


def any_length(x: Any) -> Any:
    ndonnx = pytest.importorskip("ndonnx")
    return ndonnx.argument(shape=(x.shape[0], "n", x.shape[2]), dtype=ndonnx.float64)


@pytest.mark.parametrize(("made", "error", "words"), [
    (sparse_tensor, TypeError, "must be a dense tensor, such as `x.to_dense\\(\\)`, got layout torch.sparse_coo"),
    (rows_that_data_choose, ValueError, "must have known sizes.* shape \\(2, nan, 4\\)"),
    (any_length, ValueError, "must have known sizes.* shape \\(2, None, 4\\)"),
])  # fmt: skip
def test_sparse_arrays_and_unknown_sizes_are_refused(made: Callable[[Any], Any], error: type, words: str) -> None:
    x = np.ones((2, 5, 4))
    with pytest.raises(error, match=f"^`q` {words}"):
        relskew.relative_attention(made(x), made(x), made(x))

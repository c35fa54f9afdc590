"""One backend of Keras at work: ``KERAS_BACKEND=torch python keras_backend.py ROOT GIVEN.npz FOUND.npz``."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

root = Path(sys.argv[1])
sys.path.insert(0, str(root / "examples"))  # the next imports need it, so they follow

import keras  # noqa: E402
import pytest  # noqa: E402
from keras_attention import TENSORFLOW, RelativeAttention, numpy_attention  # noqa: E402

from relskew_core import Span, relative_attention, relative_attention_vjp  # noqa: E402


def run_the_page() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (root / "docs/keras.md").read_text(), re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["loaded"].layers[1].get_config() == names["model"].layers[1].get_config()


LAYERS: dict[str, dict[str, Any]] = {
    "keys": {"left": 3, "right": 1}, "bias": {"left": 3, "right": 1}, "t5": {"left": 20, "right": 20},
    "alibi": {"left": 6, "right": 6},
}  # fmt: skip


def learn_once(given: Any, positions: str) -> dict[str, Any]:
    """Return the output and, by one step at a learning rate of 1, the gradients of the weights."""
    inputs = keras.Input((None, 6))
    mask = keras.Input((None,), dtype="bool")
    layer = RelativeAttention(2, 4, positions=positions, **LAYERS[positions])
    model = keras.Model([inputs, mask], layer(inputs, mask=mask))
    names = [weight.path.partition("/")[2].replace("table", positions) for weight in model.weights]
    model.set_weights([given[name] for name in names])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    out = model.predict([given["x"], given["mask"]], verbose=0)
    model.fit([given["x"], given["mask"]], given["target"], batch_size=8, verbose=0)
    learnt = model.get_weights()
    found = {"out": out, **{name: given[name] - now for name, now in zip(names, learnt, strict=True)}}
    return {f"{positions}: {name}": x for name, x in found.items()}


def check_precision(given: Any) -> None:
    for positions, reach in LAYERS.items():
        layer = RelativeAttention(2, 4, positions=positions, **reach, dtype="mixed_bfloat16")
        assert keras.backend.standardize_dtype(layer(given["x"]).dtype) == "bfloat16"


def check_what_is_refused(given: Any) -> None:
    layer = RelativeAttention(2, 4, left=3, right=3, positions="alibi")
    with pytest.raises(ValueError, match="reach"):
        layer(given["x"])
    for reach, positions, error in [
        ((3, 3), "ropes", "`positions` must be one of"),
        ((8, 8), "t5", "`left` or `right` must be more than 8 with T5's buckets, got 8 and 8"),
        ((16, 0), "t5", "`left` or `right` must be more than 16"),
    ]:
        with pytest.raises(ValueError, match=error):
            RelativeAttention(2, 4, *reach, positions=positions)
    for reach in ((9, 9), (17, 0)):
        assert RelativeAttention(2, 4, *reach, positions="t5")(given["x"]).shape == given["x"].shape


def check_dropout_in_tensorflow() -> None:
    """Both passes of the NumPy path drop the same, in a graph whose lengths are not known."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    arrays: list[Any] = [rng.standard_normal(shape) for shape in [(2, 2, 5, 4)] * 3 + [(2, 4, 4)]]
    options: dict[str, Any] = {"span": Span.causal(4, "clip"), "causal": True, "dropout": 0.5}

    rows, table = tf.TensorSpec((None, 2, None, 4), "float64"), tf.TensorSpec((2, 4, 4), "float64")

    @tf.function(input_signature=[rows, rows, rows, table])  # type: ignore[untyped-decorator]
    def both(*arrays: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = numpy_attention(*arrays[:3], rel_k=arrays[3], seed=tf.constant(7), **options)
        return out, tape.gradient(out, arrays)

    out, gradients = both(*map(tf.constant, arrays))
    np.testing.assert_allclose(out, relative_attention(*arrays, **options, seed=7), atol=1e-12)
    expected = relative_attention_vjp(np.ones_like(arrays[0]), *arrays, **options, seed=7)
    for name, gradient in zip(("q", "k", "v", "rel_k"), gradients, strict=True):
        np.testing.assert_allclose(gradient, getattr(expected, name), atol=1e-12)


if __name__ == "__main__":
    given = dict(np.load(sys.argv[2]))
    run_the_page()
    np.savez(sys.argv[3], **{name: x for positions in LAYERS for name, x in learn_once(given, positions).items()})
    check_precision(given)
    check_what_is_refused(given)
    if TENSORFLOW:
        check_dropout_in_tensorflow()

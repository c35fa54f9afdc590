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

from relskew_core import (  # noqa: E402
    BlockSpec,
    Span,
    attention_block,
    init_weights,
    relative_attention,
    relative_attention_vjp,
)


def run_the_page() -> None:
    names: dict[str, Any] = {}
    page = (root / "docs/keras.md").read_text()
    if TENSORFLOW:
        page = page[page.index("## A layer to copy") :]
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for block in blocks:
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


SPECS: dict[str, BlockSpec] = {
    "causal": BlockSpec(
        16, 4, Span.causal(16), causal=True, num_kv_heads=2, rel_values=True, rel_bias=True, sinks=True
    ),
    "cross": BlockSpec(16, 4, Span.clipped(3), cross=True, bias=False),
    "t5": BlockSpec.t5(16, 4, num_buckets=8, max_distance=16),
    "alibi": BlockSpec.alibi(16, 4, causal=True),
}
TOKENS = np.asarray([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]])


def check_the_module() -> None:
    """The values, caches, masks and gradients of the library's own layer are those of the block."""
    from relskew_core.layers.keras import RelativeMultiheadAttention

    rng = np.random.default_rng(0)
    x, memory = (rng.standard_normal((2, length, 16)).astype("float32") for length in (7, 5))

    def same(one: Any, other: Any) -> None:
        one, other = (keras.ops.convert_to_numpy(x) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=2e-6)

    for name, spec in SPECS.items():
        weights = init_weights(spec, seed=0)
        layer = RelativeMultiheadAttention.from_weights(weights, spec)
        sources: dict[str, Any] = {"memory": memory} if spec.cross else {}
        same(layer(x, **sources), attention_block(x, weights, spec, **sources))
        for key, weight in layer.block_weights().items():
            same(weight, weights[key])
        inputs = [keras.Input((None, 16)) for _ in range(1 + spec.cross)]
        whole = keras.Model(inputs, layer(*inputs))
        assert whole.output_shape == (None, None, 16)
        same(whole.predict([x, *sources.values()], verbose=0), attention_block(x, weights, spec, **sources))
        again = RelativeMultiheadAttention.from_config(layer.get_config())
        assert (again.spec, again.settings) == (layer.spec, layer.settings)
        check_step(name, RelativeMultiheadAttention.from_weights(weights, spec), [x, *sources.values()])

    spec, weights = SPECS["causal"], init_weights(SPECS["causal"], seed=0)
    layer, expected = RelativeMultiheadAttention.from_weights(weights, spec), attention_block(x, weights, spec)
    rooms: list[dict[str, Any]] = [{}, {"length": 8}, {"keep": 15}]
    for room in rooms:
        cache, steps = layer.empty_cache(2, **room), []
        for token in np.split(x, 7, axis=1):
            y, cache = layer(token, past=cache)
            steps.append(keras.ops.convert_to_numpy(y))
        same(np.concatenate(steps, axis=1), expected)
    with pytest.raises(ValueError, match="`key_padding_mask` must be given for all keys"):
        layer(x, past=layer.empty_cache(2), mask=np.ones((2, 7), dtype="bool"))
    padded = np.arange(7) >= 5
    y, _ = layer(x, past=layer.empty_cache(2), key_padding_mask=np.stack([padded, padded]))
    same(y, attention_block(x, weights, spec, mask=~padded))

    # masks of Keras reach the keys, beside one by query and key
    for name in ("t5", "cross"):
        spec, weights = SPECS[name], init_weights(SPECS[name], seed=0)
        embed = keras.layers.Embedding(8, 16, mask_zero=True)
        inputs = [keras.Input((None,), dtype="int32") for _ in range(1 + spec.cross)]
        layer = RelativeMultiheadAttention.from_weights(weights, spec)
        band = np.tril(np.ones((5, 5), dtype="bool"), 1)
        for seen in (None, band):
            options = {} if seen is None else {"attention_mask": keras.ops.convert_to_tensor(seen)}
            out = keras.Model(inputs, layer(*map(embed, inputs), **options)).predict([TOKENS] * len(inputs), verbose=0)
            embedded = keras.ops.convert_to_numpy(embed.embeddings)[TOKENS]
            mask = (TOKENS > 0)[:, None, None, :] & (True if seen is None else seen)
            memory_too = {"memory": embedded} if spec.cross else {}
            same(out, attention_block(embedded, weights, spec, mask=mask, **memory_too))
            given = [x[:, :5], memory][: len(inputs)]
            shown = layer.attention_weights(*given, **({} if seen is None else {"attention_mask": seen}))
            same(keras.ops.sum(shown, axis=-1), np.ones((2, 4, 5)))
    with pytest.raises(ValueError, match="a mask by query and key is `attention_mask`"):
        layer(x[:, :5], memory, memory_mask=band[None])

    # dropout in training alone, from its seed; Keras's precision, LoRA and int8; a saved model
    dropping = [RelativeMultiheadAttention.from_weights(weights, spec, dropout=0.5, seed=3) for _ in "ab"]
    same(*(keras.ops.convert_to_numpy(layer(x, memory, training=True)) for layer in dropping))
    assert (
        np.abs(keras.ops.convert_to_numpy(dropping[0](x, memory, training=True) - dropping[0](x, memory))).max() > 0.01
    )
    mixed = RelativeMultiheadAttention(spec, dtype="mixed_bfloat16")
    assert keras.backend.standardize_dtype(mixed(x, memory).dtype) == "bfloat16"
    assert keras.backend.standardize_dtype(mixed.rel_k.dtype) == "float32"
    out = keras.ops.convert_to_numpy(layer(x, memory))
    layer.q_proj.enable_lora(2)
    layer.q_proj.lora_kernel_b.assign(np.ones((2, 16)))
    assert np.abs(keras.ops.convert_to_numpy(layer(x, memory)) - out).max() > 0.01
    layer.v_proj.quantize("int8")
    assert np.abs(keras.ops.convert_to_numpy(layer(x, memory)) - out).max() > 1e-6
    whole.save("module.keras")
    same(keras.saving.load_model("module.keras").predict(x, verbose=0), whole.predict(x, verbose=0))


def check_step(name: str, layer: Any, inputs: list[Any]) -> None:
    """One step of training at a rate of 1 subtracts the gradients that torch finds for the block in float64."""
    import torch

    symbols = [keras.Input((None, 16)) for _ in inputs]
    model = keras.Model(symbols, layer(*symbols))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = {key: keras.ops.convert_to_numpy(weight) for key, weight in layer.block_weights().items()}
    model.fit(inputs, inputs[0], batch_size=8, verbose=0)
    weights = {key: torch.tensor(value, dtype=torch.float64, requires_grad=True) for key, value in before.items()}
    x, *memory = (torch.tensor(value, dtype=torch.float64) for value in inputs)
    sources: dict[str, Any] = {"memory": memory[0]} if memory else {}
    loss = torch.square(attention_block(x, weights, layer.spec, **sources) - x).mean()
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    for key, value in layer.block_weights().items():
        learnt = before[key] - keras.ops.convert_to_numpy(value)
        np.testing.assert_allclose(learnt, gradients[key].numpy(), atol=2e-6, err_msg=f"{name}: {key}")


def check_the_module_is_refused() -> None:
    with pytest.raises(
        ImportError, match=r"needs Keras on torch or JAX, and its backend is 'tensorflow'; .*keras_attention"
    ):
        import relskew_core.layers.keras  # noqa: F401


if __name__ == "__main__":
    given = dict(np.load(sys.argv[2]))
    run_the_page()
    np.savez(sys.argv[3], **{name: x for positions in LAYERS for name, x in learn_once(given, positions).items()})
    check_precision(given)
    check_what_is_refused(given)
    if TENSORFLOW:
        check_dropout_in_tensorflow()
        check_the_module_is_refused()
    else:
        check_the_module()

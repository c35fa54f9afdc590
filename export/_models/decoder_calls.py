"""What decoders and encoder–decoders are called with: examples, caches, and modules around Hugging Face models."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from relskew_core._array.checks import describe
from relskew_core.export._models.convert import cast
from relskew_core.export._models.fixed import drawn
from relskew_core.layers.torch import RelativeMultiheadAttention

Layers = Sequence[Sequence[Tensor]]
"""The caches of every layer: keys and values, and four tensors with those of a memory."""

BATCH = 2  # the number of rows of the examples


def cache_of(past: Layers) -> Any:
    cache = _caches().DynamicCache()
    _fill(cache, past)
    return cache


def cache_with_memory(past: Layers, of_memory: Layers = ()) -> Any:
    """Return the cache of a decoder with cross-attention; keys and values of the memory are computed if not given."""
    cache = _caches().EncoderDecoderCache(cache_of(()), cache_of(()))
    for own, layers in ((cache.self_attention_cache, past), (cache.cross_attention_cache, of_memory)):
        _fill(own, layers)
    cache.is_updated.update(dict.fromkeys(range(len(of_memory)), True))
    return cache


def _fill(cache: Any, layers: Layers) -> None:
    for layer, (keys, values) in enumerate(layers):
        cache.update(keys, values, layer)


def _caches() -> Any:
    return importlib.import_module("transformers.cache_utils")


def cache_name(model: nn.Module) -> str:
    """Return the name of the model's argument for its past, which transformers 5.24 has shortened."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def pairs_of(cache: Any) -> list[list[Tensor]]:
    return [[layer.keys, layer.values] for layer in cache.layers]


class Causal(nn.Module):
    """A transformers decoder, from tokens and pairs of keys and values to logits and pairs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        signature = inspect.signature(model.forward).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.values())
        if not signature.keys() & {"cache", "past_key_values"} and not takes_all:
            raise TypeError(
                "`model` must keep its past in `cache` or `past_key_values`, a cache of keys and values, got "
                f"{type(model).__name__}, which has no such argument: torch_to_onnx exports it without a past"
            )
        self.cache_name = cache_name(model)

    def forward(
        self, tokens: Tensor, past: Layers, encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[list[Tensor]]]:  # fmt: skip
        given: dict[str, Any] = {"encoder_attention_mask": encoder_attention_mask}
        if encoder_hidden_states is None:
            given, cache = {}, cache_of(past)
            own = cache
        else:
            given["encoder_hidden_states"], cache = encoder_hidden_states, cache_with_memory(past)
            own = cache.self_attention_cache
        given[self.cache_name] = cache
        results = self.model(input_ids=tokens, use_cache=True, return_dict=True, **given)
        return results.logits, pairs_of(own)

    def empty_cache(self, batch: int) -> list[list[Tensor]]:
        token = torch.zeros((1, 1), dtype=torch.int64, device="cpu")
        with torch.no_grad():
            _, pairs = self(token, ())
        if not pairs or not all(isinstance(x, Tensor) and x.ndim == 4 for pair in pairs for x in pair):
            raise TypeError(
                "`model` must fill a DynamicCache with keys and values (batch, heads, positions, D) in every layer, "
                f"got {type(self.model).__name__}, which leaves {describe(pairs)}: a model that caches something else, "
                "such as hidden states, is exported without a past by torch_to_onnx"
            )
        return [[x.new_zeros((batch, x.shape[1], 0, x.shape[3])) for x in pair] for pair in pairs]


def called_alike(model: nn.Module, past: Callable[[int], Any] | None) -> nn.Module:
    generates = callable(getattr(model, "prepare_inputs_for_generation", None))
    if past is not None or callable(getattr(model, "empty_cache", None)) or not generates:
        return model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise TypeError(
            f"`model` must be a decoder, got the encoder–decoder {type(model).__name__}: encoder_decoder_to_onnx "
            "writes it"
        )
    return Causal(model)


def empty_past(model: nn.Module, past: Callable[[int], Any] | None) -> Callable[[int], Any]:
    if past is not None:
        if not callable(past):
            raise TypeError(f"`past` must be a function that returns the caches of a batch, got {describe(past)}")
        return past
    own = getattr(model, "empty_cache", None)
    if callable(own):
        return own
    layers = [
        module
        for module in model.modules()
        if isinstance(module, RelativeMultiheadAttention) and module.spec.causal and not module.spec.cross
    ]
    if not layers:
        raise ValueError(
            "`past` must be given because the model has no `empty_cache` and no causal RelativeMultiheadAttention: a "
            "function that returns for a batch one pair of keys and values (batch, heads, 0, D) a layer"
        )
    return lambda batch: [layer.empty_cache(batch) for layer in layers]


def example(
    model: nn.Module, empty: Callable[[int], Any], memory: Sequence[Tensor], dtype: torch.dtype | None
) -> tuple[Any, ...]:
    """Return example arguments, whose lengths are neither 0 nor 1 and all differ from the batch."""
    batch, length = BATCH, 3
    past = empty(batch)
    if dtype is not None:
        past = pytree.tree_map(partial(cast, dtype=dtype), past)
    given = _check_caches("what `past(batch)` returns", past, batch, 0)
    tokens = torch.zeros((batch, length), dtype=torch.int64, device="cpu")
    try:
        inspect.signature(model.forward).bind(tokens, past, *memory)
    except TypeError as error:
        called = ", ".join(["tokens", "past", *("memory", "mask")[: len(memory)]])
        raise TypeError(f"`model` must be called as model({called}), got {type(model).__name__}: {error}") from error
    result = model(tokens, past, *memory)
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise TypeError(f"`model` must return (logits, past), got {describe(result)}")
    logits, present = result
    if logits.ndim != 3 or logits.shape[:2] != (batch, length) or not logits.is_floating_point():
        raise ValueError(
            f"`model` must return logits (batch, length, vocabulary), got {describe(logits)} for tokens (2, 3)"
        )
    if _check_caches("the past that `model` returns", present, batch, length) != given:
        raise ValueError("`model` must return as many caches as it is given, with the same heads and widths")
    return torch.zeros((batch, 2), dtype=torch.int64, device="cpu"), present, *memory


def memory_of(given: Any, dtype: torch.dtype | None) -> list[Tensor]:
    if given is None:
        return []
    tensors = list(given) if isinstance(given, tuple | list) else [given]
    if not tensors or not all(isinstance(x, Tensor) and x.ndim > 1 and x.numel() for x in tensors):
        raise TypeError(
            "`memory` must be a tensor (batch, length, width), or a list of tensors that begin with these axes, got "
            f"{describe(given)}"
        )
    generator = torch.Generator("cpu").manual_seed(0)
    rows = [drawn(x.detach(), (BATCH, *x.shape[1:]), generator) for x in tensors]
    return rows if dtype is None else [cast(x, dtype) for x in rows]


class Memories:
    """Draws memories like an example, with other lengths in turn where these may vary.

    What is of one length in the example stays so.
    """

    def __init__(self, shown: Sequence[Tensor], lengths: Sequence[int | None]) -> None:
        self._shown, self._lengths = shown, lengths
        self._generator = torch.Generator("cpu").manual_seed(0)
        self._turns = itertools.cycle((1, 9, 4))

    def __call__(self, rows: int) -> list[Tensor]:
        sizes = dict.fromkeys(x.shape[1] for x in self._shown)
        lengths = dict(zip(sizes, self._turns, strict=False))
        return [
            drawn(x, (rows, fixed or lengths[x.shape[1]], *x.shape[2:]), self._generator)
            for x, fixed in zip(self._shown, self._lengths, strict=True)
        ]


def _check_caches(name: str, caches: Any, batch: int, length: int) -> list[tuple[int, int]]:
    """Check keys and values of that many positions, and return heads and width of every tensor of the caches."""
    pairs = list(caches) if isinstance(caches, tuple | list) else []
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"{name} must be a list with one pair of keys and values a layer (caches that grow, `empty_cache(batch)`), "
            f"got {describe(caches)}"
        )
    for tensor in (tensor for pair in pairs for tensor in pair):
        right = isinstance(tensor, Tensor) and tensor.ndim == 4
        if not right or (tensor.shape[0], tensor.shape[2]) != (batch, length):
            raise ValueError(
                f"{name} must hold tensors (batch, heads, positions, D), of {batch} and {length} positions here, got "
                f"{describe(tensor)}"
            )
    return [(tensor.shape[1], tensor.shape[3]) for pair in pairs for tensor in pair]


KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
"""The caches of a layer: of self-attention, and of the memory."""


class Encoder(nn.Module):
    """From tokens, or audio features, and their mask to the memory.

    ``broadcasts``: the mask is added as ``(batch, 1, 1, memory_length)``, so that the model makes none of all pairs.
    """

    def __init__(self, model: Any, *, embedded: bool, broadcasts: bool) -> None:
        super().__init__()
        self.model, self.broadcasts = model, broadcasts
        self.argument = "inputs_embeds" if embedded else "input_ids"

    def forward(self, source: Tensor, mask: Tensor) -> Tensor:
        if self.broadcasts:
            dtype = self.model.dtype
            mask = (1 - mask[:, None, None]).to(dtype) * torch.finfo(dtype).min
        return self.model.get_encoder()(**{self.argument: source}, attention_mask=mask)[0]


class _TextDecoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache_name = cache_name(model)

    def decode(self, mask: Tensor, tokens: Tensor, memory: Tensor, past: Layers) -> tuple[Tensor, list[list[Tensor]]]:
        cache = cache_with_memory([layer[:2] for layer in past], [layer[2:] for layer in past])
        results = self.model(
            decoder_input_ids=tokens, attention_mask=mask, encoder_outputs=(memory,), use_cache=True, return_dict=True,
            **{self.cache_name: cache},
        )  # fmt: skip
        caches = pairs_of(cache.self_attention_cache), pairs_of(cache.cross_attention_cache)
        return results.logits, [own + of for own, of in zip(*caches, strict=True)]


class FirstCall(_TextDecoder):
    def forward(self, mask: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        return self.decode(mask, tokens, memory, ())


class OfMemory(_TextDecoder):
    """From the memory to its keys and values in every layer; the exporter removes the rest of the decoder."""

    def forward(self, memory: Tensor) -> list[list[Tensor]]:
        rows, length = memory.shape[:2]
        mask = torch.ones((rows, length), dtype=torch.int64, device="cpu")
        _, layers = self.decode(mask, mask.new_zeros((rows, 1)), memory, ())
        return [layer[2:] for layer in layers]


class LaterCall(_TextDecoder):
    """From the memory's mask, tokens and all caches to logits and the caches that have grown."""

    def __init__(self, model: Any, width: int) -> None:
        super().__init__(model)
        self.width = width

    def forward(self, mask: Tensor, tokens: Tensor, past: Layers) -> tuple[Tensor, list[list[Tensor]]]:
        keys = past[0][2]
        memory = keys.new_zeros((1, 1, 1)).expand(keys.shape[0], keys.shape[2], self.width)
        logits, layers = self.decode(mask, tokens, memory, past)
        return logits, [layer[:2] for layer in layers]


ENCODER, OF_MEMORY, LATER, FIRST = range(4)  # the order of the graphs


class GraphPart(NamedTuple):
    module: nn.Module
    example: tuple[Any, ...]
    inputs: list[str]
    outputs: list[str]
    axes: list[dict[int, str]]

    def called(self, _: Sequence[tuple[Any, ...]]) -> dict[tuple[int, int], str]:
        return {(index, axis): name for index, names in enumerate(self.axes) for axis, name in names.items()}


def source_of(model: Any, batch: int, length: int, generator: torch.Generator) -> Tensor:
    if takes_sounds(model):
        return torch.randn(
            (batch, length, model.config.d_model), generator=generator, dtype=torch.float32, device="cpu"
        ).to(model.dtype)
    size = getattr(model.config, "vocab_size", None)
    if size is None:
        raise TypeError(
            "`model` must encode tokens, of a `config.vocab_size`, or `input_features`, got "
            f"{type(model).__name__} without that size"
        )
    return torch.randint(size, (batch, length), generator=generator, dtype=torch.int64, device="cpu")


def takes_sounds(model: Any) -> bool:
    return "input_features" in inspect.signature(model.forward).parameters


def _encoder(model: Any, source: Tensor, mask: Tensor) -> Encoder:
    padded = mask.clone()
    padded[-1, -2:] = 0
    plain, wide = (Encoder(model, embedded=takes_sounds(model), broadcasts=which) for which in (False, True))
    wanted = plain(source, padded)
    try:
        found = wide(source, padded)
    except (TypeError, ValueError, IndexError, RuntimeError):  # the shape does not broadcast
        return plain
    return wide if torch.allclose(found, wanted, rtol=1e-4, atol=1e-5) else plain


def parts_of(model: Any) -> list[GraphPart]:
    generator = torch.Generator("cpu").manual_seed(0)
    batch, length, memory_length = 2, 3, 5
    source = source_of(model, batch, memory_length, generator)
    mask = torch.ones((batch, memory_length), dtype=torch.int64, device="cpu")
    tokens = torch.zeros((batch, length), dtype=torch.int64, device="cpu")
    encoder, first = _encoder(model, source, mask), FirstCall(model)
    memory = encoder(source, mask)
    _, past = first(mask, tokens, memory)
    if not past or any(not isinstance(x, Tensor) or x.ndim != 4 for layer in past for x in layer):
        raise TypeError(
            "`model` must fill an EncoderDecoderCache with keys and values (batch, heads, length, D), got "
            f"{describe(past)}"
        )
    later = LaterCall(model, memory.shape[-1])
    of_memory, of_text = {0: "batch", 1: "memory_length"}, {0: "batch", 1: "length"}
    kinds = [f"{layer}.{kind}" for layer in range(len(past)) for kind in KINDS]
    caches = [{0: "batch", 2: "past_length" if "decoder" in kind else "memory_length"} for kind in kinds]
    return [
        GraphPart(
            encoder, (source, mask), ["input_features" if takes_sounds(model) else "input_ids", "attention_mask"],
            ["last_hidden_state"], [of_memory, of_memory],
        ),
        GraphPart(
            OfMemory(model), (memory,), ["encoder_hidden_states"],
            [f"present.{kind}" for kind in kinds if "encoder" in kind], [of_memory],
        ),
        GraphPart(
            later, (mask, tokens[:, :2], past),
            ["encoder_attention_mask", "input_ids", *(f"past_key_values.{kind}" for kind in kinds)],
            ["logits", *(f"present.{kind}" for kind in kinds if "decoder" in kind)], [of_memory, of_text, *caches],
        ),
        GraphPart(
            first, (mask, tokens, memory), ["encoder_attention_mask", "input_ids", "encoder_hidden_states"],
            ["logits", *(f"present.{kind}" for kind in kinds)], [of_memory, of_text, of_memory],
        ),
    ]  # fmt: skip

"""The encoder, the first call and a later call of an encoder–decoder, as modules from tensors to tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relskew_core._array.checks import describe
from relskew_core.export._models.decoder_calls import Layers, cache_name, cache_with_memory, pairs_of

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
        """Return ``(batch, memory_length, width)``."""
        if self.broadcasts:
            dtype = self.model.dtype
            mask = (1 - mask[:, None, None]).to(dtype) * torch.finfo(dtype).min
        memory: Tensor = self.model.get_encoder()(**{self.argument: source}, attention_mask=mask)[0]
        return memory


class _TextDecoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache_name = cache_name(model)

    def decode(self, mask: Tensor, tokens: Tensor, memory: Tensor, past: Layers) -> tuple[Tensor, list[list[Tensor]]]:
        """Return logits, and all caches of every layer."""
        cache = cache_with_memory([layer[:2] for layer in past], [layer[2:] for layer in past])
        results = self.model(
            decoder_input_ids=tokens, attention_mask=mask, encoder_outputs=(memory,), use_cache=True, return_dict=True,
            **{self.cache_name: cache},
        )  # fmt: skip
        caches = pairs_of(cache.self_attention_cache), pairs_of(cache.cross_attention_cache)
        return results.logits, [own + of for own, of in zip(*caches, strict=True)]


class FirstCall(_TextDecoder):
    """From the memory's mask, tokens and the memory to logits and all caches."""

    def forward(self, mask: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Project the memory."""
        return self.decode(mask, tokens, memory, ())


class LaterCall(_TextDecoder):
    """From the memory's mask, tokens and all caches to logits and the caches that have grown."""

    def __init__(self, model: Any, width: int) -> None:
        super().__init__(model)
        self.width = width

    def forward(self, mask: Tensor, tokens: Tensor, past: Layers) -> tuple[Tensor, list[list[Tensor]]]:
        """Read the memory's projections from its caches; only the memory's shape is needed."""
        keys = past[0][2]
        memory = keys.new_zeros((1, 1, 1)).expand(keys.shape[0], keys.shape[2], self.width)
        logits, layers = self.decode(mask, tokens, memory, past)
        return logits, [layer[:2] for layer in layers]


@dataclass(frozen=True, slots=True)
class GraphPart:
    """One of the three graphs: its module, an example, its names, and the names of its inputs' lengths."""

    module: nn.Module
    example: tuple[Any, ...]
    inputs: list[str]
    outputs: list[str]
    axes: list[dict[int, str]]

    def called(self, _: Sequence[tuple[Any, ...]]) -> dict[tuple[int, int], str]:
        """Return the names of the lengths, by input and axis."""
        return {(index, axis): name for index, names in enumerate(self.axes) for axis, name in names.items()}


def source_of(model: Any, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return an input of the encoder."""
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
    """Whether the encoder takes audio features instead of tokens."""
    return "input_features" in inspect.signature(model.forward).parameters


def _encoder(model: Any, source: Tensor, mask: Tensor) -> Encoder:
    """Return the encoder with a mask that broadcasts, if the model takes one."""
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
    """Return the three parts, with examples whose lengths are above 1 and all differ."""
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
            first, (mask, tokens, memory), ["encoder_attention_mask", "input_ids", "encoder_hidden_states"],
            ["logits", *(f"present.{kind}" for kind in kinds)], [of_memory, of_text, of_memory],
        ),
        GraphPart(
            later, (mask, tokens[:, :2], past),
            ["encoder_attention_mask", "input_ids", *(f"past_key_values.{kind}" for kind in kinds)],
            ["logits", *(f"present.{kind}" for kind in kinds if "decoder" in kind)], [of_memory, of_text, *caches],
        ),
    ]  # fmt: skip

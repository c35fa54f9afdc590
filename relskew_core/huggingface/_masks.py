"""Masks of keys alone, in place of transformers' masks of all pairs of positions."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MASK_NAME, CAUSAL_NAME = "relskew_keys", "relskew_keys_of_a_decoder"
"""The names under which transformers finds masks of keys alone."""


def mask_keys_alone(part: Any, name: str = MASK_NAME) -> None:
    """Let a module that makes masks make masks of keys alone."""
    if hasattr(part, "_get_output_attention_mask"):  # Parakeet's encoder makes its own mask
        part._get_output_attention_mask = functools.partial(_keys_of, part)
        return
    register_masks()
    part.config = copy.copy(part.config)
    part.config._attn_implementation = name


def register_masks() -> None:
    """Register the masks of keys with transformers, if a model uses them: also in a copy in another process."""
    if "transformers" not in sys.modules:
        return
    masking = importlib.import_module("transformers.masking_utils")

    def keys(*, mask_function: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if mask_function is not masking.bidirectional_mask_function:
            mask: Tensor | None = masking.sdpa_mask(
                mask_function=mask_function, attention_mask=attention_mask, **options
            )
            return mask
        return None if attention_mask is None else attention_mask[:, None, None, :]

    def keys_of_a_decoder(*, mask_function: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if mask_function is masking.causal_mask_function:
            return attention_mask  # (batch, keys): a mask with two axes contains no bias by head and pair
        mask: Tensor | None = masking.sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **options)
        return mask

    masking.AttentionMaskInterface.register(MASK_NAME, keys)
    masking.AttentionMaskInterface.register(CAUSAL_NAME, keys_of_a_decoder)


@dataclass(frozen=True)
class KeyMask:
    """A mask of keys, ``(batch, length)``, in place of the mask of all pairs that the model is about to make.

    Expanded, and combined with its transpose, it stays a mask of keys: queries that are padding see what others see,
    which no output that counts depends on.
    """

    keys: Tensor

    def unsqueeze(self, axis: int) -> KeyMask:
        return self

    def expand(self, *shape: Any) -> KeyMask:
        return self

    def transpose(self, one: int, other: int) -> KeyMask:
        return self

    def __and__(self, other: KeyMask) -> Tensor:
        return self.keys[:, None, :]

    def int(self) -> Tensor:
        return self.keys.int()


def _keys_of(encoder: Any, *given: Any, **options: Any) -> KeyMask:
    return KeyMask(type(encoder)._get_output_attention_mask(encoder, *given, **options))

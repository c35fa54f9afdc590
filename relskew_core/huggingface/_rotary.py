"""A bias by relative position instead of rotary positions, in Hugging Face models that have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relskew_core._array.checks import describe
from relskew_core._positions.span import Span
from relskew_core.huggingface._register import Bias, register_attention


def replace_rotary(
    model: nn.Module, *, rel_bias: Bias = "alibi", span: Span | None = None, name: str = "relskew"
) -> nn.Module:
    """Replace the rotary positions of Llama-like models by ALiBi or a learned bias, in place.

    Queries and keys are no longer rotated, and the bias is added to their products, as by :func:`register_attention`.
    Train the model again, or further, because its weights were trained with rotary positions. Caches, ``generate`` and
    padding on either side work as before.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers whose rotary embeddings are modules: Llama, Mistral, Qwen, Gemma and most others.
    rel_bias, span, name : optional
        As in :func:`register_attention`; with ``rel_bias=None`` the model has no positions at all (NoPE).

    Returns
    -------
    torch.nn.Module
        ``model``. A saved checkpoint does not record the replacement: call this function again after
        ``from_pretrained``.

    Raises
    ------
    ValueError, TypeError
        If the model has no rotary embeddings, or does not use the attention interface of transformers; if an argument
        does not fit.

    See Also
    --------
    register_attention : adds a bias to the rotary positions.
    replace_attention : for models that have relative positions.

    Notes
    -----
    Press et al. 2022, "Train Short, Test Long", compare both: with the same training, a model with ALiBi continues to
    longer inputs on which a model with rotary positions fails.

    Examples
    --------
    ALiBi in a small random Llama:

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2)
    >>> model = replace_rotary(LlamaForCausalLM(config))
    >>> model(torch.arange(6)[None]).logits.shape
    torch.Size([1, 6, 50])

    Tokens are generated as before, with a cache:

    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, min_new_tokens=4).shape
    torch.Size([1, 7])

    A learned bias for each head and the last 32 positions:

    >>> learned = torch.nn.Parameter(torch.zeros(32, 32))
    >>> model = replace_rotary(model, rel_bias=learned, name="learned")
    >>> model(torch.arange(6)[None]).logits.sum().backward()
    >>> learned.grad.shape
    torch.Size([32, 32])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {describe(model)}")
    rotary = [part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    if not rotary or not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            "`model` must be one of transformers with modules of rotary embeddings, such as LlamaRotaryEmbedding, got "
            f"{type(model).__name__}: for a model without rotary positions, use `register_attention`"
        )
    transformer: Any = model
    transformer.set_attn_implementation(register_attention(name, rel_bias=rel_bias, span=span))
    owners: dict[nn.Module, Any] = {}
    for owner in model.modules():  # parents come first, so that the innermost model is kept
        if hasattr(owner, "set_attn_implementation"):
            owners |= dict.fromkeys(owner.modules(), owner)
    refused = {type(owners[part]).__name__ for part in rotary if owners[part].config._attn_implementation != name}
    if refused:  # transformers only logs a warning
        raise ValueError(
            "`model` must use the attention interface of transformers, since it has no positions otherwise, got "
            f"{', '.join(sorted(refused))}"
        )
    for part in rotary:
        if _unturned not in part._forward_hooks.values():
            part.register_forward_hook(_unturned)
    return model


def _unturned(part: nn.Module, given: Any, angles: Any) -> Any:
    """Return the cosines and sines, or the complex numbers, of the identity rotation."""
    if isinstance(angles, tuple) and len(angles) == 2:
        return torch.ones_like(angles[0]), torch.zeros_like(angles[1])
    if isinstance(angles, Tensor) and angles.is_complex():
        return torch.ones_like(angles)
    raise ValueError(
        f"`model` must have rotary embeddings that return a cosine and a sine, got {describe(angles)} of "
        f"{type(part).__name__}"
    )

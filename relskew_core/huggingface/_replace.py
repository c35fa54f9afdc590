"""Every attention of a model replaced by the drop-in for its class."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from relskew_core.huggingface._t5 import T5RelativeAttention
from relskew_core.huggingface._vits import VitsRelativeAttention

Model = TypeVar("Model", bound=nn.Module)

_DROP_INS: dict[str, type[VitsRelativeAttention | T5RelativeAttention]] = {
    "VitsAttention": VitsRelativeAttention,
    "T5Attention": T5RelativeAttention,
}


def replace_attention(model: Model) -> Model:
    """Replace every attention of a ``transformers`` VITS or T5 by relative attention, in place.

    Weights, state dict, caches, masks and dropout stay what they are. A bias by bucket is no longer written as a matrix
    for all queries and keys, and the model exports to ONNX with dynamic lengths. A second call changes nothing.

    Parameters
    ----------
    model : torch.nn.Module
        A model, or any part of one, that contains ``VitsAttention`` or ``T5Attention``.

    Returns
    -------
    torch.nn.Module
        The model. Given an attention itself, what takes its place.

    Raises
    ------
    ValueError
        If there is none. Later, in the model's ``forward``: if attention weights are asked for, which are never held.

    Examples
    --------
    >>> from torch import nn
    >>> replace_attention(nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    ValueError: `model` must contain VitsAttention or T5Attention, got Linear with none
    """
    root: Any = nn.ModuleDict({"model": model})
    found = [
        (parent, name, child)
        for parent in root.modules()
        for name, child in parent.named_children()
        if type(child).__name__ in _DROP_INS
    ]
    if not found and not any(isinstance(part, tuple(_DROP_INS.values())) for part in model.modules()):
        raise ValueError(f"`model` must contain {' or '.join(_DROP_INS)}, got {type(model).__name__} with none")
    for parent, name, child in found:
        setattr(parent, name, _DROP_INS[type(child).__name__](child))
    replaced: Model = root["model"]
    return replaced

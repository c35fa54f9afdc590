"""Every attention of a model replaced by the drop-in for its class, also by local attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from relskew_core._array.checks import check_window, describe
from relskew_core.huggingface import (  # noqa: F401  # their classes enter themselves into `DropIn.known`
    _alibi,
    _conformers,
    _deberta,
    _images,
    _speech,
    _t5,
    _xlnet,
)
from relskew_core.huggingface._attend import (
    CAUSAL_NAME,
    MASK_NAME,
    OWN_MASKS,
    DropIn,
    check_forward,
    kind_of,
    mask_keys_alone,
    refuse_weights,
)  # fmt: skip


def checked_window(window: Any) -> tuple[int, int] | None:
    sides = check_window("window", window)
    if window is None:
        return None
    if sides is None or None in sides:
        raise ValueError(f"`window` must be bounded on both sides, or None, got {describe(window)}")
    left, right = sides
    return (left or 0, right or 0)


def check_local(parts: Iterable[DropIn]) -> None:
    parts = list(parts)
    refused = sorted({type(part).replaces[0] for part in parts if not part.local})
    if refused or not any(part.attends_to_itself() for part in parts):
        why = f"got one for {', '.join(refused)}" if refused else "no encoder of this model has relative positions"
        raise ValueError(
            "`window` must be None, except for encoders with positions along a sequence, such as T5's, MPNet's and the "
            f"Conformers': {why}"
        )


def make_local(model: nn.Module, window: tuple[int, int]) -> None:
    """Set the window of a model's drop-ins, and let the modules around them make masks of linear size."""
    for part in model.modules():
        if isinstance(part, DropIn) and part.attends_to_itself():
            part.window = window
    for part in model.modules():
        inside = {
            name for child in part.modules() if isinstance(child, DropIn) and child.window for name in child.masks
        }
        if kind_of(part).__name__ in inside:
            mask_keys_alone(part)


Model = TypeVar("Model", bound=nn.Module)

NEAREST = {
    ("LayoutLM",): "`conventions.T5` has these buckets, docs/variants.md",
    ("WindowAttention",): "`conventions.Swin` reads the table, docs/variants.md",
    ("RotaryEmbedding",): "`register_attention` adds a bias to rotary positions, `replace_rotary` replaces them",
}
"""What to do with unsupported models, by their modules."""


def replace_attention(model: Model, *, window: tuple[int, int] | None = None) -> Model:
    """Replace every attention of a ``transformers`` model that has relative positions by relative attention, in place.

    Weights, state dict, caches, masks and dropout do not change. A bias or a product by position is no longer
    materialised as a matrix for all queries and keys once that matrix is large. A second call changes nothing.

    Parameters
    ----------
    model : torch.nn.Module
        A model, or any part of one, of the families in ``docs/huggingface.md``: T5 and related models, VITS,
        Wav2Vec2-BERT and others, and Conformers of ESPnet, NeMo, fairseq and SpeechBrain. Attention without relative
        positions is not changed.
    window : tuple of int, optional
        Local attention, as ``(left, right)``: a query sees only keys at ``-left ≤ r ≤ right``, and memory and time grow
        linearly with the length. It is for encoders of sequences with T5's bias or a Conformer's positions
        (``docs/speech.md``); their decoders and cross-attention do not change. A second call sets a new window.

    Returns
    -------
    torch.nn.Module
        ``model``.

    Raises
    ------
    ValueError
        If there is nothing to replace; the message says what the model has, and what is supported. If ``window`` is
        passed for attention that does not support it. Later, in the model's ``forward``: if attention weights are
        requested, which are never materialised.
    TypeError
        If ``model`` is not a module, or ``window`` is not a pair of ints.

    See Also
    --------
    register_attention : ALiBi or a learned bias for models with rotary positions or none.
    replace_rotary : the same in a model that exists already.

    Examples
    --------
    T5, here small and random; its weights and its results do not change:

    >>> import torch
    >>> from transformers import T5Config, T5EncoderModel
    >>> sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2, "d_ff": 16}
    >>> config = T5Config(**sizes, vocab_size=50, dropout_rate=0)
    >>> model = T5EncoderModel(config)
    >>> before = model(torch.arange(6)[None]).last_hidden_state
    >>> model = replace_attention(model)
    >>> torch.allclose(model(torch.arange(6)[None]).last_hidden_state, before, atol=1e-5)
    True

    Local attention for long inputs, to at most two tokens on each side:

    >>> model = replace_attention(model, window=(2, 2))
    >>> model(torch.arange(40)[None]).last_hidden_state.shape
    torch.Size([1, 40, 16])

    A model without relative positions:

    >>> replace_attention(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    ValueError: `model` must have relative positions in one of the attention classes below, got Linear with ...
    """
    sides = checked_window(window)
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {describe(model)}")
    parts = dict(model.named_modules())
    kinds = {name for part in parts.values() if (name := kind_of(part).__name__) not in DropIn.known or _serving(part)}
    # All are made before the first takes a place, so that the model is unchanged if one cannot be made.
    made = [(part, new) for name, part in parts.items() if (new := _drop_in(part, name, kinds)) is not None]
    present = [*(new for _, new in made), *(part for part in parts.values() if isinstance(part, DropIn))]
    if not present:
        supported = ", ".join(sorted(DropIn.known))
        classes: set[str] = {type(part).__name__ for part in parts.values()}
        attentions = ", ".join(sorted(name for name in classes if "Attention" in name))
        raise ValueError(
            f"`model` must have relative positions in one of the attention classes below, got {type(model).__name__} "
            f"with {attentions or 'no attention'}. By hand: {_nearest(parts.values())}. Supported are {supported}"
        )
    if sides is not None:
        check_local(present)
    for part, new in made:
        new.take_the_place_of(part)
    deciding = {name: CAUSAL_NAME for _, new in made for name in new.key_masks}
    deciding |= {name: MASK_NAME for _, new in made for name in new.masks}
    for part in parts.values():
        config: Any = getattr(part, "config", None)
        kind = deciding.get(kind_of(part).__name__)
        # Without a name of an implementation, as in a part made alone, transformers makes no mask. Encoders that make
        # masks themselves hide keys from queries that are padding, too, which only a window changes.
        own = kind == MASK_NAME and any(hasattr(part, method) for method in OWN_MASKS)
        if kind is not None and not own and getattr(config, "_attn_implementation", "") is not None:
            mask_keys_alone(part, kind)
    if sides is not None:
        make_local(model, sides)
    if not isinstance(model, DropIn) and _without_weights not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_without_weights, with_kwargs=True)
    return model


def _without_weights(model: nn.Module, given: Any, named: dict[str, Any]) -> None:
    """Refuse a call that asks for weights: many models do not pass the request on to their attention."""
    asked = named.get("output_attentions")
    refuse_weights(getattr(getattr(model, "config", None), "output_attentions", False) if asked is None else asked)


def _serving(original: nn.Module) -> list[type[DropIn]]:
    return [drop_in for drop_in in DropIn.known.get(kind_of(original).__name__, ()) if drop_in.serves(original)]


def _drop_in(original: nn.Module, name: str, kinds: set[str]) -> DropIn | None:
    for drop_in in _serving(original):
        if drop_in.needs in (None, *kinds):
            check_forward(original, name, drop_in)
            return drop_in(original)
    return None


def _nearest(parts: Iterable[nn.Module]) -> str:
    for part in parts:
        if hasattr(part, "emb_rel_k"):
            return "`conventions.load_vits` and `load_vits_encoder` read the weights, docs/piper.md"
        for names, advice in NEAREST.items():
            if any(name in type(part).__name__ for name in names):
                return advice
    return "the calls for other code are in docs/chooser.md"

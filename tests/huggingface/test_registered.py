"""The registered attention, with a stand-in for transformers' interface; tests/peers has whole models."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from relskew_core import Span, alibi_bias
from relskew_core.huggingface import register_attention, replace_rotary

H, N, M, D = 2, 3, 5, 4


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace transformers, and return the attention that is registered there."""
    attention: dict[str, Any] = {"sdpa": print}
    masks: dict[str, Any] = {}

    class Interface(dict[str, Any]):
        def __init__(self) -> None:
            super().__init__(attention)

        @classmethod
        def register(cls, name: str, function: Any) -> None:
            attention[name] = function

    def sdpa_mask(*, q_length: int, kv_length: int, q_offset: int, kv_offset: int, **options: Any) -> torch.Tensor:
        queries, keys = torch.arange(q_length)[:, None] + q_offset, torch.arange(kv_length) + kv_offset
        return (keys <= queries)[None, None]

    package, masking = ModuleType("transformers"), ModuleType("transformers.masking_utils")
    vars(package).update(AttentionInterface=Interface)
    vars(masking).update(sdpa_mask=sdpa_mask, AttentionMaskInterface=SimpleNamespace(register=masks.__setitem__))
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)
    return {"attention": attention, "masks": masks}


def heads(seed: int, length: int) -> torch.Tensor:
    return torch.randn(1, H, length, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bias_of(length: int) -> np.ndarray:
    return np.asarray(alibi_bias(H, Span.full(length), xp=np))


@pytest.mark.parametrize("case", ["alone", "a past", "a cache of a fixed length", "both sides"])
def test_alibi(registered: dict[str, Any], case: str) -> None:
    name = register_attention("ours")
    mask = None
    n, m, offset = {"alone": (M, M, 0), "both sides": (M, M, 0)}.get(case, (N, M, M - N))
    if case == "a past":
        mask = registered["masks"][name](q_length=N, kv_length=M, q_offset=offset, kv_offset=0)
    elif case == "a cache of a fixed length":  # its last place is not filled yet
        offset = 1
        mask = registered["masks"][name](q_length=N, kv_length=M, q_offset=torch.tensor(offset), kv_offset=0)
    q, k, v = heads(1, n), heads(2, m), heads(3, m)
    module = SimpleNamespace(is_causal=case != "both sides")
    got, weights = registered["attention"][name](module, q, k, v, mask, scaling=0.5, dropout=0.0, position_ids=None)
    want = oracles.relative_attention(
        q.numpy(), k.numpy(), v.numpy(), None, Span.full(M), rel_bias=bias_of(M), scale=0.5, offset=offset,
        causal=module.is_causal,
    ).out  # fmt: skip
    assert weights is None
    assert oracles.relative_error(got.transpose(1, 2).numpy(), want) < 1e-12


@pytest.mark.no_cover
def test_a_compiled_call_checks_where_queries_are(registered: dict[str, Any]) -> None:
    register_attention("ours", rel_bias=torch.randn(H, 3, dtype=torch.float64))
    attend, module = registered["attention"]["ours"], SimpleNamespace(is_causal=True)
    q, k, v = heads(1, N), heads(2, M + 4), heads(3, M + 4)
    compiled = torch.compile(lambda mask: attend(module, q, k, v, mask)[0], backend="aot_eager", fullgraph=True)
    seen = registered["masks"]["ours"](q_length=N, kv_length=M + 4, q_offset=M - N, kv_offset=0)
    assert torch.allclose(compiled(seen.clone()), attend(module, q, k, v, seen)[0])
    with pytest.raises(RuntimeError, match="`attention_mask` must show which 3 of 9 keys are those of the queries"):
        compiled(seen | (torch.arange(M + 4) < M))


def test_keys_of_another_text_have_no_bias(registered: dict[str, Any]) -> None:
    """Modules that attend to both say which: by their class, by their attributes, or they are refused."""
    register_attention("ours", rel_bias=torch.full((H, 2 * M - 1), 1e3).cumsum(-1).double(), span=Span.full(M))
    q, k, v = heads(1, M), heads(2, M), heads(3, M)

    class StandIn(torch.nn.Module):
        def forward(self, hidden_states: Any, encoder_hidden_states: Any = None) -> Any: ...

    class StandInCross(StandIn): ...

    def differs(kind: type[Any], **attributes: Any) -> bool:
        module = kind()
        vars(module).update(attributes)
        got, _ = registered["attention"]["ours"](module, q, k, v, None)
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(attributes.get("is_causal")))
        return not torch.allclose(got.transpose(1, 2), plain)

    assert not differs(StandInCross)
    assert not differs(StandIn, is_cross_attention=True)
    assert not differs(StandIn, is_decoder=True, is_causal=False)
    assert differs(StandIn, is_decoder=False, is_causal=False)
    assert differs(StandIn, is_decoder=True, is_causal=True)
    assert differs(StandIn, is_causal=True)
    assert differs(torch.nn.Module, is_causal=False)
    with pytest.raises(
        ValueError, match="`model` must have attention that says whether it attends to another sequence"
    ):
        differs(StandIn, is_causal=False)
    with pytest.raises(ValueError, match="`attention_mask` must be a mask, got None: Module has no `is_causal`"):
        differs(torch.nn.Module)
    q = q[..., :N, :]
    with pytest.raises(
        ValueError, match="`attention_mask` must be a mask where 3 queries attend to 5 keys and the fut"
    ):
        differs(torch.nn.Module, is_causal=False)


def test_taken_names_unknown_arguments_and_no_transformers_are_refused(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="`name` must not be one of transformers' own, got 'sdpa'"):
        register_attention("sdpa")
    name = register_attention(register_attention("ours"))
    q = heads(1, 2)
    with pytest.raises(ValueError, match="`position_bias` must be None, got"):
        registered["attention"][name](None, q, q, q, None, position_bias=q)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="needs transformers: pip install transformers"):
        register_attention("ours")


class StandInRotaryEmbedding(torch.nn.Module):
    def __init__(self, angles: Any) -> None:
        super().__init__()
        self.angles = angles

    def forward(self) -> Any:
        return self.angles


class StandInModel(torch.nn.Sequential):
    """A model that uses transformers' interface for its attention, or does not and ignores the name."""

    def __init__(self, *parts: torch.nn.Module, uses: bool = True) -> None:
        super().__init__(*parts)
        self.uses, self.config = uses, SimpleNamespace(_attn_implementation="eager")
        self.chosen: list[str] = []

    def set_attn_implementation(self, name: str) -> None:
        self.chosen.append(name)
        for part in self.modules():
            if isinstance(part, StandInModel) and part.uses:
                part.config._attn_implementation = name


@pytest.mark.parametrize("kind", ["pair", "complex", "other"])
def test_rotary_embeddings_turn_nothing(registered: dict[str, Any], kind: str) -> None:
    x = torch.randn(3, 4)
    angles = {"pair": (x, x), "complex": torch.complex(x, x), "other": x}[kind]
    model = StandInModel(StandInRotaryEmbedding(angles))
    for _ in range(2):
        assert replace_rotary(model, name="ours") is model
    assert model.chosen == ["ours", "ours"]
    assert "ours" in registered["attention"]
    if kind == "other":
        with pytest.raises(ValueError, match=r"^`model` must have rotary embeddings that return a cosine and a sine"):
            model[0]()
        return
    turned = model[0]()
    cosine, sine = turned if kind == "pair" else (turned.real, turned.imag)
    assert (cosine == 1).all()
    assert (sine == 0).all()
    assert len(model[0]._forward_hooks) == 1


def test_rotary_positions_stay_in_a_model_without_the_interface(registered: dict[str, Any]) -> None:
    """Transformers ignores the name there, so the model would have no positions at all."""
    rotary = StandInRotaryEmbedding((torch.ones(2), torch.ones(2)))
    inner = StandInModel(rotary, uses=False)
    with pytest.raises(ValueError, match=r"^`model` must use the attention interface of transformers.*got StandInM"):
        replace_rotary(StandInModel(inner))
    assert not rotary._forward_hooks
    replace_rotary(StandInModel(StandInModel(rotary), uses=False))
    assert rotary._forward_hooks


def test_a_model_without_rotary_embeddings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`model` must be one of transformers with modules of rotary embeddings"):
        replace_rotary(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^`model` must be a torch\.nn\.Module, got"):
        replace_rotary("llama")  # type: ignore[arg-type]

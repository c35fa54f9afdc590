"""Modules to which others have attached something, before their attention is replaced: stand-ins and plain torch."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface.stand_ins import STAND_INS, attentions, is_replaced, vits, x
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

from relskew_core.huggingface import replace_attention
from torch_modules import of

Tensor = torch.Tensor


@pytest.mark.parametrize("hook", [None, "a hook"])
@pytest.mark.parametrize("name", STAND_INS)
def test_another_forward_is_refused(name: str, hook: str | None) -> None:
    model = torch.nn.ModuleDict({"layer": STAND_INS[name][0]()})
    attention = attentions(model)[-1]
    before, path = attention.forward, next(path for path, part in model.named_modules() if part is attention)
    kinds = [type(part) for part in model.modules()]
    if hook:
        attention._hf_hook, attention._old_forward = hook, lambda *given: before(*given)
    attention.forward = functools.partial(lambda *given, **named: before(*given, **named))
    with pytest.raises(ValueError, match=rf"got another `forward` in '{path}' \({type(attention).__name__}\)"):
        replace_attention(model)
    assert [type(part) for part in model.modules()] == kinds


def test_another_method_is_refused() -> None:
    model = STAND_INS["mpnet"][0]()
    model.encoder.compute_position_bias = lambda states: states
    with pytest.raises(ValueError, match=r"got another `compute_position_bias` in 'encoder' \(MPNetEncoder\)"):
        replace_attention(model)


@torch.no_grad()
def test_hooks_of_torch_stay_and_can_be_removed() -> None:
    attention, seen = vits(0.0).eval(), list[Any]()
    handles = [
        attention.register_forward_pre_hook(lambda part, given: seen.append(part)),
        attention.register_forward_hook(lambda part, given, out: seen.append(part)),
        attention.register_state_dict_pre_hook(lambda part, prefix, keep: seen.append(part)),
        attention.register_load_state_dict_pre_hook(lambda part, *given: seen.append(part)),
        attention.register_load_state_dict_post_hook(lambda part, keys: seen.append(part)),
    ]
    model = torch.nn.Sequential(attention)
    del attention
    (ours,) = replace_attention(model)
    for used in (handles, []):
        seen.clear()
        ours(x())
        model.load_state_dict(model.state_dict())
        assert [part is ours for part in seen] == [True] * len(used)
        for handle in handles:
            handle.remove()


class Half(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "a parametrised table": lambda made: parametrize.register_parametrization(made, "emb_rel_k", Half()),
    "two parametrised tables": lambda made: [
        parametrize.register_parametrization(made, name, Half()) for name in ("emb_rel_k", "emb_rel_v")
    ],
    "a parametrised layer": lambda made: parametrize.register_parametrization(made.q_proj, "weight", Half()),
    "the weight norm of a table": lambda made: parametrizations.weight_norm(made, "emb_rel_k"),
    "the weight norm of a layer": lambda made: parametrizations.weight_norm(made.k_proj),
    "the former weight norm of a table": lambda made: weight_norm(made, "emb_rel_v"),
    "pruned": lambda made: prune.l1_unstructured(made, "emb_rel_k", 3),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@torch.no_grad()
def test_parametrised_weights(name: str) -> None:
    """The same numbers, also after steps of training, and the same names as the original's."""
    torch.manual_seed(0)
    attention = vits(0.0).eval()
    WRAPPED[name](attention)
    keys = list(attention.state_dict())
    ours: Any = replace_attention(torch.nn.Sequential(attention))
    assert is_replaced(ours[0])
    assert list(attention.state_dict()) == keys
    for _ in range(2):
        ours(x())
        plain = vits(0.0).eval()
        for key in ("emb_rel_k", "emb_rel_v"):
            setattr(plain, key, torch.nn.Parameter(getattr(attention, key).clone()))
        for key, layer in plain.named_children():
            layer.weight.copy_(getattr(attention, key).weight)
            layer.bias.copy_(getattr(attention, key).bias)
        torch.testing.assert_close(ours(x())[0], replace_attention(plain)(x())[0])
        for parameter in attention.parameters():
            parameter.mul_(1.1)
    for part in ours.modules():
        if parametrize.is_parametrized(part):
            for key in list(part.parametrizations):
                parametrize.remove_parametrizations(part, key)
    assert is_replaced(ours[0])
    torch.testing.assert_close(replace_attention(ours)(x())[0], ours(x())[0])


# The last layer of every attention returns a view.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_sharded_weights() -> None:
    """By FSDP, which makes a class around that of the attention and keeps the module itself."""
    attention = vits(0.0).eval()
    want = replace_attention(copy.deepcopy(attention))(x())[0]
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        fully_shard(attention, mesh=init_device_mesh("cpu", (1,)))
        (ours,) = replace_attention(torch.nn.Sequential(attention))
        assert is_replaced(ours)
        out = ours(x())[0].clone()
        torch.testing.assert_close(out, want)
        out.sum().backward()
        assert {type(parameter.grad) for parameter in ours.parameters()} == {type(ours.emb_rel_k)}
    finally:
        dist.destroy_process_group()


def around(layer: Any) -> Any:
    """Return a model that adds what it is given."""

    def forward(self: Any, given: Tensor, mask: Tensor) -> Tensor:
        out = self.layer(given, attention_mask=mask)[0]
        return given + out.relu()

    return of(forward, layer=layer)


@torch.no_grad()
def test_torch_fx_keeps_attention_whole() -> None:
    """With its hooks, and in another dtype and at other lengths than those of an example."""
    attention, seen = vits(0.0).eval(), list[Any]()
    attention.register_forward_pre_hook(lambda part, given: seen.append(given[0].shape))
    ours = replace_attention(around(attention))
    traced = torch.fx.symbolic_trace(ours)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["layer"]
    assert not seen
    mask = torch.tensor([[[[True] * 5 + [False]]]])
    for model in (traced, copy.deepcopy(traced)):
        torch.testing.assert_close(model(x(2, 6, 8), mask), ours(x(2, 6, 8), mask))
    assert traced.layer is attention


@pytest.mark.filterwarnings("ignore:`torch.jit.", "ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_torch_jit() -> None:
    ours: Any = replace_attention(around(vits(0.0).eval()))
    given = (x(2, 6, 8), torch.ones(2, 1, 1, 6, dtype=torch.bool))
    traced: Any = torch.jit.trace(ours, given)
    torch.testing.assert_close(traced(*given), ours(*given))
    for model in (ours, ours.layer):
        with pytest.raises(TypeError, match=r"^torch\.jit\.script cannot compile VitsRelativeAttention: use torch\."):
            torch.jit.script(model)

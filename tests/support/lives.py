"""What happens to a torch module between two calls: steps that change no result, except by rounding its weights."""

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass
class Life:
    """A module, a call of it, and the buffers of its original, which its maker provides anew."""

    module: Any
    call: Callable[[Any], Any]
    provided: dict[str, Tensor] = field(default_factory=dict)
    ends: list[Callable[[], Any]] = field(default_factory=list)  # of what lasts until the next step

    def __call__(self) -> Any:
        return self.call(self.module)

    def go(self, step: str) -> None:
        while self.ends:
            self.ends.pop()()
        STEPS[step](self)


def _load(life: Life, state: dict[str, Any], *, assign: bool) -> None:
    life.module.load_state_dict(state, assign=assign)
    _provide(life)


def _provide(life: Life) -> None:
    for name, x in life.provided.items():
        owner, _, last = name.rpartition(".")
        life.module.get_submodule(owner)._buffers[last] = x.clone()


def on_meta(life: Life) -> None:
    """Make it without memory, and let a state take the place of its parameters."""
    state = copy.deepcopy(life.module.state_dict())
    life.module.to("meta")
    _load(life, state, assign=True)


def emptied(life: Life) -> None:
    """Give it memory that contains anything, and load a state."""
    state = copy.deepcopy(life.module.state_dict())
    life.module.to("meta").to_empty(device="cpu")
    for x in (*life.module.parameters(), *life.module.buffers()):
        x.data.fill_(float("nan") if x.is_floating_point() else 2**20)
    _load(life, state, assign=False)


def copied(life: Life) -> None:
    life.module = copy.deepcopy(life.module)


def pickled(life: Life) -> None:
    life.module = pickle.loads(pickle.dumps(life.module))


def saved(life: Life) -> None:
    file = io.BytesIO()
    torch.save(life.module, file)
    file.seek(0)
    life.module = torch.load(file, weights_only=False)


def averaged(life: Life, **how: Any) -> None:
    """Average it over steps that do not change it, as SWA does, with its buffers."""
    average = AveragedModel(life.module, use_buffers=True, **how)
    for _ in range(3):
        average.update_parameters(life.module)
    life.module = average.module
    _provide(life)


def averaged_exponentially(life: Life) -> None:
    averaged(life, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def rounded(life: Life, dtype: torch.dtype = torch.bfloat16) -> None:
    before = next(x.dtype for x in life.module.parameters() if x.is_floating_point())
    life.module.to(dtype).to(before)


def widened(life: Life) -> None:
    rounded(life, torch.float64)


def hooked(life: Life) -> None:
    for part in life.module.modules():
        handles = [part.register_forward_pre_hook(_nothing), part.register_forward_hook(_nothing)]
        life.ends += [handle.remove for handle in handles]


def _nothing(*_: Any) -> None: ...


def parametrised(life: Life) -> None:
    """Compute every weight from another one."""
    for part in list(life.module.modules()):
        if isinstance(part, (nn.Linear, nn.Embedding)) and not parametrize.is_parametrized(part):
            parametrize.register_parametrization(part, "weight", nn.Identity())
            life.ends.append(partial(parametrize.remove_parametrizations, part, "weight"))


def offloaded(life: Life) -> None:
    """Keep the parameters of every module elsewhere between its calls, and nothing in their place."""
    for part in life.module.modules():
        held = {name: x for name, x in part._parameters.items() if x is not None}
        away = {name: nn.Parameter(x.to("meta"), False) for name, x in held.items()}
        bring, take = partial(_exchange, held), partial(_exchange, away)
        if held:
            take(part)
            hooks = part.register_forward_pre_hook(bring), part.register_forward_hook(take)
            life.ends += [partial(bring, part), *(hook.remove for hook in hooks)]


def _exchange(parameters: dict[str, Any], part: nn.Module, *_: Any) -> None:
    part._parameters.update(parameters)


def _weights(life: Life) -> dict[str, Tensor]:
    return {f"inner.{name}": x.detach() for name, x in life.module.named_parameters()}


def _called(life: Life) -> Callable[[dict[str, Tensor]], Any]:
    # torch leaves the weights of the call in a module that is registered twice, if it ties them
    return lambda weights: torch.func.functional_call(_Whole(life), weights, (torch.zeros(1),), tie_weights=False)


def faked(life: Life) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        life()


def traced(life: Life) -> None:
    make_fx(_called(life), tracing_mode="fake", _allow_non_fake_inputs=True)(_weights(life))


def functional(life: Life) -> None:
    torch.func.functionalize(_called(life))(_weights(life))


def mapped(life: Life) -> None:
    torch.vmap(lambda x: (life(), x)[1], randomness="same")(torch.zeros(1))


def exported(life: Life) -> None:
    torch.export.export(_Whole(life), (torch.zeros(1),))


def compiled(life: Life) -> None:
    torch.compile(_Whole(life), backend="eager")(torch.zeros(1))


class _Whole(nn.Module):
    def __init__(self, life: Life) -> None:
        super().__init__()
        self.inner, self.call = life.module, life.call

    def forward(self, x: Tensor) -> Any:
        found = self.call(self.inner)
        return (found[0] if isinstance(found, (tuple, list)) else found) + 0 * x


def lost_by(step: str, model: nn.Module) -> nn.Module:
    """Return a copy of a model that nothing has happened to, with weights as a step leaves them."""
    other = copy.deepcopy(model)
    if step == "rounded":
        for x in other.parameters():
            x.data = x.data.to(torch.bfloat16).to(x.dtype)
    return other


def check_step(step: str, make: Callable[[], Any], call: Callable[[Any], Any]) -> None:
    """Compare a module after a step, whether it was called before or not, with one that nothing has happened to."""
    untouched = lost_by(step, make())
    for called_before in (False, True):
        life = Life(make(), call)
        if called_before:
            life()
        life.go(step)
        torch.testing.assert_close(life(), call(untouched), rtol=0, atol=1e-12)


LASTING = (
    on_meta, emptied, copied, pickled, saved, averaged, averaged_exponentially, rounded, widened, hooked, parametrised,
    offloaded,
)  # fmt: skip
TRACES = (faked, traced, functional, mapped, exported, compiled)
TRACED = {step.__name__ for step in TRACES}
STEPS: dict[str, Callable[[Life], None]] = {step.__name__: step for step in (*LASTING, *TRACES)}


def cases(names: Iterable[str], *fixed: str) -> list[tuple[str, str]]:
    """Return all modules with each lasting step, and with traces those that have numbers that follow from sizes."""
    return [(name, step) for name in names for step in STEPS if step not in TRACED or name in fixed]

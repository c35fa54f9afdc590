"""Drop-ins for stand-ins that are made without memory, loaded, averaged, cast, copied and traced."""

from typing import Any

import pytest
import torch
from huggingface.stand_ins import STAND_INS

import lives
from relskew_core.huggingface import replace_attention


@pytest.mark.parametrize(("name", "step"), lives.cases(STAND_INS, "umt5", "deberta-v2", "prophet"))
@torch.no_grad()
def test_a_step_changes_no_result(name: str, step: str) -> None:
    make, call = STAND_INS[name]

    def ours() -> Any:
        torch.manual_seed(0)
        return replace_attention(make()).eval()

    lives.check_step(step, ours, call)

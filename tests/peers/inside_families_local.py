"""Encoders with a window: what attention with a mask of a band gives, in memory linear in the length, and in ONNX."""

import copy
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peers.common import check, hf
from peers.families import FAMILIES
from peers.families_conformers import CONFORMERS
from peers.family import Family
from peers.test_families_numbers import check_gradients, drop_ins, given, gradients_of, outputs, tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onnx_sessions import opened
from relskew_core.export import torch_to_onnx
from relskew_core.huggingface import replace_attention
from relskew_core.huggingface._attend import DropIn, attend

LOCAL = [
    "T5", "T5 sdpa", "MT5", "UMT5", "Pop2Piano", "SwitchTransformers", "Wav2Vec2-BERT relative_key",
    "Wav2Vec2-BERT relative", "Wav2Vec2-Conformer", "MPNet", "SeamlessM4T", "SpeechT5", "WavLM",
    "FastSpeech2-Conformer", "Parakeet", *CONFORMERS,
]  # fmt: skip
WINDOW = (3, 2)


def local(family: Family, window: tuple[int, int] = WINDOW) -> Any:
    return replace_attention(family.make(), window=window)


def outside(window: tuple[int, int], q: Tensor, k: Tensor) -> Tensor:
    relative = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    return (relative < -window[0]) | (relative > window[1])


@pytest.fixture
def banded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drop-ins without a window of their own attend with a dense mask of one, whoever makes the numbers."""

    def dense(self: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self.local and self.attends_to_itself():
            band = ~outside(WINDOW, q, k)
            mask = options.pop("mask", None)
            if mask is None or mask.dtype == torch.bool:
                mask = band if mask is None else band & mask
            else:
                mask = torch.where(band, mask, torch.finfo(mask.dtype).min)
            options["mask"] = mask
        return attend(q, k, v, **options)

    monkeypatch.setattr(DropIn, "attend", dense)


@pytest.mark.parametrize("name", LOCAL)
def test_a_wide_window_is_the_original(name: str) -> None:
    family = FAMILIES[name]
    theirs, ours = family.make(), local(family, (70, 70))
    assert any(part.window == (70, 70) for part in drop_ins(ours))
    for length in family.lengths:
        got, want = (outputs(model, family, length) for model in (ours, theirs))
        check(got, want, family.gate)


@pytest.mark.parametrize("name", LOCAL)
@torch.enable_grad()
def test_a_narrow_window(name: str, request: pytest.FixtureRequest) -> None:
    family = FAMILIES[name]
    got, gradients = gradients_of(local(family).train(), family, 30)
    request.getfixturevalue("banded")
    want, expected = gradients_of(replace_attention(family.make()).train(), family, 30)
    check(got, want, family.gate)
    check_gradients(gradients, expected, 1e-7, 1e-9)
    with torch.no_grad():
        whole = outputs(family.make(), family, 30)
    assert max(float((x - y).detach().norm() / y.norm()) for x, y in zip(got, whole, strict=True)) > 1e-3


def with_a_band(theirs: Any) -> Any:
    """Let Parakeet itself attend with a band that is added to its mask."""
    sdpa = hf("AttentionInterface")()["sdpa"]

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **more: Any) -> Any:
        mask = attention_mask.masked_fill(outside(WINDOW, query, key), torch.finfo(query.dtype).min)
        return sdpa(module, query, key, value, mask, **more)

    hf("AttentionInterface").register("banded", attention)
    theirs.config._attn_implementation = "banded"
    return theirs


@pytest.mark.parametrize("name", ["Wav2Vec2-Conformer", "Wav2Vec2-BERT relative", "SeamlessM4T"])
def test_a_conformer_itself_with_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions mix frames without any key, which attend to all keys, into frames that count."""
    family = FAMILIES[name]
    theirs, ours = family.make(), local(family, (0, 6))
    inputs = given(family, 30, ours)
    inputs["attention_mask"][1, inputs["attention_mask"].shape[1] // 2 :] = 0
    module = importlib.import_module(drop_ins(ours)[0].kind.__module__)
    attend = module.eager_attention_forward

    def banded(part: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        return attend(part, q, k, v, mask.masked_fill(outside((0, 6), q, k), torch.finfo(q.dtype).min), **options)

    monkeypatch.setattr(module, "eager_attention_forward", banded)
    for part in theirs.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "eager"
    got, want = (tensors(model(**copy.deepcopy(inputs))) for model in (ours, theirs))
    check(got, want, family.gate)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that a model makes."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize(("name", "window"), [*((name, WINDOW) for name in LOCAL),
                                              *((name, None) for name in ("Gemma 4", *CONFORMERS))])  # fmt: skip
def test_memory_is_linear_in_the_length(name: str, window: tuple[int, int] | None) -> None:
    """Masks of transformers, which have a number for each pair, included; without a window, those of chunks are not."""
    family = FAMILIES[name]
    largest = []
    for length in (400, 800):
        model = replace_attention(family.make(), window=window)
        inputs = given(family, length, model)
        if "decoder_input_ids" in inputs:
            model, inputs = model.encoder, {key: inputs[key] for key in ("input_ids", "attention_mask")}
        with Largest() as seen:  # type: ignore[no-untyped-call]  # torch leaves its constructor untyped
            model(**inputs)
        largest.append(seen.numbers)
    assert largest[1] < 2.5 * largest[0]
    assert largest[1] < 2 * 800 * 800


@pytest.mark.parametrize("name", ["T5 sdpa", "Parakeet"])
def test_a_copy_and_a_pickle(name: str) -> None:
    family = FAMILIES[name]
    ours = local(family)
    (want, *_) = outputs(ours, family, 30)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        check(outputs(again, family, 30)[0], want)
    assert replace_attention(ours) is ours
    check(outputs(ours, family, 30)[0], want)
    replace_attention(ours, window=(4, 1))
    assert {part.window for part in drop_ins(ours)} == {(4, 1), None} - ({None} if name == "Parakeet" else set())


@pytest.mark.parametrize(("name", "window"), [
    ("T5 sdpa", (70, 40)), ("Parakeet", WINDOW),
    *(pytest.param(name, WINDOW, marks=pytest.mark.slow) for name in ("UMT5", "WavLM", "Wav2Vec2-Conformer")),
])  # fmt: skip
def test_a_window_exports_for_any_batch_and_length(name: str, window: tuple[int, int], tmp_path: Path) -> None:
    family = FAMILIES[name]
    ours = local(family, window).float()
    if "decoder_input_ids" in family.given(7):
        ours = ours.encoder

    def feed(length: int) -> dict[str, Tensor]:
        inputs = given(family, length, ours)
        inputs.pop("decoder_input_ids", None)
        return inputs

    torch_to_onnx(ours, feed(30), tmp_path / "local.onnx", tolerance=1e-3)
    session = opened(tmp_path / "local.onnx")
    for length in (1, 7, 64, 150):
        for batch in (1, 2):
            inputs = {key: x[-batch:] for key, x in feed(length).items()}
            out, *_ = session.run(None, {key: x.numpy() for key, x in inputs.items()})
            want = ours(**inputs)
            mask = getattr(want, "attention_mask", inputs["attention_mask"])[..., None]
            check(torch.from_numpy(out) * mask, want.last_hidden_state * mask, 1e-4)


@pytest.mark.slow
def test_an_hour_of_sound(tmp_path: Path) -> None:
    """360,000 frames of 10 ms, half as many after the subsampling, in onnxruntime; the original serves a minute."""
    theirs = FAMILIES["Parakeet"].make().float()
    ours = replace_attention(copy.deepcopy(theirs), window=WINDOW)
    width = theirs.config.num_mel_bins
    short = {"input_features": torch.randn(2, 400, width), "attention_mask": torch.ones(2, 400, dtype=torch.bool)}
    torch_to_onnx(ours, short, tmp_path / "parakeet.onnx", tolerance=1e-3)
    session = opened(tmp_path / "parakeet.onnx")
    sound = torch.randn(1, 360_000, width, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 360_000, dtype=torch.bool)
    out, _ = session.run(None, {"input_features": sound.numpy(), "attention_mask": mask.numpy()})
    factor, minute = theirs.config.subsampling_factor, 6_000
    assert out.shape[:2] == (1, 360_000 // factor)
    want = with_a_band(theirs)(sound[:, :minute], mask[:, :minute]).last_hidden_state
    heard = minute // factor - 20  # the last steps of the minute attend to what follows
    check(torch.from_numpy(out)[:, :heard], want[:, :heard], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFORMERS)
def test_an_hour_of_frames(name: str) -> None:
    """45,000 frames, as after a subsampling by 8, of which the original has the first minute.

    All others are padding, or frames that chunks do not see; with a window, no frame is padding. Legacy positions
    depend on the length with padding, so that their minute is another.
    """
    family, hour, minute = FAMILIES[name], 45_000, 750
    theirs, ours = family.make(), replace_attention(family.make())
    whole = {key: x[:1] for key, x in given(family, hour, ours).items()}
    heard = whole if name == "NeMo chunks" else {**whole, "attention_mask": torch.arange(hour)[None] < minute}
    got = ours(**heard)
    replace_attention(ours, window=WINDOW)(**whole)
    if name != "ESPnet legacy":
        want = theirs(**{key: x[:, : minute + 40] for key, x in heard.items()})
        check(got[:, :minute], want[:, :minute], 10 * max(family.gate, 1e-6))

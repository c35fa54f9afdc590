"""`relskew draw`."""

from pathlib import Path

import numpy as np
import pytest
from cli.commands import BLOCK, Capture, error_of, output_of, relskew
from rich.console import Console

from relskew_core import BlockSpec, Span, attention_weights, init_weights
from relskew_core.draw import Picture, draw_call, draw_weights

pytest.importorskip("matplotlib")


def drawn(capsys: Capture, *arguments: str) -> str:
    return output_of(capsys, "draw", *arguments)


def printed(picture: Picture, width: int = 80, *, colour: bool = False) -> str:
    console = Console(width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()


def test_a_call_in_the_terminal(capsys: Capture) -> None:
    told = drawn(capsys, "call", "--queries", "3", "--past", "2", "--causal", "--window", "1,")
    assert "3 queries, 5 keys, causal, window=(1, None), offset=2" in told
    rows = [line.split() for line in told.splitlines() if line[:1].isdigit()][1:]
    assert rows == [
        ["2", "·", "−1", "0", "·", "·"], ["3", "·", "·", "−1", "0", "·"], ["4", "·", "·", "·", "−1", "0"],
    ]  # fmt: skip


def test_segments_are_lengths(capsys: Capture) -> None:
    told = drawn(capsys, "call", "--queries", "2", "--past", "2", "--segments", "3,1", "--clip", "1")
    rows = [line.split() for line in told.splitlines() if line.startswith(("2  ", "3  "))]
    assert rows == [["2", "0", "0", "1", "·"], ["3", "·", "·", "·", "1"]]
    assert "4 keys in total, got '3,2'" in error_of(capsys, "draw", "call", "--queries", "4", "--segments", "3,2")


def test_a_span_is_drawn_in_every_way_or_in_the_one_asked_for(capsys: Capture) -> None:
    three = drawn(capsys, "span", "--length", "3", "--causal")
    assert [line.split("beyond: ")[1].strip() for line in three.splitlines() if "beyond: " in line] == [
        "error", "clip", "zero",
    ]  # fmt: skip
    assert three.count("beyond: ") == 3
    for options, wanted in ((["--length", "3", "--beyond", "zero"], "zero"), (["--clip", "2"], "clip")):
        (line,) = [line for line in drawn(capsys, "span", *options).splitlines() if "beyond: " in line]
        assert line.split() == ["−2", "…", "2,", "beyond:", wanted]


def test_panels_stand_side_by_side_where_there_is_room() -> None:
    for width, count in ((80, 1), (30, 2)):
        lines = printed(draw_weights(np.ones((2, 3, 3))), width).splitlines()
        assert len([line for line in lines if "head" in line]) == count


def test_colours_of_the_terminal_are_those_of_the_files() -> None:
    told = printed(draw_call(2, causal=True), colour=True)
    assert "\x1b[38;2;31;41;51;48;2;" in told  # ink on a colour
    assert "\x1b[38" not in printed(draw_call(2, causal=True))


def test_many_columns_are_shades_and_too_many_are_joined() -> None:
    told = printed(draw_call(40, causal=True, window=(3, 0)))
    assert len([line for line in told.splitlines() if "█" in line]) == 20
    assert "40 columns" in told
    narrow = printed(draw_call(200, causal=True), 60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "200 columns, 0 … 199; a place is the strongest of 8 × 4" in narrow
    assert sum(any(shade in line for shade in "·░▒▓█") for line in narrow.splitlines()) == 200 / 4 / 2
    shades = printed(draw_weights(np.eye(20)), 60)
    assert sum(line.count("█") for line in shades.splitlines()) == 20


def test_pictures_become_files(capsys: Capture) -> None:
    assert drawn(capsys, "span", "--clip", "2", "--save", "folder/span.svg") == "wrote folder/span.svg\n"
    assert "<title>Rows of a table</title>" in Path("folder/span.svg").read_text()
    drawn(capsys, "call", "--queries", "3", "--save", "call.PNG")
    assert Path("call.PNG").read_bytes().startswith(b"\x89PNG")


def test_weights_from_a_checkpoint_and_an_input(capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    spec = BlockSpec(8, 2, Span.causal(6), causal=True)
    arrays = init_weights(spec, seed=5)
    state = {f"layer.{key}": torch.from_numpy(np.array(array)).bfloat16() for key, array in arrays.items()}
    torch.save(state, "model.pt")
    x = np.random.default_rng(0).standard_normal((4, 8))
    np.save("x.npy", x[None].astype(np.float32))
    told = drawn(
        capsys, "weights", *BLOCK, "--causal", "--weights", "model.pt", "--prefix", "layer.", "--input", "x.npy",
        "--head", "1",
    )  # fmt: skip
    rounded = {key: state[f"layer.{key}"].double().numpy() for key in arrays}
    q, k = (
        (x.astype(np.float32) @ rounded[f"{name}.weight"].T + rounded[f"{name}.bias"]).reshape(4, 2, 4).swapaxes(0, 1)
        for name in ("q_proj", "k_proj")
    )
    wanted = attention_weights(q, k, rounded["rel_k"], spec.span, causal=True)[1]
    last = next(line.split() for line in told.splitlines() if line.startswith("3 "))
    assert last[1:] == [f"{value:.2f}".removeprefix("0") for value in wanted[3]]
    assert "head 1" in told
    assert "head 0" not in told
    assert "Weights: model.pt, layer.*. Input: x.npy." in told
    np.save("x.npy", x[:, :3])
    assert "--input x.npy: must have shape (length, 8), got (4, 3)" in error_of(
        capsys, "draw", "weights", *BLOCK, "--clip", "2", "--input", "x.npy"
    )


def test_a_block_from_an_exported_model(capsys: Capture) -> None:
    pytest.importorskip("onnx")
    asked = [*BLOCK, "--length", "6", "--causal", "--seed", "2"]
    assert relskew("export", "m.onnx", *asked) == 0
    same = drawn(capsys, "weights", "--model", "m.onnx", "--seed", "2", "--queries", "5")
    assert same == drawn(capsys, "weights", *asked, "--queries", "5")
    assert same != drawn(capsys, "weights", "--model", "m.onnx", "--queries", "5")
    assert relskew("export", "bare.onnx", *asked, "--no-projections") == 0
    assert "attends without projections" in error_of(capsys, "draw", "weights", "--model", "bare.onnx")

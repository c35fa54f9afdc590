"""The page of `examples/web` in a headless Chromium: its tokens are Python's, and it says what it runs on."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from chromium import PROGRAM, Chromium
from examples.chorales.data import Music
from examples.chorales.model import Decoder, Size
from examples.chorales.tokens import encode
from examples.chorales.train import train
from examples.web.__main__ import RUNTIME, server
from relskew_core.export import decoder_to_onnx, generate

pytestmark = pytest.mark.skipif(
    PROGRAM is None or not RUNTIME.is_dir(), reason="needs Chromium and onnxruntime-web: make test-web"
)
WAVES = [(pitch, 1) for pitch in (60, 62, 64, 65, 67, 65, 64, 62)] * 4
PROMPT = encode([WAVES])[:21]
GREEDY = """(async (provider, prompt, n) => {
  const { Decoder } = await import("/decoder.js");
  const decoder = await Decoder.open("/decoder.onnx", provider);
  const tokens = [];
  for await (const token of decoder.generate(prompt, n)) tokens.push(token);
  await decoder.close();
  return tokens;
})(%s, %s, %d)"""
SOFTWARE = (
    "--enable-unsafe-webgpu", "--enable-unsafe-swiftshader", "--use-webgpu-adapter=swiftshader",
    "--enable-features=Vulkan,WebGPU",
)  # fmt: skip
"""WebGPU without a GPU: slow, and the same numbers."""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    size = Size(width=32, heads=4, layers=2, hidden=64, reach=32, window=64)
    model = train(Decoder("relative", size), Music([[WAVES]], [], 1), 60, seed=0)
    return decoder_to_onnx(model, tmp_path_factory.mktemp("decoder") / "decoder.onnx")


@pytest.fixture(scope="module")
def url(decoder: Path) -> Iterator[str]:
    with server(decoder, 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/"
        serving.shutdown()


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Chromium]:
    with Chromium() as one:
        one.open(url)
        yield one


def until(browser: Chromium, part: str, seconds: float = 60) -> str:
    said = None
    for _ in range(int(seconds * 10)):
        said = browser.run("document.getElementById('status')?.textContent")
        if said and part in said:
            return str(said)
        time.sleep(0.1)
    raise AssertionError(f"the page never said {part!r}, but {said!r}; {browser.errors}")


def greedy(browser: Chromium, provider: str, n: int) -> list[int]:
    made: list[int] = browser.run(GREEDY % (json.dumps(provider), PROMPT, n))
    return made


def test_the_tokens_are_those_of_python(browser: Chromium, decoder: Path) -> None:
    until(browser, "Ready on WebAssembly.")
    made = greedy(browser, "wasm", 40)
    assert made == generate(decoder, PROMPT, 40).tolist()
    assert len(set(made)) > 3


def test_the_tokens_are_those_of_python_on_webgpu(url: str, decoder: Path) -> None:
    with Chromium(*SOFTWARE) as browser:
        browser.open(url)
        until(browser, "Ready on WebAssembly.")
        if not browser.run("navigator.gpu ? navigator.gpu.requestAdapter().then(Boolean) : false"):
            pytest.skip("this Chromium has no WebGPU in software")
        assert greedy(browser, "webgpu", 8) == generate(decoder, PROMPT, 8).tolist()
        browser.run("choice = document.getElementById('provider'); choice.value = 'webgpu'")
        browser.run("choice.dispatchEvent(new Event('change'))")
        assert until(browser, "Ready on WebGPU") == "Ready on WebGPU."


def test_chance_draws_as_it_should(browser: Chromium) -> None:
    counts = browser.run(
        """import("/decoder.js").then(({ drawn, likeliest }) => {
          const logits = Float32Array.from([0.1, 0.6, 0.3], Math.log);
          const counts = [0, 0, 0];
          for (let i = 0; i < 3000; i++) counts[drawn(1, 2, () => (i + 0.5) / 3000)(logits)]++;
          return [likeliest(logits), ...counts];
        })"""
    )
    assert counts == [1, 0, 2000, 1000]


def test_the_page_draws_the_notes_it_generates(browser: Chromium, tmp_path: Path) -> None:
    until(browser, "Ready on WebAssembly.")
    browser.run("document.getElementById('count').value = 24; document.getElementById('make').click()")
    assert until(browser, "a second").startswith("24 tokens on WebAssembly, ")
    drawn = browser.run(
        """(() => {
          const roll = document.getElementById("roll");
          const { data } = roll.getContext("2d").getImageData(0, 0, roll.width, roll.height);
          const colours = new Set();
          for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) colours.add(data.slice(i, i + 3).join());
          return [...colours];
        })()"""
    )
    assert {"125,155,179", "0,96,156"} <= set(drawn)  # the colours of given and of generated notes
    pictures = Path(os.environ.get("PICTURES", tmp_path))
    for name, width, height in (("desktop", 1280, 720), ("phone", 390, 844)):
        browser.screenshot(pictures / f"web-{name}.png", width, height)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"wider than a {name}"
    assert browser.run("document.getElementById('stop').disabled") is False
    browser.run("document.getElementById('stop').click()")
    assert browser.run("document.getElementById('stop').disabled") is True
    assert browser.errors == []


def test_a_missing_provider_is_named(browser: Chromium) -> None:
    until(browser, "WebAssembly")
    browser.run("choice = document.getElementById('provider'); choice.value = 'webgpu'")
    browser.run("choice.dispatchEvent(new Event('change'))")
    assert until(browser, "Not on WebGPU").endswith(". Ready on WebAssembly.")
    browser.run("document.getElementById('make').click()")
    assert until(browser, "a second").startswith("Not on WebGPU: ")


def test_nothing_but_the_page_is_served(url: str) -> None:
    for path in ("../../Makefile", "%2e%2e/%2e%2e/Makefile", "ort/../../../../Makefile", "ort/%2e%2e/package.json"):
        with pytest.raises(OSError, match="404"):
            urlopen(url + path)
    with urlopen(url + "tune.json") as answer:
        tune = json.load(answer)
    assert len(tune["prompt"]) == 33
    assert np.ptp(tune["prompt"]) < 64

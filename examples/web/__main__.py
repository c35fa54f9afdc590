"""``python -m examples.web``: serve the page, with the decoder of ``make example``."""

from __future__ import annotations

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.chorales.__main__ import BARS, TUNE
from examples.chorales.tokens import HELD, LOWEST, NEW, REST, encode
from examples.chorales.tunes import tunes

HERE = Path(__file__).parent
RUNTIME = HERE.parents[1] / ".venv-web" / "node_modules" / "onnxruntime-web" / "dist"


class Page(SimpleHTTPRequestHandler):
    """The files of this folder, the runtime under ``ort/``, a decoder, and the page's data about its tokens."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012 -- as the base has it

    def __init__(self, *arguments: Any, decoder: Path, **named: Any) -> None:
        self.decoder = decoder
        super().__init__(*arguments, directory=str(HERE), **named)

    def translate_path(self, path: str) -> str:
        """Return the path of a file."""
        here = Path(super().translate_path(path))  # the base class has removed ".."
        inside = here.relative_to(HERE) if here.is_relative_to(HERE) else Path()
        if inside.parts[:1] == ("ort",):
            return str(RUNTIME.joinpath(*inside.parts[1:]))
        return str(self.decoder if inside == Path("decoder.onnx") else here)

    def do_GET(self) -> None:
        """Answer a request."""
        if self.path != "/tune.json":
            return super().do_GET()
        body = json.dumps(tune()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, format: str, *_: Any) -> None:  # noqa: A002 -- the base calls it so
        """Log nothing."""


def tune() -> dict[str, Any]:
    """Return the beginning of a tune, and the meaning of its tokens."""
    one = next(one for one in tunes() if one.title == TUNE)
    return {
        "title": TUNE,
        "prompt": encode([one.notes])[: 1 + BARS * one.bar],
        "kinds": {"new": NEW, "rest": REST, "held": HELD, "lowest": LOWEST},
        "secondsPerStep": 0.27,
    }


def server(decoder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server that only this machine can reach."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Page, decoder=decoder))


def main(
    decoder: Annotated[Path, typer.Option(help="What `make example` writes.")] = Path("example-output/decoder.onnx"),
    port: Annotated[int, typer.Option(min=0)] = 8000,
) -> None:
    """Serve the page until Ctrl-C."""
    for path, made in ((decoder, "make example"), (RUNTIME, "make web")):
        if not path.exists():
            raise SystemExit(f"{path} is missing: {made}")
    with server(decoder, port) as serving:
        print(f"http://127.0.0.1:{serving.server_port}/", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    typer.run(main)

"""A headless Chromium, spoken to through a pipe: its own protocol, and nothing else to install."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
]  # fmt: skip


class Chromium:
    def __init__(self, *flags: str) -> None:
        assert PROGRAM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{theirs} 4>&{ours}'
        command = [PROGRAM, *QUIET, *flags, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(["bash", "-c", shell, "chromium", *command], pass_fds=(theirs, ours),
                                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(theirs)
        os.close(ours)
        self._unread, self._asked, self._session = b"", 0, {}
        self.errors: list[str] = []
        """What the page complained of."""
        (page,) = (one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)  # it ends when its pipe is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._folder.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        asked = {"id": self._asked, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._asked:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                result: dict[str, Any] = told["result"]
                return result
            self._hear(told)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _hear(self, told: dict[str, Any]) -> None:
        given = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(given["exceptionDetails"].get("exception", given["exceptionDetails"]).get("description"))
        elif told.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        given = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in given:
            raise RuntimeError(given["exceptionDetails"]["exception"]["description"])
        return given["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path, width: int, height: int) -> None:
        self.resize(width, height)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

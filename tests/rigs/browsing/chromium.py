"""A headless Chromium that a test drives over two pipes: pages opened, looked at, asked and
photographed.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    " ": 32,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
"""Numbers that a browser's own uses of keys go by."""


def program() -> str | None:
    """A Chromium of this machine."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page of one browser."""

    def __init__(self, program: str, home: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={home}",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "about:blank",
        ]
        start = f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", start, program, *flags],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._in, self._out, self._buffer, self._number, self._session = (
            ours[1],
            theirs[0],
            b"",
            0,
            "",
        )
        self.events: list[dict[str, Any]] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    @property
    def pid(self) -> int:
        """Of the browser, below which all its processes are."""
        return self._process.pid

    def do(self, method: str, **values: Any) -> dict[str, Any]:
        """Have a command of the browser's protocol done; what it gives."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._in, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + 40
        while True:
            found = self._next(deadline)
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._out], [], [], left)[0], (
                "the browser does not answer"
            )
            part = os.read(self._out, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        whole, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        return message

    def look_like(
        self, width: int, height: int, *, dark: bool = False, still: bool = False
    ) -> None:
        """Have a screen of this size, light or dark. still: its reader wants nothing to move."""
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
        self.do("Emulation.setEmulatedMedia", features=[scheme, motion])

    def open(self, url: str) -> None:
        """Go to a page anew, and wait until it is there."""
        self.do("Page.navigate", url="about:blank")
        self.wait("location.href == 'about:blank'")
        self.events.clear()
        self.do("Page.navigate", url=url)
        self.wait("location.href != 'about:blank' && document.readyState == 'complete'")

    def ask(self, code: str) -> Any:
        """What an expression of JavaScript gives, once it does."""
        found = self.do("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, code: str, patience_s: float = 30.0) -> Any:
        """Ask until it is true."""
        deadline = time.monotonic() + patience_s
        while not (found := self.ask(code)):
            assert time.monotonic() < deadline, f"never came true: {code}"
            time.sleep(0.1)
        return found

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, down and up."""
        text = {"Enter": {"text": "\r"}, " ": {"text": " "}}.get(key, {})
        values = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": KEYS[key],
        }
        self.do("Input.dispatchKeyEvent", type="keyDown", modifiers=8 * shift, **values, **text)
        self.do("Input.dispatchKeyEvent", type="keyUp", modifiers=8 * shift, **values)

    def write(self, text: str) -> None:
        """Text, into what has the focus."""
        self.do("Input.insertText", text=text)

    def photograph(self, path: Path, *, whole: bool = False) -> None:
        """What is seen, or all of the page."""
        shot = self.do("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def troubles(self) -> list[str]:
        """Errors that the page made, and what its policy refused."""
        said = []
        for event in self.events:
            values = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                said.append(str(values["exceptionDetails"]))
            elif event.get("method") == "Page.javascriptDialogOpening":
                said.append(f"a dialog: {values}")
            elif event.get("method") == "Log.entryAdded" and values["entry"]["level"] == "error":
                said.append(f"{values['entry'].get('text')} {values['entry'].get('url', '')}")
        return said

    @property
    def called(self) -> list[str]:
        """Addresses that the page asked."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """End it."""
        for end in (self._in, self._out):
            os.close(end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait(10)


@contextlib.contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """A browser for as long as the block lasts."""
    found = program()
    assert found is not None
    made = Browser(found, home)
    try:
        yield made
    finally:
        made.close()

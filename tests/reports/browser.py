"""Drives a headless Chromium over its DevTools protocol: loads a file, listens, clicks, looks."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

START_S_MAX = 60.0
# A promise of the next frame: until then, what follows of scrolling or of the pointer is not told.
NEXT_FRAME = "new Promise(told => requestAnimationFrame(() => requestAnimationFrame(told)))"


def find_browser() -> str | None:
    """Return the program, or None; on Debian `make report` installs it."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab.

    Attributes:
        errors: what the console said in earnest, and exceptions.
        requests: every address that was asked for.
    """

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method, and take note of the events that come before its answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and told["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(json.dumps(told["args"])[:500])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {told['message']}")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Make the window so large, and say which colours its user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: Path) -> float:
        """Load a file; return the seconds until its script has drawn everything."""
        self.errors.clear()
        self.requests.clear()
        started = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.run(
            "document.readyState === 'complete' && document.documentElement.dataset.drawn"
        ):
            assert time.monotonic() - started < 60, f"{path} is not drawn: {self.errors}"
        return time.monotonic() - started

    def run(self, script: str) -> Any:
        """Evaluate a script; return its value."""
        how = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def place_of(self, selector: str) -> tuple[float, float, float, float]:
        """Return (x, y, width, height) of the first element that a selector finds, in view."""
        found = self.run(
            f"(async () => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            f"await {NEXT_FRAME};"
            "const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] })()"
        )
        x, y, width, height = found
        return x, y, width, height

    def mouse(self, kind: str, x: float, y: float, *, down: bool = False) -> None:
        """Do what ``kind`` says, such as "mouseMoved"; return when the page has seen it."""
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        buttons = {"buttons": 1} if down else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed, **buttons)
        self.run(NEXT_FRAME)

    def hover(self, selector: str) -> str:
        """Put the pointer on an element; return what is said of it."""
        x, y, width, height = self.place_of(selector)
        self.mouse("mouseMoved", x + width / 2, y + height / 2)
        tip = "document.getElementById('tip')"
        said: str = self.run(f"{tip}.hidden ? '' : {tip}.textContent")
        return said

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as a PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Start a browser of its own, which ends with the block."""
    program = find_browser()
    assert program is not None
    home = Path(tempfile.mkdtemp(prefix="holdfast-browser-"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--mute-audio"]
    flags += ["--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={home}"]
    environment = os.environ | {"HOME": str(home), "XDG_CONFIG_HOME": str(home)}
    process = subprocess.Popen(
        [program, *flags, "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        yield (page := Page(_address(home, process)))
        page.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _address(home: Path, process: "subprocess.Popen[bytes]") -> str:
    """Return where the first tab listens."""
    port_file, until = home / "DevToolsActivePort", time.monotonic() + START_S_MAX
    while not (port_file.exists() and port_file.read_text().count("\n")):
        assert process.poll() is None, "the browser has ended"
        assert time.monotonic() < until, "the browser does not start"
        time.sleep(0.05)
    port = port_file.read_text().split()[0]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
        if tabs:
            return str(tabs[0]["webSocketDebuggerUrl"])
        assert time.monotonic() < until, "the browser has no tab"
        time.sleep(0.05)

"""A headless Chromium, driven over the DevTools protocol."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from missing import missing
from node_tools import HOW_TO, INSTALLED, node
from websockets.sync.client import ClientConnection, connect

PACKED = INSTALLED / "node_modules" / "@sparticuz" / "chromium"
START_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 60.0
UNPACK = """
const fs = require("node:fs"), zlib = require("node:zlib"), { pipeline } = require("node:stream/promises");
const [from, to] = process.argv.slice(1);
pipeline(fs.createReadStream(from), zlib.createBrotliDecompress(), fs.createWriteStream(to, { mode: 0o755 }));
"""
SWITCHES = (
    "--headless",
    "--no-sandbox",  # does not work as root, and the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
KEYS = {"/": 191, "?": 191, "[": 219, "]": 221, "Escape": 27, "Enter": 13, "ArrowDown": 40, "ArrowRight": 39}


def executable() -> str:
    """Return the path of a Chromium: $CHROMIUM, the pinned one, or the machine's own."""
    if named := os.environ.get("CHROMIUM"):
        return named
    packed = PACKED / "bin" / "chromium.br"
    if packed.is_file() and os.uname().machine == "x86_64":
        version = json.loads((PACKED / "package.json").read_text(encoding="utf-8"))["version"]
        unpacked = INSTALLED / f"chromium-{version}"
        if not unpacked.is_file():
            partial = INSTALLED / f"chromium-{version}.{os.getpid()}"
            subprocess.run([node(), "-e", UNPACK, str(packed), str(partial)], check=True, timeout=120)
            partial.replace(unpacked)
        return str(unpacked)
    own = next(
        filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None
    )
    if own is None:
        missing(f"needs a Chromium; {HOW_TO}, or name one of your own by CHROMIUM=PATH")
    return own


class Tab:
    """One page of the browser.

    Attributes:
        requested_urls: Addresses that the page has requested.
        errors: Exceptions in the page, and errors logged by the browser.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = 0
        self._session: str | None = None
        self.requested_urls: list[str] = []
        self.errors: list[str] = []
        self._target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.resize(1280, 800)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._ids += 1
        frame: dict[str, Any] = {"id": self._ids, "method": method, "params": parameters}
        if self._session is not None:
            frame["sessionId"] = self._session
        self._socket.send(json.dumps(frame))
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while True:
            answer = json.loads(self._socket.recv(timeout=max(0.0, deadline - time.monotonic())))
            if answer.get("id") == self._ids:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method"), answer.get("params", {}))

    def _note(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested_urls.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])

    def open(self, address: str) -> None:
        """Navigate to an address; one that differs in the fragment only does not reload the page."""
        answer = self._call("Page.navigate", url=address)
        assert not answer.get("errorText"), answer

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression; promises are awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, *, timeout_s: float = 30.0) -> None:
        """Return as soon as an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ }} }})()"):
            assert time.monotonic() < deadline, f"expected {expression}; errors: {self.errors}"
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press keys, one after another."""
        for key in keys:
            code = KEYS.get(key, ord(key[0].upper()))
            event = {"key": key, "windowsVirtualKeyCode": code}
            text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            self._call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
            self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches a selector."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        assert box is not None, f"expected an element {selector}"
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self._call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Set the page's size in pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Set the preferred color scheme, "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def go_offline(self) -> None:
        """Disconnect the network."""
        self._call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )

    def close(self) -> None:
        """Close the tab."""
        self._call("Target.closeTarget", targetId=self._target)

    def picture(self) -> bytes:
        """Return a screenshot of the page as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Run a browser with a temporary profile until the block ends."""
    with tempfile.TemporaryDirectory(prefix="ropewalk-chromium-", ignore_cleanup_errors=True) as profile:
        command = [executable(), *SWITCHES, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                yield Browser(_address(Path(profile), process))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _address(profile: Path, process: "subprocess.Popen[bytes]") -> str:
    """Return the browser's WebSocket URL, which it writes into its profile."""
    port_file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (port_file.is_file() and (lines := port_file.read_text().splitlines())[1:]):
        assert process.poll() is None, f"Chromium ended with status {process.returncode}: {process.args!r}"
        assert time.monotonic() < deadline, "expected Chromium to listen"
        time.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


class Browser:
    """A running Chromium."""

    def __init__(self, address: str) -> None:
        self._address = address

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        """Open a tab; it is closed when the block ends."""
        with connect(self._address, max_size=None, open_timeout=START_TIMEOUT_S, proxy=None) as socket:
            tab = Tab(socket)
            try:
                yield tab
            finally:
                tab.close()

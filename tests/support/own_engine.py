"""A separate Docker engine that a test can stop and start. Root only."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from missing import missing

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30


def require_own_engine() -> None:
    """Skip the test if no further engine can be started; in CI fail it."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        missing(
            "needs root and dockerd, to start an engine of its own; scripts/docker-engine start installs it"
        )


class OwnEngine:
    """A dockerd with its own socket, data and bridge."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="ropewalk-engine-", dir="/tmp"))
        self.host = f"unix://{self.home}/docker.sock"
        number = os.getpid() % 200 + 20
        self._bridge = f"rwtest{number}"
        self._address = f"10.213.{number}.1/24"
        self._process: subprocess.Popen[bytes] | None = None
        self._has_bridge = False

    def start(self) -> None:
        if not self._has_bridge:
            self._ip("link", "add", "name", self._bridge, "type", "bridge")
            self._has_bridge = True
            self._ip("addr", "add", self._address, "dev", self._bridge)
            self._ip("link", "set", self._bridge, "up")
        home = self.home
        # Its iptables rules would interfere with the other engine's; published ports work without.
        options = ["--iptables=false", "--ip-masq=false", "--bridge", self._bridge, "-H", self.host]
        places = ["--data-root", home / "data", "--exec-root", home / "exec", "--pidfile", home / "pid"]
        with open(home / "log", "ab") as log:
            self._process = subprocess.Popen(
                ["dockerd", *places, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.docker("version", check=False).returncode != 0:
            assert self._process.poll() is None, (home / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (home / "log").read_text()[-3000:]
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it with SIGTERM, so that it stops its containers."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise

    def load(self, image: str) -> None:
        """Copy an image from the shared engine."""
        environ = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE, env=environ) as save:
            self.docker("load", stdin=save.stdout)
            assert save.wait(STOP_TIMEOUT_S) == 0

    def docker(
        self, *words: str, check: bool = True, stdin: object = None
    ) -> "subprocess.CompletedProcess[str]":
        command = ["docker", "-H", self.host, *words]
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            command, check=check, stdin=stdin, capture_output=True, text=True, timeout=120
        )

    def close(self) -> None:
        try:
            self.stop()
        finally:
            if self._has_bridge:
                self._ip("link", "del", self._bridge)
            shutil.rmtree(self.home, ignore_errors=True)

    def _ip(self, *words: str) -> None:
        path = "/usr/sbin:/sbin:" + os.environ["PATH"]
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60, env={"PATH": path})

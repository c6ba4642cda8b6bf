"""The distribution's docker-registry, run on this machine for tests."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_port
from missing import missing
from module_run import end
from serve_process import eventually

PROGRAM = "docker-registry"
HOW_TO = f"get it: apt-get install {PROGRAM} (Debian and its kin)"
INSTALL_TIMEOUT_S = 300

USER, PASSWORD = "rope", "walk"
# Output of `htpasswd -nbB rope walk`.
HTPASSWD = "rope:$2b$05$HBpRQbMCZMIl6f.oNFdKneQMBsE/NPRmmSN2aOWxlqiGrk3fAGNdG"


@dataclass(frozen=True)
class Registry:
    """A running registry; its address is the part of an image's name before the slash."""

    address: str


def program() -> str:
    """Return the server's program; installs it if possible, else skips the test."""
    path = shutil.which(PROGRAM, path=f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/usr/sbin")
    if path is not None:
        return path
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        missing(f"needs {PROGRAM}; {HOW_TO}")
    # The installation must not start a system service.
    surroundings = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", PROGRAM]):
        done = subprocess.run(
            command, env=surroundings, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    path = shutil.which(PROGRAM)
    if path is None:
        missing(f"needs {PROGRAM}, which could not be installed ({done.stderr[-500:]}); {HOW_TO}")
    return path


@contextmanager
def running_registry(folder: Path, *, password: bool = False, read_only: bool = False) -> Iterator[Registry]:
    """Run a registry with its data in a folder; with `password` it requires USER and PASSWORD."""
    port = free_port()
    access = ""
    if password:
        (folder / "users").write_text(f"{HTPASSWD}\n")
        access = f"auth:\n  htpasswd:\n    realm: tests\n    path: {folder / 'users'}\n"
    maintenance = "  maintenance:\n    readonly:\n      enabled: true\n" if read_only else ""
    config = folder / "config.yml"
    config.write_text(
        "version: 0.1\nlog:\n  level: warn\n"
        f"storage:\n  filesystem:\n    rootdirectory: {folder / 'storage'}\n  delete:\n    enabled: true\n{maintenance}"
        f"http:\n  addr: 127.0.0.1:{port}\n{access}"
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program(), "serve", str(config)], stdout=log, stderr=log)

    def listens() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        eventually(listens)
        yield Registry(f"127.0.0.1:{port}")
    finally:
        end(process)

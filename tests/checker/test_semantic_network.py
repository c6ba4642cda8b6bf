"""What the hook in a server's interpreter sees of whom its process talks to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openenv_core.checker.watching import hook
from openenv_core.checker.watching.hooking import collecting, hooked

UDP = "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "", "0.0.0.0", "LOCALHOST."])
def test_this_machine_is_nobody(host: str) -> None:
    assert hook.is_local(host)


@pytest.mark.parametrize("host", ["192.0.2.7", "example.org", "1.127.0.0", "2001:db8::1"])
def test_others_are_somebody(host: str) -> None:
    assert not hook.is_local(host)


def test_allowed_by_name_or_by_its_end() -> None:
    assert hook.is_allowed("API.example.org", ["api.example.org"])
    assert hook.is_allowed("a.b.example.org", ["*.example.org"])
    assert not hook.is_allowed("example.org", ["*.example.org"])
    assert not hook.is_allowed("evil-example.org", ["*.example.org", "example.org"])


def noted(code: str, *allowed: str) -> tuple[list[str], str]:
    """Run code with the hook; return whom it tried to reach, and what it printed."""
    with hooked() as (folder, env_vars):
        notes = folder / "hosts"
        env = {**os.environ, **env_vars, hook.OUT: str(notes), hook.HOSTS: json.dumps(allowed)}
        done = subprocess.run(
            [sys.executable, "-c", f"import socket\n{code}"],
            env=env,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return notes.read_text().split(), done.stdout + done.stderr


def test_an_attempt_is_noted_and_stopped() -> None:
    hosts, said = noted(f"{UDP}\ns.sendto(b'', ('192.0.2.7', 9))\nprint('sent')")
    assert hosts == ["192.0.2.7"]
    assert "does not allow 192.0.2.7" in said
    assert "sent" not in said


def test_an_attempt_that_is_swallowed_is_noted_all_the_same() -> None:
    code = "try: socket.create_connection(('telemetry.invalid', 80), 1)\nexcept OSError: print('went on')"
    hosts, said = noted(code)
    assert hosts == ["telemetry.invalid"]
    assert "went on" in said


def test_a_process_that_the_server_starts_is_watched_too() -> None:
    inner = f"import socket; {UDP}; s.connect(('192.0.2.8', 9))"
    hosts, _ = noted(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])")
    assert hosts == ["192.0.2.8"]


def test_loopback_and_what_is_allowed_pass() -> None:
    code = (
        f"{UDP}\ns.sendto(b'', ('127.0.0.1', 9))\n"
        "socket.getaddrinfo('192.0.2.9', 80)\n"
        "try: socket.getaddrinfo('nothing.invalid', 80)\nexcept socket.gaierror: pass\nprint('done')"
    )
    hosts, said = noted(code, "nothing.invalid")
    assert hosts == []
    assert "done" in said


def test_a_sitecustomize_of_the_users_own_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('my own')")
    with hooked() as (folder, env_vars):
        env = {**os.environ, **env_vars, **collecting(folder)}
        env["PYTHONPATH"] = os.pathsep.join([env_vars["PYTHONPATH"], str(tmp_path)])
        said = subprocess.check_output([sys.executable, "-c", ""], env=env, text=True, timeout=30)
    assert said.strip() == "my own"

"""Agents' programs in the sandbox: they reach the gateway and their folder, and nothing else."""

import glob
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import agent_playing
from missing import missing
from sandbox_levels import sandbox_at
from test_agent_episodes import only, parts
from worker_fixtures import absences, trajectories

from openenv_core.sandbox import Isolation
from openenv_core.sandbox.kernel import cgroups
from rl_bridge.agents.confine import MAX_DISK_BYTES
from rl_bridge.errors import ConfigError
from rl_bridge.types import Ending


@pytest.fixture(autouse=True)
async def namespaces() -> None:
    """Skip on a machine on which this user may not make namespaces."""
    async with sandbox_at(Isolation.NAMESPACES):
        pass


PROBE = """
import json, os, resource, socket, sys, urllib.request
url, key, server, secret, own = sys.argv[1:]
def post(path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {
        "authorization": "Bearer " + key, "content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))
def attempt(act):
    try:
        return repr(act())
    except Exception as error:
        return type(error).__name__
def connect(family, address):
    with socket.socket(family) as connection:
        connection.settimeout(20)
        connection.connect(address)
        return "connected"
port = int(server.rpartition(":")[2])
found = {
    "files": sorted(os.listdir(".")),
    "home": os.getcwd() == os.environ["HOME"] == own,
    "written": open("file.json").read(),
    "server": attempt(lambda: connect(socket.AF_INET, ("127.0.0.1", port))),
    "outside": attempt(lambda: connect(socket.AF_INET, ("192.0.2.1", 80))),
    "vsock": attempt(lambda: socket.socket(socket.AF_VSOCK)),
    "secret": attempt(lambda: open(secret).read()),
    "etc": attempt(lambda: open("/etc/shadow").read()),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "usr": attempt(lambda: open("/usr/x", "w")),
    "ours": attempt(lambda: __import__("rl_bridge")),
    "longest": resource.getrlimit(resource.RLIMIT_FSIZE),
}
answer = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
found["said"] = answer["choices"][0]["message"]["content"]
open("x", "w").write("x")
print(json.dumps(found), flush=True)
post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "finish"}})
"""


async def test_a_confined_program_reaches_the_gateway_and_nothing_else(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    agent = {
        "command": (sys.executable, "-c", PROBE, "{url}", "{key}", desk, str(secret), "{folder}"),
        "files": {"file.json": '{"key": "{key}"}'},
        "sandbox": True,
    }
    answers = parts(monkeypatch, lambda prompt: "I finish.")
    async with agent_playing(desk, tmp_path, agent, str, **answers) as play:
        episode = await only(play)
    assert (episode.ending, episode.reward, len(episode.turns)) == (Ending.COMPLETED, 1.0, 1)
    found: dict[str, Any] = json.loads((tmp_path / "agents/worker/0.log").read_text())
    assert json.loads(found.pop("written"))["key"].startswith("sk-")
    assert found == {
        "files": [".tmp", "file.json"],
        "home": True,
        "server": "ConnectionRefusedError",
        "outside": "OSError",
        "vsock": "OSError",
        "secret": "FileNotFoundError",
        "etc": "FileNotFoundError",
        "processes": 0,
        "usr": "OSError",
        "ours": "ModuleNotFoundError",
        "longest": [MAX_DISK_BYTES, MAX_DISK_BYTES],
        "said": "I finish.",
    }


async def test_a_confined_program_that_is_killed_is_lost(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = {"command": ("sh", "-c", "kill -9 $$"), "sandbox": True}
    async with agent_playing(desk, tmp_path, agent, str, **parts(monkeypatch), max_attempts=1) as play:
        result = await play([7])
    assert len(absences(result)) == 1
    assert "SIGKILL" in str(result.last_failure)


GREEDY = """
import os, subprocess, sys, time, urllib.request
url, key = sys.argv[1:]
def ask(content):
    body = '{"messages": [{"role": "user", "content": "%s"}]}' % content
    urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", body.encode(), {
        "authorization": "Bearer " + key, "content-type": "application/json"})).read()
ask("a")
took = subprocess.run([sys.executable, "-c", "x = bytearray(1 << 30); input()"], stdin=subprocess.PIPE)
print("the hoarder ended with", took.returncode, flush=True)
try:
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(200)]
except OSError as error:
    print("no more processes:", error.strerror, flush=True)
else:
    time.sleep(3600)
"""


@pytest.mark.parametrize("grouped", [True, False])
async def test_memory_and_processes_of_a_confined_program_are_limited(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    """By a control group, of which the largest process is killed; without one by a watcher."""
    if not grouped:
        monkeypatch.setattr(cgroups, "find", lambda: None)
    elif cgroups.find() is None:
        missing("needs control groups that this user may make")
    agent = {
        "command": (sys.executable, "-c", GREEDY, "{url}", "{key}"),
        "sandbox": True,
        "memory_mb": 256,
        "processes": 64,
    }
    options = {**parts(monkeypatch, lambda prompt: "I see."), "max_attempts": 1}
    async with agent_playing(desk, tmp_path, agent, str, **options) as play:
        result = await play([7])
    output = (tmp_path / "agents/worker/0.log").read_text()
    assert "the hoarder ended with -9" in output
    if grouped:
        assert "no more processes: Resource temporarily unavailable" in output
        (episode,) = trajectories(result)
        assert episode.ending is Ending.COMPLETED
        assert not glob.glob(f"/sys/fs/cgroup/**/ropewalk-{os.getpid()}-*-agent", recursive=True)
    elif "no more processes" not in output:  # which RLIMIT_NPROC says to users other than root
        assert "killed in the sandbox" in output
        assert len(absences(result)) == 1


async def test_programs_are_confined_where_the_machine_permits_it(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rl_bridge.agents import sandbox

    agent = {"command": ("sh", "-c", "pwd; exit 1")}
    options = {**parts(monkeypatch), "max_attempts": 1}
    async with agent_playing(desk, tmp_path, agent, str, **options) as play:
        await play([7])
    assert (tmp_path / "agents/worker/0.log").read_text() == "/workspace\n"
    monkeypatch.setattr(sandbox, "find_readable", lambda more: (("/",), ()))  # no root can be built of that
    async with agent_playing(desk, tmp_path, agent, str, **options) as play:
        await play([7])
    assert "/ropewalk-agent-" in (tmp_path / "agents/worker/0.log").read_text()
    assert "programs cannot be confined here" in caplog.text
    assert "is the root itself" in caplog.text


def test_only_what_a_program_is_installed_with_is_shown(tmp_path: Path) -> None:
    from rl_bridge.agents.sandbox import find_installation

    def install(place: str) -> Path:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
        return path

    alone = install("home/agent")
    assert set(find_installation(str(alone))) == {alone}
    packed, link = install("lib/node_modules/a/cli.js"), tmp_path / "bin/agent"
    link.parent.mkdir()
    link.symlink_to(packed)
    assert set(find_installation(str(link))) == {link, packed, link.parent, tmp_path / "lib/node_modules"}
    in_venv = install("venv/bin/agent")
    install("venv/pyvenv.cfg")
    (in_venv.parent / "python").symlink_to(install("base/bin/python3"))
    found = find_installation(str(in_venv))
    assert set(found) == {in_venv, in_venv.parent, tmp_path / "venv", tmp_path / "base"}


async def test_a_machine_without_namespaces_is_named(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.agents import sandbox

    monkeypatch.setattr(sandbox, "find_readable", lambda more: (("/",), ()))  # no root can be built of that
    agent = {"command": ("true",), "sandbox": True}
    async with agent_playing(desk, tmp_path, agent, str, **parts(monkeypatch)) as play:
        with pytest.raises(ConfigError, match=r"(?s)programs cannot be confined here.*is the root itself"):
            await play([7])

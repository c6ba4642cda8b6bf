"""Servers in local processes: tokens, failed starts, and their end.

The server goes when its owner goes, whatever the owner goes of. Real processes, really killed.
"""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from serve_process import eventually, gone

from openenv_core import (
    AuthenticationError,
    GenericEnvClient,
    LocalProcessProvider,
    ProviderError,
    ServerStartError,
)
from openenv_core.providers.base import read_first_token

SUPPORT = str(Path(__file__).parents[1] / "support")
WAIT_TIMEOUT_S = 60

OWNER = """
import os, sys, time
from openenv_core import LocalProcessProvider

how = sys.argv[2]
# A fork that holds up a stop does so for all of this time: long, since a busy machine is slow as well.
provider = LocalProcessProvider("counter:app", cwd=sys.argv[1], stop_timeout_s=60 if how == "stop beside a fork" else 5)
print(provider.start(), flush=True)
if "fork" in how:
    fork = os.fork()
    if fork == 0 and how == "a fork ends":
        provider.stop()
        sys.exit(0)
    if fork == 0:
        time.sleep(600)
        os._exit(0)
if how == "fork":
    print(fork, flush=True)
if how == "stop beside a fork":
    begin = time.monotonic()
    provider.stop()
    print(time.monotonic() - begin, flush=True)
    os.kill(fork, 9)
if how == "a fork ends":
    os.waitpid(fork, 0)
    print("ended", flush=True)
if how == "raise":
    raise RuntimeError("on purpose")
if how != "end":
    time.sleep(600)
"""


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def port_is_free(url: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(url.rpartition(":")[2])))
        except OSError:
            return False
        return True


@contextmanager
def owner(how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a program that owns a server; yield it and the server's URL."""
    command = [sys.executable, "-c", OWNER, SUPPORT, how]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, marks=pytest.mark.soak),
    ],
)
@pytest.mark.slow
def test_killed_owner_ends_its_server(signum: signal.Signals) -> None:
    with owner("wait") as (process, url):
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 2  # the guard and the server
        process.send_signal(signum)
        process.wait(WAIT_TIMEOUT_S)
        eventually(lambda: all(map(gone, family)))
        eventually(lambda: port_is_free(url))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", pytest.param("end", marks=pytest.mark.soak)])
def test_owner_that_exits_without_stop_leaves_nothing_behind(how: str) -> None:
    with owner(how) as (process, url):
        process.wait(WAIT_TIMEOUT_S)
        assert port_is_free(url)  # the owner's exit waits for the server's


@pytest.mark.slow
def test_fork_that_outlives_the_owner_does_not_keep_the_server_running() -> None:
    with owner("fork") as (process, url):
        fork = psutil.Process(int(process.stdout.readline()))
        try:
            process.kill()
            process.wait(WAIT_TIMEOUT_S)
            eventually(lambda: port_is_free(url))
            assert not gone(fork)
        finally:
            fork.kill()


@pytest.mark.slow
def test_fork_does_not_delay_stopping() -> None:
    with owner("stop beside a fork") as (process, url):
        assert float(process.stdout.readline()) < 30
        assert port_is_free(url)


@pytest.mark.slow
def test_ended_fork_keeps_the_server_running() -> None:
    with owner("a fork ends") as (process, url):
        assert process.stdout.readline() == "ended\n"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health") as reply:
            assert reply.status == 200


@pytest.mark.soak
@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_owner_without_standard_streams_can_serve(closed: str) -> None:
    command = f'"$0" -c "$1" "$2" end {closed}'
    arguments = ["sh", "-c", command, sys.executable, OWNER, SUPPORT]
    assert subprocess.run(arguments, capture_output=True, timeout=WAIT_TIMEOUT_S).returncode == 0


@pytest.mark.slow
def test_killed_guard_ends_the_server() -> None:
    with owner("wait") as (process, url):
        guard = psutil.Process(process.pid).children()[0]
        (server,) = guard.children()
        guard.kill()
        eventually(lambda: gone(server))
        eventually(lambda: port_is_free(url))


@pytest.mark.slow
def test_provider_can_be_restarted() -> None:
    before = children()
    provider = LocalProcessProvider("counter:app", cwd=SUPPORT, env_vars={"COUNTER_TEST": "1"})
    assert provider.url is None
    url = provider.start()
    family = children() - before
    assert provider.start() == provider.url == url
    assert any(p.environ().get("COUNTER_TEST") == "1" for p in family)
    # Ctrl-C in the terminal does not reach the guard; one that does leaves stopping to the owner.
    (guard,) = family & set(psutil.Process().children())
    assert os.getsid(guard.pid) != os.getsid(0)
    guard.send_signal(signal.SIGINT)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health") as reply:
        assert reply.status == 200
    assert not gone(guard)
    provider.stop()
    provider.stop()
    assert provider.url is None
    assert all(map(gone, family))
    assert port_is_free(url)
    with provider:
        assert provider.url is not None


TOKEN, OTHER = "a-token-of-good-length", "another-token-of-good-length"


@pytest.mark.slow
def test_tokens_of_the_shell_are_not_inherited_and_the_client_uses_the_first_of_its_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text(f"# mine\n\n{TOKEN}\n{OTHER}\n")
    monkeypatch.setenv("ROPEWALK_TOKENS", TOKEN)
    monkeypatch.setenv("ROPEWALK_TOKEN_FILE", str(tmp_path / "tokens"))
    of_file = {"ROPEWALK_TOKEN_FILE": str(tmp_path / "tokens")}
    for variables, options in (
        ({}, {}),
        ({"ROPEWALK_TOKENS": f" {TOKEN}, {OTHER}"}, {}),
        (of_file, {"headers": {"authorization": f"Bearer {OTHER}"}}),  # the caller's header goes first
    ):
        with GenericEnvClient.from_process("counter:app", cwd=SUPPORT, env_vars=variables, **options) as env:
            assert env.reset(seed=1).observation["total"] == 1
            refusal = pytest.raises(AuthenticationError) if variables else nullcontext()
            with refusal, GenericEnvClient(env.base_url).sync() as other:
                other.connect()


def test_unreadable_token_file_gives_no_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# mine\n\n{TOKEN}\n{OTHER}\n")
    (tmp_path / "bytes").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "pipe")
    assert read_first_token({"ROPEWALK_TOKEN_FILE": "tokens"}, tmp_path) == TOKEN
    assert read_first_token({"ROPEWALK_TOKEN_FILE": "tokens", "ROPEWALK_TOKENS": OTHER}, tmp_path) == OTHER
    for name in ("bytes", "pipe", "missing", "", "."):
        assert read_first_token({"ROPEWALK_TOKEN_FILE": name}, tmp_path) is None


def test_server_that_ignores_sigterm_is_killed_with_its_children() -> None:
    stubborn = (
        "import os, signal, sys, socket, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: time.sleep(600)\n"  # nor does a child of it heed
        "server = socket.socket(fileno=int(sys.argv[1]))\n"
        "connection, _ = server.accept()\n"
        "connection.recv(1000)\n"
        'connection.sendall(b\'HTTP/1.0 200 OK\\r\\n\\r\\n{"status":"healthy"}\')\n'
        "connection.close()\n"
        "time.sleep(600)\n"
    )
    command = (sys.executable, "-c", stubborn, "{fd}")
    before = children()
    with LocalProcessProvider("stubborn", command=command, stop_timeout_s=0.2) as provider:
        family = children() - before
        url = provider.url
    assert url is not None
    assert all(map(gone, family))
    assert port_is_free(url)


def test_last_output_of_the_server_is_in_the_error() -> None:
    with pytest.raises(ServerStartError, match="ended with status 2") as failed:
        LocalProcessProvider("no_such_module:app").start()
    assert 'Could not import module "no_such_module"' in failed.value.output
    assert failed.value.output.rstrip() in str(failed.value)
    loud = (sys.executable, "-c", "import sys; sys.stdout.write('x' * 10**7 + 'the end'); sys.exit(7)")
    with pytest.raises(ServerStartError, match="ended with status 7") as failed:
        LocalProcessProvider("loud", command=loud).start()
    assert failed.value.output.endswith("the end")
    assert len(failed.value.output) < 10**5


def test_silent_server_fails_at_the_start_timeout_and_a_missing_directory_at_once() -> None:
    before = children()
    silent = (sys.executable, "-c", "import time; time.sleep(600)")
    with pytest.raises(ServerStartError, match="raise start_timeout_s"):
        LocalProcessProvider("silent", command=silent, start_timeout_s=0.3).start()
    assert children() <= before
    with pytest.raises(ProviderError, match="expected to start"):
        LocalProcessProvider("counter:app", cwd="/no/such/directory").start()


def test_a_port_that_is_taken_is_an_error_of_the_provider() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProviderError, match=f"cannot listen on 127.0.0.1:{port} for 'counter:app'"):
            LocalProcessProvider("counter:app", port=port).start()


@pytest.mark.parametrize("where", ["subprocess.Popen", "_OutputTail"])
def test_a_ctrl_c_just_after_the_server_s_process_began_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    begin, guards = subprocess.Popen, list[Any]()

    def interrupt(process: Any, *_: Any, **options: Any) -> None:
        guards.append(begin(process, **options) if options else process)
        raise KeyboardInterrupt

    provider = LocalProcessProvider("counter:app", cwd=SUPPORT)
    with monkeypatch.context() as patched:
        patched.setattr(f"openenv_core.providers.process.{where}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            provider.start()
    (guard,) = guards
    eventually(lambda: guard.poll() is not None)
    guard.stdout.close()


def test_stopping_ends_a_running_start() -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    provider = LocalProcessProvider("silent", command=command, stop_timeout_s=0.5)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(provider.start)
        eventually(lambda: provider._ending is not None)
        provider.stop()
        with pytest.raises(ServerStartError):
            starting.result(WAIT_TIMEOUT_S)

"""The code interpreter's hardened image: its walls from inside, and how it is started and stopped."""

import base64
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from envs.code_interpreter_env import CodeInterpreterEnv
from envs.code_interpreter_env.models import CodeInterpreterObservation
from openenv_core.cli.main import main
from openenv_core.client import SyncEnvClient
from openenv_core.providers.docker import Engine, LocalDockerProvider

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dockerfiles" / "code_interpreter"
LEAN = "ropewalk-test-interpreter:lean"
HARDENED = "ropewalk-test-interpreter:hardened"
# Of the options that both ways of starting a container give; what the engine adds by itself is not compared.
SAME = {
    *(
        "CapAdd",
        "CapDrop",
        "Privileged",
        "SecurityOpt",
        "UsernsMode",
        "PidMode",
        "IpcMode",
        "NetworkMode",
        "Init",
    ),
    *("ReadonlyRootfs", "Tmpfs", "Mounts", "Binds", "VolumesFrom", "Devices", "LogConfig"),
    *("Memory", "MemorySwap", "PidsLimit"),
}

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(900)]


def docker(*words: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 or not check, done.stdout[-4000:] + done.stderr
    return (done.stdout + done.stderr).strip()


def inspected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", name))[0]
    return found


@pytest.fixture(scope="module")
def lean(engine: Engine) -> Iterator[str]:
    assert main(["build", str(ROOT / "envs" / "code_interpreter_env"), "--tag", LEAN]) == 0
    yield LEAN
    docker("image", "rm", "--force", LEAN)


@pytest.fixture(scope="module")
def image(lean: str) -> Iterator[str]:
    # Figures are enough here: the other batteries are 60 MB to fetch.
    arguments = ("--build-arg", f"ENVIRONMENT={lean}", "--build-arg", "EXTRA=figures")
    docker("build", "--force-rm", *arguments, "--tag", HARDENED, str(FOLDER))
    yield HARDENED
    docker("image", "rm", "--force", HARDENED)


def run(image: str, *options: str, environ: Mapping[str, str] | None = None) -> str:
    """Start a container as an operator would; return its id."""
    done = subprocess.run(
        [FOLDER / "run", "--image", image, *options],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **(environ or {})},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_until_healthy(container: str) -> None:
    end = time.monotonic() + 300
    while inspected(container)["State"]["Running"] and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{url_of(container)}/health", timeout=10):
            return
        time.sleep(0.2)
    raise AssertionError(docker("logs", container))


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[str]:
    name = run(image, "--memory", "1g")
    try:
        wait_until_healthy(name)
        yield name
    finally:
        docker("rm", "--force", name)


@pytest.fixture
def env(container: str) -> Iterator[SyncEnvClient[Any, Any, Any]]:
    with CodeInterpreterEnv(url_of(container)).sync() as client:
        client.reset(limits={"timeout_s": 30})
        yield client


def url_of(container: str) -> str:
    return f"http://{docker('port', container, '8000').splitlines()[0]}"


def ran(env: Any, code: str) -> CodeInterpreterObservation:
    seen: CodeInterpreterObservation = env.execute(code).observation
    return seen


def test_the_level_is_lsm_with_everything_taken_away(container: str, env: Any) -> None:
    assert docker("exec", container, "id", "-u") == "10001"
    seen = ran(env, "import os\nos.getuid(), os.getresgid()")
    assert (seen.isolation, seen.result) == ("lsm", "(10001, (10001, 10001, 10001))")
    status = docker("exec", container, "cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status


def test_run_gives_what_our_provider_gives(container: str, image: str) -> None:
    with LocalDockerProvider(image, memory="1g", pids=1024) as provider:
        assert provider.url is not None
        port = provider.url.rpartition(":")[2]
        (name,) = docker("ps", "--quiet", "--filter", f"publish={port}").split()
        ours = inspected(name)["HostConfig"]
    by_hand = inspected(container)["HostConfig"]
    assert {key: by_hand.get(key) or None for key in SAME} == {key: ours.get(key) or None for key in SAME}
    assert {port[0]["HostIp"] for port in by_hand["PortBindings"].values()} == {"127.0.0.1"}


def test_packages_are_there_and_figures_come_out(env: Any) -> None:
    seen = ran(
        env,
        "import sys\nhad = {'numpy', 'matplotlib.pyplot'} <= sys.modules.keys()\n"
        "import matplotlib.pyplot as plt\nplt.plot([3, 1, 2])\nprint(had)",
    )
    assert (seen.status, seen.stdout) == ("ok", "True\n")
    (figure,) = [shown for shown in seen.outputs if "image/png" in shown.data]
    assert base64.b64decode(figure.data["image/png"]).startswith(b"\x89PNG")


def test_files_go_in_and_come_out(env: Any) -> None:
    env.put_file("in/a.bin", bytes(range(256)))
    seen = ran(env, "open('b.bin', 'wb').write(open('in/a.bin', 'rb').read()[::-1])")
    assert [file.path for file in seen.files] == ["b.bin"]
    assert env.get_file("b.bin") == bytes(range(255, -1, -1))


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd').read()",
        "open('/usr/lib/x', 'w')",
        "open('/tmp/x', 'w')",
        "os.listdir('/tmp')",
        "os.listdir('/app/env')",
        "open('/proc/1/environ').read()",
        "os.listdir(os.path.dirname(json.__file__) + '/../site-packages/code_interpreter_env')",
        "os.fork()",
        "os.execv('/bin/sh', ['sh'])",
        "os.kill(os.getppid(), 9)",
        "os.kill(1, 15)",
        "socket.socket()",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_UNIX)",
        "socket.create_connection(('127.0.0.1', 8000))",
    ],
)
def test_code_reaches_nothing_outside(env: Any, attempt: str) -> None:
    seen = ran(env, f"import json, os, socket\n{attempt}")
    assert seen.status == "error", (seen.stdout, seen.result)
    assert seen.error is not None
    assert seen.error.ename in ("PermissionError", "FileNotFoundError", "OSError"), seen.error
    assert ran(env, "1 + 1").result == "2"


def test_too_much_memory_is_the_session_s_trouble_alone(container: str, env: Any) -> None:
    assert ran(env, "x = 5\ndata = bytearray(900 << 20)").status == "memory"
    assert ran(env, "x").result == "5"
    assert docker("exec", container, "healthcheck") == ""
    assert inspected(container)["State"]["OOMKilled"] is False


def test_more_memory_than_the_container_has_ends_sessions_and_no_server(image: str) -> None:
    name = run(image, "--memory", "256m", environ={"CODE_INTERPRETER_PRELOAD": "none"})
    try:
        wait_until_healthy(name)
        with ExitStack() as stack:
            # Each has less than the server: the kernel would take the server first, were it not told otherwise.
            clients = [stack.enter_context(CodeInterpreterEnv(url_of(name)).sync()) for _ in range(32)]
            for client in clients:
                client.reset(limits={})
                ran(client, "data = b'x' * (8 << 20)")
            left = [ran(client, "len(data)").status for client in clients]
        assert 0 < left.count("ok") < len(left), left
        assert inspected(name)["State"]["Running"]
        with CodeInterpreterEnv(url_of(name)).sync() as client:
            client.reset(limits={})
            assert ran(client, "1 + 1").result == "2"
    finally:
        docker("rm", "--force", name)


def test_threads_are_bounded(env: Any) -> None:
    seen = ran(
        env,
        "import threading, time\n"
        "threading.stack_size(65536)\n"
        "count = 0\n"
        "try:\n"
        "    while count < 2000:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "        count += 1\n"
        "except RuntimeError:\n"
        "    print('bounded')\n",
    )
    assert seen.stdout == "bounded\n"


def test_no_worker_is_left_when_sessions_end(container: str) -> None:
    def processes() -> int:
        return len(docker("top", container, "-eo", "pid").splitlines())

    end = time.monotonic() + 30
    while (before := processes()) > 4 and time.monotonic() < end:  # a header, an init, the server, the zygote
        time.sleep(0.2)
    clients = [CodeInterpreterEnv(url_of(container)).sync() for _ in range(3)]
    for client in clients:
        client.reset(limits={})
    end = time.monotonic() + 30
    while (
        processes() != before + 3 and time.monotonic() < end
    ):  # the image looks after its health now and then
        time.sleep(0.2)
    assert processes() == before + 3
    for client in clients:
        client.close()
    end = time.monotonic() + 30
    while processes() != before and time.monotonic() < end:
        time.sleep(0.2)
    assert processes() == before


def test_it_stops_when_it_is_told_to_in_the_middle_of_everything(image: str) -> None:
    name = run(image)
    try:
        wait_until_healthy(name)
        with CodeInterpreterEnv(url_of(name)).sync() as client:
            client.reset(limits={})
            client.execute("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)")
            waiting = subprocess.Popen(
                ["docker", "stop", "--time", "60", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            assert waiting.wait(timeout=50) == 0
        state = inspected(name)["State"]
        # Not 137: it ended by itself.
        assert (state["Running"], state["ExitCode"]) == (False, 0), docker("logs", name)
    finally:
        docker("rm", "--force", name)


@pytest.fixture(scope="module")
def old_kernel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A filter by which the kernel seems to have neither Landlock nor user name spaces."""
    away = [{"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number} for names, number in (
        (["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"], 38),
        (["unshare"], 1),
    )]  # fmt: skip
    file = tmp_path_factory.mktemp("seccomp") / "old.json"
    file.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": away}))
    return f"seccomp={file}"


def test_below_lsm_it_does_not_start(image: str, old_kernel: str) -> None:
    name = run(image, "--", "--security-opt", old_kernel)
    try:
        code = docker("wait", name)
        said = docker("logs", name)
    finally:
        docker("rm", "--force", name)
    assert code == "2", said
    assert "expected isolation of at least lsm" in said
    assert "CODE_INTERPRETER_MINIMUM_ISOLATION" in said
    assert "Traceback" not in said


def test_below_lsm_it_starts_when_that_is_named(image: str, old_kernel: str) -> None:
    told = {"CODE_INTERPRETER_MINIMUM_ISOLATION": "seccomp"}
    name = run(image, "--", "--security-opt", old_kernel, environ=told)
    try:
        wait_until_healthy(name)
        with CodeInterpreterEnv(url_of(name)).sync() as client:
            client.reset(limits={})
            assert ran(client, "1").isolation == "seccomp"
            assert "root" in str(ran(client, "open('/etc/passwd').read()").result)
    finally:
        docker("rm", "--force", name)


def test_root_s_sessions_have_users_of_their_own(image: str) -> None:
    # What a container has by default, without run: nobody should, and it holds all the same.
    name = docker("run", "--detach", "--user", "0", "--publish", "127.0.0.1::8000", image)
    try:
        wait_until_healthy(name)
        with CodeInterpreterEnv(url_of(name)).sync() as one, CodeInterpreterEnv(url_of(name)).sync() as two:
            users = set()
            for client in (one, two):
                client.reset(limits={})
                seen = ran(client, "import os\nos.getuid()")
                assert seen.isolation == "lsm"
                users.add(int(str(seen.result)))
        assert len(users) == 2
        assert min(users) > 10001
    finally:
        docker("rm", "--force", name)


def test_nothing_in_it_helps_an_intruder(image: str) -> None:
    script = (
        "find / -xdev -type f -perm /6000; find / -xdev -user 10001; find / -xdev -type d -perm -o+w ! -path /tmp;"
        "find / -xdev -type f -perm -o+w; for name in pip apt apt-get dpkg perl gcc cc; do command -v $name; done;"
        "find / -xdev -path '*-packages/pip'; ls /var/lib/apt /var/cache/apt 2>&-; :"
    )
    assert docker("run", "--rm", "--user", "0", image, "sh", "-c", script) == ""
    places = "/ /app /opt/ropewalk /usr /etc /var/tmp /run/lock"
    script = f"for place in {places}; do touch $place/x 2>&- && echo $place; done; :"
    assert docker("run", "--rm", image, "sh", "-c", script) == ""


def test_run_refuses_to_publish_to_strangers_without_tokens() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWALK_")}
    told = [str(FOLDER / "run"), "--print", "--publish", "0.0.0.0:8000"]
    done = subprocess.run(told, capture_output=True, text=True, env=environ, timeout=20, check=False)
    assert done.returncode == 2
    assert "ROPEWALK_TOKENS" in done.stderr
    done = subprocess.run(
        told,
        capture_output=True,
        text=True,
        env={**environ, "ROPEWALK_TOKENS": "a-secret"},
        timeout=20,
        check=False,
    )
    assert done.returncode == 0
    assert "--env ROPEWALK_TOKENS" in done.stdout
    assert "a-secret" not in done.stdout

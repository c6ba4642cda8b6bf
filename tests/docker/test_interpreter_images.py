"""The hardened image of the code interpreter, from inside and outside."""

import base64
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from module_run import finished

from envs.code_interpreter_env import CodeInterpreterEnv
from envs.code_interpreter_env.models import CodeInterpreterObservation
from openenv_core.cli.main import main
from openenv_core.client import SyncEnvClient
from openenv_core.providers.docker import DockerEngine

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dockerfiles" / "code_interpreter"
LEAN = "ropewalk-test-interpreter:lean"
HARDENED = "ropewalk-test-interpreter:hardened"
pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(900)]


def docker(*arguments: str) -> str:
    done = finished("docker", *arguments, timeout_s=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return (done.stdout + done.stderr).strip()


def inspected(name: str) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(docker("inspect", name))[0]
    return description


@pytest.fixture(scope="module")
def lean(engine: DockerEngine) -> Iterator[str]:
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
    done = finished(
        FOLDER / "run", "--image", image, *options, env={**os.environ, **(environ or {})}, timeout_s=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_until_healthy(container: str) -> None:
    end = time.monotonic() + 300
    while inspected(container)["State"]["Running"] and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{url_of(container)}/health", timeout=60):
            return
        time.sleep(0.2)
    raise AssertionError(docker("logs", container))


@contextmanager
def healthy(container: str) -> Iterator[str]:
    """Wait for a container's server; remove the container in the end."""
    try:
        wait_until_healthy(container)
        yield container
    finally:
        docker("rm", "--force", container)


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[str]:
    with healthy(run(image, "--memory", "1g")) as name:
        yield name


@pytest.fixture
def env(container: str) -> Iterator[SyncEnvClient[Any, Any, Any]]:
    with CodeInterpreterEnv(url_of(container)).sync() as client:
        client.reset(limits={"timeout_s": 30})
        yield client


def url_of(container: str) -> str:
    return f"http://{docker('port', container, '8000').splitlines()[0]}"


def execute_ok(env: Any, code: str) -> CodeInterpreterObservation:
    observation: CodeInterpreterObservation = env.execute(code).observation
    return observation


def test_the_level_is_lsm_with_everything_taken_away(container: str, env: Any) -> None:
    assert docker("exec", container, "id", "-u") == "10001"
    observation = execute_ok(env, "import os\nos.getuid(), os.getresgid()")
    assert (observation.isolation, observation.result) == ("lsm", "(10001, (10001, 10001, 10001))")
    status = docker("exec", container, "cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status


def test_packages_are_there_and_figures_come_out(env: Any) -> None:
    observation = execute_ok(env, "import matplotlib.pyplot as plt, numpy\nplt.plot(numpy.array([3, 1, 2]))")
    (figure,) = [output for output in observation.outputs if "image/png" in output.data]
    assert base64.b64decode(figure.data["image/png"]).startswith(b"\x89PNG")


ATTEMPTS = (
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
)


def test_code_reaches_nothing_outside(env: Any) -> None:
    for attempt in ATTEMPTS:
        observation = execute_ok(env, f"import json, os, socket\n{attempt}")
        assert observation.status == "error", (attempt, observation.stdout, observation.result)
        assert observation.error is not None
        refusals = ("PermissionError", "FileNotFoundError", "OSError")
        assert observation.error.ename in refusals, (attempt, observation.error)
        assert execute_ok(env, "1 + 1").result == "2"


def test_memory_limit_ends_only_its_own_session(container: str, env: Any) -> None:
    assert execute_ok(env, "x = 5\ndata = bytearray(900 << 20)").status == "memory"
    assert execute_ok(env, "x").result == "5"
    assert docker("exec", container, "healthcheck") == ""
    assert inspected(container)["State"]["OOMKilled"] is False


def test_more_memory_than_the_container_has_ends_sessions_and_no_server(image: str) -> None:
    environ = {"CODE_INTERPRETER_PRELOAD": "none"}
    with healthy(run(image, "--memory", "256m", environ=environ)) as name, ExitStack() as stack:
        # Each has less than the server: the kernel would take the server first, were it not told otherwise.
        clients = [stack.enter_context(CodeInterpreterEnv(url_of(name)).sync()) for _ in range(32)]
        for client in clients:
            client.reset(limits={})
            execute_ok(client, "data = b'x' * (8 << 20)")
        left = [execute_ok(client, "len(data)").status for client in clients]
        assert 0 < left.count("ok") < len(left), left
        stack.close()
        assert inspected(name)["State"]["Running"]
        with CodeInterpreterEnv(url_of(name)).sync() as client:
            client.reset(limits={})
            assert execute_ok(client, "1 + 1").result == "2"


def test_no_worker_is_left_when_sessions_end(container: str) -> None:
    def until_processes(condition: Callable[[int], bool]) -> int:
        end = time.monotonic() + 60
        # The image looks after its health now and then.
        while not condition(count := len(docker("top", container, "-eo", "pid").splitlines())):
            assert time.monotonic() < end, count
            time.sleep(0.2)
        return count

    before = until_processes(lambda count: count <= 4)  # a header, an init, the server, the zygote
    clients = [CodeInterpreterEnv(url_of(container)).sync() for _ in range(3)]
    for client in clients:
        client.reset(limits={})
    until_processes(lambda count: count == before + 3)
    for client in clients:
        client.close()
    until_processes(lambda count: count == before)


def test_container_stops_on_request_under_load(image: str) -> None:
    with healthy(run(image)) as name:
        with CodeInterpreterEnv(url_of(name)).sync() as client:
            client.reset(limits={})
            client.execute("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)")
            assert finished("docker", "stop", "--time", "60", name, timeout_s=50).returncode == 0
        state = inspected(name)["State"]
        # Not 137: it ended by itself.
        assert (state["Running"], state["ExitCode"]) == (False, 0), docker("logs", name)


@pytest.fixture(scope="module")
def old_kernel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A filter that makes the kernel look as if it had neither Landlock nor user namespaces."""
    away = [{"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number} for names, number in (
        (["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"], 38),
        (["unshare"], 1),
    )]  # fmt: skip
    file = tmp_path_factory.mktemp("seccomp") / "old.json"
    file.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": away}))
    return f"seccomp={file}"


def test_lower_level_than_lsm_must_be_named(image: str, old_kernel: str) -> None:
    name = run(image, "--", "--security-opt", old_kernel)
    try:
        code = docker("wait", name)
        log = docker("logs", name)
    finally:
        docker("rm", "--force", name)
    assert code == "2", log
    assert "expected isolation of at least lsm" in log
    assert "CODE_INTERPRETER_MINIMUM_ISOLATION" in log
    assert "Traceback" not in log
    named = {"CODE_INTERPRETER_MINIMUM_ISOLATION": "seccomp"}
    with (
        healthy(run(image, "--", "--security-opt", old_kernel, environ=named)) as name,
        CodeInterpreterEnv(url_of(name)).sync() as client,
    ):
        client.reset(limits={})
        assert execute_ok(client, "1").isolation == "seccomp"


def test_sessions_under_root_have_their_own_users(image: str) -> None:
    # What a container has by default, without run: nobody should, and it holds all the same.
    with healthy(docker("run", "--detach", "--user", "0", "--publish", "127.0.0.1::8000", image)) as name:
        with CodeInterpreterEnv(url_of(name)).sync() as one, CodeInterpreterEnv(url_of(name)).sync() as two:
            users = set()
            for client in (one, two):
                client.reset(limits={})
                observation = execute_ok(client, "import os\nos.getuid()")
                assert observation.isolation == "lsm"
                users.add(int(str(observation.result)))
        assert len(users) == 2
        assert min(users) > 10001


def test_image_contains_no_tools_for_an_intruder(image: str) -> None:
    script = (
        "find / -xdev -type f -perm /6000; find / -xdev -user 10001; find / -xdev -type d -perm -o+w ! -path /tmp;"
        "find / -xdev -type f -perm -o+w; for name in pip apt apt-get dpkg perl gcc cc; do command -v $name; done;"
        "find / -xdev -path '*-packages/pip'; ls /var/lib/apt /var/cache/apt 2>&-; :"
    )
    assert docker("run", "--rm", "--user", "0", image, "sh", "-c", script) == ""
    places = "/ /app /opt/ropewalk /usr /etc /var/tmp /run/lock"
    script = f"for place in {places}; do touch $place/x 2>&- && echo $place; done; :"
    assert docker("run", "--rm", image, "sh", "-c", script) == ""


def test_run_refuses_public_addresses_without_tokens() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWALK_")}
    command = [str(FOLDER / "run"), "--print", "--publish", "0.0.0.0:8000"]
    for variables, status in (({}, 2), ({"ROPEWALK_TOKENS": "a-secret"}, 0)):
        done = finished(*command, env={**environ, **variables}, timeout_s=20)
        assert done.returncode == status
        if variables:
            assert "--env ROPEWALK_TOKENS" in done.stdout
            assert "a-secret" not in done.stdout
        else:
            assert "ROPEWALK_TOKENS" in done.stderr

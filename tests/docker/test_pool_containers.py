"""The pool over a real engine: containers in milliseconds, replaced, and gone in the end."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from own_engine import OwnEngine, require_own_engine
from slim_server import IMAGE, options

from openenv_core import GenericAction, GenericEnvClient
from openenv_core.errors import ImageNotFound
from openenv_core.providers.docker import Engine
from openenv_core.providers.pool import DockerPool, PoolTimeout

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]  # one waits for an image to be built

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
LABEL = "ropewalk-test.pool"


def eventually(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "expected it to come about by now"
        time.sleep(0.05)


def labelled(engine: Engine, value: str) -> list[str]:
    return [each["Id"] for each in engine.labelled(f"{LABEL}={value}")]


def healthy(url: str) -> bool:
    with urlopen(url + "/health", timeout=10) as answer:
        return b"healthy" in answer.read()


def test_containers_are_handed_out_once_replaced_and_removed(engine: Engine) -> None:
    pool = DockerPool(IMAGE, 2, options=options(memory="64m"), labels={LABEL: "life"})
    assert pool.options.memory == "64m"
    with pool:
        pool.wait(timeout_s=PATIENCE_S)
        ids = set()
        for _ in range(3):
            with pool.lease(PATIENCE_S) as lease:
                assert healthy(lease.url)
                assert engine.inspect(lease.container.id)["HostConfig"]["Memory"] == 64 << 20
                ids.add(lease.container.id)
        assert len(ids) == 3
        pool.wait(timeout_s=PATIENCE_S)
        eventually(lambda: len(labelled(engine, "life")) == 2)
        assert not ids & set(labelled(engine, "life"))
        # One that died is not handed out; its log can be read as long as somebody has it.
        provider = pool.provider(PATIENCE_S)
        with suppress(OSError):
            urlopen(provider.start() + "/die", timeout=10)
        eventually(lambda: not provider.alive)
        assert "dying as told" in provider.output()
        provider.stop()
    assert labelled(engine, "life") == []


@pytest.mark.soak
def test_an_image_that_is_missing_is_said_at_once(engine: Engine) -> None:
    with DockerPool("ropewalk-test-never-built:1", 2) as pool:
        begin = time.monotonic()
        with pytest.raises(PoolTimeout, match="no wait will bring one") as late:
            pool.lease(600)
        assert isinstance(late.value.last_failure, ImageNotFound)
        assert time.monotonic() - begin < 60


def test_clients_have_containers_of_their_own(engine: Engine, hostile_image: str) -> None:
    with DockerPool(hostile_image, 2, stop_timeout_s=0.0) as pool:
        first, second = (pool.client(GenericEnvClient, lease_timeout_s=PATIENCE_S) for _ in range(2))
        with first, second:
            assert first.base_url != second.base_url
            assert first.reset().observation["said"] == "ready"
            assert first.step(GenericAction(what="write", text="/tmp/mine")).observation["said"]
            assert second.reset().observation["said"] == "ready"
            assert pool.state.used == 2
        eventually(lambda: pool.state.used == 0 and pool.state.ready > 0)

        async def awaited() -> str:
            env = await pool.client(GenericEnvClient, lease_timeout_s=PATIENCE_S)
            async with env:
                return str((await env.reset()).observation["said"])

        assert asyncio.run(awaited()) == "ready"


OWNER = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from slim_server import IMAGE, options
from openenv_core.providers.pool import DockerPool

pool = DockerPool(IMAGE, 3, options=options(), max_starting=1, labels={"ropewalk-test.pool": sys.argv[3]})
lease = pool.lease(60)
print("one is used", flush=True)
if sys.argv[3] == "killed":
    time.sleep(60)
"""


@pytest.mark.soak
@pytest.mark.parametrize("how", ["killed", "forgets"])
def test_nothing_is_left_of_a_dead_owner(engine: Engine, how: str) -> None:
    """Others are being started when it dies."""
    command = [sys.executable, "-c", OWNER, str(ROOT), str(ROOT / "tests" / "support"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "one is used\n"
        if how == "killed":
            owner.send_signal(signal.SIGKILL)
        owner.wait(PATIENCE_S)
        if how == "killed":
            eventually(lambda: labelled(engine, how) == [])
            time.sleep(2)  # what the engine was making then is there by now, and removed as well
            eventually(lambda: labelled(engine, how) == [])
        else:
            # An interpreter that ends takes them along; and nothing comes after.
            assert labelled(engine, how) == []
            time.sleep(2)
            assert labelled(engine, how) == []


@pytest.fixture
def own_engine(engine: Engine) -> Iterator[OwnEngine]:
    require_own_engine()
    own = OwnEngine()
    try:
        own.start()
        own.load(IMAGE)
        yield own
    finally:
        own.close()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_pool_survives_the_restart_of_its_engine(
    own_engine: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", own_engine.host)
    with DockerPool(IMAGE, 2, options=options()) as pool:
        pool.wait(timeout_s=PATIENCE_S)
        used = pool.lease(PATIENCE_S)
        before = own_engine.docker("ps", "-aq", "--no-trunc").stdout.split()
        own_engine.stop()
        with pytest.raises(PoolTimeout, match="expected a Docker engine at unix://"):
            pool.lease(3)
        used.close()  # while there is no engine that could remove it
        own_engine.start()
        with pool.lease(PATIENCE_S) as lease:
            assert healthy(lease.url)
            assert lease.container.id not in before
        pool.wait(timeout_s=PATIENCE_S)
        eventually(lambda: len(own_engine.docker("ps", "-aq").stdout.split()) == 2)
        assert not set(before) & set(own_engine.docker("ps", "-aq", "--no-trunc").stdout.split())
        assert pool.state.last_failure is None
    assert own_engine.docker("ps", "-aq").stdout == ""

"""The container pool over a real engine, and engines that stop and come back."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from own_engine import OwnEngine, require_own_engine
from owned_containers import REMOVAL_TIMEOUT_S, WAIT_TIMEOUT_S, eventually, exists, owner
from slim_server import IMAGE, options

from openenv_core import EngineUnavailableError
from openenv_core.providers.docker import DockerEngine, LocalDockerProvider
from openenv_core.providers.docker.attach import EngineAddress
from openenv_core.providers.pool import DockerPool, PoolTimeoutError

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]  # one waits for an image to be built

ROOT = Path(__file__).parents[2]
LABEL = "ropewalk-test.pool"


def list_labelled(engine: DockerEngine, value: str) -> list[str]:
    return [each["Id"] for each in engine.list_labelled(f"{LABEL}={value}")]


def healthy(url: str) -> bool:
    with urlopen(url + "/health", timeout=60) as answer:
        return b"healthy" in answer.read()


def test_containers_are_handed_out_once_replaced_and_removed(engine: DockerEngine) -> None:
    pool = DockerPool(IMAGE, 2, options=options(memory="64m"), labels={LABEL: "life"})
    assert pool.options.memory == "64m"
    with pool:
        pool.wait(timeout_s=WAIT_TIMEOUT_S)
        ids = set()
        for _ in range(3):
            with pool.lease(WAIT_TIMEOUT_S) as lease:
                assert healthy(lease.url)
                assert engine.inspect(lease.container.id)["HostConfig"]["Memory"] == 64 << 20
                ids.add(lease.container.id)
        assert len(ids) == 3
        pool.wait(timeout_s=WAIT_TIMEOUT_S)
        eventually(lambda: len(list_labelled(engine, "life")) == 2)
        assert not ids & set(list_labelled(engine, "life"))
        # One that died is not handed out; its log can be read as long as somebody has it.
        provider = pool.provider(WAIT_TIMEOUT_S)
        with suppress(OSError):
            urlopen(provider.start() + "/die", timeout=60)
        eventually(lambda: not provider.alive)
        assert "dying as told" in provider.output()
        provider.stop()
    assert list_labelled(engine, "life") == []


def test_pool_lends_one_image_after_its_name_moves_to_another(engine: DockerEngine) -> None:
    named = {"repo": "ropewalk-test-pool", "tag": "latest"}
    engine.call("POST", f"/images/{IMAGE}/tag", query=named)
    try:
        with DockerPool("ropewalk-test-pool:latest", 2, options=options(), labels={LABEL: "moved"}) as pool:
            pool.wait(timeout_s=WAIT_TIMEOUT_S)
            images = set()
            for number in range(4):
                with pool.lease(WAIT_TIMEOUT_S) as lease:
                    images.add(engine.inspect(lease.container.id)["Image"])
                    if number == 0:
                        engine.call(
                            "POST", "/commit", query={"container": lease.container.id, **named}, body={}
                        )
        found = engine.find_image("ropewalk-test-pool:latest")
        assert found is not None
        assert len(images) == 1
        assert found["Id"] not in images  # the name has moved
    finally:
        engine.call("DELETE", "/images/ropewalk-test-pool:latest", query={"force": "true"})


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
def test_dead_owner_leaves_no_containers(engine: DockerEngine, how: str) -> None:
    """It dies while further containers are starting."""
    command = [sys.executable, "-c", OWNER, str(ROOT), str(ROOT / "tests" / "support"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "one is used\n"
        if how == "killed":
            owner.send_signal(signal.SIGKILL)
        owner.wait(WAIT_TIMEOUT_S)
        if how == "killed":
            eventually(lambda: list_labelled(engine, how) == [])
        assert list_labelled(engine, how) == []  # an interpreter that ends takes them along
        time.sleep(2)  # what the engine was making then is there by now, and removed as well
        eventually(lambda: list_labelled(engine, how) == [], WAIT_TIMEOUT_S if how == "killed" else 0)


# ---- engines that go away and come back


@pytest.fixture(scope="module")
def own(engine: DockerEngine) -> Iterator[OwnEngine]:
    require_own_engine()
    engine_of_its_own = OwnEngine()
    try:
        engine_of_its_own.start()
        engine_of_its_own.load(IMAGE)
        yield engine_of_its_own
    finally:
        engine_of_its_own.close()


@pytest.mark.soak
def test_an_owner_that_dies_while_the_engine_is_away_leaves_no_container(own: OwnEngine) -> None:
    engine = DockerEngine(EngineAddress(own.host))
    fields = {"command": list(options().command or ()), "stop_timeout_s": 0}
    with owner(IMAGE, host=own.host, **fields) as owning:
        assert exists(engine, owning.container)
        own.stop()
        owning.process.send_signal(signal.SIGKILL)
        owning.process.wait(WAIT_TIMEOUT_S)
        own.start()
        eventually(lambda: not exists(engine, owning.container), REMOVAL_TIMEOUT_S)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_pools_and_providers_survive_the_restart_of_their_engine(
    own: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", own.host)
    provider = LocalDockerProvider(IMAGE, options=options())
    with DockerPool(IMAGE, 2, options=options()) as pool:
        pool.wait(timeout_s=WAIT_TIMEOUT_S)
        used = pool.lease(WAIT_TIMEOUT_S)
        provider.start()
        container = provider.container
        assert container is not None
        before = own.docker("ps", "-aq", "--no-trunc").stdout.split()
        own.stop()
        with pytest.raises(PoolTimeoutError, match="expected a Docker engine at unix://"):
            pool.lease(3)
        used.close()  # while there is no engine that could remove it
        with pytest.raises(EngineUnavailableError, match="start one"):
            provider.stop()
        with pytest.raises(EngineUnavailableError):
            LocalDockerProvider(IMAGE).start()
        own.start()
        assert exists(DockerEngine.find(), container.id)
        provider.stop()
        assert not exists(DockerEngine.find(), container.id)
        with pool.lease(WAIT_TIMEOUT_S) as lease:
            assert healthy(lease.url)
            assert lease.container.id not in before
        pool.wait(timeout_s=WAIT_TIMEOUT_S)
        eventually(lambda: len(own.docker("ps", "-aq").stdout.split()) == 2)
        assert not set(before) & set(own.docker("ps", "-aq", "--no-trunc").stdout.split())
        assert pool.state.last_failure is None
    assert own.docker("ps", "-aq").stdout == ""

"""An engine that goes away and comes back: nothing is lost sight of. Each test has an engine of its own."""

import signal
import time
from collections.abc import Iterator

import pytest
from own_engine import OwnEngine, require_own_engine
from owned_containers import GONE_S, PATIENCE_S, eventually, exists, owner
from slim_server import IMAGE, options

from openenv_core import EngineUnavailable
from openenv_core.providers.docker import Engine, LocalDockerProvider
from openenv_core.providers.docker._wire import Address

pytestmark = [pytest.mark.docker, pytest.mark.soak]


@pytest.fixture(scope="module")
def own(engine: Engine) -> Iterator[OwnEngine]:
    require_own_engine()
    engine_of_its_own = OwnEngine()
    try:
        engine_of_its_own.start()
        engine_of_its_own.load(IMAGE)
        yield engine_of_its_own
    finally:
        engine_of_its_own.close()


def test_an_owner_that_dies_while_the_engine_is_away_leaves_no_container(own: OwnEngine) -> None:
    engine = Engine(Address(own.host))
    fields = {"command": list(options().command or ()), "stop_timeout_s": 0}
    with owner(IMAGE, host=own.host, **fields) as owning:
        assert exists(engine, owning.container)
        own.stop()
        owning.process.send_signal(signal.SIGKILL)
        owning.process.wait(PATIENCE_S)
        time.sleep(1)
        own.start()
        eventually(lambda: not exists(engine, owning.container), GONE_S)


def test_a_container_that_could_not_be_removed_is_removed_later(
    own: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", own.host)
    engine = Engine.find()
    provider = LocalDockerProvider(IMAGE, options=options())
    provider.start()
    container = provider.container
    assert container is not None
    own.stop()
    with pytest.raises(EngineUnavailable, match="start one"):
        provider.stop()
    with pytest.raises(EngineUnavailable):
        LocalDockerProvider(IMAGE).start()
    own.start()
    assert exists(engine, container.id)
    provider.stop()
    assert not exists(engine, container.id)

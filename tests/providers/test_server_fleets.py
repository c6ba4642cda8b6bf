"""What all fleets share, on servers in processes of this machine: updates, scaling, clients of several servers."""

import threading
from collections.abc import Iterator

import pytest
from process_fleet import ProcessFleet
from serve_process import SUPPORT, eventually

from envs.blackjack_env import BlackjackAction, BlackjackEnv
from openenv_core import SyncEnvClient, make
from openenv_core.client.tools import MCPToolClient
from openenv_core.errors import CapacityError, ConfigurationError, EpisodeLostError, ProviderError
from openenv_core.providers.fleet import read_load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SUPPORT)
    monkeypatch.setattr("openenv_core.providers.fleet.POLL_INTERVAL_S", 0.01)


@pytest.fixture
def tally() -> Iterator[ProcessFleet]:
    with ProcessFleet("tally:app", 2, ROPEWALK_MAX_SESSIONS="2") as fleet:
        yield fleet


def connect(fleet: ProcessFleet, number: int) -> "SyncEnvClient":
    """Open a session on one server, of an environment that is not deterministic."""
    url = fleet.servers()[number].url
    env = MCPToolClient(url, token=fleet.token, queue_timeout_s=0).sync()
    env.reset()
    return env


def test_an_update_under_load_is_noticed_by_nobody() -> None:
    with BlackjackEnv(provider=(fleet := ProcessFleet("blackjack", 2)), token=fleet.token).sync() as env:
        urls = fleet.urls()
        envs = [env, *(env.new_session() for _ in range(5))]

        def play() -> list[object]:
            seen = []
            for seed, each in enumerate(envs):
                seen.append(each.reset(seed=seed).observation)
                while not seen[-1].done:
                    seen.append(each.step(BlackjackAction(action="hit")).observation)
            return seen

        expected = play()
        rolling = threading.Thread(target=fleet.roll)
        rolling.start()
        while rolling.is_alive():
            assert play() == expected
        assert fleet.urls() == urls
        # The client asks for the servers anew when none of those that it knows answers.
        fleet._resize(0)
        fleet._resize(1)
        assert fleet.urls()[0] not in urls
        assert play() == expected
    assert fleet.servers() == []


def test_sessions_go_to_the_emptier_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv_core.client.servers.CAPACITY_TIMEOUT_S", 60.0)
    with ProcessFleet("blackjack", 2) as fleet:
        first, second = fleet.urls()
        with make(first, token=fleet.token) as env:
            crowd = [env.new_session() for _ in range(4)]
            eventually(lambda: fleet.load().in_use == 5)
            with make([first, second], token=fleet.token) as other:
                others = [other.new_session() for _ in range(3)]
                assert {each.base_url for each in (other, *others)} == {second}
            assert len(crowd) == 4
        fleet.providers["games-1"].stop()
        with make([first, second], token=fleet.token) as env:
            assert env.base_url == first


def test_a_stop_ends_a_start_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, errors = ProcessFleet("blackjack", 2), []
    monkeypatch.setattr(fleet, "_resize", lambda servers: begun.set() if servers else None)
    begun = threading.Event()

    def start() -> None:
        with pytest.raises(ProviderError, match="stopped meanwhile") as raised:
            fleet.start()
        errors.append(raised.value)

    starting = threading.Thread(target=start)
    starting.start()
    assert begun.wait(60)
    fleet.stop()  # as a client does after Ctrl-C
    starting.join(60)
    assert len(errors) == 1
    monkeypatch.undo()
    with fleet:
        assert len(fleet.urls()) == 2


def test_scaling_in_ends_no_session(tally: ProcessFleet) -> None:
    with connect(tally, 1) as env:
        with pytest.raises(ProviderError, match="games-1 to have no session"):
            tally.scale(1, idle_timeout_s=0.1)
        with pytest.raises(CapacityError, match="is stopping"):
            connect(tally, 1)
        assert [env.call_tool("add", amount=1) for _ in range(3)] == [1, 2, 3]
    tally.scale(1)
    assert [server.name for server in tally.servers()] == ["games-0"]
    tally.scale(2)
    with connect(tally, 1) as env:  # an update does not wait, and says so to who was playing
        tally.replace("games-1")
        with pytest.raises(EpisodeLostError):
            env.call_tool("add", amount=1)
    with pytest.raises(ConfigurationError, match="at least 1"):
        tally.scale(0)


def test_autoscaling_follows_the_queue(tally: ProcessFleet) -> None:
    stopping = threading.Event()

    def pause() -> None:
        if stopping.wait(0.02):
            raise KeyboardInterrupt

    def scale() -> None:
        with pytest.raises(KeyboardInterrupt):
            tally.autoscale(1, 3, pause)

    envs = [connect(tally, number) for number in (0, 0, 1, 1)]
    scaling = threading.Thread(target=scale)
    waiting = MCPToolClient(tally.urls()[0], token=tally.token).sync()
    opening = threading.Thread(target=waiting.reset)
    scaling.start()
    opening.start()
    try:
        eventually(lambda: len(tally.servers()) == 3)
        envs[0].close()  # who waits gets its place
        opening.join()
        envs[1].close()
        waiting.close()
        for env in envs[2:]:
            assert env.call_tool("add", amount=1) == 1
        # One server is enough once the others have no session.
        for env in envs[2:]:
            env.close()
        eventually(lambda: len(tally.servers()) == 1)
    finally:
        stopping.set()
        scaling.join()
    load = read_load(tally.urls()[0], tally.token)
    assert load is not None
    assert load.in_use == 0


def test_the_end_of_autoscaling_leaves_no_server_that_refuses_sessions(
    tally: ProcessFleet, caplog: pytest.LogCaptureFixture
) -> None:
    looks = iter(range(2))
    env = connect(tally, 1)

    def scale() -> None:
        with pytest.raises(StopIteration):
            tally.autoscale(1, 1, lambda: next(looks))

    scaling = threading.Thread(target=scale)
    scaling.start()
    eventually(lambda: "waiting for games-1" in caplog.text)
    assert [env.call_tool("add", amount=1) for _ in range(3)] == [1, 2, 3]
    env.close()
    scaling.join(60)
    assert [server.name for server in tally.servers()] == ["games-0"]

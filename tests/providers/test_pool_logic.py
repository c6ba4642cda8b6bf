"""The container pool without an engine: its members are servers of /health in threads of this process."""

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from serve_process import eventually

from openenv_core import ConfigurationError, ContainerOptions, GenericEnvClient
from openenv_core.errors import ImageNotFoundError, ProviderError
from openenv_core.providers.pool import DockerPool, PoolClosedError, PoolError, PoolTimeoutError

WAIT_TIMEOUT_S = 60


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        authorization = getattr(self.server, "authorization", None)
        if self.headers["Authorization"] != authorization:
            self.send_error(401)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "healthy"}')

    def log_message(self, *_: object) -> None:
        pass


class Tiny:
    """A member of a pool."""

    def __init__(self, home: "Home") -> None:
        self.home = home
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.options = ContainerOptions()
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), name="tiny")
        self.thread.start()
        self.dead = False

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()

    def alive(self) -> bool:
        return not self.dead

    def remove(self) -> None:
        self.home.removals += 1
        if self.home.removal_failures:
            self.home.removal_failures -= 1
            raise ProviderError("the engine is away")
        self.die()
        self.home.removed.append(self)


class Home:
    """Where members come from, and what became of them."""

    def __init__(self) -> None:
        self.makes: Callable[[Home], Tiny] = Tiny
        self.made: list[Tiny] = []
        self.removed: list[Tiny] = []
        self.removals = self.removal_failures = 0
        self.failures: list[BaseException] = []
        self.gate = threading.Event()
        self.gate.set()
        self.starting = 0
        self.starts: list[int] = []
        """How many were under way at each start, itself among them."""

    def start(self, stopping: threading.Event) -> Tiny:
        self.starting += 1
        self.starts.append(self.starting)
        try:
            while not self.gate.wait(0.01):
                if stopping.is_set():
                    raise ProviderError("stopped meanwhile")
            if self.failures:
                time.sleep(0.01)
                raise self.failures.pop(0)
            self.made.append(self.makes(self))
            return self.made[-1]
        finally:
            self.starting -= 1


class TinyPool(DockerPool):
    """A pool of a home's members."""

    def __init__(self, start: Callable[[threading.Event], Tiny], size: int, max_starting: int) -> None:
        super().__init__("no image", size, max_starting=max_starting)
        self._start_container: Any = lambda: start(self._stopping)


@pytest.fixture
def home() -> Iterator[Home]:
    home = Home()
    yield home
    for member in home.made:
        member.die()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IDLE_INTERVAL_S", "MIN_BACKOFF_S", "POLL_INTERVAL_S"):
        monkeypatch.setattr(f"openenv_core.providers.pool.{name}", 0.02)
    monkeypatch.setattr("openenv_core.providers.pool.MAX_BACKOFF_S", 0.05)


@contextmanager
def filled(home: "Home", size: int = 1) -> Iterator[TinyPool]:
    """A pool whose members are all there."""
    with TinyPool(home.start, size, size) as pool:
        pool.wait(timeout_s=WAIT_TIMEOUT_S)
        yield pool


def use_up(pool: TinyPool, timeout_s: float) -> None:
    for _ in range(10):
        pool.lease(timeout_s).close()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("openenv-pool")]


def test_each_member_is_handed_out_once_and_replaced(home: Home) -> None:
    with TinyPool(home.start, 2, 1) as pool:
        members = set()
        for _ in range(5):
            with pool.lease(WAIT_TIMEOUT_S) as lease:
                assert lease.container.alive()
                assert lease.url == lease.container.url
                members.add(lease.container)
        assert len(members) == 5
        assert max(home.starts) == 1
        eventually(lambda: len(home.removed) == 5 and pool.state.ready == 2)
        assert set(home.removed) == members
        state = pool.state
        assert (state.used, state.leaving, state.starting, state.last_failure) == (0, 0, 0, None)
    assert set(home.removed) == set(home.made)
    assert threads() == []


def test_pool_never_exceeds_its_size(home: Home) -> None:
    with TinyPool(home.start, 2, 2) as pool:
        first, second = pool.lease(WAIT_TIMEOUT_S), pool.lease(WAIT_TIMEOUT_S)
        with pytest.raises(PoolTimeoutError, match="of 2 containers 0 are ready, 0 starting, 2 used") as late:
            pool.lease(0.05)
        assert late.value.last_failure is None
        assert "give containers back" in str(late.value)
        assert len(home.made) == 2
        used = first.container, second.container
        first.close()
        first.close()
        with pool.lease(WAIT_TIMEOUT_S) as third:
            assert third.container not in used
            assert first.closed
            assert not second.closed
        with pytest.raises(PoolError, match="was given back; take another lease"):
            assert first.url  # its port may be the third's
        second.close()


def test_health_of_members_is_checked_with_their_token(home: Home) -> None:
    def with_token(home: Home) -> Tiny:
        """A member whose server wants a token, as a container's may."""
        member: Any = Tiny(home)
        member.server.authorization = "Bearer let-me-in"
        member.options = ContainerOptions(env_vars={"ROPEWALK_TOKENS": "let-me-in"})
        return member

    home.makes = with_token
    with TinyPool(home.start, 1, 1) as pool, pool.lease(WAIT_TIMEOUT_S) as lease:
        assert lease.container.alive()


def test_hanging_members_are_replaced_after_two_checks(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that hangs once is kept; the checks of one member do not delay those of others."""
    monkeypatch.setattr("openenv_core.providers.pool.HEALTH_TIMEOUT_S", 0.05)
    with filled(home, 3) as pool:
        slow, *hanging = home.made
        checks: list[Any] = []

        def healthy(member: Any, timeout_s: float) -> bool:
            checks.append(member)
            if member in hanging or (member is slow and checks.count(slow) == 1):
                time.sleep(timeout_s)
                return False
            return True

        monkeypatch.setattr("openenv_core.providers.pool.healthy", healthy)
        eventually(lambda: set(home.removed) == set(hanging) and pool.state.ready == 3)
        eventually(lambda: checks.count(slow) > 2)
        assert [checks.count(member) for member in hanging] == [2, 2]
        assert slow.alive()


def test_a_dead_member_is_not_handed_out(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv_core.providers.pool.IDLE_INTERVAL_S", 60)  # nobody looks but the hand-out
    with filled(home, 2) as pool:
        dead = list(home.made)
        for member in dead:
            member.die()
        with pool.lease(WAIT_TIMEOUT_S) as lease:
            assert lease.container not in dead


def test_failed_starts_are_retried_one_at_a_time(home: Home) -> None:
    home.failures = [ProviderError(f"trouble {i}") for i in range(8)]
    home.gate.clear()  # no start fails before all have begun
    with TinyPool(home.start, 3, 3) as pool:
        eventually(lambda: home.starting == 3)
        home.gate.set()
        pool.wait(timeout_s=WAIT_TIMEOUT_S)
        # The first three together, and one at a time until one has succeeded.
        assert max(home.starts[:3]) == 3
        assert home.starts[3:9] == [1] * 6
        assert home.failures == []
        assert (pool.state.failed, pool.state.last_failure) == (8, None)


def test_lease_timeout_carries_the_last_failure_and_a_missing_image_is_not_waited_for(home: Home) -> None:
    home.failures = [ProviderError("the engine is away")] * 1000
    with TinyPool(home.start, 1, 1) as pool:
        eventually(lambda: pool.state.failed)
        with pytest.raises(
            PoolTimeoutError, match=r"starts failed; the last failure: the engine is away"
        ) as late:
            pool.lease(0.1)
        assert isinstance(late.value.last_failure, ProviderError)
        assert late.value.__cause__ is late.value.last_failure
        home.failures = [ImageNotFoundError("expected an image 'x', got none")] * 1000
        eventually(lambda: isinstance(pool.state.last_failure, ImageNotFoundError))
        for ask in (pool.lease, lambda timeout_s: pool.wait(1, timeout_s)):
            with pytest.raises(PoolTimeoutError, match=r"no wait will bring one.*expected an image 'x'"):
                ask(3600.0)


def test_failed_removals_are_retried_and_count_against_the_size(home: Home) -> None:
    home.removal_failures = 1000
    with filled(home, 2) as pool:
        for _ in range(2):
            pool.lease(WAIT_TIMEOUT_S).close()
        with pytest.raises(
            PoolTimeoutError, match=r"2 are being removed.*the last failure: the engine is away"
        ):
            use_up(pool, 0.1)
        assert len(home.made) == 2
        home.removal_failures = 0
        pool.lease(WAIT_TIMEOUT_S).close()
        eventually(lambda: len(home.removed) >= 2)


def test_closing_ends_running_starts_and_leases(home: Home) -> None:
    pool = TinyPool(home.start, 3, 1)
    lease = pool.lease(WAIT_TIMEOUT_S)
    pool.wait(2, WAIT_TIMEOUT_S)
    home.gate.clear()
    pool.lease(WAIT_TIMEOUT_S).close()
    eventually(lambda: home.starting == 1)

    def wait() -> None:
        for _ in range(2):  # there is one
            pool.lease(WAIT_TIMEOUT_S)

    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(wait)
        eventually(lambda: pool.state.ready == 0)
        pool.close()
        with pytest.raises(PoolClosedError):
            waiting.result(WAIT_TIMEOUT_S)
    assert set(home.removed) == set(home.made)
    assert threads() == []
    lease.close()
    pool.close()
    for ask in (pool.lease, pool.wait, pool.start):
        with pytest.raises(PoolClosedError, match="make a new one"):
            ask()


def test_close_does_not_wait_for_removals_that_fail(home: Home) -> None:
    with filled(home) as pool:
        home.removal_failures = 10_000
        pool.close(0.1)
        assert home.removed == []
        home.removal_failures = 0
        eventually(lambda: len(home.removed) == 1 and threads() == [])  # the thread goes on


def test_dropped_lease_returns_its_member(home: Home) -> None:
    with filled(home) as pool:
        lease = pool.lease(WAIT_TIMEOUT_S)
        used = lease.container
        del lease
        gc.collect()
        eventually(lambda: used in home.removed)


def test_client_leases_a_member_on_use_and_returns_it(home: Home) -> None:
    with filled(home) as pool:
        client = pool.client(GenericEnvClient, lease_timeout_s=WAIT_TIMEOUT_S)
        assert pool.state.used == 0
        with pytest.raises(Exception, match="expected"), client:  # there is no environment in it
            pass
        eventually(lambda: len(home.removed) == 1)
        provider = pool.provider(WAIT_TIMEOUT_S)
        assert (provider.alive, provider.output()) == (False, "")
        url = provider.start()
        assert (provider.start(), provider.alive) == (url, True)
        with suppress(StopIteration):
            next(member for member in home.made if member.url == url).die()
        assert not provider.alive
        provider.stop()
        provider.stop()
        eventually(lambda: len(home.removed) == 2)


def test_fork_gets_no_members_and_removes_none(home: Home) -> None:
    with filled(home) as pool:
        with pool._changed:  # as another thread may
            fork = os.fork()
            if fork == 0:
                status = 1
                try:
                    pool.lease(WAIT_TIMEOUT_S)
                except PoolError as error:
                    pool.close()
                    status = 0 if "fork" in str(error) and not home.removals else 2
                finally:
                    os._exit(status)
        ended: list[tuple[int, int]] = []
        try:
            eventually(lambda: ended.append(os.waitpid(fork, os.WNOHANG)) or ended[-1][0])
            assert ended[-1][1] == 0
        finally:
            if not ended[-1][0]:
                os.kill(fork, signal.SIGKILL)
                os.waitpid(fork, 0)
        assert home.made[0].alive()


def test_stop_ends_a_waiting_start_in_another_thread(home: Home) -> None:
    with (
        TinyPool(home.start, 1, 1) as pool,
        pool.lease(WAIT_TIMEOUT_S),
        ThreadPoolExecutor(2) as callers,
    ):
        provider = pool.provider(3600.0)
        starting = callers.submit(provider.start)
        eventually(provider._lock.locked)
        time.sleep(0.05)
        callers.submit(provider.stop).result(WAIT_TIMEOUT_S)
        with pytest.raises(PoolError, match="its taker was stopped meanwhile"):
            starting.result(WAIT_TIMEOUT_S)


def test_impossible_settings_are_refused() -> None:
    for options, expected in (
        ({"size": 0}, "size"),
        ({"max_starting": 0}, "max_starting"),
        ({"memroy": "1g"}, "memory"),
    ):
        with pytest.raises(ConfigurationError, match=expected):
            DockerPool("x", **options)  # type: ignore[arg-type]


def test_all_containers_of_a_pool_are_of_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name moves to another image at every look."""
    looks = itertools.count()
    moving = SimpleNamespace(find_image=lambda _: {"Id": f"sha256:{next(looks)}"})
    started: list[Any] = []

    def start(image: str, *_: Any, image_id: str | None = None, **__: Any) -> Any:
        started.append((image, image_id))
        raise ProviderError("not now")

    monkeypatch.setattr("openenv_core.providers.pool.start_container", start)
    monkeypatch.setattr("openenv_core.providers.docker.engine.DockerEngine.find", lambda: moving)
    with DockerPool("image:latest", 2):
        eventually(lambda: len(started) >= 3)
    assert set(started) == {("image:latest", "sha256:0")}

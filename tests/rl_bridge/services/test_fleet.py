"""Roles on real Monarch: their death is noticed, told apart from an error, and nothing outlives the run."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl_bridge.errors import RoleFailed, TrainingError

pytestmark = pytest.mark.heavy

WAIT_S = 40.0
"""A bound for what would hang otherwise; none is meant to come near it."""
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _roles_can_import_their_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def until_gone(pids: set[int]) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(_alive(pid) for pid in pids):  # noqa: ASYNC110 - they are other processes
            await asyncio.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_role_answers_and_its_output_goes_to_its_log(tmp_path: Path) -> None:
    from fleet_roles import Worker

    from rl_bridge.services.fleet import Fleet

    before = descendants()
    async with Fleet(tmp_path / "logs") as fleet:
        worker = fleet.spawn("worker", Worker, 7, environment={"ROPEWALK_TEST": "set"})
        other = fleet.spawn("other", Worker, 8)
        assert await fleet.guard(worker.add.call_one(1)) == 8
        assert await fleet.guard(other.add.call_one(1)) == 9
        pid, variable = await fleet.guard(worker.describe.call_one())
        other_pid, other_variable = await fleet.guard(other.describe.call_one())
        assert len({pid, other_pid, os.getpid()}) == 3
        assert (variable, other_variable) == ("set", None)
        roles = {pid, other_pid} | (descendants() - before)
        assert roles
        assert "I am 7" in (tmp_path / "logs" / "worker.log").read_text()
        assert "I am 7" not in (tmp_path / "logs" / "other.log").read_text()
    await until_gone(roles)


async def test_a_role_that_dies_under_a_call_ends_it(tmp_path: Path) -> None:
    from fleet_roles import Worker

    from rl_bridge.services.fleet import Fleet

    before = descendants()
    async with Fleet(tmp_path / "logs") as fleet:
        worker = fleet.spawn("worker", Worker, 7)
        pid, _ = await fleet.guard(worker.describe.call_one())
        roles = {pid} | (descendants() - before)

        async def killed_midway() -> None:
            waiting = asyncio.ensure_future(_call(worker))
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            await waiting

        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RoleFailed, match="a process of the run died") as caught:
                await fleet.guard(killed_midway())
        # The end of its log tells why, where the role could say so.
        assert "I am 7" in str(caught.value)
        assert "worker.log" in str(caught.value)
    await until_gone(roles)


async def _call(worker: object) -> None:
    await worker.wait.call_one()  # type: ignore[attr-defined]


async def test_a_role_that_dies_while_nobody_calls_it_is_noticed(tmp_path: Path) -> None:
    from fleet_roles import Worker

    from rl_bridge.services.fleet import Fleet

    before = descendants()
    async with Fleet(tmp_path / "logs") as fleet:
        worker = fleet.spawn("worker", Worker, 7)
        other = fleet.spawn("other", Worker, 8)
        pid, _ = await fleet.guard(worker.describe.call_one())
        await fleet.guard(other.describe.call_one())
        roles = {pid} | (descendants() - before)
        cancelled = asyncio.Event()

        async def busy_elsewhere() -> None:
            os.kill(pid, signal.SIGKILL)
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RoleFailed, match="a process of the run died"):
                await fleet.guard(busy_elsewhere())
        assert cancelled.is_set()
        # From then on nothing more is begun.
        with pytest.raises(RoleFailed):
            await fleet.guard(asyncio.sleep(600))
    await until_gone(roles)


async def test_an_error_of_the_application_is_no_lost_role(tmp_path: Path) -> None:
    from fleet_roles import Worker
    from monarch.actor import ActorError

    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path / "logs") as fleet:
        worker = fleet.spawn("worker", Worker, 7)
        # One of ours comes out as what it was; it is raised, never returned as the call's value.
        with pytest.raises(TrainingError, match="the loss is strange") as caught:
            await fleet.guard(worker.fail.call_one(True))
        assert isinstance(caught.value.__cause__, ActorError)
        with pytest.raises(ActorError, match="ZeroDivisionError"):
            await fleet.guard(worker.fail.call_one(False))
        # The role is alive, and so is the fleet.
        assert await fleet.guard(worker.add.call_one(1)) == 8


async def test_an_error_of_the_controller_is_passed_on(tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    async def work() -> None:
        raise KeyError("mine")

    async with Fleet(tmp_path / "logs") as fleet:
        with pytest.raises(KeyError, match="mine"):
            await fleet.guard(work())


async def test_everything_ends_after_a_failure_too(tmp_path: Path) -> None:
    from fleet_roles import Worker

    from rl_bridge.services.fleet import Fleet

    roles: set[int] = set()

    async def fail() -> None:
        before = descendants()
        async with Fleet(tmp_path / "logs") as fleet:
            worker = fleet.spawn("worker", Worker, 7)
            pid, _ = await fleet.guard(worker.describe.call_one())
            roles.update({pid} | (descendants() - before))
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        await fail()
    assert roles
    await until_gone(roles)


async def test_a_report_that_comes_after_the_end_interrupts_nobody(tmp_path: Path) -> None:
    import monarch.actor

    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path / "logs"):
        pass
    # Monarch calls it whenever a dead role's report arrives; what it ships with exits the process.
    monarch.actor.unhandled_fault_hook("a role died some time ago")  # type: ignore[arg-type]


async def test_a_late_report_is_not_charged_to_the_next_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import monarch.actor
    from fleet_roles import Worker

    from rl_bridge.services import supervision
    from rl_bridge.services.fleet import Fleet

    reports: list[object] = []
    original = supervision._on_fault

    def recorded(failure: object) -> None:
        reports.append(failure)
        original(failure)

    monkeypatch.setattr(supervision, "_on_fault", recorded)
    async with Fleet(tmp_path / "first") as first:
        worker = first.spawn("worker", Worker, 7)
        pid, _ = await first.guard(worker.describe.call_one())
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RoleFailed):
                await first.guard(asyncio.sleep(600))
    assert reports, "without a real report this test shows nothing"
    async with Fleet(tmp_path / "second") as second:
        successor = second.spawn("worker", Worker, 8)
        for report in tuple(reports):  # handing one over records it once more
            monarch.actor.unhandled_fault_hook(report)  # type: ignore[arg-type]
        await asyncio.sleep(0)  # what a fault would be recorded by has run
        assert await second.guard(successor.add.call_one(1)) == 9


CONTROLLER = """
import asyncio, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from fleet_roles import Worker
from rl_bridge.services.fleet import Fleet

async def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the roles that are looked at here
    async with Fleet(Path({logs!r})) as fleet:
        worker = fleet.spawn("worker", Worker, 7)
        pid, _ = await fleet.guard(worker.describe.call_one())
        print(pid, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(await fleet.guard(worker.add.call_one(1)), flush=True)

asyncio.run(main())
"""


def start_controller(tmp_path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CONTROLLER.format(here=str(HERE), logs=str(tmp_path / "logs"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_interrupt_of_the_whole_group_leaves_the_roles_to_the_controller(tmp_path: Path) -> None:
    with start_controller(tmp_path) as controller:
        try:
            assert controller.stdin is not None
            assert controller.stdout is not None
            pid = int(controller.stdout.readline())
            os.killpg(controller.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
            controller.stdin.write("go on\n")
            controller.stdin.flush()
            assert controller.stdout.readline() == "8\n"
            assert controller.wait(WAIT_S) == 0
            assert not _alive(pid)
        finally:
            controller.kill()


async def test_roles_do_not_outlive_a_controller_that_is_killed(tmp_path: Path) -> None:
    with start_controller(tmp_path) as controller:
        try:
            assert controller.stdout is not None
            pid = int(controller.stdout.readline())
            roles = {pid, *(child.pid for child in psutil.Process(controller.pid).children(recursive=True))}
        finally:
            controller.kill()
    await until_gone(roles)

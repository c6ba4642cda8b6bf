"""The fleet on real Monarch: a loss for good ends the run, late reports do not, and nothing outlives it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from service_waits import WAIT_S, alive, descendants, until, until_gone

from rl_bridge.errors import RoleError

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

HERE = Path(__file__).parent


async def test_everything_ends_after_a_failure_too(roles: ModuleType, tmp_path: Path) -> None:
    from rl_bridge.services.fleet import Fleet

    started: set[int] = set()

    async def fail() -> None:
        before = descendants()
        async with Fleet(tmp_path / "logs") as fleet:
            worker = await roles.Worker.options(name="worker").as_actor(7)
            pid = await fleet.guard(worker.describe.route())
            started.update({pid} | (descendants() - before))
            await fleet.guard(broken())

    async def broken() -> None:
        raise KeyError("something else")

    with pytest.raises(KeyError, match="something else"):
        await fail()
    assert started
    await until_gone(started)


async def test_a_late_report_is_not_charged_to_the_next_fleet(
    roles: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import monarch.actor

    from rl_bridge.services import processes
    from rl_bridge.services.fleet import Fleet

    reports: list[object] = []
    original = processes._on_fault

    def recorded(failure: object) -> None:
        reports.append(failure)
        original(failure)

    monkeypatch.setattr(processes, "_on_fault", recorded)
    async with Fleet(tmp_path / "first") as first:
        worker = await roles.Worker.options(name="worker").as_actor(7)
        pid = await first.guard(worker.describe.route())
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RoleError):
                await first.guard(asyncio.sleep(600))
        await until(lambda: bool(reports))  # without a real report this test shows nothing
    async with Fleet(tmp_path / "second") as second:
        successor = await roles.Worker.options(name="worker").as_actor(8)
        for report in tuple(reports):  # handing one over records it once more
            monarch.actor.unhandled_fault_hook(report)  # type: ignore[arg-type]
        await asyncio.sleep(0)  # what a fault would be recorded by has run
        assert await second.guard(successor.add.route(1)) == 9
    # Nor does one interrupt anybody after the end: what Monarch ships with exits the process.
    monarch.actor.unhandled_fault_hook("a role died some time ago")  # type: ignore[arg-type]


CONTROLLER = """
import asyncio, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from service_roles import Worker
from rl_bridge.services.fleet import Fleet

async def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the roles that are looked at here
    async with Fleet(Path({logs!r})) as fleet:
        worker = await Worker.options(name="worker").as_actor(7)
        pid = await fleet.guard(worker.describe.route())
        print(pid, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(await fleet.guard(worker.add.route(1)), flush=True)

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
            assert not alive(pid)
        finally:
            controller.kill()


async def test_roles_do_not_outlive_a_controller_that_is_killed(tmp_path: Path) -> None:
    with start_controller(tmp_path) as controller:
        try:
            assert controller.stdout is not None
            pid = int(controller.stdout.readline())
            started = {pid, *(child.pid for child in psutil.Process(controller.pid).children(recursive=True))}
        finally:
            controller.kill()
    await until_gone(started)


LATE = """
import asyncio, sys
from pathlib import Path
from service_roles import Worker
from rl_bridge.services import shutdown
from rl_bridge.services.fleet import Fleet

shutdown.SHUTDOWN_TIMEOUT_S = 1e-6

async def main():
    async with Fleet(Path(sys.argv[1])):
        await Worker.options(name="worker").as_actor(7)

asyncio.run(main())
raise SystemExit(3)
"""


def test_a_goodbye_that_is_late_shows_nothing(tmp_path: Path) -> None:
    paths = [str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stderr

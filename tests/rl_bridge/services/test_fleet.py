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
from module_run import finished
from service_waits import WAIT_S, kill, pids_of, until, until_gone

from rl_bridge.errors import RoleError

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

HERE = Path(__file__).parent


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
        policy = await roles.Policy.as_actor()
        kill(*pids_of(policy))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RoleError):
                await first.guard(asyncio.sleep(600))
        await until(lambda: bool(reports))  # without a real report this test shows nothing
    async with Fleet(tmp_path / "second") as second:
        successor = await roles.Policy.as_actor()
        for report in tuple(reports):  # handing one over records it once more
            monarch.actor.unhandled_fault_hook(report)  # type: ignore[arg-type]
        await asyncio.sleep(0)  # what a fault would be recorded by has run
        assert await second.guard(successor.once.route()) == pids_of(successor)[0]
    # Nor does one interrupt anybody after the end: what Monarch ships with exits the process.
    monarch.actor.unhandled_fault_hook("a role died some time ago")  # type: ignore[arg-type]


CONTROLLER = """
import asyncio, signal, sys
from pathlib import Path
from service_roles import Policy
from rl_bridge.services.fleet import Fleet

async def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the roles that are looked at here
    async with Fleet(Path(sys.argv[1])) as fleet:
        policy = await Policy.as_actor()
        for line in sys.stdin:
            print(await fleet.guard(policy.once.route()), flush=True)

asyncio.run(main())
"""


@pytest.fixture
def environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.parametrize("killed", [False, True])
def test_roles_outlive_an_interrupt_of_the_whole_group_and_not_their_controller(
    tmp_path: Path, environment: dict[str, str], killed: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as controller:
        try:
            assert controller.stdin is not None
            assert controller.stdout is not None
            pids = []
            for _ in range(2):
                controller.stdin.write("who are you\n")
                controller.stdin.flush()
                pids.append(int(controller.stdout.readline()))
                os.killpg(controller.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
            assert pids[0] == pids[1]
            started = {child.pid for child in psutil.Process(controller.pid).children(recursive=True)}
            assert pids[0] in started
            if not killed:
                controller.stdin.close()
                assert controller.wait(WAIT_S) == 0
        finally:
            controller.kill()
    asyncio.run(until_gone(started))


LATE = """
import asyncio, sys
from pathlib import Path
from service_roles import Policy
from rl_bridge.services import own_process
from rl_bridge.services.fleet import Fleet

own_process.SHUTDOWN_TIMEOUT_S = 1e-6

async def main():
    async with Fleet(Path(sys.argv[1])):
        await Policy.as_actor()

asyncio.run(main())
raise SystemExit(3)
"""


def test_a_goodbye_that_is_late_shows_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    ended = finished(sys.executable, "-c", LATE, str(tmp_path), env=environment, timeout_s=200)
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stderr

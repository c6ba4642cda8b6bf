"""A controller on loopback which four hosts join; one leaves after a notice, one is killed, two stay to the end."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from service_roles import Policy
from service_waits import held, pids_of, until, until_gone

from rl_bridge.interface import find_free_port
from rl_bridge.services.fleet import Fleet
from rl_bridge.services.hosts import Hosts
from rl_bridge.services.joining import SECRET_FILE, JoinServer, make_secret


def start_host(controller: str, secret: Path) -> subprocess.Popen[str]:
    words = ["rl_bridge.services.worker", "--join", controller, "--secret-file", str(secret)]
    return subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True)


def is_on(pid: int, host: subprocess.Popen[str]) -> bool:
    return host.pid in {parent.pid for parent in psutil.Process(pid).parents()}


async def main(folder: Path) -> None:
    own = f"tcp://127.0.0.1:{find_free_port('127.0.0.1')}"
    server = JoinServer("127.0.0.1", 0, make_secret(folder))
    (folder / "wrong").write_text("guessed")
    async with (
        server,
        Fleet(folder / "logs", hosts=Hosts.this_machine(address=own), heartbeat_s=0.2) as fleet,
    ):
        policy = await Policy.options(max_replicas=3).as_service()
        await policy.load.fanout(7)
        async with server.admit(fleet):
            secret = folder / SECRET_FILE
            assert secret.stat().st_mode & 0o777 == 0o600
            stranger = start_host(server.address, folder / "wrong")
            first = start_host(server.address, secret)
            await until(lambda: policy.serving == 2)
            assert is_on(pids_of(policy)[1], first)
            assert not is_on(pids_of(policy)[0], first)
            assert {(await policy.generate.route())[1] for _ in range(4)} == {7}, "it has caught up"
            await until(lambda: stranger.poll() is not None)
            assert stranger.returncode == 1
            assert "the secret is not that of this run" in stranger.communicate()[1]

            second = start_host(server.address, secret)
            await until(lambda: policy.serving == 3)
            third = start_host(server.address, secret)
            await until(lambda: [event.kind for event in fleet.events].count("joined") == 3)
            assert len(policy.replicas) == 3, "the third host is idle"

            # A notice: what is in flight comes to its end, and the idle host takes over.
            wait = folder / "wait"
            wait.touch()
            calls = [asyncio.ensure_future(policy.once.route(wait)) for _ in range(3)]
            await until(lambda: held(folder) == 3)
            pids = pids_of(policy)
            first.send_signal(signal.SIGTERM)
            await until(lambda: policy.serving == 2)
            wait.unlink()
            assert sorted(await asyncio.gather(*calls)) == sorted(pids)
            await until(lambda: first.poll() is not None and policy.serving == 3)
            assert first.returncode == 0
            assert [is_on(pid, third) for pid in pids_of(policy)] == [False, False, True]

            # A loss: others repeat calls in flight, an idle host takes over, and the budget of restarts is left alone.
            fourth = start_host(server.address, secret)
            await until(lambda: [event.kind for event in fleet.events].count("joined") == 4)
            wait.touch()
            before = held(folder)
            calls = [asyncio.ensure_future(policy.generate.route(wait)) for _ in range(3)]
            await until(lambda: held(folder) == before + 3)
            lost = pids_of(policy)[1]
            os.kill(second.pid, signal.SIGKILL)
            await until(lambda: policy.serving == 3 and is_on(pids_of(policy)[-1], fourth))
            wait.unlink()
            assert lost not in {pid for pid, _, _ in await asyncio.gather(*calls)}
            await until_gone([lost])
            assert [row.restarts for row in policy.replicas] == [0, 0, 0]
        left = {process.pid for process in psutil.Process().children(recursive=True)}
    for host in (third, fourth):
        await until(lambda host=host: host.poll() is not None)
        assert host.returncode == 0, host.communicate()[1]
    await until_gone(left)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

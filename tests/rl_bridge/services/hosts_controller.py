"""A controller whose hosts are network namespaces: cuts a link, heals it, and checks what becomes of it.

Run inside the controller's namespace with the folder for logs, the link to the first host, and both addresses.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from service_roles import Policy
from service_waits import all_serve, held, pids_of, until, until_gone

from rl_bridge.services import placement
from rl_bridge.services.fleet import Fleet
from rl_bridge.services.hosts import Hosts

placement.HOST_AVOIDANCE_S = 8.0


def network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def set_link(name: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", name, state], check=True)


async def main(logs: Path, link: str, own: str, *workers: str) -> None:
    async with Fleet(logs, hosts=Hosts.workers(workers, address=own), heartbeat_s=0.5) as fleet:
        policy = await Policy.options(num_replicas=2).as_service()
        await policy.load.fanout(1)
        stranded, reachable = pids_of(policy)
        first, second = network_of(stranded), network_of(reachable)
        assert first != second, "one replica a host"
        wait = logs / "wait"
        wait.touch()
        waiting = [asyncio.ensure_future(policy.generate.route(wait)) for _ in range(2)]
        await until(lambda: held(logs) == 2)
        set_link(link, "down")
        wait.unlink()
        async with asyncio.timeout(90.0):
            async with asyncio.timeout(60.0):
                assert [pid for pid, _, _ in await asyncio.gather(*waiting)] == [reachable] * 2
            await until(lambda: [status.restarts for status in policy.replicas] == [1, 0])
            restarted = time.monotonic()  # the silent host is avoided since then, or a little longer
            await until(lambda: all_serve(policy))
        assert network_of(pids_of(policy)[0]) == second, "the new one is where the link is whole"
        assert {(await policy.generate.route())[1] for _ in range(4)} == {1}
        set_link(link, "up")
        await asyncio.sleep(max(0.0, restarted + placement.HOST_AVOIDANCE_S + 1.0 - time.monotonic()))
        more = await Policy.options(name="more").as_service()
        assert network_of(pids_of(more)[0]) == first, "the healed host serves again"
        # It is silence, not a death: nobody said that a process ended.
        assert not any("ended" in event.detail for event in fleet.events if event.kind == "lost"), (
            fleet.events
        )
        pids = [stranded, *pids_of(policy), *pids_of(more)]
    await until_gone(pids)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))

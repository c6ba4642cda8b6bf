"""A controller whose hosts are network namespaces: cuts a link, heals it, and prints what became of it.

Run inside the controller's namespace with the folder for logs, the link to the first host, and both addresses.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from service_roles import Policy
from service_waits import alive, held, until, until_gone

from rl_bridge.services import options
from rl_bridge.services.fleet import Fleet
from rl_bridge.services.hosts import Hosts

options.HOST_AVOIDANCE_S = 8.0


def network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def set_link(name: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", name, state], check=True)


async def main(logs: Path, link: str, own: str, *workers: str) -> dict[str, object]:
    found: dict[str, object] = {}
    async with Fleet(logs, hosts=Hosts.workers(workers, address=own), heartbeat_s=0.5) as fleet:
        policy = await Policy.options(num_replicas=2).as_service()
        await policy.load.fanout(1)
        first, second = (network_of(status.pids[0]) for status in policy.replicas)
        stranded = policy.replicas[0].pids[0]
        found["one replica a host"] = first != second
        wait = logs / "wait"
        wait.touch()
        waiting = [asyncio.ensure_future(policy.generate.route(wait)) for _ in range(2)]
        await until(lambda: held(logs) == 2)
        set_link(link, "down")
        wait.unlink()
        begin = time.monotonic()
        answers = await asyncio.gather(*waiting)
        found["calls are answered by who can be reached"] = [pid for pid, _, _ in answers] == [
            policy.replicas[1].pids[0]
        ] * 2
        found["seconds until they were"] = time.monotonic() - begin
        await until(lambda: [status.restarts for status in policy.replicas] == [1, 0])
        restarted = time.monotonic()  # the host that fell silent is avoided since then, or a little longer
        await until(lambda: all(status.state == "serving" for status in policy.replicas))
        found["seconds until two served again"] = time.monotonic() - begin
        found["the new one is where the link is whole"] = network_of(policy.replicas[0].pids[0]) == second
        found["versions"] = sorted({(await policy.generate.route())[1] for _ in range(4)})
        set_link(link, "up")
        await asyncio.sleep(max(0.0, restarted + options.HOST_AVOIDANCE_S + 1.0 - time.monotonic()))
        more = await Policy.options(name="more").as_service()
        found["the healed host serves again"] = network_of(more.replicas[0].pids[0]) == first
        found["events"] = [(event.replica, event.kind, event.detail) for event in fleet.events]
        replicas = [*policy.replicas, *more.replicas]
        pids = [stranded, *(pid for status in replicas for pid in status.pids)]
    with contextlib.suppress(TimeoutError):
        await until_gone(pids)
    found["left over"] = [pid for pid in pids if alive(pid)]
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))))  # noqa: T201

"""A controller which a host joins that reads the weights of a publisher here; run it in the controller's namespace.

Arguments: the folder for logs, this host's address, and the words before a command that is to run on the other host.
"""

import asyncio
import sys
from pathlib import Path

import torch
from store_roles import Publisher, Reader
from store_stage import state_of

from rl_bridge.interface import find_free_port
from rl_bridge.services.fleet import Fleet
from rl_bridge.services.hosts import Hosts
from rl_bridge.services.joining import SECRET_FILE, JoinServer, make_secret
from rl_bridge.weights import WeightStore

LIMIT_S = 100.0
"""A bound for what would hang otherwise; none is meant to come near it."""


async def main(folder: Path, own: str, inside: list[str]) -> None:
    server = JoinServer(own, 0, make_secret(folder))
    hosts = Hosts.this_machine(address=f"tcp://{own}:{find_free_port(own)}")
    async with asyncio.timeout(LIMIT_S), server, Fleet(folder / "logs", hosts=hosts) as fleet:
        store = WeightStore.create(transport="rdma")
        publisher = await Publisher.options(name="publisher").as_actor(store)
        reader = await Reader.options(name="reader", max_replicas=2).as_service(store)
        await publisher.put.route(1, 1.0)
        async with server.admit(fleet):
            words = ["--join", server.address, "--secret-file", str(folder / SECRET_FILE)]
            command = [*inside, sys.executable, "-m", "rl_bridge.services.worker", *words]
            host = await asyncio.create_subprocess_exec(*command)
            try:
                while reader.serving < 2:  # noqa: ASYNC110 - another process makes it true
                    await asyncio.sleep(0.05)
                for version in (2, 3):
                    await publisher.put.route(version, float(version))
                    read = await reader.get.fanout(version)
                    assert sorted(read.values) == [0, 1], read.failed
                    for state in read.values.values():
                        for name, tensor in state_of(float(version)).items():
                            assert torch.equal(state[name], tensor)
            finally:
                host.terminate()
                status = await host.wait()
            assert (status, len(reader.replicas)) == (0, 1)
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))

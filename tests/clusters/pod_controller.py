"""What the controller's pod runs, on this machine: its service account is in a folder, named first.

`hosts` starts replicas on the pods, and prints which pod each is on; `train` is `ropewalk train` with further words.
"""

import asyncio
import json
import sys
from pathlib import Path

import kubernetes.config.incluster_config as account

from examples.grpo_blackjack.kubernetes.job import pods
from openenv_core.cli.main import main as ropewalk


async def hosts(logs: str, address: str) -> None:
    from service_roles import Policy

    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.hosts import Hosts

    job = pods()
    labels = "app.kubernetes.io/name=ropewalk,app.kubernetes.io/component=cpus"
    job.add_mesh("cpus", num_replicas=2, label_selector=labels)
    there = Hosts.from_job(job, mesh="hosts", cpu_mesh="cpus", gpus_per_host=1, address=address)
    async with Fleet(Path(logs), hosts=there, heartbeat_s=0.5):
        needy = await Policy.options(name="needy", num_replicas=2, with_gpus=True).as_service()
        modest = await Policy.options(name="modest", num_replicas=2).as_service()
        answers = await modest.load.fanout(3)
        found = {
            "needy": [parent(status.pids[0]) for status in needy.replicas],
            "modest": [parent(status.pids[0]) for status in modest.replicas],
            "versions": sorted(answers.values.values()),
        }
    print(json.dumps(found))  # noqa: T201


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


if __name__ == "__main__":
    folder, what, *words = sys.argv[1:]
    account.SERVICE_TOKEN_FILENAME = f"{folder}/token"
    account.SERVICE_CERT_FILENAME = f"{folder}/ca.crt"
    if what == "hosts":
        asyncio.run(hosts(*words))
    else:
        sys.exit(ropewalk(["train", *words]))

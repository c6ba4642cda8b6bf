"""Several hosts: as processes, and as network namespaces whose link is cut."""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from free_ports import free_ports
from module_run import finished
from namespaces import CONTROLLER_ADDRESS, inside, namespaces
from service_waits import kill, pids_of, until, until_gone

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
WORKER = (
    "import sys; from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(ca='trust_all_connections', address=sys.argv[1])"
)


def test_a_cut_link_is_noticed_and_healed(tmp_path: Path) -> None:
    own = f"tcp://{CONTROLLER_ADDRESS}:26700"
    with namespaces(2) as (controller, hosts), contextlib.ExitStack() as stack:
        workers = [f"tcp://{host.address}:26600" for host in hosts]
        for host, worker in zip(hosts, workers, strict=True):
            process = subprocess.Popen([*inside(host.namespace), sys.executable, "-c", WORKER, worker])
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        words = [str(HERE / "hosts_controller.py"), str(tmp_path / "logs"), hosts[0].link, own, *workers]
        ran = finished(*inside(controller), sys.executable, *words, timeout_s=250)
    assert ran.returncode == 0, ran.stderr


async def test_the_hosts_of_a_job_share_the_replicas(roles: ModuleType, tmp_path: Path) -> None:
    from monarch.job import ProcessJob

    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.hosts import Hosts

    hosts = Hosts.from_job(ProcessJob({"machines": 2}), mesh="machines", gpus_per_host=2)
    async with Fleet(tmp_path, hosts=hosts, heartbeat_s=0.2) as fleet:
        policy = await roles.Policy.options(num_replicas=2).as_service()
        await policy.load.fanout(1)
        parents = {psutil.Process(pid).ppid() for pid in pids_of(policy)}
        assert len(parents) == 2
        ranks = await roles.Ranks.options(hosts=2, procs=2, with_gpus=True).as_actor()
        assert len(set(pids_of(ranks))) == 4
        assert {psutil.Process(pid).ppid() for pid in pids_of(ranks)} == parents
        shown = [
            await target.call_all("variable", ("CUDA_VISIBLE_DEVICES",), {})
            for target in ranks.roster.targets
        ]
        assert shown == [["0", "1", "0", "1"]]
        kill(pids_of(policy)[0])
        await until(lambda: policy.replicas[0].restarts == 1 and policy.replicas[0].state == "serving")
        assert (await fleet.guard(policy.generate.route()))[1] == 1
        pids = [*pids_of(policy), *pids_of(ranks)]
    await until_gone([*pids, *parents])


SBATCH = """#!/bin/sh
cat > "$STAND_IN/script"
setsid bash "$STAND_IN/script" >"$STAND_IN/output" 2>&1 &
echo $! > "$STAND_IN/pid"
echo "Submitted batch job 7"
"""
SQUEUE = """#!/bin/sh
echo '{"jobs": [{"job_state": ["RUNNING"], "job_resources": {"nodes": {"allocation": [{"name": "'$(hostname)'"}]}}}]}'
"""
SRUN = """#!/bin/sh
SLURM_NODEID=0 exec "$@"
"""
SCANCEL = """#!/bin/sh
echo "$1" >> "$STAND_IN/cancelled"
kill -9 -- -$(cat "$STAND_IN/pid")
for process in /proc/[0-9]*; do
  variables=$(tr '\\0' '\\n' < "$process/environ" 2>/dev/null) || continue
  case $variables in
    *"STAND_IN=$STAND_IN"*) case $variables in *SLURM_NODEID=0*) kill -9 "${process#/proc/}" ;; esac ;;
  esac
done
exit 0
"""
SLURM_CONTROLLER = """
import asyncio, sys
from pathlib import Path
from monarch.job import SlurmJob
from service_roles import Policy
from rl_bridge.services.fleet import Fleet
from rl_bridge.services.hosts import Hosts

async def main(folder):
    job = SlurmJob(
        {"machines": 1}, python_exe=sys.executable, monarch_port=int(sys.argv[2]), partition="gpu", log_dir=str(folder)
    )
    hosts = Hosts.from_job(job, mesh=sys.argv[4], address=sys.argv[3])
    async with Fleet(folder / "logs", hosts=hosts):
        policy = await Policy.options(num_replicas=2).as_service()
        print((await policy.load.fanout(3)).values)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("mesh", ["machines", "mistyped"])
def test_a_slurm_job_is_submitted_used_and_cancelled(tmp_path: Path, mesh: str) -> None:
    """Slurm itself is a stand-in of four scripts that run the job here; the job and its script are Monarch's."""
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("srun", SRUN), ("scancel", SCANCEL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port, own = free_ports(2)
    ran = finished(
        *(sys.executable, "-c", SLURM_CONTROLLER, str(tmp_path), str(port), f"tcp://127.0.0.1:{own}", mesh),
        env={**os.environ, "STAND_IN": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout_s=100,
    )
    if mesh == "machines":
        assert ran.returncode == 0, ran.stderr
        assert ast.literal_eval(ran.stdout.splitlines()[-1]) == {0: 3, 1: 3}
    else:
        assert "RoleError: expected to reach the hosts 'mistyped' of SlurmJob" in ran.stderr
    script = (tmp_path / "script").read_text()
    assert "#SBATCH --nodes=1" in script
    assert "#SBATCH --partition=gpu" in script
    # However it ends, the allocation is given back.
    assert (tmp_path / "cancelled").read_text() == "7\n"

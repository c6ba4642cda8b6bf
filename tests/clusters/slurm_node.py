"""A Slurm of a test's own: Debian's daemons, unpacked and run from folders, with nothing installed.

It has one node, or one in each of several network namespaces.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from free_ports import free_ports
from missing import missing
from module_run import end, finished
from namespaces import CONTROLLER_ADDRESS, NamespaceHost

PACKAGES = (
    "libhwloc15",
    "liblua5.1-0",
    "libmunge2",
    "munge",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurmctld",
    "slurmd",
)
CACHE = Path("/var/tmp/ropewalk-slurm")
START_S = 60
DOWNLOAD_S = 300

# Who uses it is who runs the test.
CONFIG = """
ClusterName=test
SlurmctldHost={controller}
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def require_slurm() -> Path:
    """The folder of Debian's Slurm, fetched where it is not there; the test is skipped where it cannot be had."""
    root = CACHE / "root"
    if (root / ".complete").exists():
        return root
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        missing("needs Slurm from the packages of Debian or its kin")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        fetched = _apt(made, "download", *PACKAGES)
        if fetched.returncode:  # what is on offer may not be known here yet
            _apt(made, "update")
            fetched = _apt(made, "download", *PACKAGES)
        if fetched.returncode:
            missing(f"needs {', '.join(PACKAGES)} of this distribution: {fetched.stderr.strip()[-300:]}")
        unpacked = Path(made, "root")
        for package in Path(made).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True, timeout=60)
        (unpacked / ".complete").touch()
        shutil.rmtree(root, ignore_errors=True)
        unpacked.rename(root)
    return root


def _apt(folder: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return finished("apt-get", "-q", *words, cwd=folder, timeout_s=DOWNLOAD_S)


class SlurmNode:
    """munged, slurmctld and slurmd, with keys, ports and spools of their own.

    Args:
        root: The folder of `require_slurm`.
        hosts: The namespaces of the nodes `node1` and so on, each with two CPUs, real or not; none for this machine as
            the only node.
        controller: The namespace of slurmctld, in which commands run.
    """

    def __init__(
        self, root: Path, hosts: Sequence[NamespaceHost] = (), controller: str | None = None
    ) -> None:
        self._hosts = {f"node{number}": host for number, host in enumerate(hosts, 1)}
        self.home = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._root = root
        self._controller = [] if controller is None else self._inside(controller)
        (library,) = root.glob("usr/lib/*/slurm-wlm")
        self._plugins = library
        self.environment = {
            **os.environ,
            "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{library}:{library.parent}",
            "SLURM_CONF": str(self.home / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "SlurmNode":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Jobs of a test that failed: a step outlives the daemon that has started it.
        for process in self.processes():
            if process.pid not in {daemon.pid for daemon in self._daemons}:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for daemon in reversed(self._daemons):
            end(daemon)
        shutil.rmtree(self.home, ignore_errors=True)

    def run(self, *words: str, timeout_s: float = 30, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = finished(*self._controller, *words, env=self.environment, timeout_s=timeout_s)
        if check:
            assert done.returncode == 0, (words, done.stdout, done.stderr, self.logs())
        return done.stdout

    def state(self, job: str) -> str:
        """A job's state, RUNNING or COMPLETED for example."""
        shown = self.run("scontrol", "show", "job", "-o", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait(self, job: str, *states: str, timeout_s: float) -> str:
        """Wait for one of the states; returns which."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, (state, self.logs())
            time.sleep(0.2)
        return state

    def wait_idle(self, *, timeout_s: float) -> None:
        """Wait until the node has nothing to do, and has told the end of all that it did."""
        deadline = time.monotonic() + timeout_s
        while self.run("sinfo", "--noheader", "--format=%t", check=False).strip() != "idle":
            died = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not died, (died, self.logs())
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"--- {log.name} ---\n{log.read_text()[-2000:]}" for log in self.home.glob("*.log"))

    def processes(self) -> list[psutil.Process]:
        """Everything that was started under this Slurm."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # Steps have the daemon's log, and no environment to be known by.
                if process.name().startswith("slurmstepd"):
                    mine = any(file.path.startswith(f"{self.home}/") for file in process.open_files())
                else:
                    mine = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if mine:
                    found.append(process)
        return found

    def _start(self) -> None:
        home, ports = self.home, free_ports(2)
        nodes = [f"NodeName={name} NodeAddr={host.address} CPUs=2" for name, host in self._hosts.items()]
        for name in ("state", *(f"spool-{node}" for node in self._hosts or ("localhost",))):
            (home / name).mkdir()
        names = ["127.0.0.1 localhost", *(f"{host.address} {name}" for name, host in self._hosts.items())]
        (home / "hosts").write_text("\n".join([*names, ""]))
        (home / "munge.key").write_bytes(secrets.token_bytes(1024))
        (home / "munge.key").chmod(0o400)
        user = pwd.getpwuid(os.geteuid()).pw_name
        (home / "slurm.conf").write_text(
            CONFIG.format(
                home=home,
                plugins=self._plugins,
                user=user,
                controller=f"{socket.gethostname()}({CONTROLLER_ADDRESS})" if nodes else "localhost",
                nodes="\n".join(nodes or [f"NodeName=localhost CPUs={os.cpu_count()} State=UNKNOWN"]),
                ctld=ports[0],
                slurmd=ports[1],
            )
        )
        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        places = [f"--{option}={home}/munge.{option.removesuffix('-file')}" for option in files]
        self._daemon("munged", "--foreground", "--force", *places)
        self._daemon("slurmctld-wlm", "-D", "-i", "-f", f"{home}/slurm.conf", prefix=self._controller)
        step = f"{self._root}/usr/sbin/slurmstepd-wlm"
        for node in self._hosts or ("localhost",):
            words = ("-D", "-N", node, "-f", f"{home}/slurm.conf", "-d", step)
            prefix = self._inside(self._hosts[node].namespace) if self._hosts else ()
            self._daemon("slurmd-wlm", *words, prefix=prefix)
        self.wait_idle(timeout_s=START_S)

    def _inside(self, namespace: str) -> list[str]:
        """Return the words before a command in a namespace, where the nodes have names.

        Not `ip netns exec`: that replaces /sys, whose control groups slurmd needs.
        """
        enter = (
            'mount --bind "$0" /etc/hosts && namespace=$1 && shift && exec nsenter --net="$namespace" "$@"'
        )
        words = ["unshare", "--mount", "--propagation=private", "sh", "-c", enter]
        return [*words, f"{self.home}/hosts", f"/run/netns/{namespace}"]

    def _daemon(self, name: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        with (self.home / f"{name}-{len(self._daemons)}.out.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*prefix, f"{self._root}/usr/sbin/{name}", *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

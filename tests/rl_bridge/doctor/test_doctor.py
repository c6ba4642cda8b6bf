"""What the doctor looks at: requirements, the machine, what a configuration counts on."""

import importlib.metadata
import json
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_bridge.config import Config, load_config
from rl_bridge.doctor import host as host_module
from rl_bridge.doctor.host import (
    CgroupLimits,
    Finding,
    Severity,
    counted_on,
    limits,
    machine,
    packages,
    requirements,
)

FILE = "env: {app: 'a:b'}\nrollout: {task: 'c:D'}\n"


def named(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_requirements_of_an_extra_include_those_of_the_extras_it_names() -> None:
    lines = [
        "httpx>=0.27",
        'a==1; extra == "one"',
        'ropewalk[two]; extra == "one"',
        'a>=0.5; extra == "two"',
        'b<3; extra == "two"',
        'ropewalk[one]; extra == "two"',
        'c; extra == "three"',
    ]
    found = requirements(lines, "one")
    assert {name: set(map(str, versions)) for name, versions in found.items()} == {
        "a": {"==1", ">=0.5"},
        "b": {"<3"},
    }


def test_packages_are_compared_with_what_the_extra_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.13.0+cpu", "vllm": "0.31.0", "numpy": "2.4.0rc1"}

    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    wanted = ("torch==2.13.0", "vllm==0.32.0", "torchtitan==0.3.0", "numpy>=1.26")
    asked = [f'{requirement}; extra == "rl"' for requirement in wanted]
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked)
    found = named(packages())
    assert (found["torch"].level, found["torch"].told) == (Severity.GOOD, "2.13.0+cpu")
    assert found["numpy"].level is Severity.GOOD
    assert (found["vllm"].level, found["torchtitan"].level) == (Severity.ODD, Severity.BAD)
    assert "expected ==0.32.0, got 0.31.0; pip install 'ropewalk[rl]'" in found["vllm"].told


def test_limits_of_a_container_are_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "usable_gpus", lambda: 0)
    allowed = CgroupLimits(memory=3 << 20, memory_used=1 << 20, cores=0.5)
    monkeypatch.setattr(host_module, "limits", lambda: allowed)
    found = named(machine())
    assert found["cores"].metrics["cores"] == 0.5
    assert found["memory"].metrics["free_gb"] == pytest.approx(2 * 2**20 / 1e9)
    assert "limit (cgroup)" in found["memory"].told
    monkeypatch.setattr(host_module, "limits", lambda: CgroupLimits(memory=1 << 59, cores=1e4))
    assert not any("limit" in named(machine())[what].told for what in ("cores", "memory"))


def cgroup(root: Path, own: str, **files: str) -> CgroupLimits:
    root.mkdir(exist_ok=True)
    (root / "self").write_text(own)
    for name, content in files.items():
        file = root / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return limits(cgroups=root, own=root / "self")


def test_limits_of_cgroups_2_are_those_of_the_tightest_around(tmp_path: Path) -> None:
    found = cgroup(
        tmp_path,
        "0::/pod/one\n",
        pod__one__memory_DOT_max="max\n",
        pod__one__cpu_DOT_max="max 100000\n",
        pod__memory_DOT_max="8000\n",
        pod__memory_DOT_current="3000\n",
        pod__memory_DOT_stat="anon 1\ninactive_file 1000\n",
        pod__cpu_DOT_max="250000 100000\n",
        memory_DOT_max="9000\n",
    )
    assert found == CgroupLimits(memory=8000, memory_used=2000, cores=2.5)


def test_limits_of_a_container_whose_path_is_the_machines(tmp_path: Path) -> None:
    assert cgroup(tmp_path, "0::/docker/x\n", cpu_DOT_max="50000 100000\n") == CgroupLimits(cores=0.5)
    assert cgroup(tmp_path / "none", "7:memory:/\n") == CgroupLimits()


def test_what_a_small_container_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20, total=64 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(host_module, "usable_gpus", lambda: 0)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    found = named(machine())
    assert (found["/dev/shm"].level, found["descriptors"].level) == (Severity.ODD, Severity.ODD)
    assert "--shm-size" in found["/dev/shm"].told
    assert found["GPUs"].level is Severity.BAD
    assert "CUDA_VISIBLE_DEVICES" in found["GPUs"].told


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port that is held and refuses whoever connects."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def loaded(tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    return load_config(file, overrides)


def test_gpus_of_the_roles(tmp_path: Path) -> None:
    config = loaded(tmp_path, "trainer.num_gpus=2")
    assert named(counted_on(config, gpus=1))["GPUs of the roles"].level is Severity.BAD
    assert named(counted_on(config, gpus=2))["GPUs of the roles"].level is Severity.GOOD  # they take turns
    apart = loaded(tmp_path, "trainer.num_gpus=2", "monarch.colocate=false")
    assert named(counted_on(apart, gpus=2))["GPUs of the roles"].level is Severity.BAD
    assert named(counted_on(apart, gpus=3))["GPUs of the roles"].level is Severity.GOOD
    elsewhere = loaded(tmp_path, "trainer.num_gpus=2", "monarch.job=a:b")
    assert "GPUs of the roles" not in named(counted_on(elsewhere, gpus=0))


def test_ports_are_the_first_hosts_alone(tmp_path: Path) -> None:
    """On the others the controller's address is not theirs, which is as it should be."""
    config = loaded(tmp_path, "monarch.master_addr=192.0.2.1", "monarch.job=a:b", "monarch.num_nodes=2")
    first, second = (counted_on(config, gpus=0, node_rank=rank) for rank in (0, 1))
    assert [one.level for one in first if one.what.startswith("monarch")] == [Severity.BAD, Severity.BAD]
    assert [one.level for one in second] == [Severity.GOOD]


def test_ports_of_the_controller(tmp_path: Path, listener: int) -> None:
    def levels(*overrides: str) -> dict[str, Severity]:
        found = counted_on(loaded(tmp_path, *overrides), gpus=0)
        return {one.what: one.level for one in found if one.what.startswith("monarch")}

    assert levels() == {"monarch.coord_port": Severity.GOOD}
    assert levels(f"monarch.coord_port={listener}") == {"monarch.coord_port": Severity.BAD}
    assert levels(f"monarch.master_port={listener}") == {"monarch.coord_port": Severity.GOOD}
    assert levels(f"monarch.master_port={listener}", "monarch.job=a:b")["monarch.master_port"] is Severity.BAD
    elsewhere = "monarch.master_addr=192.0.2.1"
    assert levels(elsewhere) == {"monarch.coord_port": Severity.ODD}
    assert levels(elsewhere, "monarch.job=a:b")["monarch.coord_port"] is Severity.BAD
    told = named(counted_on(loaded(tmp_path, elsewhere), gpus=0))["monarch.coord_port"].told
    assert "192.0.2.1:0 is no address of this host" in told


def test_servers_and_workers_that_somebody_else_started(
    tmp_path: Path, listener: int, deaf_port: int
) -> None:
    there, missing = f"http://127.0.0.1:{listener}", f"http://127.0.0.1:{deaf_port}/path"
    worker = f"tcp://127.0.0.1:{listener}"
    odd = ["http://[::1", "http://u:secret@h:x", "nothing"]
    overrides = [
        "env.app=null",
        f"env.url={json.dumps([there, missing, *odd])}",
        f"monarch.workers=[{worker}, tcp://x]",
    ]
    found = named(counted_on(loaded(tmp_path, *overrides), gpus=0))
    assert (found[there].level, found[worker].level) == (Severity.GOOD, Severity.GOOD)
    assert (found[missing].level, found["tcp://x"].level) == (Severity.BAD, Severity.BAD)
    assert "refused" in found[missing].told
    assert [found[url].level for url in odd] == [Severity.BAD] * 3
    assert "expected an address such as http://HOST:PORT or tcp://HOST:PORT" in found["tcp://x"].told

"""The doctor's checks of requirements and of the machine."""

import importlib.metadata
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_bridge.doctor.host import Finding, Severity, check_machine, check_packages, collect_requirements


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
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
    found = collect_requirements(lines, "one")
    assert {name: set(map(str, versions)) for name, versions in found.items()} == {
        "a": {"==1", ">=0.5"},
        "b": {"<3"},
    }


def test_packages_are_compared_with_what_the_extra_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cpu", "vllm": "0.31.0", "numpy": "2.4.0rc1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    requirements = ("torch==2.13.0", "vllm==0.32.0", "torchtitan==0.3.0", "numpy>=1.26")
    extra_requirements = [f'{requirement}; extra == "rl"' for requirement in requirements]
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: extra_requirements)
    found = by_name(check_packages())
    assert (found["torch"].level, found["torch"].told) == (Severity.GOOD, "2.13.0+cpu")
    assert found["numpy"].level is Severity.GOOD
    assert (found["vllm"].level, found["torchtitan"].level) == (Severity.ODD, Severity.BAD)
    assert (
        "expected ==0.32.0, got 0.31.0; in a checkout: python3.11 scripts/bootstrap.py train-gpu"
        in found["vllm"].told
    )


@pytest.mark.parametrize(("in_dev", "expected_gpus"), [(1, 0), (0, 1)])
def test_limits_of_a_small_container_are_reported(
    in_dev: int, expected_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"][:in_dev]))
    found = by_name(check_machine(gpus=0, expected_gpus=expected_gpus))
    assert (found["/dev/shm"].level, found["descriptors"].level) == (Severity.ODD, Severity.ODD)
    assert "--shm-size" in found["/dev/shm"].told
    assert found["GPUs"].level is Severity.BAD
    assert "CUDA_VISIBLE_DEVICES" in found["GPUs"].told
    assert by_name(check_machine(gpus=0, expected_gpus=0))["GPUs"].level is (
        Severity.BAD if in_dev else Severity.GOOD
    )

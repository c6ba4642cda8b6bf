"""The GPUs that a process sees: positions are assigned by us, names by the host."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(
    ("visible", "positions", "seen"),
    [("", [1], "1"), ("5,7", [1], "7"), ("5", [1], ""), ("", [0, 2], "0,2"), ("5,7,9", [0, 2], "5,9")],
)
def test_the_scheduler_s_names_are_kept(
    tmp_path: Path, visible: str, positions: list[int], seen: str
) -> None:
    from rl_bridge.services.hosts import Hosts

    far = Hosts.workers(["tcp://10.0.0.2:1"], address="tcp://10.0.0.1:1", gpus_per_host=3)
    assert shown(tmp_path, far.variables_of(positions), visible) == seen


def test_a_process_without_one_sees_none(tmp_path: Path) -> None:
    from rl_bridge.services.hosts import Hosts

    far = Hosts.workers(["tcp://10.0.0.2:1"], address="tcp://10.0.0.1:1", gpus_per_host=2)
    here = Hosts.this_machine(gpus=2)
    for hosts in (far, here):
        assert shown(tmp_path, hosts.variables_of([]), "3") == ""
    assert shown(tmp_path, here.variables_of([0, 1]), "") == "0,1"
    # One that is told nothing is left as it was.
    for visible in ("", "3"):
        assert shown(tmp_path, {}, visible) == visible


@pytest.mark.parametrize(
    ("devices", "counted"),
    [("3,5", ("3", "5")), (" 3, 5", ("3", "5")), ("0,0", ()), ("-1", ()), ("1,-1,2", ("1",)), ("", ())],
)
def test_gpus_hidden_from_cuda_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, devices: str, counted: tuple[str, ...]
) -> None:
    from rl_bridge.services.hosts import Hosts

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert Hosts.this_machine().gpus == counted


def test_one_that_is_not_there_is_not_made_up_for_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_bridge.devices import own_device
    from rl_bridge.errors import ModelError

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("ROPEWALK_GPU", raising=False)
    assert own_device().type == "cpu"
    monkeypatch.setenv("ROPEWALK_GPU", "1")
    monkeypatch.setenv("ROPEWALK_GPUS", "6")
    with pytest.raises(ModelError, match=r"at position 1 on .* \(6\), got none; lower monarch\.gpus"):
        own_device()


@pytest.mark.parametrize(
    ("on_gpu", "inherited", "seen"),
    [
        (True, {}, "expandable_segments:True, "),
        (True, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64, "),
        (True, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, ", backend:native"),
        (False, {}, ", "),
    ],
)
def test_allocator_settings_are_set_unless_the_user_has(
    tmp_path: Path, on_gpu: bool, inherited: dict[str, str], seen: str
) -> None:
    from rl_bridge.devices import allocator_environment

    environment = allocator_environment(on_gpu=on_gpu) | inherited
    variables = "${PYTORCH_ALLOC_CONF-}, ${PYTORCH_CUDA_ALLOC_CONF-}"
    assert shown(tmp_path, environment, None, variables) == seen.strip()


def shown(
    folder: Path, overrides: dict[str, str], visible: str | None, variables: str = "${CUDA_VISIBLE_DEVICES-}"
) -> str:
    from rl_bridge.services.processes import _SHELL

    log = folder / "log"
    log.unlink(missing_ok=True)
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    subprocess.run(
        ["/bin/sh", "-c", _SHELL, "/bin/sh", "-c", f'echo "{variables}"'],
        env={"PATH": "/usr/bin:/bin", "ROPEWALK_ROLE_LOG": str(log), **inherited, **overrides},
        check=True,
        timeout=60,
    )
    return log.read_text().strip()

"""Imports that fail: the errors name the package at fault and what to do, wherever they are shown."""

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_bridge.cli.common import exit_status
from rl_bridge.doctor import host
from rl_bridge.doctor.host import Severity, check_imports
from rl_bridge.errors import MissingDependencyError

OTHER_TORCH = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
WITHOUT_NAME = """
try:
    import torchvision
except RuntimeError as error:
    raise ModuleNotFoundError("Could not import module 'AutoTokenizer'.") from error
"""
"""What transformers does when one of its modules fails to import."""
TIMEOUT_S = 300.0

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes packages that can be imported here and in child processes; they are forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write_packages(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(source)
        importlib.invalidate_caches()

    yield write_packages
    for name in set(sys.modules) - before:
        del sys.modules[name]


def failure_of(module: str) -> MissingDependencyError:
    with pytest.raises((ImportError, RuntimeError)) as caught:
        importlib.import_module(module)
    return MissingDependencyError.of_import(caught.value)


def test_a_package_for_another_torch_is_named_though_the_error_has_no_name(write: Write) -> None:
    write(torchvision=OTHER_TORCH, wrapped=WITHOUT_NAME)
    for error in (failure_of("wrapped"), failure_of("torchvision")):
        assert str(error) == (
            "the package 'torchvision' is installed, but its import raised RuntimeError: operator torchvision::nms "
            "does not exist; it does not match torch, and nothing here uses it: pip uninstall torchvision"
        )
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_missing_package_is_told_from_one_that_lacks_a_module(write: Write) -> None:
    write(older="import older.newer\n", asks="import absent_one.part\n", lacks="from json import absent\n")
    assert "expected the package 'absent_one' to be installed, it is not; " in str(failure_of("asks"))
    for name, told in (("older", "No module named 'older.newer'"), ("lacks", "cannot import name 'absent'")):
        message = str(failure_of(name))
        assert message.startswith(f"the package '{name}' is installed, but its import raised ")
        assert told in message
        assert "`ropewalk doctor`" in message


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("of an unknown kind"), ImportError("of an unknown kind")]
)
def test_no_message_prints_none(error: ImportError, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise error

    assert exit_status("train", work) == 1
    told = capsys.readouterr().err
    assert "of an unknown kind" in told
    assert "None" not in told


def test_doctor_imports_what_training_imports(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(torchvision=OTHER_TORCH, wrapped=WITHOUT_NAME, fine="print('noise')\n")
    monkeypatch.setattr(
        host, "STACK", {"fine": "fine", "wrapped": "wrapped", "not_installed": "not_installed"}
    )
    monkeypatch.setattr(host, "OPTIONAL_SIBLINGS", ("torchvision",))
    odd, bad = check_imports()
    assert (odd.what, odd.level) == ("import torchvision", Severity.ODD)
    assert (bad.what, bad.level) == ("import wrapped", Severity.BAD)
    assert odd.told == bad.told
    assert odd.told.endswith("pip uninstall torchvision")
    monkeypatch.setattr(host, "OPTIONAL_SIBLINGS", ())
    monkeypatch.setattr(host, "STACK", {"fine": "fine"})
    (good,) = check_imports()
    assert (good.what, good.told, good.level) == ("imports", "fine", Severity.GOOD)


def test_doctor_reports_a_library_that_ends_the_process(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(fine="", ends="import os\nos._exit(3)\n")
    monkeypatch.setattr(host, "OPTIONAL_SIBLINGS", ())
    monkeypatch.setattr(host, "STACK", {"fine": "fine", "ends": "ends"})
    (bad,) = check_imports()
    assert bad.level is Severity.BAD
    assert "ended with 3 after fine" in bad.told


@pytest.mark.heavy
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_the_real_stack_is_imported_and_a_broken_torchvision_named(write: Write, tmp_path: Path) -> None:
    (good,) = check_imports()
    assert (good.level, good.told) == (Severity.GOOD, "torch, monarch, transformers, torchtitan, vllm")
    write(torchvision=OTHER_TORCH)
    (tmp_path / "torchvision-0.1.dist-info").mkdir()  # transformers and vLLM look for the distribution
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    odd, *bad = check_imports()
    assert (odd.what, odd.level) == ("import torchvision", Severity.ODD)
    assert "import vllm" in [one.what for one in bad]
    for finding in bad:
        assert finding.level is Severity.BAD
        assert "operator torchvision::nms does not exist" in finding.told
        assert finding.told.endswith("pip uninstall torchvision")

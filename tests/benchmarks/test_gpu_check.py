"""`scripts/gpu-check`: its checks on a CPU, and its report of failing, crashing, hanging and skipped ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from module_run import ROOT, finished


def gpu_check(*argv: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python}
    return finished(ROOT / "scripts" / "gpu-check", *argv, env=environment, timeout_s=280)


def read_checks(file: Path) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for check in json.loads(file.read_text())["checks"]}


def figures(check: dict[str, Any]) -> dict[str, Any]:
    return {row["what"]: row["value"] for row in check["figures"]}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "names",
    [
        "versions,train-0.6B",
        pytest.param("step,attention,loss,weights-0.6B", marks=pytest.mark.soak),
        pytest.param("reload,decode-0.6B", marks=pytest.mark.soak),
        pytest.param("blackjack", marks=pytest.mark.soak),
    ],
)
def test_checks_pass_on_a_cpu_with_tiny_shapes(names: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    process = gpu_check("--dry", "--only", names, "--json", str(file))
    assert process.returncode == 0, process.stdout + process.stderr
    checks = read_checks(file)
    statuses = {name: check["status"] for name, check in checks.items()}
    assert statuses == dict.fromkeys(names.split(","), "passed")
    assert all(f"{name} " in process.stdout.rpartition("\n\n")[2] for name in checks)
    assert all(figures(check) for check in checks.values())
    if "train-0.6B" in checks:
        # Four rows of 91 tokens: 2 layers of 6 x their parameters, and attention.
        assert figures(checks["train-0.6B"])["train/flops_per_token"] > 6 * 2 * 50_000


@pytest.mark.heavy
def test_each_planted_fault_is_out_of_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that looks across documents, a gradient that is off, weights that came otherwise."""
    import torch

    from benchmarks.gpu import training
    from benchmarks.gpu.child import Reporter
    from rl_bridge.titan import layers

    def missed(check: Any) -> set[str]:
        reporter = Reporter(tmp_path / "told.jsonl", True, "tiny")
        reporter.file.unlink(missing_ok=True)
        check(reporter)
        rows = [json.loads(line) for line in reporter.file.read_text().splitlines()]
        assert reporter.met == all(row.get("met", True) for row in rows)
        return {row["what"] for row in rows if not row.get("met", True)}

    def causal(document: torch.Tensor) -> torch.Tensor:
        return torch.ones(document.shape[-1], document.shape[-1], dtype=torch.bool).tril()[None, None]

    assert missed(training.attention) == missed(training.weights) == set()
    with monkeypatch.context() as patch:
        patch.setattr(layers, "document_mask", causal)
        assert {
            f"mask, float32: {name}, relative error" for name in ("output", "d q", "d k", "d v")
        } < missed(training.attention)
    reference = {
        "gradients": {"one": torch.ones(3), "other": torch.ones(3)},
        "loss": 1.0,
        "the trainer's loss": 1.0,
        "its gradient's norm": 1.0,
        "float32": torch.zeros(2),
        "bfloat16": torch.zeros(2),
    }
    ours = reference | {
        "gradients": {"one": torch.ones(3), "other": torch.tensor([1.0, 1.002, 1.0])},
        "loss": 1.0002,
        "float32": torch.tensor([0.0, 0.002]),
    }
    assert missed(lambda reporter: training.compare(reporter, reference, reference)) == set()
    assert missed(lambda reporter: training.compare(reporter, ours, reference)) == {
        "loss, relative to the CPU's",
        "gradients, the largest difference over the largest entry",
        "log-probabilities in float32, from the CPU's in float32",
    }
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda self, *to: self + 1.0 if to == (torch.bfloat16,) else self)
        assert missed(training.weights) == {
            "shared_memory: tensors that came otherwise",
            "shared_memory: tensors that changed while they were held",
        }


STUB = """
import sys, time
from pathlib import Path
if sys.argv[1:3] == ["-m", "benchmarks.gpu.child"]:
    from benchmarks.gpu.child import Reporter
    name, reporter = sys.argv[3], Reporter(Path(sys.argv[4]), True, "")
    if name == "step":
        reporter.record("apart", float("nan"), at_most=1.0)
        reporter.end("failed", "a figure is out of its bounds")
    elif name == "attention":
        print("Segmentation fault of a kernel", flush=True)
        import os; os.kill(os.getpid(), 11)
    elif name == "loss":
        reporter.record("so far", 3.0, "GB")
        import subprocess; subprocess.Popen(["sleep", "1000.25"])
        time.sleep(1000)
    else:
        reporter.end("passed")
else:
    sys.argv = sys.argv[2:]
    from benchmarks.gpu import __main__ as command
    sys.executable = PYTHON
    command.CHECKS["loss"] = (2, "hangs")
    sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_failing_crashing_or_hanging_check_does_not_stop_the_rest(tmp_path: Path) -> None:
    python, stub, file = tmp_path / "python", tmp_path / "stub.py", tmp_path / "found.json"
    stub.write_text(f"PYTHON = {str(python)!r}\n{STUB}")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {stub} "$@"\n')
    python.chmod(0o755)
    argv = ["--only", "step,attention,loss,versions", "--json", str(file)]
    process = gpu_check(*argv, python=str(python))
    assert process.returncode == 1, process.stdout + process.stderr
    checks = read_checks(file)
    assert {name: check["status"] for name, check in checks.items()} == {
        "step": "failed",
        "attention": "crashed",
        "loss": "timed out",
        "versions": "passed",
    }
    assert "NOT MET" in process.stdout
    assert "Segmentation fault of a kernel" in checks["attention"]["why"]
    assert figures(checks["loss"]) == {"so far": 3.0}, "what it told before it hung is kept"
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "1000.25"] not in commands, "what it had started is ended with it"


def test_check_that_cannot_run_here_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """A Python that has nothing but itself, as a machine without an index may."""
    file = tmp_path / "found.json"
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')  # type: ignore[attr-defined]
    bare.chmod(0o755)
    process = gpu_check("--only", "versions,reload", "--json", str(file), python=str(bare))
    assert process.returncode == 1, "nothing was looked at, which is no pass"
    assert {name: (check["status"], check["why"]) for name, check in read_checks(file).items()} == {
        "versions": ("skipped", "torch is not installed here"),
        "reload": ("skipped", "torch is not installed here"),
    }


@pytest.mark.heavy
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_a_machine_without_a_gpu_fails_one_check_and_skips_the_others(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert gpu_check("--only", "versions,decode-8B", "--json", str(file)).returncode == 1
    checks = read_checks(file)
    assert (checks["versions"]["status"], checks["decode-8B"]["status"]) == ("failed", "skipped")
    assert "sees no GPU: it is built without CUDA" in checks["versions"]["why"]
    assert figures(checks["versions"])["torchtitan"] == "0.3.0"
    assert checks["decode-8B"]["why"] == "torch sees no GPU here; --dry runs this on the CPU"


def test_missing_package_is_reported_and_missing_own_module_fails() -> None:
    from benchmarks.gpu.child import missing_package

    caused = RuntimeError("so")
    caused.__cause__ = ModuleNotFoundError("no", name="vllm.engine")
    assert missing_package(caused) == "vllm.engine"
    assert missing_package(ModuleNotFoundError("no", name="rl_bridge.nowhere")) is None
    assert missing_package(ValueError("else")) is None


def test_invalid_arguments_are_refused() -> None:
    listed = gpu_check("--list").stdout.splitlines()
    assert len(listed) == 12
    assert all(" s: " in line for line in listed)
    wrong = gpu_check("--only", "nothing")
    assert (wrong.returncode, "expected --only with some of versions," in wrong.stderr) == (2, True)
    assert "examples:" in gpu_check("--help").stdout

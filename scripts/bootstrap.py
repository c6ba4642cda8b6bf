"""Creates the virtual environment that a command needs, then runs the command in it.

    python3.11 scripts/bootstrap.py PROFILE -- COMMAND [ARGUMENT ...]

Uses only the standard library, so it runs on a machine with only Python and pip. If the environment is up to date, the
command starts at once.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "torch==2.13.0"
# Text-only models do not need these. If an index only has CUDA builds, they fail on import, which breaks
# transformers.
OPTIONAL_SIBLINGS = ("torchvision", "torchaudio", "torchcodec")
KEPT_LINES = 40


@dataclass(frozen=True)
class Profile:
    """The content of a virtual environment.

    Attributes:
        folder: Folder below .venvs; profiles may share one.
        extras: Extras of the project; None installs the pinned packages only, without the project.
        constraints: The file of pins.
        cpu_torch: Whether to install a CPU build of PyTorch.
        alone: Packages to install without their dependencies, whose pins conflict with ours although they work.
    """

    folder: str
    extras: str | None
    constraints: str
    cpu_torch: bool
    alone: tuple[str, ...] = ()


# The released packages that ours must be compatible with. Each has its own openenv_core, so none can be installed next
# to the project.
RELEASED = ("0.10.0", "0.3.1", "0.2.3", "0.1.1")

TRACKIO = ("trackio==0.43.0", "gradio-client==2.7.2", "brotli==1.2.1")
TORCHSTORE = ("torchstore==0.1.2", "pygtrie==2.5.0")
# What transformers reads a model in GGUF with, for scripts/published-model.
PUBLISHED = ("accelerate==1.15.0", "gguf==0.19.0")
# Trainers that the adapters are tested with. TRL also needs accelerate, which is in PUBLISHED.
TRAINERS = (
    "trl==1.16.0",
    "skyrl-gym==0.4.0",
    "func-timeout==4.3.5",
    "omegaconf==2.4.0",
    "stable-baselines3==2.9.2",
    "renderers==0.1.12",
    "prime-pydantic-config==0.4.3",
)
# E2B's clients, which are tested with `ropewalk sandboxes`.
E2B = (
    "e2b==2.63.0",
    "e2b-code-interpreter==2.11.5",
    "e2b-dockerfile-utils==0.1.1",
    "connectrpc==0.12.1",
    "protobuf-py==0.6.0",
    "protobuf-py-ext==0.6.0",
    "pyqwest==0.12.0",
    "h2==4.4.1",
    "hpack==4.2.0",
    "hyperframe==6.1.0",
    "wcmatch==11.2",
    "bracex==3.2.3",
)

PROFILES = {
    **{
        f"released-{version}": Profile(f"released-{version}", None, f"released-{version}.txt", False)
        for version in RELEASED
    },
    "test": Profile("test", "server,gymnasium,reasoning,rl-common,dev", "test.txt", True),
    "train": Profile("rl-cpu", "rl-cpu,server,gymnasium", "rl-cpu.txt", True),
    "published": Profile("rl-cpu", "rl-cpu,server,gymnasium", "rl-cpu.txt", True, PUBLISHED),
    "train-gpu": Profile("rl", "rl,server,gymnasium", "rl.txt", False),
    "test-all": Profile(
        "rl-cpu",
        "rl-cpu,server,gymnasium,reasoning,dev",
        "rl-cpu.txt",
        True,
        (*TORCHSTORE, *PUBLISHED, *TRAINERS, *TRACKIO, *E2B),
    ),
    "core": Profile("core", "server,gymnasium,reasoning,dev", "test.txt", False),
    # A third-party MCP client; separate from the project, as its users install it.
    "fastmcp": Profile("fastmcp", None, "fastmcp.txt", False),
    # A trainer that pins another version of MCP's SDK; it uses the core from this tree.
    "verifiers": Profile("verifiers", None, "verifiers.txt", False),
    # Harbor, whose own trials run on our tasks; it needs Python 3.12.
    "harbor": Profile("harbor", None, "harbor.txt", False),
    # MkDocs, for the documentation site; it reads our sources without importing them.
    "docs": Profile("docs", None, "docs.txt", False),
    # Public MCP servers, used unchanged by tests.
    "mcp-servers": Profile("mcp-servers", None, "mcp-servers.txt", False),
}


def main() -> None:
    """Create the environment, then replace this process with the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", choices=sorted(PROFILES))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    name = arguments.profile
    if sys.version_info[:2] < OLDEST:
        sys.exit(f"expected Python {'.'.join(map(str, OLDEST))} or newer, this is {sys.version.split()[0]}")
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    environment = prepare(name, PROFILES[name])
    if command:
        os.environ["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        os.environ["VIRTUAL_ENV"] = str(environment)
        os.execvp(command[0], command)


def prepare(name: str, profile: Profile) -> Path:
    """Create or update a profile's environment, and return its folder."""
    version = ".".join(map(str, sys.version_info[:2]))
    suffix = "" if sys.version_info[:2] == OLDEST else f"-{version}"
    environment = ROOT / ".venvs" / f"{profile.folder}{suffix}"
    stamp = environment / f".ready-{name}"
    fingerprint = compute_fingerprint(name)
    environment.parent.mkdir(exist_ok=True)
    with hold_lock(environment.parent / f".{environment.name}.lock"):
        if stamp.is_file() and stamp.read_text() == fingerprint:
            return environment
        start_time = time.monotonic()
        if environment.exists() and not is_in_place(environment):
            print_message(f"recreating {environment.relative_to(ROOT)}: it was made for another folder")
            shutil.rmtree(environment)
        if not (environment / "bin" / "python").is_file():
            print_message(f"making {environment.relative_to(ROOT)}")
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        install(environment / "bin" / "python", profile)
        stamp.write_text(fingerprint)
        print_message(f"installed {environment.name} in {time.monotonic() - start_time:.0f} s")
    return environment


def is_in_place(environment: Path) -> bool:
    """Return whether an environment was created at its path: if copied or moved, it would run the old path's code."""
    try:
        return f"-m venv {environment}\n" in (environment / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return False


def compute_fingerprint(name: str) -> str:
    """Return a digest of everything that an installation depends on."""
    digest = hashlib.sha256(f"{name} {sys.version} {ROOT}".encode())
    profile = PROFILES[name]
    depends = [Path(__file__), ROOT / "constraints" / profile.constraints]
    if profile.extras is not None:
        depends.append(ROOT / "pyproject.toml")
    for path in depends:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install(python: Path, profile: Profile) -> None:
    """Install the project, editable, with a profile's extras and pins; or only the pinned packages."""
    constraints = ROOT / "constraints" / profile.constraints
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    if profile.extras is None:
        print_message(f"installing {profile.folder}")
        # Tests import few of these modules, so compile on import instead of all at once.
        run_pip([*pip, "--no-compile", "-r", str(constraints)], profile.folder)
        return
    if constraints.is_file() and sys.version_info[:2] == OLDEST:  # the pins are for this version
        pip += ["-c", str(constraints)]
    target = f"{ROOT}[{profile.extras}]"
    if profile.cpu_torch and sys.platform == "linux":
        build = f"{TORCH}+cpu"
        pip += cpu_index(python, build)
        if is_missing(python, TORCH.partition("==")[0]):
            print_message("installing PyTorch for CPUs")
            run_pip([*pip, build], profile.folder)
    print_message(f"installing the project with [{profile.extras}]")
    run_pip([*pip, "-e", target], profile.folder)
    if profile.alone:
        run_pip([*pip, "--no-deps", *profile.alone], profile.folder)
    for package in OPTIONAL_SIBLINGS:
        if not is_missing(python, package) and not can_import(python, package):
            print_message(f"removing {package}: this build needs CUDA, and nothing here needs it")
            subprocess.run(
                [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "uninstall", "-y", package],
                check=True,
                stderr=subprocess.DEVNULL,
            )


def cpu_index(python: Path, build: str) -> list[str]:
    """Return pip's options for a CPU build of PyTorch: none if pip's own index has one."""
    process = subprocess.run(
        [
            str(python),
            "-m",
            "pip",
            "-q",
            "--disable-pip-version-check",
            "install",
            "--dry-run",
            "--no-deps",
            build,
        ],
        capture_output=True,
        check=False,
    )
    return [] if process.returncode == 0 else ["--extra-index-url", PYTORCH_CPU_INDEX]


def is_missing(python: Path, package: str) -> bool:
    """Return whether a package is not installed; an installed one may still fail to import."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is not None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0


def can_import(python: Path, package: str) -> bool:
    """Return whether a package can be imported."""
    return (
        subprocess.run([str(python), "-c", f"import {package}"], capture_output=True, check=False).returncode
        == 0
    )


def run_pip(command: Sequence[str], environment: str) -> None:
    """Run pip and show its progress; on failure print its last lines and exit."""
    last_lines: deque[str] = deque(maxlen=KEPT_LINES)
    start_time = reported_at = time.monotonic()
    packages = 0
    activity = "asking the index"
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        terminate_on_error(process),
    ):
        assert process.stdout is not None
        for line in process.stdout:
            last_lines.append(line)
            packages += line.startswith("Collecting ")
            if line.startswith(("Collecting ", "Building ", "Installing ")):
                activity = line.split(" (from ")[0].strip()[:60]
            pause = 0.2 if sys.stdout.isatty() else 15.0
            if time.monotonic() - reported_at > pause:
                reported_at = time.monotonic()
                show_progress(
                    f"  {environment}: {reported_at - start_time:4.0f} s  {packages:3} packages  {activity}"
                )
    show_progress("")
    if process.returncode:
        sys.stderr.writelines(last_lines)
        sys.exit(f"pip failed with status {process.returncode}: {' '.join(command)}")


@contextlib.contextmanager
def terminate_on_error(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Terminate a process if the block fails: pip must not keep writing while the next command repairs its work."""
    try:
        yield
    except BaseException:
        process.terminate()
        process.wait()
        raise


def show_progress(text: str) -> None:
    """Replace the line on a terminal; elsewhere print the line unless it is empty."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)
    elif text:
        print(text, flush=True)


def print_message(text: str) -> None:
    """Print a line with the project's prefix."""
    print(f"[ropewalk] {text}", flush=True)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a file's lock, so that two commands do not write to one folder at once."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_message("waiting for another command to finish")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

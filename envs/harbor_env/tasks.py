"""The supported part of Harbor's task format.

A task is a folder with `task.toml`, `instruction.md`, `environment/`, `tests/` and optionally `solution/`. Unsupported
settings are rejected when the folder is read, with file and key: ignoring them would silently change the task and so
train the wrong thing.
"""

import hashlib
import os
import posixpath
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from openenv_core.errors import ConfigurationError, describe_faults
from openenv_core.tasks import SPLITS, IndexedTasks

TASK: Final = "task.toml"
WORKDIR: Final = "/app"
"""The working directory of tasks without an image."""

ARTIFACTS: Final = "/logs/artifacts"
"""The folder whose content the verifier always gets."""

_RESERVED: Final = ("/tests", "/logs/verifier", "/solution", "/proc", "/dev", "/sys")
"""Paths that belong to the verifier or the system, and cannot be taken over from the policy."""

_TEMPLATE: Final = re.compile(r"\$\{(\w+)(?::-(.*))?\}")
_CANARY: Final = re.compile(r"(<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)


class InvalidTaskError(ConfigurationError):
    """A folder is not a valid task, or uses something unsupported; the message names the file."""


class _Table(BaseModel):
    # Other versions of the format have further keys. Those that change a task's meaning are rejected by name below.
    model_config = ConfigDict(extra="ignore", frozen=True)


Network = Literal["public", "no-network"]


class AgentTable(_Table):
    """[agent]: settings of the policy's phase."""

    timeout_sec: Annotated[float, Field(gt=0)] | None = None
    user: str | int | None = None
    network_mode: Network | None = None


def _parse_megabytes(value: Any) -> Any:
    """Convert the older form `memory = "2G"` to megabytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([GMK])", value.strip().upper()) if isinstance(value, str) else None
    return value if match is None else int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]])


class EnvironmentTable(_Table):
    """[environment] or [verifier.environment]: the image and resources of a phase."""

    build_timeout_sec: Annotated[float, Field(gt=0)] = 600.0
    docker_image: str | None = None
    os: Annotated[Literal["linux"], BeforeValidator(lambda value: str(value).lower())] = "linux"
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0), BeforeValidator(_parse_megabytes)] | None = None
    storage_mb: Annotated[int, Field(gt=0), BeforeValidator(_parse_megabytes)] | None = None
    gpus: int = 0
    env: dict[str, str] = {}
    workdir: str | None = None
    network_mode: Network = "public"
    healthcheck: None = None
    tpu: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] = []

    @model_validator(mode="before")
    @classmethod
    def _rename_former_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in data:
                data.setdefault(new, data.pop(old))
        if isinstance(allowed := data.pop("allow_internet", None), bool):
            data.setdefault("network_mode", "public" if allowed else "no-network")
        return data


class VerifierTable(_Table):
    """[verifier]: settings of the test phase. Here, both of its modes run in a different machine than the policy."""

    timeout_sec: Annotated[float, Field(gt=0)] = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: Network | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: Annotated[list[Any], Field(max_length=0)] = []


class Artifact(_Table):
    """An entry of `artifacts`: a path that the verifier gets in addition to the working directory."""

    source: str
    service: Literal["main"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, data: Any) -> Any:
        return {"source": data} if isinstance(data, str) else data


class _Package(_Table):
    name: str


class TaskTable(_Table):
    """The supported keys of task.toml."""

    task: _Package | None = None
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    verifier: VerifierTable = VerifierTable()
    artifacts: tuple[Artifact, ...] = ()
    steps: Annotated[list[Any], Field(max_length=0)] = []
    metadata: dict[str, Any] = {}


@dataclass(frozen=True)
class HarborTask:
    """One task: its folder and its parsed configuration."""

    folder: Path
    config: TaskTable

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read and check a task.

        Raises:
            InvalidTaskError: The folder is not a valid task, or uses something unsupported.
        """
        file = folder / TASK
        try:
            task = cls(folder.resolve(), TaskTable.model_validate(tomllib.loads(file.read_text("utf-8-sig"))))
        except ValidationError as error:
            raise InvalidTaskError(f"{file}: {describe_faults(error, 'task')}") from None
        except (OSError, ValueError) as error:
            raise InvalidTaskError(f"{file}: {error}") from None
        task._check()
        return task

    @property
    def id(self) -> str:
        """The task's id: the name in `[task]`, if any, else that of its folder."""
        return self.folder.name if self.config.task is None else self.config.task.name

    @cached_property
    def instruction(self) -> str:
        """The task's prompt, without canary lines, which mark data sets."""
        lines = (self.folder / "instruction.md").read_text("utf-8-sig").split("\n")
        while lines and _CANARY.fullmatch(lines[0].strip()):
            del lines[0]
            while lines and not lines[0].strip():
                del lines[0]
        return "\n".join(lines)

    @property
    def kind(self) -> Literal["process", "container"]:
        """The kind of machine it runs in: "container" if it names an image or has a Dockerfile, else "process"."""
        has_image = (
            self.config.environment.docker_image or (self.folder / "environment" / "Dockerfile").is_file()
        )
        return "container" if has_image else "process"

    @property
    def loose_files(self) -> Path | None:
        """The folder to copy into the working directory at the start: environment/, unless it has a Dockerfile."""
        folder = self.folder / "environment"
        built = (folder / "Dockerfile").is_file()
        return folder if folder.is_dir() and not built else None

    @property
    def separate(self) -> bool:
        """Whether the verifier gets only the artifacts, and not the working directory."""
        verifier = self.config.verifier
        return verifier.environment is not None or verifier.environment_mode == "separate"

    def collect_paths(self, workdir: str) -> list[str]:
        """Return the paths that are copied from the policy's machine to the verifier's.

        Raises:
            InvalidTaskError: A path overlaps one that belongs to the verifier or the system.
        """
        artifact_paths = [posixpath.join(workdir, artifact.source) for artifact in self.config.artifacts]
        sources = (*artifact_paths, ARTIFACTS) if self.separate else (workdir, *artifact_paths, ARTIFACTS)
        paths = [posixpath.normpath(path) for path in sources]
        for path in paths:
            if path == "/" or any(_overlap(path, reserved) for reserved in _RESERVED):
                raise InvalidTaskError(
                    f"{self.folder / TASK}: expected a working folder and artifacts apart from /, "
                    f"{', '.join(_RESERVED)}, got {path}; set [environment] workdir, or WORKDIR in its image"
                )
        return list(dict.fromkeys(paths))

    def variables(self, table: Mapping[str, str]) -> dict[str, str]:
        """Return a table of variables with `${NAME}` and `${NAME:-default}` expanded from this process's environment.

        Raises:
            InvalidTaskError: A variable is not set and has no default.
        """
        values: dict[str, str] = {}
        for name, value in table.items():
            match = _TEMPLATE.fullmatch(value)
            text = value if match is None else os.environ.get(match[1], match[2])
            if text is None:
                raise InvalidTaskError(f"{self.folder / TASK}: expected the variable {value} to be set")
            values[name] = text
        return values

    def _check(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise InvalidTaskError(f"{self.folder}: {message}")

        environment, verifier = self.folder / "environment", self.config.verifier
        require((self.folder / "instruction.md").is_file(), "expected instruction.md, got none")
        for folder in (environment, self.folder / "tests"):
            compose = folder / "docker-compose.yaml"
            require(
                not compose.exists(),
                f"expected one container, got several by {compose.name} in {folder.name}/",
            )
        require(
            environment.is_dir() or self.config.environment.docker_image is not None,
            "expected environment/ or [environment] docker_image, got neither",
        )
        require(
            verifier.environment is None or verifier.environment_mode != "shared",
            "expected no [verifier.environment] with environment_mode shared, got both",
        )
        if self.verifier_image is None:
            require((self.folder / "tests" / "test.sh").is_file(), "expected tests/test.sh, got none")
        if self.kind == "container":
            return
        modes = (self.config.environment.network_mode, self.config.agent.network_mode, verifier.network_mode)
        require(
            all(mode in ("no-network", None) for mode in modes),
            "expected [environment] network_mode no-network of a task without an image, got public; say so, or name "
            "an image: docker_image, or environment/Dockerfile",
        )
        require(
            self.verifier_image is None, "expected no image for the verifier of a task without one, got one"
        )
        require(not self.config.environment.gpus, "expected an image for a task with GPUs, got none")
        workdir = self.config.environment.workdir or WORKDIR
        require(
            posixpath.normpath(workdir) == WORKDIR,
            f"expected the workdir {WORKDIR} of a task without an image, got {workdir}",
        )
        self.collect_paths(WORKDIR)

    @cached_property
    def verifier_image(self) -> "str | Path | None":
        """The verifier's own image, which contains the tests: a name or a folder to build; None if it has none."""
        verifier = self.config.verifier
        if not self.separate:
            return None
        if verifier.environment is not None and verifier.environment.docker_image is not None:
            return verifier.environment.docker_image
        tests = self.folder / "tests"
        return tests if (tests / "Dockerfile").is_file() else None

    @property
    def image(self) -> str | Path:
        """The policy's image: a name or a folder to build."""
        return self.config.environment.docker_image or self.folder / "environment"


class HarborTasks(IndexedTasks):
    """The tasks of a folder.

    Args:
        path: A task; a folder of tasks, which form the split train; or a folder with subfolders of tasks named after
            the splits train, validation and test.

    Raises:
        InvalidTaskError: A task is invalid or unsupported.
        ConfigurationError: There are no tasks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.place = root = Path(path).expanduser().resolve()
        folders = {name: root / name for name in SPLITS if (root / name).is_dir()}
        if (root / TASK).is_file() or not folders:
            folders = {"train": root}
        self._tasks = {name: _read_all(folder) for name, folder in folders.items()}
        self._tasks = {name: tasks for name, tasks in self._tasks.items() if tasks}
        if not self._tasks:
            reason = "which holds none" if root.is_dir() else "which is no folder"
            raise ConfigurationError(
                f"expected a folder of Harbor tasks, each a folder with {TASK}, got {root}, {reason}; "
                "name the one that holds them: ropewalk serve harbor PATH"
            )
        counts = Counter(task.id for tasks in self._tasks.values() for task in tasks)
        if duplicates := sorted(task_id for task_id, count in counts.items() if count > 1):
            raise InvalidTaskError(
                f"{root}: expected tasks of different names, got {', '.join(duplicates)} twice"
            )

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits."""
        return list(self._tasks)

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks in a split.

        Raises:
            KeyError: There is no such split.
        """
        return len(self._split(split))

    def task(self, split: str, index: int) -> HarborTask:
        """Return a task.

        Raises:
            KeyError: There is no such split.
            IndexError: The split has no such index.
        """
        tasks = self._split(split)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(tasks):
            raise IndexError(
                f"expected an index below {len(tasks)} of the split {split!r}, got {index!r:.40}"
            )
        return tasks[index]

    def find(self, task_id: str) -> tuple[str, int]:
        """Return the split and index of a task by its id.

        Raises:
            KeyError: There is no such task.
        """
        for split, tasks in self._tasks.items():
            for index, task in enumerate(tasks):
                if task.id == task_id:
                    return split, index
        raise KeyError(f"expected the id of a task, got {task_id!r:.80}")

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the public description of a task: its instruction, but not its tests."""
        task = self.task(split, index)
        return {
            "split": split,
            "index": index,
            "id": task.id,
            "task": task.instruction,
            "kind": task.kind,
            "metadata": task.config.metadata,
        }

    def _split(self, split: str) -> list[HarborTask]:
        try:
            return self._tasks[split]
        except (KeyError, TypeError):
            raise KeyError(f"expected a split ({', '.join(self.splits)}), got {split!r:.40}") from None


def compute_digest(folder: Path) -> str:
    """Return a digest of a folder's contents, including names and file modes."""
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        data = b"" if not path.is_file() else path.read_bytes()
        header = f"{path.relative_to(folder).as_posix()}\0{path.lstat().st_mode:o}\0{len(data)}\0"
        hasher.update(header.encode() + data)
    return hasher.hexdigest()[:16]


def _read_all(folder: Path) -> list[HarborTask]:
    if (folder / TASK).is_file():
        return [HarborTask.read(folder)]
    return [HarborTask.read(file.parent) for file in sorted(folder.glob(f"*/{TASK}"))]


def _overlap(a: str, b: str) -> bool:
    return f"{a}/".startswith(f"{b}/") or f"{b}/".startswith(f"{a}/")

"""openenv.yaml: the description of an environment, and what its author declares about it.

The keys are those of the released package, with the same meaning; the whole `validation` block is optional.
`validation.episodes` is ours: the released parser ignores it.
"""

import difflib
import types
from pathlib import Path
from typing import Any, Final, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from openenv_core.errors import ConfigurationError

MANIFEST: Final = "openenv.yaml"


class ManifestError(ConfigurationError):
    """A manifest that is missing, unreadable or invalid.

    Attributes:
        faults: One line per error.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class Reward(_Block):
    """Declarations about rewards.

    Attributes:
        range: Minimum and maximum reward of one step.
    """

    range: tuple[float, float] = (0.0, 1.0)
    oracle_tolerance: float = Field(default=0.0, ge=0)
    floor_margin: float = Field(default=0.0, ge=0)
    variance_tolerance: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_increasing(self) -> Self:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"expected the lower end first, got {list(self.range)}")
        return self


class Resources(_Block):
    """Resources that the environment needs."""

    cpu: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    disk_mb: int | None = Field(default=None, gt=0)
    episode_timeout_s: float | None = Field(default=None, gt=0)
    gpus: int = Field(default=0, ge=0)
    gpu_types: list[str] = Field(default_factory=list)


class Verifier(_Block):
    """How a final state is scored."""

    kind: Literal["reward_channel", "script"]
    entry: str | None = None


class Oracle(_Block):
    """How the maximum reward is demonstrated."""

    form: Literal["injected_state", "script"]
    location: str


class Capabilities(_Block):
    """Optional capabilities of the environment."""

    verifier: Verifier | None = None
    oracle: Oracle | None = None
    set_state: bool = False
    llm_judged: bool = False
    rubric_tree: bool = False
    task_api: bool = False
    canaries: str | None = None
    declared_tools: list[str] = Field(default_factory=list)
    declared_task_count: dict[str, int] = Field(default_factory=dict)


class Network(_Block):
    """Which hosts the environment connects to.

    Attributes:
        mode: `public`: any host; `no-network`: none; `allowlist`: those in `allowed_hosts`.
    """

    mode: Literal["public", "no-network", "allowlist"] = "public"
    allowed_hosts: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _hosts_of_a_list(self) -> Self:
        if (self.mode == "allowlist") != bool(self.allowed_hosts):
            raise ValueError(f"expected allowed_hosts with mode allowlist and with no other, got {self.mode}")
        return self


class Tags(_Block):
    """Tags of the environment."""

    tags: list[str] = Field(min_length=1)


class Episodes(_Block):
    """Declarations about episodes. Ours; see docs/validate.md.

    Attributes:
        endless: Episodes never end by themselves.
        max_steps: Number of valid actions within which an episode ends.
        example_actions: Valid actions for the checker to play; without any it samples from the schema.
        reset_options: Options that the checker passes to every reset, besides a seed and an episode_id.
        deterministic: Seed and actions determine the whole episode.
        varied: Different seeds give different episodes; false for a single fixed puzzle.
    """

    endless: bool = False
    max_steps: int = Field(default=1000, ge=1)
    example_actions: list[dict[str, Any]] = Field(default_factory=list)
    reset_options: dict[str, Any] = Field(default_factory=dict)
    deterministic: bool = True
    varied: bool = True


class Judge(_Block):
    """The model that judges."""

    model: str
    version: str
    params: dict[str, Any] = Field(default_factory=dict)


class TaskDistribution(_Block):
    """Where tasks come from."""

    generator_seed: int | None = None
    dataset_version: str | None = None
    generator_model: str | None = None


class ValidationExecution(_Block):
    """How the released validator runs the environment."""

    kind: Literal["openenv_ws"] = "openenv_ws"
    probe_path: str = "validation/runtime.json"
    dockerfile: str = "Dockerfile"
    context: str = "."
    agent_boundary: Literal["api"] = "api"
    requires_credentials: bool = False


class Validation(_Block):
    """The author's declarations that the checker verifies."""

    schema_version: str | None = None
    reward: Reward | None = None
    resources: Resources = Field(default_factory=Resources)
    capabilities: Capabilities = Field(default_factory=Capabilities)
    network: Network = Field(default_factory=Network)
    types: Tags | None = None
    judge: Judge | None = None
    task_distribution: TaskDistribution | None = None
    execution: ValidationExecution | None = None
    episodes: Episodes = Field(default_factory=Episodes)


class Manifest(_Block):
    """The whole of openenv.yaml."""

    spec_version: Literal[1]
    name: str = Field(min_length=1)
    version: str | None = None
    description: str | None = None
    type: Literal["space"] = "space"
    runtime: Literal["fastapi"] = "fastapi"
    app: str = Field(default="server.app:app", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    port: int = Field(default=8000, ge=1, le=65535)
    variables: Any = None
    validation: Validation = Field(default_factory=Validation)


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest in a folder.

    Raises:
        ManifestError: It is missing, not YAML, or invalid.
    """
    return parse_manifest(read_keys(folder))


def read_keys(folder: Path) -> dict[str, Any]:
    """Read the manifest in a folder without validating its keys.

    Raises:
        ManifestError: It is missing, unreadable, or not a mapping.
    """
    file = folder / MANIFEST
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ManifestError([f"expected {MANIFEST} in {folder}, got none"]) from None
    except (OSError, ValueError) as error:
        raise ManifestError([f"expected a readable {file}, got: {error}"]) from None
    return load_keys(text, str(file))


def load_keys(text: str, place: str) -> dict[str, Any]:
    """Parse a manifest's text, as `read_keys` does the file's; `place` names it in messages."""
    import yaml  # imported here because clients do not need it

    try:
        content = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ManifestError([f"expected {place} to be YAML, got: {' '.join(str(error).split())}"]) from None
    if not isinstance(content, dict):
        raise ManifestError([f"expected {place} to hold keys and values, got {type(content).__name__}"])
    return content


def parse_manifest(content: object) -> Manifest:
    """Validate a parsed manifest. Raises `ManifestError` if it is invalid."""
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise ManifestError([_describe_fault(fault) for fault in error.errors()]) from None


def _describe_fault(error: Any) -> str:
    path = [str(key) for key in error["loc"]]
    place = ".".join(path) or MANIFEST
    if error["type"] == "extra_forbidden":
        known = sorted(_keys(path[:-1]))
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        return f"{place}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{place}: missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{place}: {message}, got {str(error['input'])[:80]!r}"


def _keys(path: list[str]) -> set[str]:
    """Return the valid keys of a block of the manifest."""
    model: Any = Manifest
    for key in path:
        model = _model_of(model.model_fields[key].annotation)
    return set(model.model_fields)


def _model_of(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(arm for arm in get_args(annotation) if arm is not type(None))
    return annotation

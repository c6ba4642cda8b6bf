"""Checks of the manifest, the application and its models, and the image, without playing."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.drawing import require_schema, sample
from openenv_core.checker.imports import PROJECT, find_undeclared, read_dependencies
from openenv_core.checker.subject import Subject
from openenv_core.manifest import MANIFEST, ManifestError
from openenv_core.targets import TargetKind, declared_by, exposed_port
from openenv_core.types import Action, Observation, State

_LARGEST_BYTES: Final = 10 * 1024**3
"""An image larger than this usually contains models or data, which should be mounted instead."""

_BASES: Final[Mapping[str, type[BaseModel]]] = {
    "action": Action,
    "observation": Observation,
    "reset_observation": Observation,
    "state": State,
}
"""The base class of each model of an application."""


_FORBIDDING: Final = ("action", "observation", "reset_observation")
"""Models for which a released client refuses unknown keys."""

_WIRE_TYPES: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "action": {"metadata": frozenset({"object"})},
    "observation": {
        "done": frozenset({"boolean"}),
        "reward": frozenset({"boolean", "integer", "number", "null"}),
        "metadata": frozenset({"object"}),
    },
    "state": {"episode_id": frozenset({"string", "null"}), "step_count": frozenset({"integer"})},
}
"""The JSON types on the wire of the fields that every model has."""


def _classes(subject: Subject) -> Iterator[tuple[str, type[Any]]]:
    """Yield the key in /schema and the class of every model; each member of a union separately."""
    classes: set[type[Any]] = set()
    for key, model in subject.app.models.items():
        for arm in _arms(model):
            if arm not in classes:
                classes.add(arm)
                yield key, arm


def _arms(model: Any) -> list[Any]:
    """Return the classes of a model: the members of a union, or the class itself."""
    if isinstance(model, type):
        return [model]
    if get_origin(model) is Annotated:
        return _arms(get_args(model)[0])
    arms = [arm for argument in get_args(model) for arm in _arms(argument)]
    if not arms:
        raise NotApplicableError(f"a model of an unknown kind: {model!r}")
    return arms


def _name(model: type[Any]) -> str:
    return getattr(model, "__qualname__", repr(model))


@check(CheckLevel.STATIC)
def check_manifest_present(subject: Subject) -> None:
    """The folder has an openenv.yaml."""
    folder = subject.require_folder()
    if not (folder / MANIFEST).is_file():
        raise CheckError(
            f"expected {MANIFEST} in {folder}, got none",
            change=f"add {MANIFEST} with at least spec_version: 1, name, app and port, as `ropewalk init` writes it",
        )


@check(CheckLevel.STATIC)
def check_manifest_valid(subject: Subject) -> None:
    """The manifest, or what a file declares, has only known keys, with valid values."""
    if subject.target.file is None and not (subject.require_folder() / MANIFEST).is_file():
        raise NotApplicableError("there is no manifest")
    try:
        declared_by(subject.target)
    except ManifestError as error:
        place = MANIFEST if subject.target.file is None else "the table tool.ropewalk"
        raise CheckError(
            str(error), change=f"correct these keys in {place}; docs/validate.md lists them"
        ) from error


@check(CheckLevel.STATIC)
def check_manifest_app(subject: Subject) -> None:
    """The manifest's app is a module in the folder."""
    folder, manifest = subject.require_folder(), subject.manifest
    module = manifest.app.partition(":")[0].split(".")
    # The module path starts with the folder's package, or is relative to the folder.
    parts = module[module.index(folder.name) + 1 :] if folder.name in module else module
    path = folder.joinpath(*parts)
    if not (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()):
        raise CheckError(
            f"expected {manifest.app!r} to be in {folder}, got no {'/'.join(parts)}.py there",
            change=f"set `app:` in {MANIFEST} to the application's module and attribute: server.app:app",
        )


@check(CheckLevel.STATIC)
def check_readme(subject: Subject) -> None:
    """The folder has a README that describes the environment."""
    folder = subject.require_folder()
    readme = next((file for file in sorted(folder.glob("[Rr][Ee][Aa][Dd][Mm][Ee]*")) if file.is_file()), None)
    if readme is None:
        raise CheckError(
            f"expected README.md in {folder}, got none",
            change="add one that describes an episode, the actions and observations, and the reward",
        )
    words = readme.read_text(encoding="utf-8", errors="replace").split()
    if len(words) < 12:  # fewer cannot describe an environment
        raise CheckError(
            f"expected {readme.name} to describe the environment, got {len(words)} words",
            change="describe an episode, the actions and observations, and the reward",
        )


@check(CheckLevel.STATIC)
def check_app_importable(subject: Subject) -> None:
    """The application can be imported, and has the models passed to create_app."""
    assert subject.app.models


@check(CheckLevel.STATIC)
def check_imports_declared(subject: Subject) -> str:
    """The dependencies bring every package that the application imports."""
    file = None if subject.target.file is None else subject.target.file[0]
    place = file or subject.require_folder()
    dependencies = read_dependencies(place)
    if dependencies is None:
        raise NotApplicableError(f"neither {PROJECT} nor a requirements.txt declares dependencies")
    assert subject.app.models  # imported, and so are the files of the folder that it needs
    found, missing = find_undeclared(place, dependencies)
    if found and missing:
        raise NotApplicableError(
            f"{', '.join(sorted(missing))} not installed here, and may bring {min(found)}"
        )
    if found:
        places = [
            f"{each.module} ({source.relative_to(place.resolve()) if file is None else file.name}, line {each.line})"
            for source, each in found.values()
        ]
        raise CheckError(
            f"expected every import of an installed package to be among the dependencies, got {', '.join(places)}: "
            "it is there on this machine, but not in an image",
            change=f"add {', '.join(sorted(found))} to the dependencies in "
            + (PROJECT if file is None else "the file's block `# /// script`"),
        )
    return f"{len(dependencies.required)} dependencies"


@check(CheckLevel.STATIC)
def check_models_derived(subject: Subject) -> None:
    """Actions, observations and states are derived from Action, Observation and State."""
    for key, model in _classes(subject):
        base = _BASES[key]
        if issubclass(model, base):
            continue
        if not issubclass(model, BaseModel) or set(base.model_fields) - set(model.model_fields):
            raise CheckError(
                f"expected the {key} model {_name(model)} to derive from {base.__name__}, got a class that does not "
                f"and lacks {', '.join(sorted(set(base.model_fields) - set(getattr(model, 'model_fields', ()))))}",
                change=f"derive it: class {_name(model)}({base.__name__})",
            )


@check(CheckLevel.STATIC)
def check_models_forbid_unknown_keys(subject: Subject) -> None:
    """Actions and observations refuse unknown keys, as the protocol does."""
    for key, model in _classes(subject):
        extra = getattr(model, "model_config", {}).get("extra")
        if key in _FORBIDDING and extra != "forbid":
            raise CheckError(
                f"expected the {key} model {_name(model)} to refuse unknown keys, got extra={extra!r}: a misspelt "
                "key would be ignored here, but refused by other servers and clients",
                change=f'keep the model_config of the base in {_name(model)}, with extra="forbid"',
            )


@check(CheckLevel.STATIC)
def check_models_have_schemas(subject: Subject) -> None:
    """Every field of every model has a valid JSON schema."""
    for key, model in _classes(subject):
        try:
            schema = TypeAdapter(model).json_schema()
        except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError) as error:
            raise CheckError(
                f"expected every field of {_name(model)} ({key}) in a JSON schema, got: {str(error).splitlines()[0]}",
                change="give the field a type that JSON has, or describe it: "
                "Annotated[Board, WithJsonSchema({...})] with a serialiser",
            ) from error
        change = "correct json_schema_extra or WithJsonSchema of that field"
        require_schema(schema, f"{_name(model)} ({key})", change)


@check(CheckLevel.STATIC)
def check_reserved_fields(subject: Subject) -> None:
    """Fields that every model has, such as reward and done, keep the types of the protocol."""
    for key, model in _classes(subject):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        for field, allowed in _WIRE_TYPES[key.removeprefix("reset_")].items():
            if (info := model.model_fields.get(field)) is None:
                continue
            kinds = _kinds(TypeAdapter(info.annotation or Any).json_schema())
            if wrong := sorted(kinds - allowed):
                raise CheckError(
                    f"expected {_name(model)}.{field} to be {' or '.join(sorted(allowed))}, "
                    f"got {' or '.join(wrong)}: it hides the protocol's field {field!r}",
                    change=f"rename the field {field!r} of {_name(model)}",
                )


@check(CheckLevel.STATIC)
def check_action_schema_agrees(subject: Subject) -> str:
    """The action model accepts the actions that its schema allows."""
    adapter: TypeAdapter[Any] = TypeAdapter(subject.app.action)
    drawn = sample(adapter.json_schema(), 32, subject.limits.seed)
    refusals = [fault for action in drawn if (fault := _refusal(adapter, action)) is not None]
    if len(refusals) == len(drawn):
        raise CheckError(
            f"expected the model to accept actions that its schema allows, got {len(refusals)} of {len(drawn)} "
            f"refused; the last: {refusals[-1]}",
            change="express the validators' conditions as types: Field(ge=, le=, pattern=), Literal, an enum; a "
            "client that makes actions from the schema, such as a model's structured output, knows no others",
        )
    return f"{len(drawn) - len(refusals)} of {len(drawn)} drawn actions accepted"


@check(CheckLevel.STATIC)
def check_example_actions(subject: Subject) -> str:
    """The manifest's example actions are valid."""
    examples = subject.manifest.validation.episodes.example_actions
    if not examples:
        raise NotApplicableError("the manifest gives no example_actions")
    adapter: TypeAdapter[Any] = TypeAdapter(subject.app.action)
    for example in examples:
        if (fault := _refusal(adapter, example)) is not None:
            raise CheckError(
                f"expected every one of validation.episodes.example_actions to be an action, got {example}: {fault}",
                change="correct it in openenv.yaml",
            )
    return f"{len(examples)} examples"


def _refusal(adapter: TypeAdapter[Any], action: Any) -> str | None:
    try:
        adapter.validate_python(action)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(str(key) for key in first['loc'])}: {first['msg']}"
    except Exception as error:  # raised by the author's own validator
        return f"{type(error).__name__}: {error}"
    return None


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; empty if it states no type."""
    if "$ref" in schema:
        definition = schema.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2], {})
        return _kinds({"$defs": schema.get("$defs", {}), **definition})
    arms = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if arms:
        return {kind for arm in arms for kind in _kinds({"$defs": schema.get("$defs", {}), **arm})}
    kind = schema.get("type", [])
    return {kind} if isinstance(kind, str) else set(kind)


@check(CheckLevel.STATIC)
def check_image_user(subject: Subject) -> str:
    """The image does not run as root."""
    user = str(_config(subject).get("User") or "")
    if user.partition(":")[0] in ("", "0", "root"):
        raise CheckError(
            f"expected an image with a user other than root, got {f'user {user!r}' if user else 'no user'}",
            change="end the Dockerfile with `USER env`, and build again",
        )
    return user


@check(CheckLevel.STATIC)
def check_image_health(subject: Subject) -> None:
    """The image tells whether its server is healthy."""
    test = (_config(subject).get("Healthcheck") or {}).get("Test") or []
    if not test or test[0] == "NONE":
        raise CheckError(
            "expected an image with a HEALTHCHECK, got none",
            change='add `HEALTHCHECK CMD ["healthcheck"]` to a Dockerfile on our base, and build again',
        )


@check(CheckLevel.STATIC)
def check_image_port(subject: Subject) -> str:
    """The image exposes the port that it serves."""
    exposed_ports = sorted(_config(subject).get("ExposedPorts") or {})
    port = exposed_port(subject.target.text)
    if f"{port}/tcp" not in exposed_ports:
        raise CheckError(
            f"expected an image that exposes one port, or {port} among them, got {', '.join(exposed_ports) or 'none'}",
            change=f"add `EXPOSE {port}` to the Dockerfile, and build again",
        )
    return str(port)


@check(CheckLevel.STATIC)
def check_image_size(subject: Subject) -> str:
    """The image is small enough to be pulled quickly."""
    size = int(_inspect_image(subject).get("Size") or 0)
    if size > _LARGEST_BYTES:
        raise CheckError(
            f"expected an image of at most {_megabytes(_LARGEST_BYTES)}, got {_megabytes(size)}",
            change="build in stages, leave caches and compilers behind, and mount models and data",
        )
    return _megabytes(size)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _inspect_image(subject: Subject) -> dict[str, Any]:
    if subject.kind is not TargetKind.IMAGE:
        raise NotApplicableError(f"a target of kind {subject.kind} has no image")
    from openenv_core.providers.docker.engine import DockerEngine

    image: dict[str, Any] = DockerEngine.find().call("GET", f"/images/{subject.target.text}/json")
    return image


def _config(subject: Subject) -> dict[str, Any]:
    config: dict[str, Any] = _inspect_image(subject).get("Config") or {}
    return config

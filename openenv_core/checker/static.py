"""Checks of the manifest, the application and its models, without playing."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.imports import PROJECT, find_undeclared, read_dependencies
from openenv_core.checker.subject import Subject
from openenv_core.manifest import MANIFEST
from openenv_core.types import Action, Observation, State

_BASES: Final[Mapping[str, type[BaseModel]]] = {
    "action": Action,
    "observation": Observation,
    "reset_observation": Observation,
    "state": State,
}
"""The base class of each model of an application."""


@check(CheckLevel.STATIC)
def check_manifest_valid(subject: Subject) -> None:
    """The manifest, or what a file declares, has only known keys, with valid values; its app is in the folder."""
    manifest = subject.manifest
    if subject.target.folder is None or subject.target.file is not None:
        return
    folder = subject.target.folder
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
    """Models derive from Action, Observation and State; actions and observations refuse unknown keys."""
    for key, model in _classes(subject):
        base, name = _BASES[key], getattr(model, "__qualname__", repr(model))
        lacking = sorted(set(base.model_fields) - set(getattr(model, "model_fields", ())))
        if not issubclass(model, BaseModel) or lacking:
            raise CheckError(
                f"expected the {key} model {name} to derive from {base.__name__}, got a class that does not and lacks "
                f"{', '.join(lacking)}",
                change=f"derive it: class {name}({base.__name__})",
            )
        extra = model.model_config.get("extra")
        if base is not State and extra != "forbid":
            raise CheckError(
                f"expected the {key} model {name} to refuse unknown keys, got extra={extra!r}: a misspelt key would "
                "be ignored here, but refused by other servers and clients",
                change=f'keep the model_config of the base in {name}, with extra="forbid"',
            )


def _classes(subject: Subject) -> Iterator[tuple[str, type[Any]]]:
    """Yield the key in /schema and the class of every model; each member of a union separately."""
    for key, model in subject.app.models.items():
        for arm in _arms(model):
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


@check(CheckLevel.STATIC)
def check_example_actions(subject: Subject) -> str:
    """The manifest's example actions are valid."""
    examples = subject.manifest.validation.episodes.example_actions
    if not examples:
        raise NotApplicableError("the manifest gives no example_actions")
    adapter: TypeAdapter[Any] = TypeAdapter(subject.app.action)
    for example in examples:
        try:
            adapter.validate_python(example)
        except ValidationError as error:
            raise CheckError(
                f"expected every one of validation.episodes.example_actions to be an action, got {example}: {error}",
                change="correct it in openenv.yaml",
            ) from error
    return f"{len(examples)} examples"

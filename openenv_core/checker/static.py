"""The manifest, the application and its models, before anything is played."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.drawing import require_own_names, require_schema, sample
from openenv_core.checker.subject import Subject
from openenv_core.manifest import MANIFEST, ManifestError, read_manifest
from openenv_core.types import Action, Observation, State

_BASES: Final[Mapping[str, type[BaseModel]]] = {
    "action": Action,
    "observation": Observation,
    "reset_observation": Observation,
    "state": State,
}
"""What each model of an application is derived from."""


_FORBIDDING: Final = ("action", "observation", "reset_observation")
"""Models whose unknown keys a released client refuses."""

_MEANS: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "action": {"metadata": frozenset({"object"})},
    "observation": {
        "done": frozenset({"boolean"}),
        "reward": frozenset({"boolean", "integer", "number", "null"}),
        "metadata": frozenset({"object"}),
    },
    "state": {"episode_id": frozenset({"string", "null"}), "step_count": frozenset({"integer"})},
}
"""The JSON types that the wire gives the fields which every model has."""


def _classes(subject: Subject) -> Iterator[tuple[str, type[Any]]]:
    """Yield the key in /schema and the class of every model, those of a union one by one."""
    seen: set[type[Any]] = set()
    for key, model in subject.served.models.items():
        for one in _arms(model):
            if one not in seen:
                seen.add(one)
                yield key, one


def _arms(model: Any) -> list[Any]:
    """Return the classes of a union; of a class, itself."""
    if isinstance(model, type):
        return [model]
    if get_origin(model) is Annotated:
        return _arms(get_args(model)[0])
    found = [one for part in get_args(model) for one in _arms(part)]
    if not found:
        raise NotApplicableError(f"a model of a kind that is not known here: {model!r}")
    return found


def _name(model: type[Any]) -> str:
    return getattr(model, "__qualname__", repr(model))


@check(CheckLevel.STATIC)
def check_manifest_present(subject: Subject) -> None:
    """The folder has an openenv.yaml."""
    folder = subject.need_folder()
    if not (folder / MANIFEST).is_file():
        raise CheckError(
            f"expected {MANIFEST} in {folder}, got none",
            change=f"add {MANIFEST} with at least spec_version: 1, name, app and port, as `ropewalk init` writes it",
        )


@check(CheckLevel.STATIC)
def check_manifest_valid(subject: Subject) -> None:
    """The manifest has the keys and values that it may have, and no others."""
    folder = subject.need_folder()
    if not (folder / MANIFEST).is_file():
        raise NotApplicableError("there is no manifest")
    try:
        read_manifest(folder)
    except ManifestError as error:
        raise CheckError(
            str(error), change=f"correct these keys in {folder / MANIFEST}; docs/validate.md lists them"
        ) from error


@check(CheckLevel.STATIC)
def check_manifest_app(subject: Subject) -> None:
    """The manifest's app is a file of the folder."""
    folder, manifest = subject.need_folder(), subject.manifest
    module = manifest.app.partition(":")[0].split(".")
    # Named as others import it, or as it lies in the folder.
    inside = module[module.index(folder.name) + 1 :] if folder.name in module else module
    place = folder.joinpath(*inside)
    if not (place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()):
        raise CheckError(
            f"expected {manifest.app!r} to lie in {folder}, got no {'/'.join(inside)}.py there",
            change=f"let `app:` in {MANIFEST} name the module and attribute of the application: server.app:app",
        )


@check(CheckLevel.STATIC)
def check_declared_tools(subject: Subject) -> None:
    """No tool that the manifest declares has a name that clients' own methods have."""
    subject.need_folder()
    declared = subject.manifest.validation.capabilities.declared_tools
    if not declared:
        raise NotApplicableError("the manifest declares no tools")
    require_own_names(declared)


@check(CheckLevel.STATIC)
def check_readme(subject: Subject) -> None:
    """The folder has a README that says what the environment is."""
    folder = subject.need_folder()
    found = next((file for file in sorted(folder.glob("[Rr][Ee][Aa][Dd][Mm][Ee]*")) if file.is_file()), None)
    if found is None:
        raise CheckError(
            f"expected README.md in {folder}, got none",
            change="add one: what an episode is, what actions and observations hold, what is rewarded",
        )
    words = found.read_text(encoding="utf-8", errors="replace").split()
    if len(words) < 12:  # fewer say nothing
        raise CheckError(
            f"expected {found.name} to tell of the environment, got {len(words)} words",
            change="say what an episode is, what actions and observations hold, what is rewarded",
        )


@check(CheckLevel.STATIC)
def check_app_importable(subject: Subject) -> None:
    """The application can be imported, and serves what create_app was told."""
    assert subject.served.models


@check(CheckLevel.STATIC)
def check_environment_methods(subject: Subject) -> None:
    """The environment's class has reset, step and state, which are what a server calls."""
    factory = subject.served.factory
    if not isinstance(factory, type):
        raise NotApplicableError(
            "a factory makes the environment, whose class is not known before there is one"
        )
    for method in ("reset", "step"):
        found = getattr(factory, f"{method}_async", None) or getattr(factory, method, None)
        if not callable(found):
            raise CheckError(
                f"expected {_name(factory)}.{method} to be a method, got {found!r}",
                change=f"write {method}() on {_name(factory)}",
            )
        if getattr(found, "__isabstractmethod__", False):
            raise CheckError(
                f"expected {_name(factory)} to have a {method} of its own, got none",
                change=f"write {method}() on {_name(factory)}",
            )
    state = inspect.getattr_static(factory, "state", None)
    if inspect.isfunction(state):
        raise CheckError(
            f"expected {_name(factory)}.state to be a property, got a method",
            change="put @property before def state(self)",
        )
    if state is None or getattr(state, "__isabstractmethod__", False):
        raise CheckError(
            f"expected {_name(factory)}.state to be a property, got none",
            change=f"write the property `state` on {_name(factory)}, returning a State",
        )


@check(CheckLevel.STATIC)
def check_models_derived(subject: Subject) -> None:
    """Actions, observations and states are derived from Action, Observation and State."""
    for key, model in _classes(subject):
        base = _BASES[key]
        if issubclass(model, base):
            continue
        if not issubclass(model, BaseModel) or set(base.model_fields) - set(model.model_fields):
            raise CheckError(
                f"expected the {key} model {_name(model)} to be a {base.__name__}, got a class that is none and "
                f"lacks {', '.join(sorted(set(base.model_fields) - set(getattr(model, 'model_fields', ()))))}",
                change=f"derive it: class {_name(model)}({base.__name__})",
            )


@check(CheckLevel.STATIC)
def check_models_forbid_unknown_keys(subject: Subject) -> None:
    """Actions and observations refuse keys that they do not know, as the wire does."""
    for key, model in _classes(subject):
        extra = getattr(model, "model_config", {}).get("extra")
        if key in _FORBIDDING and extra != "forbid":
            raise CheckError(
                f"expected the {key} model {_name(model)} to refuse unknown keys, got extra={extra!r}: a misspelt "
                "key would pass unseen here and be refused by other servers and clients",
                change=f'leave model_config of {_name(model)} as its base has it, with extra="forbid"',
            )


@check(CheckLevel.STATIC)
def check_models_have_schemas(subject: Subject) -> None:
    """Every field of every model can be described in a JSON schema, and the schema is one."""
    for key, model in _classes(subject):
        try:
            schema = TypeAdapter(model).json_schema()
        except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError) as error:
            raise CheckError(
                f"expected every field of {_name(model)} ({key}) in a JSON schema, got: {str(error).splitlines()[0]}",
                change="give the field a type that JSON has, or describe it: "
                "Annotated[Board, WithJsonSchema({...})] with a serialiser",
            ) from error
        change = "correct what json_schema_extra or WithJsonSchema says of that field"
        require_schema(schema, f"{_name(model)} ({key})", change)


@check(CheckLevel.STATIC)
def check_reserved_fields(subject: Subject) -> None:
    """Fields that every model has, such as reward and done, keep the types that the wire gives them."""
    for key, model in _classes(subject):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        for field, allowed in _MEANS[key.removeprefix("reset_")].items():
            if (info := model.model_fields.get(field)) is None:
                continue
            kinds = _kinds(TypeAdapter(info.annotation or Any).json_schema())
            if wrong := sorted(kinds - allowed):
                raise CheckError(
                    f"expected {_name(model)}.{field} to be {' or '.join(sorted(allowed))}, "
                    f"got {' or '.join(wrong)}: it hides what the wire means by {field!r}",
                    change=f"rename the field {field!r} of {_name(model)}",
                )


@check(CheckLevel.STATIC)
def check_reserved_tool_names(subject: Subject) -> None:
    """No tool that the action model names is called reset, step, state or close."""
    schema = TypeAdapter(subject.served.action).json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    named: set[str] = set()
    for part in parts:
        tool = part.get("properties", {}).get("tool_name", {})
        named |= {str(one) for one in [*tool.get("enum", ()), *([tool["const"]] if "const" in tool else ())]}
    if not any("tool_name" in part.get("properties", {}) for part in parts):
        raise NotApplicableError("its actions are no calls of tools")
    require_own_names(named)


@check(CheckLevel.STATIC)
def check_action_schema_agrees(subject: Subject) -> str:
    """What the action's schema allows, the action model takes."""
    adapter: TypeAdapter[Any] = TypeAdapter(subject.served.action)
    drawn = sample(adapter.json_schema(), 32, subject.limits.seed)
    refused = [fault for action in drawn if (fault := _refusal(adapter, action)) is not None]
    if len(refused) == len(drawn):
        raise CheckError(
            f"expected the model to take actions that its schema allows, got {len(refused)} of {len(drawn)} "
            f"refused; the last: {refused[-1]}",
            change="put what the validators ask for into the types: Field(ge=, le=, pattern=), Literal, an enum; "
            "whoever draws actions from the schema, a model's structured output for one, knows nothing else",
        )
    return f"{len(drawn) - len(refused)} of {len(drawn)} drawn actions taken"


@check(CheckLevel.STATIC)
def check_example_actions(subject: Subject) -> str:
    """The actions that the manifest gives as examples are valid."""
    subject.need_folder()
    examples = subject.manifest.validation.episodes.example_actions
    if not examples:
        raise NotApplicableError("the manifest gives no example_actions")
    adapter: TypeAdapter[Any] = TypeAdapter(subject.served.action)
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
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    except Exception as error:  # a validator of the author's own
        return f"{type(error).__name__}: {error}"
    return None


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; none of them where it says nothing of its type."""
    if "$ref" in schema:
        found = schema.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2], {})
        return _kinds({"$defs": schema.get("$defs", {}), **found})
    arms = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if arms:
        return {kind for arm in arms for kind in _kinds({"$defs": schema.get("$defs", {}), **arm})}
    kind = schema.get("type", [])
    return {kind} if isinstance(kind, str) else set(kind)

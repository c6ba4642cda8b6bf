"""Loading a validated `Config` from YAML and dotted overrides, with helpful errors."""

import difflib
import functools
import importlib
import inspect
import operator
import re
import sys
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from openenv_core.errors import ConfigurationError
from openenv_core.targets import target_of
from openenv_core.tracebacks import format_traceback, in_place
from rl_bridge.config.algorithm import PRESETS, AlgorithmConfig
from rl_bridge.config.environment import ENV_FORMS
from rl_bridge.config.schema import NAME_PATTERN, Config
from rl_bridge.config.sections import Section
from rl_bridge.errors import ConfigError
from rl_bridge.files import PARTIAL_SUFFIX, replace_file

SectionT = TypeVar("SectionT", bound=Section)
_MERGE = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`, which may occur more than once."""
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""A date that does not exist is a ValueError, and so is text that is not UTF-8."""

CONFIG_FILE = "config.yaml"
"""The configuration in a run's folder, with every key and override, from which the run can be resumed."""
PARTIAL_CONFIG_FILE = CONFIG_FILE + PARTIAL_SUFFIX
"""The same while it is being written."""


def save_config(config: Config, folder: Path) -> None:
    """Write the whole configuration into a run's folder; if that fails, a previous one is unchanged."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    replace_file(folder / CONFIG_FILE, text.encode())


def require_name(name: str | None, *, kind: str) -> None:
    """Raise ConfigError if a `--name` is not a plain folder name; `kind` is the plural of what is named."""
    if name is not None and not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"expected --name as letters, digits, dots, dashes and underscores, got {name!r}; "
            f"output_dir=FOLDER puts {kind} elsewhere"
        )


def make_folder_exists_error(folder: Path) -> ConfigError:
    """Return the error for a new run whose folder exists."""
    return ConfigError(
        f"expected a new folder for the run, {str(folder)!r} exists; choose another --name, "
        f"or go on with it by --resume {folder}"
    )


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a run's configuration from a YAML file and overrides of the form `a.b=value`, with a value in YAML.

    Raises:
        ConfigError: The file cannot be read, or a key or a value is wrong. The message lists every fault.
    """
    return load_section(path, overrides, Config)


ENV_RUN: Mapping[str, Any] = {
    "rollout": {"batch_size": 64, "max_new_tokens": 32, "max_length": 1024},
    "trainer": {"iterations": 20, "learning_rate": 1.0e-6, "warmup_updates": 2},
    "evaluation": {"episodes": 100},
}
"""What a run on an environment's file has unless it is overridden: a short run of a published model."""


def load_env_config(path: str, overrides: Iterable[str] = ()) -> Config:
    """Return the configuration of a run on an environment in one Python file; otherwise like `load_config`."""
    try:
        file = target_of(path).file
    except ConfigurationError as error:
        raise ConfigError(f"--env: {error}") from error
    if file is None:
        raise ConfigError(f"--env: expected a Python file with an environment's class, got {path!r}")
    data = {key: dict(section) for key, section in ENV_RUN.items()}
    name = re.sub(r"[^A-Za-z0-9._-]", "-", file[0].stem)
    return _load({**data, "name": name, "env": {"app": f"{file[0]}:{file[1]}"}}, overrides, Config)


def load_section(path: str | Path, overrides: Iterable[str], schema: type[SectionT]) -> SectionT:
    """Read a file with another schema, such as a recipe's; otherwise like `load_config`."""
    return _load(_read_yaml(Path(path)), overrides, schema)


def load_saved_config(folder: Path, overrides: Iterable[str] = ()) -> Config:
    """Read the configuration of a run's folder, perhaps written by an earlier version; otherwise like `load_config`.

    It has every key of its version. Those that are no longer known are ignored where they were not set.
    """
    data = _read_yaml(folder / CONFIG_FILE)
    try:
        Config.model_validate(data)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            if fault["type"] == "extra_forbidden" and fault["input"] is None:
                *sections, key = _locate(fault)
                functools.reduce(operator.getitem, sections, data).pop(key, None)
    return _load(data, overrides, Config)


def _load(data: dict[str, Any], overrides: Iterable[str], schema: type[SectionT]) -> SectionT:
    _resolve_short_key(data)
    # The algorithm's name first: other overrides change its preset, whatever their order.
    for override in sorted(overrides, key=_is_algorithm_name, reverse=True):
        _apply_override(data, override)
        _resolve_short_key(data)
    return _validate(data, schema)


def _resolve_short_key(data: dict[str, Any]) -> None:
    """Move `trainer.tensor_parallel` to the key that it is short for, `trainer.parallel.tp`."""
    trainer = data.get("trainer")
    if isinstance(trainer, dict) and trainer.get("tensor_parallel") is not None:
        rest = {key: value for key, value in trainer.items() if key != "tensor_parallel"}
        tp = {"tp": trainer["tensor_parallel"]}
        data["trainer"] = rest | {"parallel": {**(rest.get("parallel") or {}), **tp}}


def colocate_if_needed(config: Config, gpus: int) -> Config:
    """Return the configuration, colocated if `monarch.colocate` is unset and this machine has too few GPUs.

    Raises:
        ConfigError: The colocated configuration is not valid.
    """
    monarch, roles = config.monarch, config.monarch.roles
    can_colocate = roles.policy.gpus and 0 < roles.trainer.gpus <= gpus < monarch.gpus
    if monarch.colocate is not None or not monarch.is_local or not can_colocate:
        return config
    data = config.model_dump(exclude={"monarch": {"roles": {"policy"}}})
    data["monarch"]["colocate"] = True
    data["monarch"]["roles"]["policy"] = {
        "replicas": roles.trainer.gpus // roles.policy.gpus,
        "gpus": roles.policy.gpus,
    }
    return _validate(data, Config)


def _validate(data: dict[str, Any], schema: type[SectionT]) -> SectionT:
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        lines = [_explain(fault, schema) for fault in error.errors(include_url=False)]
        raise ConfigError("the configuration is not valid:\n  " + "\n  ".join(lines)) from error


def resolve(reference: str, *, key: str) -> Any:
    """Import the object that a key names as `package.module:name`; ConfigError if there is none."""
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"expected {key} as 'package.module:name', got {reference!r}")
    if str(Path.cwd()) not in sys.path:  # the module is usually in the current folder
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: cannot import {module_name!r}{in_place(error)}; start from the folder that contains it, or "
            "install it"
        ) from error
    except Exception as error:
        raise ConfigError(f"{key}: to import {module_name!r} raised\n{format_traceback(error)}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        suggestion = _suggest_name(attribute, list(vars(module)))
        raise ConfigError(f"{key}: module {module_name!r} has no {attribute!r}{suggestion}") from None


def resolve_function(
    reference: str, *, key: str, signature: str, args: tuple[Any, ...], **kwargs: Any
) -> Callable[..., Any]:
    """Import a function; ConfigError if it cannot be called with these arguments (described by `signature`)."""
    function = resolve(reference, key=key)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else type(function).__name__
        raise ConfigError(f"{key}={reference}: expected a plain function, got {kind}")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{key}={reference}: expected a function of {signature}, got one where {error}"
        ) from error
    except ValueError:
        pass  # a function in C without a signature to check
    return function  # type: ignore[no-any-return]  # all that is known is that it is callable


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror}") from error
    try:
        data = yaml.load(content.decode("utf-8"), Loader=_UniqueKeyLoader)
    except _YAML_ERRORS as error:
        raise ConfigError(f"{str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"expected a mapping of sections in {str(path)!r}, got {type(data).__name__}")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"expected an override as section.key=value, got {override!r}")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except _YAML_ERRORS as error:
        raise ConfigError(f"the value of the override {override!r} is not valid YAML: {error}") from error
    if _is_algorithm_name(override) and isinstance(data.get("algorithm"), dict) and isinstance(value, str):
        data["algorithm"] = _drop_preset_values(data["algorithm"]) | {"name": value}
        return
    node = data
    for key in keys[:-1]:
        child = node.get(key)
        if key == "algorithm" and isinstance(child, str):
            child = {"name": child}
        if child is not None and not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {key!r} is a value, not a section")
        node[key] = child = dict(child or {})
        node = child
    node[keys[-1]] = value


def _is_algorithm_name(override: str) -> bool:
    return override.partition("=")[0].strip() in ("algorithm", "algorithm.name")


def _drop_preset_values(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Drop values equal to the current preset's. A saved run has all keys, which would override any new preset."""
    name = algorithm.get("name", "grpo")
    if not isinstance(name, str) or name not in PRESETS:
        return algorithm
    preset = AlgorithmConfig.model_validate({"name": name}).model_dump()
    return {key: value for key, value in algorithm.items() if key not in preset or preset[key] != value}


def _explain(fault: Mapping[str, Any], schema: type[BaseModel]) -> str:
    location = _locate(fault)
    dotted = ".".join(str(key) for key in location)
    if fault["type"] == "extra_forbidden":
        section = _find_section(location[:-1], schema)
        return f"{dotted}: unknown key{_suggest_name(str(location[-1]), list(section.model_fields), location[:-1])}"
    if fault["type"] == "missing":
        return f"{dotted}: a value is needed, none was given"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return f"{dotted}: {fault['msg']}, got {fault['input']!r}"


def _locate(fault: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the keys that lead to a faulty value."""
    return tuple(key for key in fault["loc"] if key not in ENV_FORMS)


def _find_section(location: tuple[Any, ...], schema: type[BaseModel]) -> type[BaseModel]:
    model = schema
    for key in location:
        if str(key) in model.model_fields:  # otherwise it is the name of an environment
            model = next(_iter_sections(model.model_fields[str(key)].annotation))
    return model


def _iter_sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _iter_sections(argument)


def _suggest_name(name: str, choices: list[str], prefix: tuple[Any, ...] = ()) -> str:
    public = sorted(candidate for candidate in choices if not candidate.startswith("_"))
    close = difflib.get_close_matches(name, public, n=1, cutoff=0.0)
    return f"; did you mean {'.'.join([*map(str, prefix), close[0]])!r}?" if close else ""

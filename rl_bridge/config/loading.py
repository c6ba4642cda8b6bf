"""YAML and dotted overrides into a validated `Config`, with errors that say what to do."""

import difflib
import importlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rl_bridge.config.schema import Config
from rl_bridge.errors import ConfigError

CONFIG_FILE = "config.yaml"
"""In a run's folder: the configuration with every key and override, from which the run can be resumed."""


def save_config(config: Config, folder: Path) -> None:
    """Write the whole configuration into a run's folder."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a run's configuration.

    Args:
        path: A YAML file.
        overrides: `a.b=value` each; the value is read as YAML, so `true`, `3` and `[1, 2]` mean what they say.

    Raises:
        ConfigError: The file cannot be read, or a key or a value is wrong. The message lists every fault.
    """
    data = _read(Path(path))
    for override in overrides:
        _apply(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors(include_url=False)]
        raise ConfigError("the configuration is not valid:\n  " + "\n  ".join(lines)) from error


def resolve(reference: str, *, key: str) -> Any:
    """Import what `package.module:name` names.

    Args:
        reference: The dotted path.
        key: Which configuration key it came from, for the error.

    Raises:
        ConfigError: The reference is malformed, the module does not import, or it lacks the name.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"expected {key} as 'package.module:name', got {reference!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: cannot import {module_name!r} ({error}); start from the folder that contains it, or install it"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = _nearest(attribute, list(vars(module)))
        raise ConfigError(f"{key}: module {module_name!r} has no {attribute!r}{near}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror}") from error
    try:
        data = yaml.safe_load(content.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"expected a mapping of sections in {str(path)!r}, got {type(data).__name__}")
    return data


def _apply(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"expected an override as section.key=value, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {override!r} is not valid YAML: {error}") from error
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


def _explain(fault: Mapping[str, Any]) -> str:
    location = tuple(fault["loc"])
    dotted = ".".join(str(part) for part in location)
    if fault["type"] == "extra_forbidden":
        section = _section_at(location[:-1])
        return (
            f"{dotted}: unknown key{_nearest(str(location[-1]), list(section.model_fields), location[:-1])}"
        )
    if fault["type"] == "missing":
        return f"{dotted}: a value is needed, none was given"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return f"{dotted}: {fault['msg']}, got {fault['input']!r}"


def _section_at(location: tuple[Any, ...]) -> type[BaseModel]:
    model: type[BaseModel] = Config
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        candidates = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return model


def _nearest(name: str, known: list[str], prefix: tuple[Any, ...] = ()) -> str:
    public = sorted(candidate for candidate in known if not candidate.startswith("_"))
    close = difflib.get_close_matches(name, public, n=1, cutoff=0.0)
    return f"; did you mean {'.'.join([*map(str, prefix), close[0]])!r}?" if close else ""

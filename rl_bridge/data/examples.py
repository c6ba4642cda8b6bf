"""Examples and their sources, by index; `rl_bridge.data.sampling` decides their order."""

import hashlib
import importlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from openenv_core.tracebacks import in_place
from rl_bridge.data.sampling import Passes
from rl_bridge.errors import ConfigError
from rl_bridge.tokens.chat import ChatMessage


@dataclass(kw_only=True, slots=True, frozen=True)
class Example:
    """One task.

    Attributes:
        id: Its name; its index in the source if that gives none.
        prompt: The chat that the policy answers.
        target: What a reward function compares the answer with.
    """

    id: str
    prompt: tuple[ChatMessage, ...]
    target: Any = None


class Source(Protocol):
    """A sequence of examples."""

    digest: str
    """A hash of all content, the same in every process: sources with equal digests have the same examples at the same
    indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


class JsonLines:
    """A file with one object per line: `prompt` (a text or a chat), and optionally `target` and `id`.

    The file is read and checked once; afterwards only the offsets of its lines are in memory. It must not change while
    in use.

    Raises:
        ConfigError: The file cannot be read, or a line is not an example.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("q")
        digest = hashlib.blake2b(digest_size=16)
        try:
            with path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        _parse_example(line, f"{path}, line {number}", len(self._offsets))
                        self._offsets.append(offset)
                    digest.update(line)
                    offset += len(line)
        except OSError as error:
            raise ConfigError(
                f"expected examples in {str(path)!r}, cannot read it: {error.strerror}"
            ) from error
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Example:
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            return _parse_example(file.readline(), f"{self._path}, example {index}", index)


class ExampleList:
    """Examples in memory, from an iterable of `Example` or of mappings like the lines of `JsonLines`."""

    def __init__(self, items: Iterable[Any], *, name: str) -> None:
        self._examples = [
            _check_example(item, f"{name}, item {index}", index) for index, item in enumerate(items)
        ]
        digest = hashlib.blake2b(digest_size=16)
        for example in self._examples:
            digest.update(json.dumps(asdict(example), sort_keys=True, default=_type_name).encode())
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


def _type_name(value: object) -> str:
    """Return what stands in JSON for a value of an unknown type, whose `repr` may differ between processes."""
    return type(value).__qualname__


def open_source(name: str) -> Source:
    """Open a file of JSON lines, or the iterable at a dotted path (or returned by the callable there).

    Raises:
        ConfigError: There is neither, or it has no examples.
    """
    source: Source
    if name.endswith(".jsonl") or Path(name).is_file():
        source = JsonLines(Path(name))
    else:
        source = ExampleList(_import_iterable(name), name=name)
    if not len(source):
        raise ConfigError(f"expected at least one example in {name!r}, got none")
    return source


def _import_iterable(path: str) -> Iterable[Any]:
    module_name, _, attribute = path.rpartition(".")
    try:
        if not module_name:
            raise ModuleNotFoundError("it names no module")
        target = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"expected a file of JSON lines or the dotted path of an iterable, got {path!r}{in_place(error)}"
        ) from error
    items = target() if callable(target) else target
    if not isinstance(items, Iterable):
        raise ConfigError(f"expected {path!r} to be or to return an iterable, got {type(items).__name__}")
    return items


def _parse_example(line: bytes, where: str, index: int) -> Example:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"expected a JSON object, got invalid JSON: {error} ({where})") from error
    return _check_example(item, where, index)


def _check_example(item: object, where: str, index: int) -> Example:
    example = item if isinstance(item, Example) else _make_example(item, where, index)
    require_encodable(example.prompt, where)
    return example


def require_encodable(value: object, where: str) -> None:
    """Raise ConfigError if a text has a lone surrogate, which JSON allows and tokenizers refuse."""
    try:
        json.dumps(value, ensure_ascii=False, default=_type_name).encode()
    except UnicodeEncodeError as error:
        text, at = error.object, error.start
        raise ConfigError(
            f"expected text that UTF-8 can encode, got {text[at]!r} after {text[max(0, at - 40) : at]!r} ({where})"
        ) from error


def _make_example(item: object, where: str, index: int) -> Example:
    if not isinstance(item, Mapping) or "prompt" not in item:
        received = list(item) if isinstance(item, Mapping) else type(item).__name__
        raise ConfigError(f"expected an object with a prompt, got {received} ({where})")
    return Example(
        id=str(item.get("id", index)), prompt=_parse_chat(item["prompt"], where), target=item.get("target")
    )


def _parse_chat(prompt: object, where: str) -> tuple[ChatMessage, ...]:
    if isinstance(prompt, str):
        return (ChatMessage(role="user", content=prompt),)
    if isinstance(prompt, Sequence) and prompt and all(map(_is_message, prompt)):
        return tuple(ChatMessage(role=message["role"], content=message["content"]) for message in prompt)
    raise ConfigError(
        f"expected the prompt to be a text or messages with role and content, got {prompt!r:.200} ({where})"
    )


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))


class Dataset:
    """Examples in the order in which they are sampled, with an identity for checkpoints.

    The seed determines the order of every pass over them; without `shuffle` it is that of the source.
    """

    def __init__(self, source: Source, *, seed: int, shuffle: bool = True) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._passes = Passes(len(source), seed=seed, shuffle=shuffle)
        self._sample_count = 0

    def sample(self) -> Example:
        """Return the next example, for callers that do not number them."""
        example = self.get_example(self._passes[self._sample_count])
        self._sample_count += 1
        return example

    def get_example(self, index: int) -> Example:
        """Return the example at an index of the source."""
        return self._source[index]

    def identity(self) -> dict[str, Any]:
        """Return what determines the examples and their order, to be saved in checkpoints."""
        return {
            "digest": self._source.digest,
            "examples": len(self._source),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }


def require_same(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ConfigError if a `Dataset.identity` differs from the checkpoint's.

    With other examples, or in another order, some would be answered twice and others never.
    """
    for name, value in saved.items():
        if value != current[name]:
            raise ConfigError(
                f"expected the dataset that the checkpoint knows, with {name}={value!r}, got {current[name]!r}; go on "
                "with the same examples (data.source), seed and order (data.sampling), or start a new run"
            )

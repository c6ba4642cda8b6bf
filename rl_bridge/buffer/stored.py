"""Serialization of finished groups for checkpoints: JSON in which each token of a growing chat is stored once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from rl_bridge.tokens.conversation import Prefix
from rl_bridge.types import Completion, Group, Trajectory, Turn


@dataclass(kw_only=True, slots=True)
class _Turn:
    """A turn whose prompt begins with the first `known` tokens of the chat so far; `prompt` holds the rest."""

    known: int = 0
    prompt: list[int]
    completion: Completion


@dataclass(kw_only=True, slots=True)
class _Trajectory(Trajectory):
    turns: list[_Turn]  # type: ignore[assignment]  # only ever serialized, never used as a Trajectory


@dataclass(kw_only=True, slots=True)
class _Group(Group):
    trajectories: list[_Trajectory]  # type: ignore[assignment]  # likewise


_CONFIG = ConfigDict(ser_json_inf_nan="constants")
_GROUPS = TypeAdapter(list[_Group], config=_CONFIG)
_TRAJECTORIES = TypeAdapter(list[_Trajectory], config=_CONFIG)


def dump_groups(groups: Sequence[Group]) -> bytes:
    """Write groups as JSON.

    The GIL is held while a trajectory is serialized, and released between two of them so that other threads can run.
    """
    return b"[" + b",".join(b"".join(_iterate_json_parts(group)) for group in groups) + b"]"


def _iterate_json_parts(group: Group) -> Iterator[bytes]:
    header = _GROUPS.dump_json([_Group(**_fields_without(group, "trajectories"), trajectories=[])])
    yield header[1:].removesuffix(b"]}]")  # trajectories are its last field
    for index, trajectory in enumerate(group.trajectories):
        if index:
            yield b","
        stored = _Trajectory(**_fields_without(trajectory, "turns"), turns=_pack(trajectory.turns))
        yield _TRAJECTORIES.dump_json([stored])[1:-1]
    yield b"]}"


def load_groups(content: bytes) -> list[Group]:
    """Read the output of `dump_groups`; prompts that shared their tokens do so again.

    Raises:
        ValueError: The content is not such output.
    """
    return [
        Group(
            **_fields_without(group, "trajectories"),
            trajectories=[
                Trajectory(**_fields_without(stored, "turns"), turns=_unpack(stored.turns))
                for stored in group.trajectories
            ],
        )
        for group in _GROUPS.validate_json(content)
    ]


def _fields_without(record: Group | Trajectory, name: str) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name != name}


def _pack(turns: Sequence[Turn]) -> list[_Turn]:
    packed, previous = [], Prefix([])
    for turn in turns:
        known = len(previous) if isinstance(turn.prompt, Prefix) and turn.prompt.continues(previous) else 0
        packed.append(_Turn(known=known, prompt=list(turn.prompt[known:]), completion=turn.completion))
        previous = turn.prompt if isinstance(turn.prompt, Prefix) else Prefix([])
    return packed


def _unpack(turns: Sequence[_Turn]) -> list[Turn]:
    unpacked, chat = [], list[int]()
    for turn in turns:
        if not turn.known:
            chat = []
        if turn.known != len(chat):
            raise ValueError(f"expected a prompt that continues one of {len(chat)} tokens, got {turn.known}")
        chat += turn.prompt
        unpacked.append(Turn(prompt=Prefix(chat), completion=turn.completion))
    return unpacked

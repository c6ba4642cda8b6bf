"""Checks whether a server survives invalid input and broken connections."""

import asyncio
import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Final, TypeAlias

from openenv_core.checker.check import CheckError, CheckLevel, check, import_package
from openenv_core.checker.drawing import sample
from openenv_core.checker.playing import REFUSAL_CAUSE, draw_actions, expect_answer, find_difference, play
from openenv_core.checker.semantic import repeats
from openenv_core.checker.subject import Client, Subject, SubjectServer, start_server
from openenv_core.checker.watching import MIB, kill_server, limited_memory
from openenv_core.errors import ClientError, ConnectionLostError, RequestTimeoutError, ServerError
from openenv_core.targets import TargetKind

_DROPPED_CONNECTIONS: Final = 32
"""Number of sessions to disconnect during a step."""

_SLOTS: Final = 4
"""Maximum sessions of the server started for the check, unless its own cap is lower."""

_KILLED_ID: Final = "ropewalk-killed"


@check(CheckLevel.HOSTILE)
def check_disconnect_gives_the_slot_back(subject: Subject) -> None:
    """A session that disconnects during a step releases its slot, and the server continues to serve."""
    slots = min(_SLOTS, subject.cap or 1)
    options: dict[str, Any] = {} if subject.kind is TargetKind.IMAGE else {"max_sessions": slots}
    with ExitStack() as stack:
        url, _ = stack.enter_context(subject.server_or_url(**options))
        try:
            for wave in range(_DROPPED_CONNECTIONS // slots):
                asyncio.run(_drop_connections(subject, url, range(wave * slots, (wave + 1) * slots)))
            clients = [stack.enter_context(subject.client(url)) for _ in range(slots)]
            for number, client in enumerate(clients):
                actions = draw_actions(subject, number)
                play(client, number, actions, episode_id=f"ropewalk-slot-{number}")
        except (ClientError, CheckError) as error:
            if isinstance(error, CheckError) and error.cause == REFUSAL_CAUSE:
                raise
            raise CheckError(
                f"expected {slots} sessions to play after {_DROPPED_CONNECTIONS} that disconnected during a step, "
                f"got {error}",
                change="release in close() everything that __init__, reset or step has acquired, and let close() "
                "return at once, even in the middle of an episode",
            ) from error


async def _drop_connections(subject: Subject, url: str, numbers: Iterable[int]) -> None:
    """Open sessions, start a step in each, and drop the connections."""
    sessions = (_disconnect_during_step(subject, url, number) for number in numbers)
    # All are closed before an error of one ends the loop.
    for error in await asyncio.gather(*sessions, return_exceptions=True):
        if error is not None:
            raise error


async def _disconnect_during_step(subject: Subject, url: str, number: int) -> None:
    # The slot of an ending session may be released late.
    wait_s = subject.limits.step_timeout_s + 5
    client: Any = await subject.client(url, queue_timeout_s=wait_s)
    try:
        await client.reset(seed=number)
        step = asyncio.create_task(client.step(next(subject.actions(number))))
        await asyncio.sleep(0)  # the frame is on its way
        step.cancel()
        with suppress(asyncio.CancelledError, ClientError):
            await step
        if number % 2:
            client._session.conversation.carrier.abort()  # closes without waiting for the reply
    finally:
        await client.close()


@check(CheckLevel.HOSTILE)
def check_kill_and_restart(subject: Subject) -> None:
    """A killed server can be started again, and its episodes do not depend on those before."""
    actions = draw_actions(subject, 0)
    seed = subject.limits.seed
    # Dependence on hashes of text is checked elsewhere.
    with subject.server(env_vars={"PYTHONHASHSEED": "0"}) as server:
        with subject.client(server.url) as client:
            first = play(client, seed, actions, episode_id=f"{_KILLED_ID}-0")
        with subject.client(server.url) as client:
            play(client, seed, actions[:1], episode_id=_KILLED_ID)  # left in the middle
            kill_server(server)
            _require_connection_lost(client)
            server.stop()
            start_server(server)
        with subject.client(server.url) as client:
            replayed = play(client, seed, actions, episode_id=_KILLED_ID)
            with expect_answer("a read of the state"):
                client.state()
    # Some environments show the episode's id in observations.
    first = json.loads(json.dumps(first).replace(f"{_KILLED_ID}-0", _KILLED_ID))
    difference = find_difference(first, replayed) if repeats(subject) else None
    if difference is not None:
        raise CheckError(
            f"expected an episode after a kill to start fresh, got state of the killed server: {difference}",
            change="keep no state of an episode outside of the process, in files for example; at the start, remove "
            "what an earlier server may have left",
        )


def _require_connection_lost(client: Client) -> None:
    """Raise `CheckError` unless the connection to the killed server is lost."""
    try:
        client.state()
    except ConnectionLostError:
        return
    except ClientError as error:
        raise CheckError(
            f"expected the connection to a killed server to be lost, got {type(error).__name__}: {error}",
            change="let the server's own process hold its connections",
        ) from error
    raise CheckError(
        "expected the connection to a killed server to be lost, got an answer",
        change="serve from the process that is started, or from its children",
    )


Json: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]

_BASES: Final = 4
"""Number of actions whose values are replaced one at a time."""

_PLACES: Final = 8
"""Number of values replaced per action."""

_LONG: Final = 1 << 20
"""Length of a long text, in characters."""


def _nest(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


_EXTREMES: Final[tuple[Any, ...]] = (
    "",
    " ",
    "\x00",
    "\u202e\U0001d573\ufeff",
    "a" * _LONG,
    0,
    -1,
    1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64,
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    5e-324,
    1e308,
    -1e308,
    True,
    None,
    [],
    list(range(10_000)),
    _nest(150),
    {},
    {"": None},
    {str(number): number for number in range(1000)},
)
"""Replacements for each value of an action, whatever its type."""

_RAW: Final[tuple[bytes, ...]] = (
    b'{"type":"step","data":{}}',
    b'{"type":"step","data":null}',
    b'{"type":"step","data":[]}',
    b'{"type":"step","data":"x"}',
    b'{"type":"step","data":7}',
    b'{"type":"step"}',
    b'{"type":"step","data":{"x":NaN}}',
    b'{"type":"step","data":{"x":Infinity,"y":-Infinity}}',
    b'{"type":"step","data":{"x":"\\ud800"}}',
    b'{"type":"step","data":{"\\udfff":1}}',
    b'{"type":"step","data":{"x":1,"x":2}}',
    b'{"type":"step","data":{"x":1e999}}',
    b'{"type":"step","data":{"__proto__":{},"constructor":1}}',
    b'{"type":"step","data":' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"type":"step","data":{"x":' + b'{"x":' * 500 + b"1" + b"}" * 500 + b"}}",
    b'{"type":"nothing of the kind","data":{}}',
    b'{"type":["step"],"data":{}}',
    b"{}",
    b"[]",
    b"null",
    b"not JSON",
    b"",
)
"""Frames that our clients never send."""


def _frame(action: object) -> bytes:
    """Return the frame of a step, with JSON as any client might write it."""
    return b'{"type":"step","data":%b}' % json.dumps(action).encode()


def split(subject: Subject) -> tuple[list[Json], list[Any]]:
    """Return valid actions of the schema, boundary values included, and invalid ones."""
    schema = subject.schema["action"]
    allows = _validator(schema)
    fuzz, seed = subject.limits.fuzz, subject.limits.seed
    valid: dict[str, Json] = {}
    invalid: dict[str, Any] = {}
    try:
        drawn = sample(schema, fuzz, seed, keep_small=False)
    except CheckError:  # no action can be drawn from the schema: use the author's examples
        drawn = []
    bases = _bases(subject)
    for action in (*drawn, *(changed for base in bases for changed in _mutate(base, schema))):
        actions = valid if isinstance(action, Mapping) and allows(action) else invalid
        actions.setdefault(json.dumps(action), action)
    return list(valid.values()), list(invalid.values())


def _bases(subject: Subject) -> list[Json]:
    chosen: dict[tuple[str, ...], Json] = {}
    drawn = subject.actions(random.Random(f"hostile/{subject.limits.seed}"))
    for _ in range(64):
        action = next(drawn)
        keys = tuple(str(path) for path in _paths(action)) + tuple(
            str(value) for key, value in action.items() if key in ("type", "tool_name")
        )
        chosen.setdefault(keys, action)
    return list(chosen.values())[:_BASES]


def _mutate(base: Json, schema: Json) -> Iterator[Any]:
    """Yield an action with one thing changed at a time."""
    # What the schema has by default may be left out of an example, and is replaced all the same.
    names = [name for name in schema.get("properties", {}) if name != "metadata" and name not in base]
    paths = [*_paths(base), *((name,) for name in names)][:_PLACES]
    for path in paths:
        bounds = _bounds(schema["properties"][path[0]]) if path[0] in schema.get("properties", {}) else ()
        for value in (*_EXTREMES, *bounds):
            yield _replace_value(base, path, value)
        if len(path) == 1:
            yield {key: value for key, value in base.items() if key != path[0]}
    yield {**base, "no_such_key": 1}
    yield {**base, "metadata": {"x" * 1000: _nest(50)}}
    yield {**base, "metadata": "text"}
    yield {}


def _bounds(schema: Json) -> list[Any]:
    """Return values at and beyond the bounds of a schema."""
    values: list[Any] = list(schema.get("enum", ()))
    for name, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        if isinstance(schema.get(name), (int, float)):
            values += [schema[name], schema[name] + step]
    for name in ("minLength", "maxLength"):
        if isinstance(schema.get(name), int) and schema[name] <= _LONG:
            values.append("a" * schema[name])
    return values


def _paths(value: Any, path: Path = ()) -> list[Path]:
    """Return the paths of an action's values, nested ones included, down to the third level."""
    paths: list[Path] = []
    if isinstance(value, dict) and len(path) < 3:
        for key, item in value.items():
            if (*path, key) != ("metadata",):
                paths += [(*path, key), *_paths(item, (*path, key))]
    elif isinstance(value, list) and value and len(path) < 3:
        paths += [(*path, 0), *_paths(value[0], (*path, 0))]
    return paths


def _replace_value(base: Json, path: Path, value: Any) -> Json:
    action: Any = copy.deepcopy(base)
    parent = action
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return action  # type: ignore[no-any-return]


def _validator(schema: Json) -> Callable[[Mapping[Any, Any]], bool]:
    is_valid = import_package("jsonschema").validators.validator_for(schema)(schema).is_valid

    def allows(action: Mapping[Any, Any]) -> bool:
        try:
            return bool(is_valid(action))
        except (ArithmeticError, RecursionError):  # too large, or too deep, for the validator
            return False

    return allows


_DEADLINE_S: Final = 600.0

_EXCERPT_CHARS: Final = 120
"""Characters of an action that an error message shows."""


@check(CheckLevel.HOSTILE, deadline_s=_DEADLINE_S)
def check_valid_actions_are_survived(subject: Subject) -> None:
    """Every action that the schema allows, including extreme values, gets a reply, and the server stays healthy."""
    valid, _ = split(subject)
    _require_survived(
        subject,
        (_frame(action) for action in valid),
        change="bound the action's fields to what the environment can do (Field(ge=, le=, max_length=)), and "
        "raise an exception for what it cannot",
    )


@check(CheckLevel.HOSTILE, deadline_s=_DEADLINE_S)
def check_invalid_actions_are_survived(subject: Subject) -> None:
    """Every action that the schema does not allow gets a typed error, and the server stays healthy."""
    _, invalid = split(subject)
    _require_survived(
        subject,
        (*_RAW, *(_frame(action) for action in invalid)),
        change="let the action's validators raise ValueError at once for everything invalid",
    )


def _require_survived(subject: Subject, frames: Iterable[bytes], change: str) -> None:
    with (
        subject.server_or_url() as (url, server),
        limited_memory(server) as excess_memory,
        subject.client(url) as client,
    ):
        client.reset()
        last = b"nothing yet"
        try:
            for last in frames:
                _send(client, last)
            client.reset()
            _require_healthy(subject, url)
        except ClientError as error:
            raise CheckError(_describe_failure(last, error, excess_memory, server), change=change) from error


def _send(client: Any, text: bytes) -> None:
    """Send one frame, accepting any reply; reset if the episode or the session has ended."""
    try:
        done = client.send_frame(text).get("done")
    except ServerError:
        done = True  # some errors end the session, and a reset opens another
    if done:
        client.reset()


def _describe_failure(
    last: bytes, error: ClientError, excess_memory: list[int], server: SubjectServer | None
) -> str:
    sent = last.decode("utf-8", "replace")
    excerpt = sent if len(sent) <= _EXCERPT_CHARS else f"{sent[:_EXCERPT_CHARS]}... ({len(sent)} characters)"
    if excess_memory:
        outcome = f"{excess_memory[0] // MIB} MiB more memory, and the server was killed"
    elif server is not None and not server.alive:
        lines = server.output().strip().splitlines()
        outcome = "the end of the server's process" + (f": {lines[-1][:200]}" if lines else "")
    elif isinstance(error, RequestTimeoutError):
        outcome = "no answer in time"
    elif isinstance(error, ConnectionLostError):
        outcome = "the end of the connection"
    else:
        outcome = f"{type(error).__name__}: {error}"
    return f"expected an observation or a typed error for {excerpt}, got {outcome}"


def _require_healthy(subject: Subject, url: str) -> None:
    with subject.http(url) as http:
        status = http.get("/health")
    if status.status_code != 200:
        raise CheckError(
            f"expected a healthy server after all actions, got {status.status_code} {status.text[:200]}",
            change="let no action change what GET /health answers",
        )

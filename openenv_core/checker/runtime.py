"""Checks of a running environment: its schemas, episodes, rewards and tools."""

import json
import math
from typing import Any, Final

from openenv_core.checker.check import (
    CheckError,
    CheckLevel,
    CheckWarnedError,
    NotApplicableError,
    check,
    import_package,
)
from openenv_core.checker.drawing import require_schema, sample
from openenv_core.checker.playing import EPISODES, Turn, play_episode, play_episodes, play_in_process
from openenv_core.checker.subject import Client, Subject
from openenv_core.checker.watching import MIB, limited_memory
from openenv_core.errors import ClientError, ExecutionError, ServerError, ValidationFailedError
from openenv_core.protocol.frames import encode_model, encode_observation, encode_request
from openenv_core.tools.specs import is_of_tools
from openenv_core.tools.wire import RESERVED_TOOL_NAMES
from openenv_core.types import Observation

_PLAY_BUDGET_S: Final = 60.0
"""Seconds to play an episode whose end does not come."""

_EPISODE_ID: Final = "ropewalk-validate"

_OR_LEAVE_IT: Final = "or leave it to the base class, which does so for a class without a `state` of its own"

_EXCERPT_CHARS: Final = 120
"""Characters of an action that an error message shows."""


@check(CheckLevel.RUNTIME)
def check_schema_valid(subject: Subject) -> None:
    """GET /schema returns valid JSON schemas of the action, the observation and the state."""
    for name in ("action", "observation", "state"):
        schema = subject.schema.get(name)
        if not schema:
            raise CheckError(
                f"expected a schema of the {name} with content, got {schema}",
                change="pass the models to create_app",
            )
        require_schema(schema, f"the {name}", "correct json_schema_extra or WithJsonSchema of that field")


@check(CheckLevel.RUNTIME)
def check_replies_follow_schema(subject: Subject) -> str:
    """Every observation and every state follows the server's schema."""
    schema = subject.schema
    count = 0
    with subject.client() as client:
        for turn in play_episodes(subject, client):
            count += 1
            wire_fields = {**turn.result.observation, "reward": turn.result.reward, "done": turn.done}
            key = "reset_observation" if turn.action is None else "observation"
            _require_agreement(
                f"observation {turn.position_text}", schema.get(key, schema["observation"]), wire_fields
            )
            _require_agreement(f"state {turn.position_text}", schema.get("state", {}), client.state())
    return f"{count} observations and states"


def _require_agreement(label: str, schema: dict[str, Any], value: Any) -> None:
    jsonschema = import_package("jsonschema")
    fault = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if fault is not None:
        raise CheckError(
            f"expected the {label} to follow its schema, got {fault.instance!r:.80} at {fault.json_path}: "
            f"{fault.message:.300}",
            change="declare the field's actual type, or return a value of the declared one; a number that is not "
            "finite is sent as null",
        )


@check(CheckLevel.RUNTIME)
def check_tools_listed(subject: Subject) -> str:
    """The listed tools have unique, unreserved names and valid schemas, and match the manifest's declared tools."""
    tools = _list_tools(subject)
    names = [str(tool.get("name")) for tool in tools]
    if faulty := sorted({name for name in names if names.count(name) > 1 or name in RESERVED_TOOL_NAMES}):
        raise CheckError(
            f"expected each tool once, and none called {', '.join(sorted(RESERVED_TOOL_NAMES))}, "
            f"got {', '.join(faulty)}",
            change="rename or remove one: clients have methods of the reserved names",
        )
    for tool in tools:
        schema = tool.get("input_schema") or tool.get("inputSchema") or {}
        require_schema(schema, f"the arguments of {tool.get('name')}", "describe the tool's arguments")
    declared = set(subject.manifest_or_defaults.validation.capabilities.declared_tools)
    if declared and declared != set(names):
        raise CheckError(
            f"expected the tools that the manifest declares, {', '.join(sorted(declared))}, "
            f"got {', '.join(sorted(names)) or 'none'}",
            change="correct validation.capabilities.declared_tools in openenv.yaml",
        )
    return ", ".join(names)


def _list_tools(subject: Subject) -> list[dict[str, Any]]:
    if not is_of_tools(subject.schema["action"]):
        raise NotApplicableError("its actions are not tool calls")
    got: Any
    with subject.client() as client:
        client.reset()
        try:
            got = client.step({"type": "list_tools"}).observation.get("tools")
        except ServerError as error:
            got = error
    if not isinstance(got, list) or not all(isinstance(tool, dict) for tool in got):
        raise CheckError(
            f"expected the list of tools for the action list_tools, got {got!r:.200}",
            change="make the action a union of ListToolsAction and CallToolAction, and answer the first with "
            "ListToolsObservation(tools=[...])",
        )
    return got


@check(CheckLevel.RUNTIME)
def check_episode_ends(subject: Subject) -> str:
    """An episode of valid actions ends within the declared number of steps, or is declared endless."""
    limits = subject.manifest_or_defaults.validation.episodes
    lengths: list[int] = []
    with subject.client() as client:
        for seed in range(EPISODES):
            *_, last = play_episode(subject, client, seed, steps=limits.max_steps, seconds=_PLAY_BUDGET_S)
            steps, done = last.step, last.done
            lengths.append(steps)
            if limits.endless:
                if done:
                    raise CheckError(
                        f"expected no end, as validation.episodes.endless declares, got done after {steps} steps",
                        change="take validation.episodes.endless out of openenv.yaml",
                    )
                return f"declared endless; {steps} steps without an end"
            if done:
                continue
            if steps < limits.max_steps:
                raise NotApplicableError(
                    f"the episode did not end in the {steps} steps played in {_PLAY_BUDGET_S:g} s; declare a lower "
                    "validation.episodes.max_steps, or example_actions that reach the end"
                )
            raise CheckError(
                f"expected done within {limits.max_steps} steps of valid actions after reset(seed={seed}), got "
                "no end",
                change="end the episode within that many steps, or declare in openenv.yaml "
                "validation.episodes.max_steps, endless: true, or example_actions that reach the end",
            )
    return f"ends after {min(lengths)} to {max(lengths)} steps"


@check(CheckLevel.RUNTIME)
def check_episodes_by_hand(subject: Subject) -> None:
    """A class that writes its own state keeps id and number of steps in it, and goes on after no end."""
    if getattr(getattr(subject.app, "factory", None), "KEEPS_EPISODES", False):
        raise NotApplicableError("the base class keeps its episodes")
    ids: list[Any] = []
    with subject.client() as client:
        for _ in range(2):  # the client's own reset draws an id
            client.send_frame(encode_request("reset", subject.reset_options))
            ids.append(client.state().get("episode_id"))
        for turn in play_episode(subject, client, 0, steps=subject.limits.steps, episode_id=_EPISODE_ID):
            state = client.state()
            if turn.action is None:
                ids.append(state.get("episode_id"))
            count = state.get("step_count")
            # The environment may count failed steps or not.
            if not isinstance(count, int) or not turn.step <= count <= turn.step + turn.refused:
                raise CheckError(
                    f"expected step_count {turn.step} in the state {turn.position_text} got {count!r}",
                    change=f"set step_count to 0 in reset, and add 1 in each step that is taken; {_OR_LEAVE_IT}",
                )
        if None in ids or len({*ids}) < len(ids) or ids[-1] != _EPISODE_ID:
            raise CheckError(
                f"expected the state's episode_id to be that of the reset, or a new one, got {ids} after two resets "
                f"without and one with {_EPISODE_ID!r}",
                change=f"set it in reset: str(uuid4()) if episode_id is None else episode_id; {_OR_LEAVE_IT}",
            )
        if turn.done:
            _require_end(subject, client)


def _require_end(subject: Subject, client: Client) -> None:
    """Take a step after the end of an episode, which must be refused, or be an unrewarded end of the same episode."""
    got = ""
    try:
        after = client.step(next(subject.actions(0)))
        got = "" if after.done and not after.reward else f"done={after.done} and the reward {after.reward}"
    except (ExecutionError, ValidationFailedError):
        pass  # refused
    if not got and (now := client.state().get("episode_id")) != _EPISODE_ID:
        got = f"the episode {now!r}"
    if got:
        raise CheckError(
            f"expected a step after the end to be refused, or to be an end without reward, got {got}",
            change=f"begin step() with: if self._done: raise EpisodeOverError (from openenv_core); {_OR_LEAVE_IT}",
        )


@check(CheckLevel.RUNTIME)
def check_rewards_valid(subject: Subject) -> str:
    """Every reward is None or a finite number, that of a step within the range declared in the manifest."""
    declared = subject.manifest_or_defaults.validation.reward
    low, high = (-math.inf, math.inf) if declared is None else declared.range
    tolerance = 0.0 if declared is None else (high - low) * 1e-9  # rounding error of a sum of floats
    steps = 0
    rewards: list[float] = []
    for turn in play_in_process(subject):
        reward = getattr(turn.result, "reward", None)
        steps += turn.action is not None
        if reward is None:
            continue
        # numpy's numbers are not Python numbers, but can be converted.
        try:
            number = float(reward)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise CheckError(
                f"expected a finite number or None for the reward {turn.position_text}, got {reward!r:.80}: its "
                "episode is not scored",
                change="return a float, and bound what it is computed from: a division by 0, a logarithm of 0, an "
                "overflow",
            )
        if turn.action is not None and not low - tolerance <= number <= high + tolerance:
            raise CheckError(
                f"expected the reward {turn.position_text} to be in {low:g} to {high:g}, got {reward}",
                change="correct the reward, or validation.reward.range in openenv.yaml; a reward is that of "
                "one step, not a sum",
            )
        rewards.append(number)
    if steps and not rewards:
        raise CheckWarnedError(
            f"expected some step to be rewarded, got null for each of {steps}: an agent cannot learn from that",
            change="set the reward of observations; if only good play is rewarded, give an example in openenv.yaml: "
            "validation.episodes.example_actions",
        )
    return f"{len(rewards)} rewards from {min(rewards, default=0):g} to {max(rewards, default=0):g}"


@check(CheckLevel.RUNTIME)
def check_observations_serialisable(subject: Subject) -> str:
    """Observations can be encoded as JSON and decoded again, and do not change while the episode continues."""
    count = 0
    before: tuple[Turn, bytes] | None = None
    for turn in play_in_process(subject):
        count += 1
        if not isinstance(turn.result, Observation):
            raise CheckError(
                f"expected an Observation {turn.position_text}, got {type(turn.result).__name__}: {turn.result!r:.120}",
                change="return an instance of the observation model",
            )
        text = _require_round_trip(turn.result, turn.position_text)
        if before is not None and encode_model(before[0].result) != before[1]:
            raise CheckError(
                f"expected the observation {before[0].position_text} to stay as it was, got another one after the "
                "next call",
                change="put copies of the environment's mutable state into observations: list(self._board), "
                "array.copy(); without a server, players keep the very objects",
            )
        before = turn, text
    return f"{count} observations"


def _require_round_trip(observation: Observation, position_text: str) -> bytes:
    """Return an observation's JSON, once it has been decoded again."""
    model = type(observation)
    try:
        encode_observation(observation)
        text = encode_model(observation)
    except Exception as error:  # from pydantic, or from the author's own serialiser
        raise CheckError(
            f"expected to encode {model.__name__} {position_text} as JSON, got {type(error).__name__}: {error}",
            change="use only JSON types, numpy and bytes: no open files, functions, sockets or engine objects",
        ) from error
    try:
        model.model_validate(json.loads(text))
    except Exception as error:
        raise CheckError(
            f"expected to decode {model.__name__} {position_text} from its own JSON, got {error}",
            change="declare each field with the type of its values; assignments after construction are not "
            "checked unless validate_assignment is set",
        ) from error
    return text


@check(CheckLevel.RUNTIME, deadline_s=600.0)
def check_valid_actions_are_survived(subject: Subject) -> str:
    """Every action that the schema allows, including extreme values, gets a reply, and the server stays healthy."""
    try:
        actions = sample(subject.schema["action"], subject.limits.fuzz, subject.limits.seed, keep_small=False)
    except CheckError as error:  # no action can be drawn from the schema: the author gives examples
        raise NotApplicableError(error.message) from error
    with (
        subject.server_or_url() as (url, server),
        limited_memory(server) as excess_memory,
        subject.client(url) as client,
    ):
        client.reset()
        action: Any = None
        try:
            for action in actions:
                _send(client, action)
            client.reset()
            subject.fetch_schema(url)
        except (ClientError, CheckError) as error:
            outcome = f"{type(error).__name__}: {error}"
            if excess_memory:
                outcome = f"{excess_memory[0] // MIB} MiB more memory, and the server was killed"
            elif server is not None and not server.alive:
                outcome = f"the end of the server's process: {server.output().strip()[-_EXCERPT_CHARS:]}"
            raise CheckError(
                f"expected an observation or a typed error for {json.dumps(action):.120}, got {outcome}",
                change="bound the action's fields to what the environment can do (Field(ge=, le=, max_length=)), and "
                "raise an exception for what it cannot",
            ) from error
    return f"{len(actions)} actions"


def _send(client: Client, action: Any) -> None:
    """Take a step, accepting any reply; reset if the episode or the session has ended."""
    try:
        done = client.step(action).done
    except ServerError:
        done = True  # some errors end the session, and a reset opens another
    if done:
        client.reset()

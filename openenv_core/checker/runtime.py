"""Checks of a running server: its metadata and schemas, episodes, rewards and tools."""

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
from openenv_core.checker.drawing import require_schema
from openenv_core.checker.playing import EPISODES, Turn, play_episode, play_episodes, play_in_process
from openenv_core.checker.subject import Client, Subject
from openenv_core.errors import (
    ClientError,
    ExecutionError,
    ServerError,
    ValidationFailedError,
)
from openenv_core.protocol.frames import encode_model, encode_observation, encode_request
from openenv_core.tools.specs import is_of_tools
from openenv_core.tools.wire import RESERVED_TOOL_NAMES
from openenv_core.types import EnvironmentMetadata, Observation

_PLAY_BUDGET_S: Final = 60.0
"""Seconds to play an episode whose end does not come."""

_EPISODE_ID: Final = "ropewalk-validate"

_COMPARED: Final = 3
"""Number of episodes played with and without reading the state."""

_OR_LEAVE_IT: Final = "or leave it to the base class, which does so for a class without a `state` of its own"

_NOT_A_FIELD: Final = "ropewalk_no_such_field"

_REFUSE: Final = 'keep extra="forbid" on the action model, and raise only ValueError in its validators'

_NO_SUCH_TOOL: Final = "ropewalk_no_such_tool"


@check(CheckLevel.RUNTIME)
def check_health(subject: Subject) -> None:
    """GET /health reports a healthy server."""
    status, body = _get(subject, "/health")
    if status != 200 or not isinstance(body, dict) or body.get("status") != "healthy":
        raise CheckError(
            f'expected GET /health to answer 200 {{"status": "healthy"}}, got {status} {body!r:.200}',
            change="serve with create_app; a server that is out of threads reports that it is unhealthy: look for "
            "steps that never end",
        )


@check(CheckLevel.RUNTIME)
def check_metadata(subject: Subject) -> str:
    """GET /metadata returns the environment's name and description."""
    status, body = _get(subject, "/metadata")
    if status != 200 or not isinstance(body, dict):
        raise CheckError(
            f"expected GET /metadata to answer 200 with an object, got {status} {body!r:.200}",
            change="let get_metadata() of the environment return an EnvironmentMetadata",
        )
    known = set(EnvironmentMetadata.model_fields)
    if unknown := sorted(set(body) - known):
        raise CheckError(
            f"expected GET /metadata to return {', '.join(sorted(known))}, got {', '.join(unknown)} as well",
            change="leave it out: released clients refuse unknown keys",
        )
    for key in ("name", "description"):
        if not isinstance(body.get(key), str) or not body[key].strip():
            raise CheckError(
                f"expected GET /metadata to return the {key}, got {body.get(key)!r}",
                change="give the environment's class a docstring, or write get_metadata()",
            )
    return str(body["name"])


@check(CheckLevel.RUNTIME)
def check_schema_valid(subject: Subject) -> None:
    """GET /schema returns valid JSON schemas of the action, the observation and the state."""
    for name in ("action", "observation", "state"):
        schema = subject.schema[name]
        require_schema(schema, f"the {name}", "correct json_schema_extra or WithJsonSchema of that field")
        if not schema:
            raise CheckError(
                f"expected a schema of the {name} with content, got an empty one",
                change="pass the models to create_app",
            )


@check(CheckLevel.RUNTIME)
def check_observations_follow_schema(subject: Subject) -> str:
    """Every observation follows the server's schema."""
    schema = subject.schema
    count = 0
    with subject.client() as client:
        for turn in play_episodes(subject, client):
            count += 1
            wire_fields = {**turn.result.observation, "reward": turn.result.reward, "done": turn.done}
            key = "reset_observation" if turn.action is None else "observation"
            _require_agreement(
                "observation", turn.position_text, schema.get(key, schema["observation"]), wire_fields
            )
    return f"{count} observations"


@check(CheckLevel.RUNTIME)
def check_states_follow_schema(subject: Subject) -> str:
    """Every state follows the server's schema."""
    count = 0
    with subject.client() as client:
        for turn in play_episodes(subject, client):
            count += 1
            _require_agreement("state", turn.position_text, subject.schema["state"], client.state())
    return f"{count} states"


def _require_agreement(label: str, position_text: str, schema: dict[str, Any], value: Any) -> None:
    jsonschema = import_package("jsonschema")
    fault = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if fault is not None:
        raise CheckError(
            f"expected the {label} {position_text} to follow its schema, got {fault.instance!r:.80} at "
            f"{fault.json_path}: {fault.message:.300}",
            change="declare the field's actual type, or return a value of the declared one; a number that is not "
            "finite is sent as null",
        )


def _get(subject: Subject, path: str) -> tuple[int, Any]:
    with subject.http() as http:
        reply = http.get(path)
    if reply.status_code == 404:
        raise NotApplicableError(f"the server has no {path}")
    try:
        return reply.status_code, reply.json()
    except ValueError:
        return reply.status_code, reply.text


@check(CheckLevel.RUNTIME)
def check_tools_listed(subject: Subject) -> str:
    """The listed tools have unique, unreserved names and valid schemas, and match the manifest's declared tools."""
    tools = _list_tools(subject)
    names = [str(tool.get("name")) for tool in tools]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise CheckError(
            f"expected each tool once, got {', '.join(duplicates)} several times",
            change="rename or remove one",
        )
    if reserved := sorted(RESERVED_TOOL_NAMES & set(names)):
        raise CheckError(
            f"expected tools without reserved names, got {', '.join(reserved)}",
            change=f"rename them: clients have the methods {', '.join(sorted(RESERVED_TOOL_NAMES))}",
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


@check(CheckLevel.RUNTIME)
def check_unknown_tool(subject: Subject) -> None:
    """A call of an unknown tool returns an observation with an error."""
    _list_tools(subject)
    change = "answer with CallToolObservation(tool_name=..., error=ToolError(error_type=TOOL_NOT_FOUND, ...))"
    with subject.client() as client:
        client.reset()
        try:
            result = client.step({"type": "call_tool", "tool_name": _NO_SUCH_TOOL, "arguments": {}})
        except ServerError as error:
            raise CheckError(
                f"expected an observation with an error for an unknown tool, got {error}",
                change=change,
            ) from error
    tool_error = result.observation.get("error")
    if not isinstance(tool_error, dict) or not tool_error.get("error_type"):
        raise CheckError(
            f"expected error.error_type in the observation for an unknown tool, got {tool_error!r:.200}",
            change=change,
        )


def _list_tools(subject: Subject) -> list[dict[str, Any]]:
    if not is_of_tools(subject.schema["action"]):
        raise NotApplicableError("its actions are not tool calls")
    with subject.client() as client:
        client.reset()
        try:
            tools = client.step({"type": "list_tools"}).observation.get("tools")
        except ServerError as error:
            raise CheckError(
                f"expected the list of tools for the action list_tools, got {error}",
                change="make the action a union of ListToolsAction and CallToolAction, and handle both in step",
            ) from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise CheckError(
            f"expected the list of tools for the action list_tools, got {tools!r:.200}",
            change="answer with ListToolsObservation(tools=[...])",
        )
    return tools


@check(CheckLevel.RUNTIME)
def check_episode_ends(subject: Subject) -> str:
    """An episode of valid actions ends within the declared number of steps, or is declared endless."""
    limits = subject.manifest_or_defaults.validation.episodes
    lengths: list[int] = []
    with subject.client() as client:
        for seed in range(EPISODES):
            last = _play_to_end(subject, client, seed)
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


def _play_to_end(subject: Subject, client: Client, seed: int) -> Turn:
    """Play until the episode is done, or the declared steps or the time have run out; return the last turn."""
    steps = subject.manifest_or_defaults.validation.episodes.max_steps
    *_, last = play_episode(subject, client, seed, steps=steps, seconds=_PLAY_BUDGET_S)
    return last


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
def check_state_is_only_read(subject: Subject) -> str:
    """Reading the state changes neither the state nor the episode."""
    count = 0
    change = "let the property `state` return existing values, and change nothing"
    with subject.client() as client:
        for turn in play_episodes(subject, client):
            first, second = client.state(), client.state()
            count += 1
            if first != second:
                names = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
                raise CheckError(
                    f"expected two reads of the state {turn.position_text} to be the same, "
                    f"got other values of {', '.join(names)}",
                    change=change,
                )
    # Compare episodes with and without reads, if two runs without reads are the same.
    unread = _play_answers(subject, read=False)
    if unread == _play_answers(subject, read=False) and unread != _play_answers(subject, read=True):
        raise CheckError(
            "expected an episode with reads of the state to be the same as one without, got another",
            change=change,
        )
    return f"{count} states read twice"


def _play_answers(subject: Subject, *, read: bool) -> list[Any]:
    answers = []
    with subject.client() as client:
        for seed in range(_COMPARED):
            for turn in play_episode(subject, client, seed, episode_id=_EPISODE_ID):
                if read:
                    client.state()
                observation = {
                    key: value for key, value in turn.result.observation.items() if key != "metadata"
                }
                answers.append((observation, turn.result.reward, turn.done, turn.step))
    return answers


@check(CheckLevel.RUNTIME)
def check_invalid_action_refused(subject: Subject) -> None:
    """An action with an unknown key is refused with VALIDATION_ERROR; the session and its episode continue."""
    with subject.client() as client:
        client.reset(seed=0)
        before = client.state()
        valid = next(subject.actions(0))
        got = "an observation"
        try:
            client.step({**valid, _NOT_A_FIELD: 1})
        except ValidationFailedError:
            got = ""
        except ClientError as error:
            got = f"{type(error).__name__}: {error}"
        if got:
            raise CheckError(f"expected VALIDATION_ERROR for an unknown key, got {got}", change=_REFUSE)
        if (after := client.state()) != before:
            raise CheckError(
                f"expected a refused action to leave the state as it was, got {after} after {before}",
                change="leave the validation of actions to the model: it is done before step() is called",
            )
        try:
            client.step(valid)
        except (ExecutionError, ValidationFailedError):
            pass  # the rules may not allow it at this point; the session replies
        except ClientError as error:
            raise CheckError(
                f"expected the session to continue after a refused action, got {type(error).__name__}: {error}",
                change="raise only subclasses of Exception in the action's validators",
            ) from error


@check(CheckLevel.RUNTIME)
def check_reward_finite(subject: Subject) -> str:
    """Every reward is a finite number or None."""
    count = steps = rewarded_count = 0
    for turn in play_in_process(subject):
        position_text, reward = turn.position_text, getattr(turn.result, "reward", None)
        count += 1
        steps += turn.action is not None
        # numpy's numbers are not Python numbers, but can be converted.
        try:
            number = 0.0 if reward is None else float(reward)
        except (TypeError, ValueError) as error:
            raise CheckError(
                f"expected a number or None for the reward {position_text}, got {reward!r:.80}",
                change="return a float",
            ) from error
        if not math.isfinite(number):
            raise CheckError(
                f"expected a finite reward {position_text}, got {number}: its episode is not scored",
                change="bound what the reward is computed from: a division by 0, a logarithm of 0, an overflow",
            )
        rewarded_count += reward is not None
    if steps and not rewarded_count:
        raise CheckWarnedError(
            f"expected some step to be rewarded, got null for each of {steps}: an agent cannot learn from that",
            change="set the reward of observations; if only good play is rewarded, give an example in openenv.yaml: "
            "validation.episodes.example_actions",
        )
    return f"{count} rewards"


@check(CheckLevel.RUNTIME)
def check_reward_in_range(subject: Subject) -> str:
    """Every reward of a step is within the range declared in the manifest."""
    declared = subject.manifest_or_defaults.validation.reward
    if declared is None:
        raise NotApplicableError("no range is declared: validation.reward.range in openenv.yaml")
    low, high = declared.range
    tolerance = (high - low) * 1e-9  # rounding error of a sum of floats
    rewards: list[float] = []
    with subject.client() as client:
        for turn in play_episodes(subject, client):
            reward = turn.result.reward
            if turn.action is None or reward is None:
                continue
            rewards.append(float(reward))
            if not low - tolerance <= reward <= high + tolerance:
                raise CheckError(
                    f"expected the reward {turn.position_text} to be in {low:g} to {high:g}, got {reward}",
                    change="correct the reward, or validation.reward.range in openenv.yaml; a reward is that of "
                    "one step, not a sum",
                )
    return (
        f"{len(rewards)} rewards from {min(rewards):g} to {max(rewards):g}"
        if rewards
        else "no step had a reward"
    )


@check(CheckLevel.RUNTIME)
def check_observations_serialisable(subject: Subject) -> str:
    """Reset and step return observations that can be encoded as JSON and decoded again."""
    count = 0
    for turn in play_in_process(subject):
        count += 1
        if not isinstance(turn.result, Observation):
            raise CheckError(
                f"expected an Observation {turn.position_text}, got {type(turn.result).__name__}: {turn.result!r:.120}",
                change="return an instance of the observation model",
            )
        _require_round_trip(turn.result, turn.position_text)
    return f"{count} observations"


@check(CheckLevel.RUNTIME)
def check_observations_stay(subject: Subject) -> str:
    """An observation does not change while the episode continues."""
    count = 0
    before: Turn | None = None
    text: bytes | None = None
    for turn in play_in_process(subject):
        if before is not None and text is not None and _encode(before.result) != text:
            raise CheckError(
                f"expected the observation {before.position_text} to stay as it was, got another one after the next "
                "call",
                change="put copies of the environment's mutable state into observations: list(self._board), "
                "array.copy(); without a server, players keep the very objects",
            )
        before, text = turn, _encode(turn.result)
        count += 1
    return f"{count} observations"


def _encode(observation: Any) -> bytes | None:
    try:
        return encode_model(observation)
    except Exception:  # reported by observations_serialisable
        return None


def _require_round_trip(observation: Observation, position_text: str) -> None:
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

"""Episodes that agents play: the same tokens and rewards as our own dialogue's, and every way in which they end."""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import agent_playing
from missing import require
from tool_fixtures import LoggingEngine, PieceTokenizer, calling, chat_tokenizer
from worker_fixtures import Play, absences, playing, trajectories

from rl_bridge.environments.leases import SessionDeadlines
from rl_bridge.errors import ConfigError, EngineFailedError, GeneratorError, RolloutError
from rl_bridge.rollout.assignment import Absence, NoTrajectory
from rl_bridge.rollout.tool_task import ToolWorldTask
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import Completion, Ending, SamplingSettings, Trajectory

ADD, FINISH = calling("add", a=1, b=2), calling("finish")
LENGTHS = {"max_new_tokens": 400, "max_length": 8000}
LOOP = {"function": "agent_fixtures:call_in_a_loop"}


class SeededEngine(LoggingEngine):
    """Its answers follow from the prompt and the seed, as those of a deterministic run."""

    async def generate_many(
        self,
        prompts: list[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None,
        ids: object,
    ) -> list[Completion]:
        completions = []
        for prompt, seed in zip(prompts, seeds or [0] * len(prompts), strict=True):
            self._random = random.Random(seed)
            said = self._random.choice(
                [f"Hm. {ADD}", f"{ADD}\n{ADD}", calling("echo", text="hello"), "No.", FINISH]
            )
            self.script = lambda text, said=said: said  # type: ignore[misc]
            completions.append(self._answer(self._read(prompt)))
        return completions


def parts(
    monkeypatch: pytest.MonkeyPatch, script: Callable[[str], str] = str, kind: Any = LoggingEngine
) -> Any:
    pieces = PieceTokenizer()
    return {"tokenizer": chat_tokenizer(monkeypatch, pieces), "engine": kind(pieces, script), **LENGTHS}


async def only(play: Play, **options: Any) -> Trajectory:
    (one,) = trajectories(await play([7], **options))
    return one


def outline(trajectory: Trajectory) -> Any:
    (row,) = training_rows(trajectory, advantage=1.0, index=0)
    return (row, trajectory.reward, trajectory.tool_calls, len(trajectory.turns))


async def test_same_seeds_give_the_tokens_and_rewards_of_our_own_dialogue(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(24)
    options = {"sampling_key": (3, 5), "num_turns": 6}
    async with playing([desk], ToolWorldTask, str, **parts(monkeypatch, kind=SeededEngine)) as play:
        ours = trajectories(await play(seeds, **options))
    async with agent_playing(desk, tmp_path, LOOP, str, **parts(monkeypatch, kind=SeededEngine)) as play:
        theirs = trajectories(await play(seeds, **options))
    assert len(ours) == len(theirs) == 24
    for own, other in zip(ours, theirs, strict=True):
        own.reward += 1.5 * (own.ending is Ending.ILLEGAL)  # an agent that ends is not penalised
        assert outline(own) == outline(other)
    assert {one.ending for one in theirs} == {Ending.COMPLETED, Ending.TRUNCATED_TURNS}
    assert max(len(one.turns) for one in theirs) > 3


async def test_tools_over_mcp_are_steps_of_the_episode(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = {"function": "agent_fixtures:call_over_mcp"}
    async with agent_playing(
        desk, tmp_path, agent, str, **parts(monkeypatch, lambda prompt: "I look.")
    ) as play:
        episode = await only(play)
    assert (episode.ending, episode.reward, episode.tool_calls) == (Ending.COMPLETED, 1.25, 3)


@pytest.mark.parametrize(
    ("agent", "script", "ending", "reward"),
    [
        (LOOP, lambda prompt: "I give up.", Ending.COMPLETED, 0.0),
        (LOOP, lambda prompt: ADD, Ending.TRUNCATED_TURNS, 1.0),
        pytest.param(
            {"function": "agent_fixtures:never_end", "timeout_s": 30.0},
            lambda prompt: ADD,
            Ending.TRUNCATED_TIME,
            0.0,
            marks=pytest.mark.slow,  # the time that its call may take on a busy machine
        ),
        (LOOP, lambda prompt: calling("echo", text="a" * 3000), Ending.TRUNCATED_LENGTH, 0.0),
    ],
)
async def test_endings(
    desk: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent: Any,
    script: Any,
    ending: Ending,
    reward: float,
) -> None:
    async with agent_playing(desk, tmp_path, agent, str, **parts(monkeypatch, script)) as play:
        episode = await only(play, num_turns=4)
    assert (episode.ending, episode.reward) == (ending, reward)


async def test_agent_that_raises_ends_the_run(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = {"function": "agent_fixtures:break_down"}
    async with agent_playing(desk, tmp_path, agent, str, **parts(monkeypatch)) as play:
        with pytest.raises(RolloutError, match="ZeroDivisionError: the agent is wrong"):
            await play([7])


PROGRAM = """
import json, os, sys, urllib.request
def post(path, body):
    request = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode(), {
        "authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))
print(post("/v1/chat/completions", {"messages": [{"role": "user", "content": sys.argv[2]}]}), flush=True)
assert os.getcwd() == os.environ["HOME"] and "SECRET" not in os.environ
exec(os.environ.get("NEXT", ""))
print(post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "finish"}}))
"""


def program(**env: str) -> dict[str, Any]:
    return {
        "command": (sys.executable, "-c", PROGRAM, "{url}", "{task}"),
        "env": {"KEY": "{key}", **env},
    }


async def test_program_plays_an_episode_and_its_output_is_kept(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "1")
    answers = parts(monkeypatch, lambda prompt: "I finish.")
    async with agent_playing(desk, tmp_path, program(), str, **answers) as play:
        episode = await only(play)
    assert (episode.ending, episode.reward, len(episode.turns)) == (Ending.COMPLETED, 1.0, 1)
    assert "I finish." in (tmp_path / "agents/worker/0.log").read_text()


@pytest.mark.parametrize(
    ("next_line", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("os.environ['KEY'] = 'another'; os.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
async def test_program_that_is_killed_is_lost_and_played_again(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_line: str, reason: str
) -> None:
    agent = program(NEXT=next_line)
    async with agent_playing(desk, tmp_path, agent, str, **parts(monkeypatch, lambda prompt: "No.")) as play:
        result = await play([7])
    assert (absences(result), result.retried) == ([Absence.DROPPED], 3)
    assert reason in str(result.last_failure)


async def test_program_that_fails_by_itself_has_earned_what_it_has(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in (3, -1):
        agent = program(NEXT=f"sys.exit({code})")
        async with agent_playing(
            desk, tmp_path, agent, str, **parts(monkeypatch, lambda prompt: "No.")
        ) as play:
            assert (await only(play)).ending is Ending.COMPLETED
    never = {"command": (sys.executable, "-c", "print('no key'); raise SystemExit(1)")}
    async with agent_playing(desk, tmp_path, never, str, **parts(monkeypatch)) as play:
        (outcome,) = (await play([7])).outcomes
    assert isinstance(outcome, NoTrajectory)
    assert "exit code 1; its output ends with:\nno key" in outcome.reason


async def test_engine_or_environment_that_fails_is_no_play(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([ADD, ADD, FINISH])
    async with agent_playing(
        desk, tmp_path, LOOP, str, **parts(monkeypatch, lambda prompt: next(answers))
    ) as play:
        failures = iter(
            [GeneratorError("the engine is gone"), EngineFailedError("and again"), None, None, None]
        )

        def fail() -> None:
            if (error := next(failures)) is not None:
                raise error

        play.engine.before = fail
        result = await play([7])
    (episode,) = trajectories(result)
    assert (episode.ending, episode.reward, result.retried) == (Ending.COMPLETED, 1.5, 2)
    hang = calling("hang", seconds=3600)
    options = {"deadlines": SessionDeadlines(step_s=0.5), "max_attempts": 2}
    async with agent_playing(
        desk, tmp_path, LOOP, str, **parts(monkeypatch, lambda prompt: hang), **options
    ) as play:
        result = await play([7])
    (outcome,) = result.outcomes
    assert isinstance(outcome, NoTrajectory)
    assert (outcome.ending, result.retried) == (Ending.FAILED_ENVIRONMENT, 2)


async def test_engine_that_fails_up_to_the_limit_on_calls_is_no_play(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = {"function": "agent_fixtures:ask_until_refused"}
    async with agent_playing(
        desk, tmp_path, agent, str, **parts(monkeypatch, lambda prompt: "No."), max_attempts=1
    ) as play:
        calls = iter(range(3))

        def fail() -> None:
            if next(calls):
                raise GeneratorError("the engine is gone")

        play.engine.before = fail
        (outcome,) = (await play([7], num_turns=3)).outcomes
    assert isinstance(outcome, NoTrajectory)
    assert (outcome.absence, outcome.ending) == (Absence.DROPPED, Ending.FAILED_POLICY)


def test_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    from rl_bridge.agents.process import require_program
    from rl_bridge.agents.programs import AgentProgram

    with pytest.raises(ConfigError, match=r"'no-such-agent' in PATH, found none; get it with x"):
        require_program(AgentProgram(command=["no-such-agent"], install="get it with x"))


def test_values_are_filled_in_once_and_as_json_in_files() -> None:
    from rl_bridge.agents.programs import AgentProgram

    written = AgentProgram(command=["{task}"], env={"A": "{key}"}, files={"f": '{"t": "{task}"}'})
    filled = written.fill({"task": 'say "{key}"', "key": "k"})
    assert (filled.command, filled.env["A"]) == (['say "{key}"'], "k")
    assert filled.files["f"] == '{"t": "say \\"{key}\\""}'


@pytest.mark.slow
async def test_agent_of_the_page_plays(desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("openai")
    from doc_pages import blocks, page

    from examples.grpo_tools import agent as example

    (block,) = blocks(page("docs/agents.md"), "python")
    source = page("examples/grpo_tools/agent.py")
    written = block.replace("None:\n", f'None:\n    """{example.play.__doc__}"""\n')
    assert source.endswith(written), "the page shows the example"
    answers = iter([f"Hm. {ADD}\n{ADD}", FINISH])
    agent = {"function": "examples.grpo_tools.agent:play"}
    async with agent_playing(
        desk, tmp_path, agent, str, **parts(monkeypatch, lambda prompt: next(answers))
    ) as play:
        episode = await only(play)
    assert (episode.ending, episode.reward, len(episode.turns)) == (Ending.COMPLETED, 1.5, 2)

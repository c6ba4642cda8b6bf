"""Unmodified agents play episodes of an environment over MCP, with a policy that solves them in its own call format."""

import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import agent_playing
from missing import missing
from serving import serving
from solving import CharacterTokenizer, QuestionTask, SolvingEngine, find_question, find_tools
from tool_fixtures import calling, chat_tokenizer
from worker_fixtures import trajectories

from rl_bridge.agents.programs import PRESETS
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import Ending

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1300)]

EPISODES = 20
TIMEOUT_S = 400.0
BINARIES = {
    "claude-code": "node_modules/@anthropic-ai/claude-code-linux-x64/claude",
    "codex": "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
    "opencode": "node_modules/opencode-linux-x64/bin/opencode",
    "mini-swe-agent": "venv/bin/mini",
}
"""Where a folder has the programs in which they were installed without running scripts."""


def find_program(preset: str) -> str:
    """Return the path of a preset's program; if it is missing, the test is skipped."""
    folder = os.environ.get("ROPEWALK_AGENTS", "")
    places = [str(Path(folder, BINARIES[preset]))] if folder else []
    found = next(filter(None, map(shutil.which, [*places, PRESETS[preset].command[0]])), None)
    if found is None:
        missing(
            f"needs {preset}, in PATH or in the folder that ROPEWALK_AGENTS names; there, `npm i --ignore-scripts "
            "@anthropic-ai/claude-code @openai/codex opencode-ai`, and `python -m venv venv && venv/bin/pip install "
            "mini-swe-agent`"
        )
    return found


def policy_of(monkeypatch: pytest.MonkeyPatch, kind: type[SolvingEngine]) -> dict[str, Any]:
    tokenizer = CharacterTokenizer()
    return {
        "task": QuestionTask,
        "tokenizer": chat_tokenizer(monkeypatch, tokenizer),
        "engine": kind(tokenizer),
        "max_new_tokens": 4000,
        "max_length": 1_000_000,
        "max_attempts": 1,
    }


@pytest.mark.parametrize(("sandbox", "episodes"), [(False, EPISODES), (True, 2)])
@pytest.mark.parametrize("preset", PRESETS)
async def test_agent_plays_episodes_whose_tokens_are_trained_once(
    preset: str, sandbox: bool, episodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.grpo_tools.world import app

    agent = {
        "preset": preset,
        "program": find_program(preset),
        "timeout_s": TIMEOUT_S,
        "sandbox": sandbox,
    }
    options = policy_of(monkeypatch, SolvingEngine)
    engine = options["engine"]
    async with (
        serving(app) as address,
        agent_playing(f"http://{address}", tmp_path, agent, str, **options) as play,
    ):
        outcomes = []
        for seed in range(episodes):  # one at a time: the policy solves one
            outcomes += trajectories(await play([seed], difficulty="easy", max_calls=6))
    assert [(one.ending, one.reward, one.tool_calls) for one in outcomes] == [
        (Ending.COMPLETED, 1.0, 4)
    ] * episodes
    rows = [row for one in outcomes for row in training_rows(one, advantage=1.0, index=0)]
    learned = Counter(tuple(turn.completion.tokens) for one in outcomes for turn in one.turns)
    assert learned == Counter(tuple(one.tokens) for one in engine.sampled)
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(one.tokens) for one in engine.sampled)
    # The agent's one conversation is one row, however it rewrote what it sent.
    assert len(rows) == episodes


class DelegatingEngine(SolvingEngine):
    """Has another agent solve the question."""

    async def _say(self, prompt: str) -> str:
        if len(self.asked) > 1:
            return await super()._say(prompt)
        assert "Agent" in find_tools(prompt)
        order = {"description": "count", "prompt": find_question(prompt), "subagent_type": "general-purpose"}
        return f"I delegate.\n{calling('Agent', **order)}"


async def test_subagent_is_a_root_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.grpo_tools.world import app

    preset = PRESETS["claude-code"]
    flags = [flag for flag in preset.command[1:] if flag != "--bare"]
    flags[flags.index("--tools") + 1] = "Task"
    agent = {
        "command": [find_program("claude-code"), *flags],
        "env": preset.env,
        "files": preset.files,
        "timeout_s": TIMEOUT_S,
    }
    options = policy_of(monkeypatch, DelegatingEngine)
    async with (
        serving(app) as address,
        agent_playing(f"http://{address}", tmp_path, agent, str, **options) as play,
    ):
        (episode,) = trajectories(await play([0], difficulty="easy", max_calls=6))
    assert (episode.ending, episode.reward, episode.tool_calls) == (Ending.COMPLETED, 1.0, 4)
    rows = training_rows(episode, advantage=1.0, index=0)
    sampled = options["engine"].sampled
    assert [sum(row.loss_mask) for row in rows] == [
        len(sampled[0].tokens),
        sum(len(one.tokens) for one in sampled[1:]),
    ]


@pytest.mark.parametrize("preset", PRESETS)
async def test_no_other_address_is_contacted(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.grpo_tools.world import app

    if shutil.which("strace") is None:
        missing("needs strace")
    known, trace = PRESETS[preset], tmp_path / "connects"
    tracing = ("strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", str(trace))
    agent = {
        "command": [*tracing, find_program(preset), *known.command[1:]],
        "env": known.env,
        "files": known.files,
        "timeout_s": TIMEOUT_S,
    }
    options = policy_of(monkeypatch, SolvingEngine)
    async with (
        serving(app) as address,
        agent_playing(f"http://{address}", tmp_path, agent, str, **options) as play,
    ):
        (episode,) = trajectories(await play([0], difficulty="easy", max_calls=6))
    assert (episode.ending, episode.reward) == (Ending.COMPLETED, 1.0)
    addresses = Counter(re.findall(r'(?:inet_addr\(|AF_INET6, )"([^"]+)"', trace.read_text()))
    assert set(addresses) == {"127.0.0.1"}, addresses

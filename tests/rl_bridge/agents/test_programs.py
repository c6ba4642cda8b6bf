"""Unmodified agents play episodes of an environment over MCP, with a policy that solves them in its own call format."""

import asyncio
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import agent_playing
from missing import missing
from serving import serving
from solving import CharacterTokenizer, QuestionTask, SolvingEngine, find_question, find_tools
from tool_fixtures import START, calling, chat_tokenizer
from worker_fixtures import trajectories

from rl_bridge.agents.programs import PRESETS
from rl_bridge.gateway.app import Gateway, GatewayServer
from rl_bridge.gateway.episode import CallSettings
from rl_bridge.gateway.sampled import SampledEpisode
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.services.handle import LocalService
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import Completion, Ending

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
    agent = {
        "preset": preset,
        "program": find_program(preset),
        "timeout_s": TIMEOUT_S,
        "sandbox": sandbox,
    }
    await play_and_check(agent, tmp_path, monkeypatch, episodes=episodes)


async def play_and_check(
    agent: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, episodes: int
) -> None:
    """Play episodes, and check that all are solved, and that every sampled token is trained once."""
    from examples.grpo_tools.world import app

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


DELEGATED = "I delegate."


class DelegatingEngine(SolvingEngine):
    """Has another agent solve the question, and waits for it if that is a call of its own."""

    async def _say(self, prompt: str) -> str:
        offered = find_tools(prompt)
        if DELEGATED in prompt:
            return self._wait(prompt, offered)
        if len(self.asked) > 1:
            return await super()._say(prompt)
        (tool,) = [name for name in offered if name in ("Agent", "task") or name.endswith("spawn_agent")]
        order = {"description": "count", "prompt": find_question(prompt)}
        order |= {"subagent_type": "general-purpose" if tool == "Agent" else "general"}
        if tool.endswith("spawn_agent"):
            order = {"message": find_question(prompt)}
        return f"{DELEGATED}\n{calling(tool, **order)}"

    def _wait(self, prompt: str, offered: Sequence[str]) -> str:
        waiting = [name for name in offered if name.endswith("wait_agent")]
        started = re.search(r'"agent_id": ?"([^"]+)"', prompt)
        if not waiting or started is None or prompt.count("<tool_response>") > 1:
            return "That was the answer."
        return f"I wait.\n{calling(waiting[0], targets=[started[1]], timeout_ms=600_000)}"


DELEGATING: dict[str, dict[str, Any]] = {
    "claude-code": {
        "command": [
            "Task" if flag == "" else flag for flag in PRESETS["claude-code"].command if flag != "--bare"
        ]
    },
    "codex": {
        "files": {
            "codex/config.toml": PRESETS["codex"]
            .files["codex/config.toml"]
            .replace("[agents]\nenabled = false", "[agents]\nenabled = true")
            .replace("[features]", "[features]\nmulti_agent = true")
        }
    },
    "opencode": {
        "files": {
            "opencode.json": PRESETS["opencode"]
            .files["opencode.json"]
            .replace('"env*": true', '"env*": true, "task": true')
        }
    },
}
"""What is changed of each preset so that it has subagents."""


@pytest.mark.parametrize("preset", DELEGATING)
async def test_subagent_is_a_root_of_its_own(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.grpo_tools.world import app

    known = PRESETS[preset]
    changed = {"command": known.command, "env": known.env, "files": known.files} | DELEGATING[preset]
    agent = {
        **changed,
        "command": [find_program(preset), *changed["command"][1:]],
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
    # The environment ends the episode with the subagent's last call, before the main chat goes on from it.
    main, solver = (
        sum(len(one.tokens) for one in sampled if (spoken(options, one) in (DELEGATED, "I wait.")) is own)
        for own in (True, False)
    )
    assert [sum(row.loss_mask) for row in rows] == [main, solver]


def spoken(options: dict[str, Any], completion: Completion) -> str:
    """Return an answer's first line."""
    return str(options["engine"].tokenizer.decode(completion.tokens, skip_special_tokens=True)).split("\n")[0]


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
        "sandbox": False,  # what it attempts is to be seen
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


CONTEXT = 60_000
"""Tokens, which are characters here, after which the agents of the next test compact their chats."""

COMPACTING: dict[str, dict[str, Any]] = {
    "claude-code": {
        "env": {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "50"}
    },
    "codex": {
        "files": {
            "codex/config.toml": f"model_auto_compact_token_limit = {CONTEXT}\n"
            + PRESETS["codex"].files["codex/config.toml"]
        }
    },
    "opencode": {
        "files": {
            "opencode.json": PRESETS["opencode"]
            .files["opencode.json"]
            .replace(
                '"tool_call": true', f'"tool_call": true, "limit": {{"context": {CONTEXT}, "output": 1000}}'
            )
        }
    },
}


class LongWindedEngine(SolvingEngine):
    """Says so much before its first call that the agent has the chat compacted, and then begins anew."""

    def __init__(self, tokenizer: CharacterTokenizer) -> None:
        super().__init__(tokenizer)
        self.summaries = 0

    async def generate_many(self, prompts: list[Sequence[int]], *arguments: Any) -> list[Completion]:
        (prompt,) = prompts
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        last = text.split(START)[-2]
        if len(self.sampled) and not self.summaries and "<tool_response>" not in last:
            self.summaries += 1
            self.asked.append(text)
            return [self.complete(f"<summary>\n{find_question(text)}\n</summary>")]
        return await super().generate_many(prompts, *arguments)

    async def _say(self, prompt: str) -> str:
        said = await super()._say(prompt)
        return said if self.sampled else "So much to say. " * (CONTEXT // 16) + said


@pytest.mark.parametrize("preset", COMPACTING)
async def test_compaction_is_a_branch_and_is_trained_once(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.grpo_tools.world import app

    agent = {
        "preset": preset,
        "program": find_program(preset),
        "timeout_s": TIMEOUT_S,
        **COMPACTING[preset],
    }
    options = policy_of(monkeypatch, LongWindedEngine) | {"max_new_tokens": 2 * CONTEXT}
    engine = options["engine"]
    async with (
        serving(app) as address,
        agent_playing(f"http://{address}", tmp_path, agent, str, **options) as play,
    ):
        (episode,) = trajectories(await play([0], difficulty="easy", max_calls=6))
    assert (episode.ending, episode.reward, engine.summaries) == (Ending.COMPLETED, 1.0, 1)
    learned = Counter(tuple(turn.completion.tokens) for turn in episode.turns)
    assert learned == Counter(tuple(one.tokens) for one in engine.sampled)
    rows = training_rows(episode, advantage=1.0, index=0)
    assert len(rows) > 1
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(one.tokens) for one in engine.sampled)


OPENAI_AGENTS = """
import asyncio, os, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from openai import AsyncOpenAI

async def main(url, task):
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url + "/v1", api_key=os.environ["KEY"])
    params = {"url": url + "/mcp", "headers": {"Authorization": "Bearer " + os.environ["KEY"]}}
    async with MCPServerStreamableHttp(params=params, client_session_timeout_seconds=300) as tools:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="agent", instructions="Answer.", model=model, mcp_servers=[tools])
        await Runner.run(agent, task)

asyncio.run(main(*sys.argv[1:]))
"""
LITELLM = """
import json, os, sys, urllib.request
import litellm

url, task = sys.argv[1:]

def call_mcp(method, **params):
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url + "/mcp", body, headers)))["result"]

tools = [
    {"type": "function", "function": {
        "name": tool["name"], "description": tool["description"], "parameters": tool["inputSchema"]}}
    for tool in call_mcp("tools/list")["tools"]
]
chat = [{"role": "user", "content": task}]
while True:
    reply = litellm.completion(
        "openai/policy", chat, tools=tools, api_base=url + "/v1", api_key=os.environ["KEY"], stream=True)
    message = litellm.stream_chunk_builder(list(reply)).choices[0].message
    chat.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = call_mcp("tools/call", name=call.function.name, arguments=json.loads(call.function.arguments))
        chat.append({"role": "tool", "tool_call_id": call.id, "content": result["content"][0]["text"]})
"""


@pytest.mark.parametrize("script", [OPENAI_AGENTS, LITELLM], ids=["openai-agents", "litellm"])
async def test_libraries_of_agents_play_episodes_too(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(Path(find_program("mini-swe-agent")).parent / "python")
    agent = {
        "command": [python, "script.py", "{url}", "{task}"],
        "files": {"script.py": script},
        "env": {"KEY": "{key}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        "timeout_s": TIMEOUT_S,
    }
    await play_and_check(agent, tmp_path, monkeypatch, episodes=5)


@pytest.mark.parametrize("preset", ["claude-code", "codex", "opencode"])
async def test_agent_is_evaluated_with_a_model_on_a_server(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of chat completions is a gateway of ours, and the agent speaks its own protocol to another."""
    from examples.grpo_tools.world import app

    program = Path(find_program(preset))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / PRESETS[preset].command[0]).symlink_to(program)
    options = policy_of(monkeypatch, SolvingEngine)
    client = GeneratorClient(LocalService(options["engine"]), max_batch=1, timeout_s=TIMEOUT_S)
    policy = ChatPolicy(options["tokenizer"], client, max_new_tokens=4000, max_length=1_000_000)
    gateway = Gateway()
    server, episode = GatewayServer(gateway), SampledEpisode(policy, CallSettings())
    gateway.open(episode)
    await server.start()
    words = ["--policy", f"{server.url}/v1", "--model", "policy", "--key-variable", "KEY", "--agent", preset]
    words += [
        "--agent-sandbox",
        "--episodes",
        "2",
        "--sessions",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    words += ["--reset", '{"difficulty": "easy", "max_calls": 6}']
    try:
        async with serving(app) as address:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "openenv_core.cli", "eval", f"http://{address}", *words),
                env={**os.environ, "KEY": episode.key, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
                stdout=asyncio.subprocess.PIPE,
            )
            printed, _ = await process.communicate()
    finally:
        await server.close()
        await client.close()
    assert process.returncode == 0
    report = json.loads(printed)
    (figures,) = report["environments"].values()
    assert (report["agent"], figures["mean_reward"], figures["endings"]) == (preset, 1.0, {"completed": 2})
    records = map(json.loads, (tmp_path / "out" / "rollouts" / "000001.jsonl").read_text().splitlines())
    assert [[turn["parent"] for turn in record["turns"]] for record in records] == [[None, 0, 1, 2]] * 2
    assert len(options["engine"].sampled) == 8

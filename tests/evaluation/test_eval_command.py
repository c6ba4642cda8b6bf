"""`ropewalk eval` on real servers: random and callable policies, models, kills, resumption, comparison."""

import errno
import fcntl
import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, chat_server
from counter import Add, BlockingCounter, Count, Diverging
from module_run import finished
from serve_process import SUPPORT, eventually, serve
from serving import serving

from envs.blackjack_env.baselines import baselines
from envs.kuhn_env.oracle import equilibrium, value
from openenv_core.cli.eval import COMMAND, _report
from openenv_core.cli.main import run
from openenv_core.errors import OpenEnvError
from openenv_core.evaluation.episodes import Arena, PlannedEpisode, plan_episodes
from openenv_core.evaluation.policies import CallablePolicy, RandomPolicy
from openenv_core.evaluation.records import (
    EpisodeRecord,
    EvaluationFolder,
    EvaluationSettings,
    summarize,
    warnings_of,
)
from openenv_core.evaluation.statistics import mean_interval, wilson_interval
from servers import create_app

LIMIT_S = 100


@pytest.fixture(scope="module")
def table() -> Iterator[str]:
    """A BlackJack server's URL."""
    with serve(app="blackjack") as server:
        yield f"http://{server.address}"


def basic(observation: Mapping[str, Any]) -> dict[str, str]:
    return {"action": "hit" if observation["player_total"] < 17 else "stand"}


class Once:
    """A policy with state of its own in each episode: stands from the second decision on."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, observation: Mapping[str, Any]) -> dict[str, str]:
        self.asked += 1
        return {"action": "hit" if self.asked == 1 else "stand"}


def wrong(observation: dict[str, Any]) -> dict[str, str]:
    observation.clear()  # the record has it nevertheless
    return {"action": "fold"}


def broken(observation: Mapping[str, Any]) -> dict[str, str]:
    raise RuntimeError("it is broken")


def unencodable(observation: Mapping[str, Any]) -> dict[str, str]:
    return {"action": "\ud800"}


HERE = "test_eval_command"


def evaluate(*words: str) -> int:
    return run(COMMAND, words)


def figures(folder: Path) -> Any:
    return json.loads((folder / "evaluation.json").read_text())["environments"]


@pytest.mark.slow
def test_random_policy_has_the_exact_return(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "random", "blackjack"  # a URL, port and all, would be part of the policy's seed
    assert evaluate(table, "--policy", "random", "--episodes", "600", "--out", str(out)) == 0
    exact = baselines()["random"].evaluation
    found = figures(out)[table]
    assert found["ci95"][0] <= exact.mean_return <= found["ci95"][1]
    assert found["win_ci95"][0] <= exact.win <= found["win_ci95"][1]
    assert (found["episodes"], found["dropped"], found["unscored"]) == (600, 0, 0)
    assert found["endings"] == {"completed": 600}
    captured = capsys.readouterr()
    assert table in captured.out
    assert "600 of 600" in captured.err


@pytest.mark.slow
def test_policies_are_compared_task_by_task(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    folders = [tmp_path / name for name in ("random", "basic", "once")]
    for folder, policy in zip(folders, ("random", f"{HERE}:basic", f"{HERE}.Once"), strict=True):
        assert evaluate(table, "--policy", policy, "--episodes", "150", "--out", str(folder)) == 0
    hits = {tuple(turn["answer"] for turn in one["turns"])[:2] for one in lines(folders[2])}
    assert hits == {('{"action": "hit"}',), ('{"action": "hit"}', '{"action": "stand"}')}
    capsys.readouterr()
    assert evaluate("--compare", *map(str, folders[:2]), "--json") == 0
    found = json.loads(capsys.readouterr().out)[table]
    assert found["tasks"] == found["better"] + found["equal"] + found["worse"] == 150
    assert found["difference"] == pytest.approx(found["second_mean"] - found["first_mean"])
    assert found["ci95"][0] > 0  # hitting below 17 is better than chance, on the same hands


def always_bet(observation: Mapping[str, Any]) -> dict[str, str]:
    return {"action": "bet"}


@pytest.mark.slow
def test_a_policy_is_evaluated_in_each_seat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    words = ("kuhn", "--policy", f"{HERE}:always_bet", "--episodes", "400", "--seed", "1")
    out = tmp_path / "by-seat"
    assert evaluate(*words, "--seats", "first,second", "--out", str(out)) == 0
    exact = {"first": value(bet, equilibrium), "second": -value(equilibrium, bet)}
    found = figures(out)
    assert list(found) == ["kuhn as first", "kuhn as second"]
    assert [found[name]["episodes"] for name in found] == [400, 400]
    for seat, expected in exact.items():
        low, high = found[f"kuhn as {seat}"]["ci95"]
        assert low <= expected <= high
    rows = capsys.readouterr().out
    assert "kuhn as first " in rows
    assert "kuhn as second" in rows
    shown = {one["environment"]: one["turns"][0]["context"] for one in lines(out) if one["turns"]}
    assert all(f"You are the {seat} player" in shown[f"kuhn as {seat}"] for seat in exact)
    assert evaluate(*words, "--seats", "third", "--out", str(tmp_path / "none")) == 2
    assert "expected seats among first, second, got third" in capsys.readouterr().err


def bet(card: int, history: str) -> float:
    return 1.0


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rollouts" / "000001.jsonl").read_text().splitlines()]


def test_policy_errors_are_reported(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    out = str(tmp_path / "wrong")
    assert evaluate(table, "--policy", f"{HERE}:wrong", "--episodes", "3", "--out", out) == 0
    assert {(one["ending"], one["reward"]) for one in lines(Path(out))} == {("refused_action", 0.0)}
    assert all("You hold" in turn["context"] for one in lines(Path(out)) for turn in one["turns"])
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-2].split() == ["ended", "as", "refused_action"]
    assert captured.out.splitlines()[-1].split() == [table, "3"]
    assert f"{table}: 3 of 3 episodes ended with an illegal action" in captured.err
    assert "the last one because:" in captured.err
    assert evaluate("--compare", out, out) == 0
    assert f"{table}, B: 3 of 3 episodes ended with an illegal action" in capsys.readouterr().err
    # The same game by another name, as after an evaluation of its folder.
    named = tmp_path / "named"
    shutil.copytree(out, named)
    for file in (path for path in named.rglob("*") if path.is_file()):
        file.write_text(file.read_text().replace(table, "blackjack"))
    assert evaluate("--compare", out, str(named)) == 0
    captured = capsys.readouterr()
    assert f"{table} and blackjack are compared as one environment" in captured.err
    assert "blackjack, B: 3 of 3 episodes ended with an illegal action" in captured.err
    assert evaluate(table, "--policy", f"{HERE}:broken", "--out", str(tmp_path / "broken")) == 1
    assert "it is broken" in capsys.readouterr().err
    assert evaluate(table, "--policy", f"{HERE}:unencodable", "--out", str(tmp_path / "unencodable")) == 1
    assert "an action that JSON can hold, got {'action': '\\ud800'}" in capsys.readouterr().err
    (tmp_path / "needy.py").write_text("import json\nimport no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    for words, message in (
        (f"--policy random --out {out}", "choose another by --out"),
        (f"--policy {HERE}:absent --out {tmp_path}/a", "cannot import the policy"),
        (f"--policy needy:f --out {tmp_path}/a", "needy.py, line 2: No module named 'no_such_package'"),
        ("--policy random --episodes 0", "episodes: Input should be greater than 0"),
        (f"--policy random --resume {out}", "--resume without --policy and ENV"),
        ("", "expected environments and --policy"),
        (f"--policy random --split test --out {tmp_path}/b", "split 'test'"),
    ):
        assert evaluate(table, *words.split()) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [("http://127.0.0.1:9", "no server answers"), ("no_such.module:app", "Could not import module")],
)
def test_unavailable_environment_leaves_nothing_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    out = tmp_path / "out"
    assert evaluate(target, "--policy", "random", "--out", str(out)) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "--resume" not in stderr
    assert not out.exists()


PROGRAM = """
import sys
from openenv_core.cli.eval import COMMAND
from openenv_core.cli.main import run
status = run(COMMAND, sys.argv[1:])
print(sorted({"torch", "numpy", "jsonschema", "fastapi"} & set(sys.modules)))
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_evaluation_goes_on_to_the_same_figures(
    table: str, tmp_path: Path, number: signal.Signals
) -> None:
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    how = "--policy random --episodes 400 --repetitions 2 --sessions 4 --out"
    words = (table, *how.split())
    assert evaluate(*words, str(uninterrupted)) == 0
    command = [sys.executable, "-c", PROGRAM, *words, str(killed)]
    process = subprocess.Popen(command, cwd=SUPPORT, stderr=subprocess.PIPE, text=True)
    records = killed / "rollouts" / "000001.jsonl"
    eventually(lambda: records.exists() and records.read_bytes().count(b"\n") > 200)
    process.send_signal(number)
    _, output = process.communicate(timeout=LIMIT_S)
    if number is signal.SIGTERM:
        assert (process.returncode, "--resume" in output) == (130, True)
    played = records.read_bytes()
    assert played.count(b"\n") < 800
    records.write_bytes(played + b'{"environment": "cut o')  # as a kill may leave it
    assert evaluate("--resume", str(killed)) == 0
    assert figures(killed) == figures(uninterrupted)
    assert figures(killed)[table]["episodes"] == len(lines(killed)) == 800


def test_interval_is_chosen_by_the_range_that_the_environment_declares(tmp_path: Path) -> None:
    names = ("shop", "blackjack", "http://127.0.0.1:9")
    settings = EvaluationSettings(environments=names, policy="random")
    with EvaluationFolder.begin(tmp_path / "out", settings) as folder:
        for name in names:
            for group, reward in enumerate((1.0, 0.0, 1.0)):
                task = {"environment": name, "group": group, "seed": group}
                folder.write(RECORD.model_copy(update={**task, "reward": reward}))
    assert _report(folder, settings, as_json=True) == 0
    found = figures(tmp_path / "out")
    assert found["shop"]["ci95"] == list(wilson_interval(2, 3))
    for name in names[1:]:
        assert found[name]["ci95"] == pytest.approx(mean_interval([1.0, 0.0, 1.0]))
    assert [found[name]["reward_range"] for name in names] == [[0.0, 1.0], [-1.0, 1.5], None]


def test_episodes_that_a_limit_cut_off_are_told() -> None:
    cut = RECORD.model_copy(update={"ending": "truncated_turns", "reward": 0.0})
    (warning,) = warnings_of(summarize([RECORD, cut]))
    assert warning.startswith("1 of 2 episodes were cut off before their end")
    assert warnings_of(summarize([RECORD])) == []


RECORD = EpisodeRecord(environment="e", group=0, sibling=0, seed=0, ending="completed", reward=1.0)


def test_file_system_without_locks_takes_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with EvaluationFolder(tmp_path) as folder:
        folder.write(RECORD.model_copy(update={"reason": "half \ud800"}))
    (record,) = EvaluationFolder(tmp_path).read().records.values()
    assert record.reason == "half ?"


def test_a_disk_that_is_full_cuts_no_record(tmp_path: Path) -> None:
    settings = EvaluationSettings(environments=("e",), policy="random")
    with EvaluationFolder.begin(tmp_path, settings) as folder:
        folder.write(RECORD)
        written = (tmp_path / "rollouts" / "000001.jsonl").stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (written + 9, before[1]))  # a part of a line has room
        try:
            with pytest.raises(OpenEnvError, match="see that there is room"):
                folder.write(RECORD.model_copy(update={"group": 1}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        folder.write(RECORD.model_copy(update={"group": 2}))
    assert list(EvaluationFolder(tmp_path).read().records) == [("e", 0, 0), ("e", 2, 0)]


def test_lost_episode_is_counted_apart_and_played_again(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert evaluate(table, "--policy", "random", "--episodes", "3", "--out", str(out)) == 0
    whole = figures(out)
    lost = {**lines(out)[0], "ending": "failed_environment", "reward": None, "reason": "it was lost"}
    unscored = {**lines(out)[1], "ending": "failed_reward", "reward": None, "reason": "nobody can judge it"}
    with (out / "rollouts" / "000001.jsonl").open("a") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in (lost, unscored)))
    found = summarize(list(EvaluationFolder(out).read().records.values()))
    assert (found["episodes"], found["dropped"], found["unscored"]) == (1, 1, 1)
    capsys.readouterr()
    assert evaluate("--resume", str(out)) == 0
    assert "0 dropped and 1 unscored, the last one because: nobody can judge it" in capsys.readouterr().err
    assert (figures(out)[table]["episodes"], len(lines(out))) == (2, 6)
    assert whole[table]["episodes"] == 3


async def test_reward_that_is_not_finite_leaves_the_episode_unscored() -> None:
    settings = EvaluationSettings(environments=("e",), policy="random")
    records: list[EpisodeRecord] = []
    async with serving(create_app(Diverging, Add, Count)) as address:
        for amounts in ([1, 0, 9], [5, 5]):
            given = iter(amounts)
            arena = Arena(
                environment="e",
                url=f"http://{address}",
                token=None,
                policy=CallablePolicy(lambda _, given=given: {"amount": next(given)}),
                settings=settings,
            )
            episode = PlannedEpisode(group=0, sibling=0, seed=0, options={"seed": 0})
            await arena.play([episode], records.append)
    assert [(record.ending, record.reward, record.reason) for record in records] == [
        ("failed_reward", None, "the reward is nan"),
        ("completed", 2.0, None),
    ]


async def test_episode_that_fails_after_the_patience_is_played_again() -> None:
    class Faltering(BlockingCounter):
        failed = False

        def step(self, action: Add) -> Count:
            if not Faltering.failed:
                Faltering.failed = True
                time.sleep(0.3)
                raise RuntimeError("no disk")
            return Count(reward=1, done=True)

    settings = EvaluationSettings(environments=("e",), policy="random", patience_s=0.2)
    records: list[EpisodeRecord] = []
    async with serving(create_app(Faltering, Add, Count)) as address:
        place: dict[str, Any] = {"environment": "e", "url": f"http://{address}", "token": None}
        arena = Arena(**place, policy=RandomPolicy(), settings=settings)
        await arena.play(plan_episodes(settings, 0, 1), records.append)
    assert [(record.ending, record.reward) for record in records] == [("completed", 1)]


@pytest.mark.slow
def test_server_that_dies_makes_no_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with serve(app="blackjack") as server:
        url = f"http://{server.address}"

        def kill() -> None:
            records = out / "rollouts" / "000001.jsonl"
            eventually(lambda: records.exists() and records.read_bytes().count(b"\n") > 100)
            server.process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        words = (url, "--policy", "random", "--episodes", "100000", "--sessions", "4", "--patience", "0.2")
        assert evaluate(*words, "--out", str(out)) == 1
        killer.join()
    stderr = capsys.readouterr().err
    assert "4 episodes in a row were lost" in stderr
    assert f"--resume {out}" in stderr
    records = EvaluationFolder(out).read().records.values()
    lost = [one for one in records if one.ending == "failed_environment"]
    assert len(lost) >= 4
    assert {one.reward for one in lost} == {None}
    assert {one.ending for one in records} == {"completed", "failed_environment"}


@pytest.fixture
def model() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def url_of(model: ChatServer) -> str:
    return f"http://127.0.0.1:{model.port}/v1"


def act(arguments: str) -> dict[str, Any]:
    function = {"name": "act", "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


STAND = act('{"action": "stand"}')


def test_model_plays_by_calls(table: str, tmp_path: Path, model: ChatServer) -> None:
    model.answers += [{"content": "Hm \ud800."}, act("{"), act(r'{"action": "\ud800"}'), STAND]
    out = tmp_path / "out"
    assert evaluate(table, "--policy", url_of(model), "--episodes", "1", "--out", str(out)) == 0
    (record,) = lines(out)
    assert (record["ending"], record["tool_calls"], len(record["turns"])) == ("completed", 3, 4)
    assert model.requests[0]["tools"][0]["function"]["name"] == "act"
    assert model.requests[0]["messages"][0]["content"].startswith("You hold")
    replies = [one["content"] for one in model.requests[2]["messages"] if one["role"] in ("user", "tool")]
    assert "there is no call of a tool" in replies[1]
    assert record["turns"][0]["answer"] == model.requests[1]["messages"][1]["content"] == "Hm ?."
    assert "no JSON object: {" in replies[2]
    assert record["turns"][1]["context"].startswith("[user] error: there is no call")


def test_model_is_offered_the_tools_of_the_episode(tmp_path: Path, model: ChatServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weld", "arguments": "{}"}}
    model.answers.append({"content": None, "tool_calls": [call]})
    with serve(app="kits:app") as server:
        out, reset = str(tmp_path / "out"), '{"kit": ["weld"]}'
        words = f"--policy {url_of(model)} --episodes 1 --out {out} --reset".split()
        assert evaluate(f"http://{server.address}", *words, reset) == 0
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["weld"]
    assert lines(Path(out))[0]["reward"] == 1


def test_every_episode_is_sampled_with_a_seed_of_its_own(
    table: str, tmp_path: Path, model: ChatServer
) -> None:
    model.answers.append(STAND)
    words = (table, "--policy", url_of(model), "--episodes", "3", "--repetitions", "2", "--temperature", "1")
    for name in ("first", "second"):
        assert evaluate(*words, "--out", str(tmp_path / name)) == 0
    first, second = (
        {request["seed"] for request in half} for half in (model.requests[:6], model.requests[6:])
    )
    assert len(first) == 6
    assert first == second


@pytest.mark.slow
def test_server_with_room_for_one_is_waited_for(tmp_path: Path, model: ChatServer) -> None:
    model.answers.append(STAND)
    with serve("--max-sessions", "1", app="blackjack") as server:
        for policy in ("random", url_of(model)):
            out = tmp_path / policy[-2:]
            how = f"--policy {policy} --sessions 4 --patience 0.2 --timeout 5 --episodes 20 --out {out}"
            assert evaluate(f"http://{server.address}", *how.split()) == 0
            found = figures(out)[f"http://{server.address}"]
            assert (found["episodes"], found["dropped"]) == (20, 0)


def test_model_plays_in_text_until_its_context_is_full(
    table: str, tmp_path: Path, model: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    model.answers += ["I cannot say.", 400]
    out = tmp_path / "out"
    how = ("--mode", "text", "--episodes", "1", "--system", "Play well.", "--out")
    words = (table, "--policy", url_of(model), *how)
    assert evaluate(*words, str(out)) == 0
    (record,) = lines(out)
    assert (record["ending"], record["reward"]) == ("truncated_length", 0.0)
    assert "tools" not in model.requests[0]
    assert model.requests[0]["messages"][0]["content"].startswith("Play well.\n\nCall one tool at a time")
    model.answers[:] = [400]
    assert evaluate(*words, str(tmp_path / "refused")) == 1
    assert "refuses the first request" in capsys.readouterr().err
    model.answers[:] = [503]
    late = ("--policy-timeout", "0.2", "--out", str(tmp_path / "late"))
    assert evaluate(*words[:-1], *late) == 1  # it has no figure, and no zero
    assert "1 dropped" in capsys.readouterr().err
    assert {(one["ending"], one["reward"]) for one in lines(tmp_path / "late")} == {("failed_policy", None)}


@pytest.mark.slow
def test_tasks_of_a_split_are_repeated_in_several_environments(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with serve(app="sqlite") as server:
        how = "--policy random --split test --episodes 2 --repetitions 3 --max-turns 2 --success 1 --out"
        assert evaluate(f"http://{server.address}", *how.split(), str(out)) == 0
        found = figures(out)[f"http://{server.address}"]
        assert (found["episodes"], found["win_rate"], found["pass_at"]["3"][0]) == (6, 0.0, 0.0)
        played = sorted((one["group"], one["sibling"]) for one in lines(out))
        assert played == [(task, sibling) for task in range(2) for sibling in range(3)]
        several = tmp_path / "several"
        how = "--policy random --episodes 2 --max-turns 2 --out"
        assert evaluate(f"http://{server.address}", table, *how.split(), str(several)) == 0
        assert list(figures(several)) == [f"http://{server.address}", table]
        assert len({one["group"] for one in lines(several)}) == 4


@pytest.mark.slow
def test_evaluation_needs_nothing_heavy(table: str, tmp_path: Path) -> None:
    words = (table, "--policy", "random", "--episodes", "2", "--out", str(tmp_path / "out"))
    done = finished(sys.executable, "-c", PROGRAM, *words, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"

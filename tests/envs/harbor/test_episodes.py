"""Episodes of Harbor tasks: rewards of solutions, actions and tools, and the ways an episode ends."""

import asyncio
import itertools
import os
import shutil
import signal
import time
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harbor_player import Player
from harbor_tasks import IN_A_SANDBOX, NOTHING, SOLVED, TASKS
from serve_process import eventually, serve

from envs.harbor_env import EditFile, HarborEnv, ReadFile, Run, Submit, WriteFile
from envs.harbor_env.server import machines
from envs.harbor_env.tasks import HarborTask, HarborTasks
from openenv_core.errors import EpisodeOverError
from openenv_core.outcomes import infrastructure_failure, outcome_of, unscored_reason
from openenv_core.tasks import InvalidResetOptionError
from openenv_core.tools import CallToolAction


def check_verdicts(player: Player, name: str) -> None:
    task = next(one for one in map(player.tasks.task, ["train"] * 5, range(5)) if one.folder.name == name)
    began = player.reset(task.id)
    assert began.task == task.instruction
    player.solve(task)
    solved = player.submit()
    assert (solved.rewards, solved.reward, solved.done) == (SOLVED[name], 1.0, True), solved
    player.reset(task.id)
    nothing = player.submit()
    assert (nothing.rewards, nothing.reward, nothing.done) == (NOTHING[name], 0.0, True), nothing


@pytest.mark.parametrize("name", IN_A_SANDBOX)
def test_a_solution_earns_the_reward_and_nothing_does_not(player: Player, name: str) -> None:
    check_verdicts(player, name)


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", sorted({*SOLVED} - {*IN_A_SANDBOX}))
def test_solution_earns_the_reward_in_a_container(player: Player, name: str) -> None:
    check_verdicts(player, name)


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
def test_container_follows_the_task_and_is_removed(player: Player, engine: Any) -> None:
    player.reset("ropewalk/report")
    machine: Any = player.env._machine
    container = machine._container
    host = engine.inspect(container.id)["HostConfig"]
    assert (host["NetworkMode"], host["Memory"]) == ("none", 2048 << 20)
    seen = player.run("whoami; pwd; cat notes.txt; cat /proc/self/environ | tr '\\0' '\\n' | grep WANTED")
    assert seen.output.splitlines() == ["nobody", "/srv", "name: REPORT_NAME"]
    check_actions(player, "/tmp")
    slow = player.step(Run(command="sleep 60 & echo begun; sleep 60", timeout_s=3))
    assert (slow.status, slow.output, slow.exit_code) == ("timeout", "begun\n", None)
    assert "sleep 60" not in player.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output.replace("cat", "")
    assert player.run("yes | head -c 20000000").status == "output_limit"
    assert player.submit().reward == 0.0
    assert not container.alive()


def check_actions(player: Player, folder: str) -> None:
    path = f"{folder}/deep/note.txt"
    assert player.step(WriteFile(path=path, content="one two\n")).status == "ok"
    player.run(f"chmod +x {path}")
    assert player.step(EditFile(path=path, old="two", new="three $HOME 'ü'")).status == "ok"
    assert player.step(ReadFile(path=path)).output == "one three $HOME 'ü'\n"
    assert player.run(f"test -x {path}").exit_code == 0
    long = "".join(f"{n}\n" for n in range(20_000))
    assert player.step(WriteFile(path=path, content=long)).status == "ok"
    seen = player.step(ReadFile(path=path))
    assert (seen.output, seen.cut) == (long[: 64 << 10], True)
    assert player.step(EditFile(path=path, old="19999", new="x")).status == "refused"
    assert player.run(f"md5sum < {path}").output.split()[0] == md5(long.encode()).hexdigest()
    player.step(WriteFile(path=path, content="one three\n"))
    twice = player.step(EditFile(path=path, old="e", new="x"))
    assert twice.status == "refused"
    assert "got it 3 times" in (twice.reason or "")
    gone = player.step(ReadFile(path=f"{folder}/none"))
    assert (gone.status, gone.done) == ("refused", False)
    assert player.step(WriteFile(path="/proc/x", content="")).status == "refused"
    failed = player.run("echo out; echo err >&2; exit 3")
    assert (failed.exit_code, sorted(failed.output.split())) == (3, ["err", "out"])


def test_actions_read_write_edit_and_run(player: Player) -> None:
    player.reset("make-tool")
    check_actions(player, "/app")
    slow = player.step(Run(command="sleep 60 & echo begun; sleep 60", timeout_s=1.5))
    assert (slow.status, slow.output) == ("timeout", "begun\n")
    flood = player.run("yes | head -c 20000000")
    assert (flood.status, flood.cut) == ("output_limit", True)
    assert player.run("echo still").output == "still\n"
    seen = player.run("echo $HOME; cat /etc/hostname; exec 3<>/dev/tcp/127.0.0.1/80")
    assert seen.exit_code != 0
    assert seen.output.startswith("/tmp\n")


def test_the_same_actions_are_tools(player: Player) -> None:
    player.reset("ropewalk/count-lines")

    def call(name: str, **arguments: Any) -> Any:
        action = CallToolAction(tool_name=name, arguments=arguments)
        return player.thread.run(player.env.step_async, action)

    tools = [spec.name for spec in player.env.list_tools()]
    assert tools == ["run", "read_file", "write_file", "edit_file", "submit"]
    assert call("run", command="grep -c ERROR log.txt; exit 1").result == "3\n\n[exit code 1]"
    assert call("write_file", path="count.txt", content="2\n").error is None
    assert call("edit_file", path="count.txt", old="7", new="3").error.error_type == "execution_error"
    assert call("edit_file", path="count.txt", old="2", new="3").error is None
    assert call("read_file", path="count.txt").result == "3"
    end = call("submit")
    assert (end.reward, end.done) == (1.0, True)
    with pytest.raises(EpisodeOverError):
        call("run", command="ls")
    with pytest.raises(EpisodeOverError):
        player.run("ls")


def test_taking_down_the_sandbox_earns_nothing(player: Player) -> None:
    player.reset("ropewalk/count-lines")
    seen = player.run("echo 3 > count.txt; kill -9 $PPID")
    assert (seen.done, seen.reward, seen.status) == (True, 0.0, "killed")
    assert infrastructure_failure(seen) is None


def kill_from_outside(machine: Any) -> None:
    """Kill an idle machine's interpreter, as an operator or a machine without memory does."""

    interpreter = machine._session._worker.processes._current
    state = Path(f"/proc/{interpreter}/stat")
    eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    time.sleep(0.3)
    os.kill(interpreter, signal.SIGKILL)


@pytest.mark.parametrize("action", [Run(command="true"), Submit()], ids=["run", "submit"])
def test_sandbox_killed_from_outside_is_an_infrastructure_failure(player: Player, action: Any) -> None:
    player.reset("ropewalk/count-lines")
    player.run("echo 3 > count.txt")
    kill_from_outside(player.env._machine)
    seen = player.step(action)
    assert (seen.done, seen.reward, seen.status) == (True, None, "sandbox_error"), seen
    assert "from outside" in (infrastructure_failure(seen) or "")


def test_verifier_killed_from_outside_is_an_infrastructure_failure(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    player.reset("ropewalk/count-lines")
    player.run("echo 3 > count.txt")
    unpack = machines._SandboxMachine.unpack

    async def kill_and_unpack(self: Any, *args: Any, **options: Any) -> None:
        self._session._worker.kill()  # not at a limit of its own: no code but this server's has run in it
        await unpack(self, *args, **options)

    monkeypatch.setattr(machines._SandboxMachine, "unpack", kill_and_unpack)
    seen = player.submit()
    assert (seen.done, seen.reward, seen.status) == (True, None, "sandbox_error"), seen
    assert infrastructure_failure(seen)


def task_of(folder: Path, test: str = "", limits: str = "") -> HarborTasks:
    """Make the first of our tasks with another test, or another limit of its time, as "TABLE: LINE"."""
    shutil.copytree(TASKS / "count-lines", folder / "task")
    if test:
        (folder / "task" / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    if limits:
        table, line = limits.split(": ")
        file = folder / "task" / "task.toml"
        file.write_text(file.read_text().replace(f"[{table}]\ntimeout_sec", f"[{table}]\n{line}\n#"))
    return HarborTasks(folder)


def play(player: Player, tasks: HarborTasks, command: str) -> Any:
    env, run = player.environment(tasks), player.thread.run
    try:
        run(env.reset_async)
        seen = run(env.step_async, Run(command=command))
        return seen if seen.done else run(env.step_async, Submit())
    finally:
        run(env.close_async)


def test_the_time_of_a_task_ends_its_episode_which_is_judged(player: Player, tmp_path: Path) -> None:
    tasks = task_of(tmp_path, limits="agent: timeout_sec = 0.5")
    seen = play(player, tasks, "echo 3 > count.txt; sleep 60")
    assert (seen.done, seen.reward, seen.status) == (True, 1.0, "timeout")
    assert outcome_of(seen).truncated
    env = player.environment(tasks)
    player.thread.run(env.reset_async)
    env._deadline = 0.0
    late = player.thread.run(env.step_async, Run(command="echo 3 > count.txt"))
    assert (late.done, late.reward, late.status, outcome_of(late).truncated) == (True, 0.0, "ok", True)


@pytest.mark.parametrize(
    ("test", "limits", "why"),
    [
        ("true", "", "wrote neither"),
        ("echo good > /logs/verifier/reward.txt", "", "expected finite numbers"),
        ("echo 1 > /logs/verifier/reward.txt; echo '[1]' > /logs/verifier/reward.json", "", "finite numbers"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "verifier: timeout_sec = 0.5", "did not end"),
        ("ln -s /tests/expected.txt /logs/verifier/reward.txt", "", "wrote neither"),
    ],
    ids=["none", "text", "json", "slow", "link"],
)
def test_without_a_reward_an_episode_is_unscored_and_not_0(
    player: Player, tmp_path: Path, test: str, limits: str, why: str
) -> None:
    seen = play(player, task_of(tmp_path, test, limits), "echo 3 > count.txt")
    assert (seen.done, seen.reward) == (True, None)
    assert why in (unscored_reason(seen) or ""), seen
    assert infrastructure_failure(seen) is None


def test_tests_may_use_what_shell_scripts_take_for_granted(player: Player, tmp_path: Path) -> None:
    test = """
    set -e
    trap 'echo 0 > /logs/verifier/reward.txt' ERR
    diff <(cat count.txt) <(awk '{print $1}' /tests/expected.txt) > /dev/stdout
    ls / | grep -qx app
    echo locked > /dev/shm/lock
    setsid true
    late=$(timeout 0.1 bash -c 'sleep 60; echo late' 2>&1) || test $? = 124
    test -z "$late"
    python3 -c 'import multiprocessing as m; assert m.Pool(2).map(abs, [-1, 2]) == [1, 2]'
    echo 1 > /logs/verifier/reward.txt
    """
    seen = play(player, task_of(tmp_path, test), "echo 3 > count.txt")
    assert (seen.done, seen.reward) == (True, 1.0), seen


def test_unavailable_machine_is_an_infrastructure_failure(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    seen = player.reset("sort-table")
    assert (seen.done, seen.reward, seen.status) == (True, None, "sandbox_error")
    assert "/nowhere/docker.sock" in (infrastructure_failure(seen) or "")


def test_policies_and_verifiers_of_a_server_are_of_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's name moves to another one at every look."""
    looks, started = itertools.count(), list[Any]()
    found = {"Config": {"WorkingDir": "/srv"}}
    engine = SimpleNamespace(
        find_image=lambda name: {"Id": f"sha256:{next(looks)}", **found},
        execute=lambda *_, **__: SimpleNamespace(exit_code=0),
    )

    def start(*_: Any, image_id: str | None = None, **__: Any) -> Any:
        started.append(image_id)
        return SimpleNamespace(id="one")

    monkeypatch.setattr(machines, "start_container", start)
    monkeypatch.setattr("openenv_core.providers.docker.engine.DockerEngine.find", lambda: engine)
    task = HarborTask.read(TASKS / "sort-table")
    table = task.config.environment.model_copy(update={"docker_image": "image:latest"})
    task = replace(task, config=task.config.model_copy(update={"environment": table}))

    async def open_all() -> None:
        opener = machines.Machines()
        for verifier in (False, True, False, True):
            await opener.open(task, verifier=verifier)

    asyncio.run(open_all())
    assert started == ["sha256:0"] * 4


def test_resets_choose_tasks_by_id_split_and_seed(player: Player) -> None:
    env, run = player.env, player.thread.run
    run(env.reset_async, split="train", index=2)
    assert (env.state.task, env.state.kind) == ("make-tool", "process")
    run(env.reset_async, seed=5 * 10 + 1)
    assert (env.state.task, env.state.index, env.state.seed) == ("fix-median", 1, 51)
    both = {"task": "make-tool", "index": 1}
    for wrong in ({"task": "none"}, both, {"split": "test"}, {"index": 9}, {"x": 1}):
        with pytest.raises(InvalidResetOptionError):
            run(env.reset_async, **wrong)
    assert env.state.task == "fix-median"  # the episode goes on
    assert player.run("cat stats.py").exit_code == 0


@pytest.mark.slow
def test_a_server_serves_the_folder_and_its_tasks() -> None:
    with serve(str(TASKS), app="harbor") as server:
        found = server.request("POST", "/harbor/task", {"split": "train", "index": 2})
        assert (found[0], found[1]["task"]["id"]) == (200, "make-tool")
        with HarborEnv(f"http://{server.address}").sync() as env:
            assert env.reset(task="ropewalk/count-lines").observation.task.startswith("Write into")
            assert env.run("grep -c ERROR log.txt > count.txt").observation.exit_code == 0
            end = env.submit()
            assert (end.reward, end.done) == (1.0, True)

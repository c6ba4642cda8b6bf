"""Parts of the semantic and hostile checks: comparing episodes, the network hook, hostile values."""

import _socket
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import gallery
import pytest
from counter import Add, AsyncCounter, Count, Counter, CountState
from module_run import finished

from openenv_core.checker import inside
from openenv_core.checker.check import CheckError
from openenv_core.checker.hostile import split
from openenv_core.checker.playing import LocalEnvironment, find_difference, takes_seed, turns
from openenv_core.checker.subject import Subject
from openenv_core.checker.watching import hook_folder
from openenv_core.errors import ExecutionError
from servers import create_app


def result(reward: Any = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"observation": observation, "reward": reward, "done": done, "metadata": None}


def serve_factory(factory: Any) -> Any:
    return create_app(factory, Add, Count, state_cls=CountState).served


def test_equal_episodes_do_not_part_and_metadata_may_differ() -> None:
    episode = [result(board=[1, {"x": 2}]), {"error": "EXECUTION_ERROR"}, result(1.0, True, board=[])]
    assert find_difference(episode, [dict(one) for one in episode]) is None
    one, other = ({**result(x=1), "metadata": {"at": at}} for at in (1, 2))
    assert find_difference([one], [other]) is None


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ([result(x=1)], [result(x=2)], "at the reset, observation.x is 1 in one and 2 in the other"),
        ([result(x=[0, 1])], [result(x=[0, 2])], "observation.x[1] is 1"),
        ([result(), result(0.5)], [result(), result(0.25)], "at step 1, reward is 0.5"),
        ([result(), result(1)], [result(), result(True)], "reward is 1 in one and True"),
        ([result(), result()], [result(), {"error": "EXECUTION_ERROR"}], "at step 1"),
        ([result(), result()], [result()], "one ends after 1 steps and the other after 0"),
    ],
)
def test_first_difference_of_episodes(one: list[Any], other: list[Any], message: str) -> None:
    found = find_difference(one, other)
    assert found is not None
    assert message in found


@pytest.mark.parametrize("factory", [Counter, AsyncCounter])
def test_an_instance_is_played_as_a_server_plays_it(factory: type[Counter]) -> None:
    actions = [{"amount": 4}, {"amount": "x"}, {"amount": 9}, {"amount": 1}]
    with LocalEnvironment(serve_factory(factory)) as environment:
        played = [turn.wire_result for turn in turns(environment, 3, actions)]
    found = [one.get("error") or (one["observation"]["total"], one["done"]) for one in played]
    assert found == [(3, False), (7, False), "VALIDATION_ERROR", (16, True)]


def test_actions_and_options_are_played_again_unchanged() -> None:
    class Using(Counter):
        def reset(self, *, seed: int | None = None, cards: Any = None) -> Count:  # type: ignore[override]
            return Count(total=cards.pop())

        def step(self, action: Add) -> Count:
            return Count(total=action.metadata["cards"].pop())

    actions = [{"amount": 1, "metadata": {"cards": [1, 2]}}]
    with LocalEnvironment(serve_factory(Using), {"cards": [3, 4]}) as environment:
        episodes = [[turn.result.total for turn in turns(environment, 0, actions)] for _ in range(2)]
    assert episodes == [[4, 2], [4, 2]]


def test_exception_of_the_environment_is_an_error_or_a_finding() -> None:
    with LocalEnvironment(serve_factory(Counter)) as environment:
        environment.reset(seed=50)
        with pytest.raises(ExecutionError):
            environment.step({"amount": 1})

    def broken() -> Counter:
        raise RuntimeError("no table")

    with pytest.raises(CheckError, match="no table"):
        LocalEnvironment(serve_factory(broken))


def test_environments_that_take_a_seed() -> None:
    class Unseeded(Counter):
        def reset(self, *, episode_id: str | None = None) -> Count:  # type: ignore[override]
            return Count()

    assert takes_seed(serve_factory(Counter)) is True
    assert takes_seed(serve_factory(Unseeded)) is False
    assert takes_seed(serve_factory(lambda: Counter())) is None


UDP = "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"


def test_local_and_allowed_hosts() -> None:
    for host in (
        "127.0.0.1",
        "127.1.2.3",
        "::ffff:127.0.0.1",
        "::1",
        "",
        "0.0.0.0",
        "localhost",
        "LOCALHOST.",
    ):
        assert inside.is_local(host), host
    for host in ("192.0.2.7", "example.org", "1.127.0.0", "127.example.org", "2001:db8::1"):
        assert not inside.is_local(host), host
    assert inside.is_allowed("API.example.org", ["api.example.org"])
    assert inside.is_allowed("a.b.example.org", ["*.example.org"])
    assert not inside.is_allowed("example.org", ["*.example.org"])
    assert not inside.is_allowed("evil-example.org", ["*.example.org", "example.org"])


def run_with_hook(code: str, *allowed: str) -> tuple[list[str], str]:
    """Run code with the hook; return whom it tried to reach, and what it printed."""
    with hook_folder() as (folder, env_vars):
        notes = folder / "hosts"
        env = {**os.environ, **env_vars, inside.OUT: str(notes), inside.HOSTS: json.dumps(allowed)}
        done = finished(sys.executable, "-c", f"import socket\n{code}", env=env, timeout_s=30)
        return notes.read_text().split(), done.stdout + done.stderr


def test_connection_to_another_host_is_recorded_and_stopped_also_in_a_child_that_swallows_it() -> None:
    hosts, output = run_with_hook(f"{UDP}\ns.sendto(b'', ('192.0.2.7', 9))\nprint('sent')")
    assert hosts == ["192.0.2.7"]
    assert "does not allow 192.0.2.7" in output
    assert "sent" not in output
    inner = (
        "import socket\n"
        "try: socket.create_connection(('telemetry.invalid', 80), 1)\nexcept OSError: print('went on')"
    )
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])"
    hosts, output = run_with_hook(outer)
    assert (hosts, "went on" in output) == (["telemetry.invalid"], True)


def test_loopback_and_what_is_allowed_pass() -> None:
    code = (
        f"{UDP}\ns.sendto(b'', ('127.0.0.1', 9))\n"
        "socket.getaddrinfo('192.0.2.9', 80)\n"
        "try: socket.getaddrinfo('nothing.invalid', 80)\nexcept socket.gaierror: pass\nprint('done')"
    )
    hosts, output = run_with_hook(code, "nothing.invalid")
    assert (hosts, "done" in output) == ([], True)


def test_an_allowed_lookup_allows_its_own_addresses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    look = "try: socket.getaddrinfo('good.invalid', 80)\nexcept socket.gaierror: pass\n"
    hosts, output = run_with_hook(f"{look}{UDP}\ns.sendto(b'', ('192.0.2.7', 9))", "good.invalid")
    assert hosts == ["192.0.2.7"]
    assert "does not allow 192.0.2.7" in output
    # Names without a network: the answers are made up.
    made_up = [(2, 1, 6, "", ("192.0.2.5", 80)), (10, 1, 6, "", ("::ffff:192.0.2.6", 80, 0, 0))]
    monkeypatch.setattr(_socket, "getaddrinfo", lambda *_, **__: made_up)
    for name in ("gethostbyname", "gethostbyname_ex"):
        monkeypatch.setattr(socket, name, lambda host: host)
    found: set[str] = set()
    inside._record_lookups(found, ["*.good.example"])
    socket.getaddrinfo("bad.example", 80)
    assert found == set()
    socket.getaddrinfo("a.good.example", 80)
    assert found == {"192.0.2.5", "192.0.2.6"}


def test_a_sitecustomize_of_the_users_own_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('my own')")
    with hook_folder() as (folder, env_vars):
        env = {**os.environ, **env_vars, inside.COLLECTED: str(folder / "collected")}
        env["PYTHONPATH"] = os.pathsep.join([env_vars["PYTHONPATH"], str(tmp_path)])
        output = subprocess.check_output([sys.executable, "-c", ""], env=env, text=True, timeout=30)
    assert output.strip() == "my own"


@pytest.mark.slow
def test_hostile_values_reach_the_limits_of_the_schema_and_break_it_in_many_ways(tmp_path: Path) -> None:
    with Subject.of(gallery.build(tmp_path)) as good:
        (valid, invalid), again = (split(Subject.of(good.url)) for _ in range(2))
    assert json.dumps((valid, invalid)) == json.dumps(again)  # of the same seed
    numbers = [one["number"] for one in valid]
    notes = [one.get("note", "-") for one in valid]
    assert max(numbers) >= 2**64
    assert min(numbers) <= -(2**63)
    assert 0 in numbers
    assert "" in notes
    assert max(len(note) for note in notes) >= 1 << 20
    kinds = [type(one.get("number")) for one in invalid if isinstance(one, dict)]
    assert {str, list, dict, bool, float, type(None)} <= set(kinds)
    assert {} in invalid
    assert any("no_such_key" in one for one in invalid)
    assert not {json.dumps(one) for one in valid} & {json.dumps(one) for one in invalid}

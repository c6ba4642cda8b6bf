"""Released clients against our servers."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from module_run import finished
from released import OVER_SOCKETS, WAIT_TIMEOUT_S, drive, environment, our_server, python

from openenv_core import GenericEnvClient
from servers.routes.websocket import HANDSHAKE_WAIT_S

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

soak = pytest.mark.soak
EVERY_CLIENT = [
    *((version, "async") for version in OVER_SOCKETS),
    *(pytest.param(version, "sync", marks=soak) for version in OVER_SOCKETS),
]


@pytest.mark.parametrize(("version", "face"), EVERY_CLIENT)
def test_released_clients_play_whole_episodes_and_get_errors(
    version: str, face: str, counter_url: str
) -> None:
    plan = [
        {"reset": {"seed": 7}},
        {"play": {"amount": 1}},
        {"step": {"amount": 1}},
        {"step": {"nonsense": 1}},
        {"step": {"amount": 13}},
        {"state": {}},
        {"reset": {"start": 9}},
        {"step": {"amount": 1}},
    ]
    (outcomes,) = drive(version, "episodes", counter_url, face, plan=[plan])
    begun, one, two, three, over, wrong, thirteen, state, again, last = outcomes
    assert [o["observation"]["total"] for o in (begun, one, two, three)] == [7, 8, 9, 10]
    assert [o["reward"] for o in (begun, one, three)] == [None, 1, 1]
    assert [o["done"] for o in (one, three)] == [False, True]
    assert "call reset() to start a new one (code: EXECUTION_ERROR)" in over["text"]
    assert "(code: VALIDATION_ERROR)" in wrong["text"]
    assert "(code: VALIDATION_ERROR)" in thirteen["text"]  # the released server loses this session
    assert (state["total"], state["step_count"]) == (10, 3)
    assert (again["observation"]["total"], last["done"]) == (9, True)


def test_typed_clients_read_outcome_fields_in_the_metadata() -> None:
    marks = {"truncated": True, "infrastructure_error": "no disk", "unscored": "no judge"}
    with our_server("counter:cut_off_app") as url:
        for version in ("0.10.0", "0.2.3"):
            seen = drive(version, "typed_client", url, "3")
            assert seen == {"total": 3, "extra": None, "reward": None, "done": True, "metadata": marks}
        with GenericEnvClient(url).sync() as ours:
            ours.reset()
            last = ours.step({"amount": 3})
    assert (last.terminated, last.truncated, last.infrastructure_error) == (False, True, "no disk")
    assert last.unscored == "no judge"


@pytest.mark.parametrize(
    ("processes", "clients", "slots"), [(1, 60, 20), pytest.param(4, 500, 500, marks=soak)]
)
def test_crowd_is_admitted_as_slots_come_free(processes: int, clients: int, slots: int) -> None:
    with our_server("counter:app", "--max-sessions", str(slots)) as url, ThreadPoolExecutor() as pool:
        crowds = [pool.submit(drive, "0.10.0", "crowd", url, str(clients), "0.2") for _ in range(processes)]
        ended = [one for crowd in crowds for one in crowd.result()]
    played = [one for one in ended if "total" in one]
    sys.stdout.write(
        f"{len(played)} of {len(ended)} played, after {max(one['after_s'] for one in ended)} s\n"
    )
    assert {one["total"] for one in played} == {2}
    assert len(played) >= 2 * slots
    assert [one for one in ended if "error" in one and one["after_s"] < 0.9 * HANDSHAKE_WAIT_S] == []


@soak
@pytest.mark.parametrize(("version", "face"), EVERY_CLIENT)
def test_client_over_the_cap_reads_why(version: str, face: str) -> None:
    with our_server("counter:solo_app") as url:
        (first, second) = drive(version, "episodes", url, face, plan=[[{"reset": {}}], [{"reset": {}}]])
        assert first[0]["observation"]["total"] == 0
        # Clients before 0.10 send before they read, and may find the socket closed; so they do with their own server.
        assert "CAPACITY_REACHED" in second[0]["text"] or (
            version != "0.10.0" and second[0]["error"] == "ConnectionClosedOK"
        )
        (third,) = drive(version, "episodes", url, face, plan=[[{"reset": {"seed": 3}}]])
        assert third[0]["observation"]["total"] == 3


def test_first_release_plays_whole_episodes_in_its_own_session(counter_url: str) -> None:
    one, two = (
        drive("0.1.1", "plain_http", counter_url, session, plan=["reset", *[{"amount": 5}] * 2, "state"])
        for session in ("one", "two")
    )
    for begun, first, last, state in (one, two):
        assert [o["observation"]["total"] for o in (begun, first, last)] == [0, 5, 10]
        assert (last["reward"], last["done"], state["step_count"]) == (1.0, True, 2)
    assert one[-1]["episode_id"] != two[-1]["episode_id"]


@pytest.mark.parametrize("version", OVER_SOCKETS)
def test_released_clients_play_the_reasoning_environment(version: str) -> None:
    """The wheels have no client of reasoning_gym_env; their generic client sends and reads the same fields."""
    options = {
        "seed": 42,
        "episode_id": "one",
        "dataset_name": "chain_sum",
        "dataset_config": {"max_terms": 2, "max_digits": 1},
        "size": 1,
    }
    plan: list[dict[str, Any]] = [{"reset": options}, {"step": {"answer": "no number"}}]
    with our_server("reasoning") as url:
        ((begun, wrong),) = drive(version, "episodes", url, "async", plan=[plan])
        plan[1] = {"step": {"answer": wrong["observation"]["correct_answer"]}}
        ((again, right, over, state),) = drive(
            version, "episodes", url, "async", plan=[[*plan, plan[1], {"state": {}}]]
        )
    assert begun["observation"]["question"].startswith("State the final answer")
    assert (begun["reward"], begun["done"]) == (None, False)
    assert (wrong["observation"]["score"], wrong["reward"], wrong["done"]) == (0.0, 0.0, True)
    assert wrong["observation"]["dataset_metadata"]["source_dataset"] == "chain_sum"
    assert again == begun
    assert (right["observation"]["score"], right["reward"], right["done"]) == (1.0, 1.0, True)
    assert "call reset() for a question (code: EXECUTION_ERROR)" in over["text"]
    assert (state["episode_id"], state["step_count"], state["dataset_name"]) == ("one", 1, "chain_sum")


@soak
def test_first_release_without_a_session_gets_an_instance_per_call(counter_url: str) -> None:
    plan = ["reset", {"amount": 5}, {"amount": 5}, "state"]
    outcomes = drive("0.1.1", "plain_http", counter_url, "", plan=plan)
    assert [o.get("observation", {}).get("total") for o in outcomes] == [0, 5, 5, None]
    assert outcomes[-1]["step_count"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("target", ["blackjack", "counter:app"])
def test_released_validator_passes(target: str) -> None:
    with our_server(target) as url:
        command = [python("0.10.0").parent / "openenv", "validate", "--url", url, "--json"]
        done = finished(*command, env=environment(), timeout_s=WAIT_TIMEOUT_S)
    report = json.loads(done.stdout)
    assert (done.returncode, report["passed"], len(report["criteria"]) > 0) == (0, True, True), report
    assert all(one["passed"] for one in report["criteria"] if one.get("required", True)), report

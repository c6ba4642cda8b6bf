"""The task routes of section 2 of the wire."""

import asyncio
import json
import threading
from typing import Any

from counter import Add, Count, Counter
from pydantic import BaseModel
from serving import WAIT_TIMEOUT_S, eventually, reconfigured, request, serving, socket_to

from servers import create_app


class Split(BaseModel):
    name: str
    type: str
    size: int


class Tasks(Counter):
    """Has tasks: sync methods, splits in every form."""

    BLOCKING = True
    made = 0
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1

    def close(self) -> None:
        type(self).closed += 1

    def list_splits(self) -> Any:
        return [
            "train",
            "test",
            "dev",
            {"name": "x", "type": "test"},
            Split(name="m", type="train", size=3),
            7,
        ]

    def list_tasks(self, split: str) -> Any:
        return self._tasks(split)

    def num_tasks(self, split: str) -> int:
        return len(self._tasks(split))

    def get_task(self, split: str, index: int) -> Any:
        return self._tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> Any:
        return self._tasks(split)[start:stop]

    def _tasks(self, split: str) -> list[Any]:
        if split == "broken":
            raise RuntimeError("the data set is gone")
        if split == "unwritable":
            return [object()]
        return {"train": [{"id": i, "score": float("nan")} for i in range(3)]}[split]


BAD_CONTENT: list[Any] = [
    b"",
    b"{",
    b"[" * 100_000,
    b'{"split": "\xff"}',
    b'{"split":"train","index":' + b"9" * 9000,
]


class AsyncTasks(Counter):
    async def list_splits(self) -> Any:
        return ["train"]

    async def num_tasks(self, split: str) -> int:
        raise NotImplementedError


TRAIN = [{"id": i, "score": None} for i in range(3)]

ANSWERS: list[tuple[str, str, Any, int, Any]] = [
    ("GET", "/list_environments", None, 200, ["Mini"]),
    (
        "GET",
        "/mini/splits",
        None,
        200,
        [
            {"name": "train", "type": "train"},
            {"name": "test", "type": "test"},
            {"name": "dev", "type": "validation"},
            {"name": "x", "type": "test"},
            {"name": "m", "type": "train", "size": 3},
            {"name": "7", "type": "validation"},
        ],
    ),
    ("POST", "/MINI/tasks", {"split": "train"}, 200, {"tasks": TRAIN, "env_name": "Mini"}),
    ("POST", "/mini/num_tasks", {"split": "train"}, 200, {"num_tasks": 3}),
    ("POST", "/mini/task", {"split": "train", "index": 1}, 200, {"task": TRAIN[1]}),
    ("POST", "/mini/task", {"split": "train", "index": -1}, 200, {"task": TRAIN[2]}),
    ("POST", "/mini/task", {"split": "train", "index": 3}, 400, {"detail": "Invalid task index"}),
    ("POST", "/mini/task", {"split": "train", "index": 10**30}, 400, {"detail": "Invalid task index"}),
    ("POST", "/mini/task_range", {"split": "train"}, 200, {"tasks": TRAIN}),
    ("POST", "/mini/task_range", {"split": "train", "start": 1}, 200, {"tasks": TRAIN[1:]}),
    ("POST", "/mini/task_range", {"split": "train", "start": 0, "stop": 1}, 200, {"tasks": TRAIN[:1]}),
    ("GET", "/nope/splits", None, 404, {"detail": "unknown environment 'nope'"}),
    ("POST", "/nope/tasks", {"split": "train"}, 404, {"detail": "unknown environment 'nope'"}),
    ("POST", "/mini/tasks", {"split": "broken"}, 500, {"detail": "the data set is gone"}),
]

BAD_BODIES: list[tuple[str, Any]] = [
    ("tasks", {}),
    ("tasks", {"split": "train", "more": 1}),
    ("tasks", []),
    ("num_tasks", None),
    ("task", {"split": "train"}),
    ("task", {"split": "train", "index": "x"}),
    ("task", {"split": "train", "index": 1.5}),
    ("task_range", {"split": "train", "start": "x"}),
]


def mini(environment: type[Counter] = Tasks, cap: int = 4) -> Any:
    app = create_app(environment, Add, Count, env_name="Mini", max_concurrent_envs=cap)
    return reconfigured(app, max_wait_s=0.0)  # nobody waits for a slot


async def test_every_task_route_answers() -> None:
    Tasks.made = Tasks.closed = 0
    app = mini()
    async with serving(app) as address:
        for method, path, body, status, answer in ANSWERS:
            reply = await request(address, method, path, body)
            assert (path, body, reply.status_code, reply.json()) == (path, body, status, answer)
        await eventually(lambda: app.sessions.active == 0)
    assert Tasks.made == Tasks.closed > 0


async def test_invalid_bodies_are_refused() -> None:
    async with serving(mini()) as address:
        for route, body in BAD_BODIES:
            reply = await request(address, "POST", f"/mini/{route}", json.dumps(body))
            assert reply.status_code == 422, body
            assert reply.json()["detail"][0]["loc"][0] == "body"
        for content in BAD_CONTENT:
            reply = await request(address, "POST", "/mini/task", content)
            assert reply.status_code in {400, 422}, content
        unknown = await request(address, "POST", "/mini/tasks", {"split": "nope"})
        assert unknown.status_code == 400  # the caller's mistake
        assert "'nope'" in unknown.json()["detail"]
        unwritable = await request(address, "POST", "/mini/tasks", {"split": "unwritable"})
        assert unwritable.status_code == 500  # the environment's


async def test_missing_task_methods_are_501() -> None:
    async with serving(mini(Counter)) as plain, serving(mini(AsyncTasks)) as partly:
        for route, body, method in (
            ("num_tasks", {"split": "train"}, "num_tasks"),
            ("task", {"split": "train", "index": 0}, "get_task"),
            ("task_range", {"split": "train"}, "get_task_range"),
            ("tasks", {"split": "train"}, "list_tasks"),
        ):
            for address in (plain, partly):
                reply = await request(address, "POST", f"/mini/{route}", body)
                assert reply.status_code == 501
                assert reply.json() == {"detail": f"{method} is not supported for this environment"}
            assert (await request(plain, "POST", f"/nope/{route}", body)).status_code == 404
        reply = await request(plain, "GET", "/mini/splits")
        assert (reply.status_code, "list_splits" in reply.json()["detail"]) == (501, True)


async def test_tasks_of_a_factory_come_from_its_instances() -> None:
    async with serving(mini(lambda: AsyncTasks())) as address:  # type: ignore[arg-type]
        assert (await request(address, "GET", "/mini/splits")).json() == [{"name": "train", "type": "train"}]
        reply = await request(address, "POST", "/mini/tasks", {"split": "train"})
        assert reply.status_code == 501


async def test_task_requests_count_against_the_cap() -> None:
    async with serving(mini(cap=1)) as address:
        async with socket_to(address):
            reply = await request(address, "GET", "/mini/splits")
            assert reply.status_code == 503
            assert reply.headers["retry-after"]
            assert (await request(address, "GET", "/list_environments")).status_code == 200
        assert (await request(address, "GET", "/mini/splits")).status_code in {200, 503}


async def test_slow_task_list_blocks_no_other_and_disconnect_frees_its_slot() -> None:
    entered, release = threading.Event(), threading.Event()

    class Slow(Tasks):
        def list_splits(self) -> Any:
            entered.set()
            release.wait(WAIT_TIMEOUT_S)
            return []

    app = mini(Slow)
    async with serving(app) as address:
        try:
            leaving = asyncio.create_task(request(address, "GET", "/mini/splits"))
            await eventually(entered.is_set)
            leaving.cancel()
            assert (await request(address, "GET", "/health")).status_code == 200
            await eventually(lambda: app.sessions.active == 0)
        finally:
            release.set()

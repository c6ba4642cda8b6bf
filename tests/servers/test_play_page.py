"""The page over HTTP: its files, their protection, its data, and the released routes."""

import asyncio
import base64
import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest
from counter import Add, Count, Counter
from serving import WAIT_TIMEOUT_S, ask, reconfigured, request, serving, socket_to
from websockets.exceptions import InvalidStatus

from openenv_core import EnvironmentMetadata
from openenv_core.errors import ConfigurationError
from servers import create_app, create_fastapi_app
from servers.app import EnvironmentApp
from servers.page import manager
from servers.page.gradio import action_fields
from servers.released import create_web_interface_app
from servers.settings import ServerSettings

TOKENS = ("a-token-of-the-first", "a-token-of-another")


class Told(Counter):
    """Counts, and has a README."""

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="told", description="tells", readme_content="# Told")


class Early(Counter):
    """Has no state before its first reset."""

    began = False

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, start: int = 0) -> Count:
        self.began = True
        return super().reset(seed=seed, episode_id=episode_id, start=start)

    @property
    def state(self) -> Any:
        if not self.began:
            raise RuntimeError("Call reset() first")
        return self._state


def with_page(env: Any = Counter, settings: dict[str, Any] | None = None, **options: Any) -> EnvironmentApp:
    app = create_app(env, Add, Count, max_concurrent_envs=8, **options)
    return reconfigured(app, web=True, **(settings or {}))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_page_has_a_strict_content_security_policy_and_its_data() -> None:
    app = with_page(Told, title_override="Counting", env_name="counter")
    async with serving(app) as address:
        for path in ("/", "/web"):
            answer = await request(address, "GET", path)
            assert (answer.status_code, answer.headers["location"]) == (307, "/web/")
        assert (await request(address, "GET", "/docs")).status_code == 200
        for name, kind in (("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css")):
            answer = await request(address, "GET", f"/web/{name}")
            assert answer.headers["content-type"].startswith(kind)
            rules = dict(
                rule.strip().partition(" ")[::2]
                for rule in answer.headers["content-security-policy"].split(";")
            )
            assert rules["default-src"] == "'none'"
            assert rules["script-src"] == rules["style-src"] == rules["frame-ancestors"] == "'self'"
            assert rules["connect-src"] == "'self'"
            assert rules["require-trusted-types-for"] == "'script'"
            assert "unsafe" not in answer.headers["content-security-policy"]
        page = (await request(address, "GET", "/web/")).text
        assert re.search(r"<style|\sstyle=|\son\w+=|javascript:|https?:", page) is None
        assert page.count("<script") == 1
        page_data = (await request(address, "GET", "/web/page.json")).json()
        assert (page_data["title"], page_data["about"]["readme_content"], page_data["idle_s"]) == (
            "Counting",
            "# Told",
            900,
        )
        assert page_data["action"]["required"] == ["amount"]
        assert set(page_data["reset"]["properties"]) == {"seed", "episode_id", "start"}
        assert page_data["reset"]["properties"]["start"] == {"type": "integer", "default": 0}
        assert page_data["reset"]["additionalProperties"] is False


@pytest.mark.parametrize("name", ["ENABLE_WEB_INTERFACE", "OPENENV_WEB"])
def test_environment_variables_switch_the_page_on(name: str) -> None:
    for value, on in (("1", True), ("True", True), ("yes", True), ("false", False), ("0", False)):
        assert ServerSettings.from_environment({name: value}).web is on
    both = {"ENABLE_WEB_INTERFACE": "true", "OPENENV_WEB": "0"}
    assert ServerSettings.from_environment(both).web is False


async def test_page_is_absent_by_default_and_in_production() -> None:
    plain = reconfigured(create_fastapi_app(Counter, Add, Count), web=True)
    for app in (create_app(Counter, Add, Count), plain, with_page(settings={"mode": "production"})):
        async with serving(app) as address:
            assert (await request(address, "GET", "/")).status_code == 200
            for path in ("/web", "/web/", "/web/page.js", "/web/metadata", "/playground/"):
                assert (await request(address, "GET", path)).status_code == 404
    always = create_web_interface_app(Counter, Add, Count, "counter", max_concurrent_envs=2)
    async with serving(always) as address:
        assert (await request(address, "GET", "/web/")).status_code == 200


async def test_space_may_be_framed_by_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_ID", "me/counter")
    async with serving(with_page()) as address:
        policy = (await request(address, "GET", "/web/")).headers["content-security-policy"]
        assert policy.endswith("frame-ancestors 'self' https://huggingface.co")


def named(token: str) -> list[Any]:
    return ["ropewalk.v1", f"ropewalk.token.{base64.urlsafe_b64encode(token.encode()).decode().rstrip('=')}"]


async def test_token_guards_everything_but_the_static_files() -> None:
    app = with_page(settings={"tokens": TOKENS})
    async with serving(app) as address:
        for path in ("/", "/web", "/web/", "/web/page.js", "/web/page.css"):
            assert (await request(address, "GET", path)).status_code in (200, 307)
            assert (await request(address, "POST", path)).status_code == 401
        for path in ("/web/page.json", "/web/metadata", "/web/state", "/docs", "/schema", "/web/page.cs"):
            assert (await request(address, "GET", path)).status_code == 401
        foreign = {"origin": "https://elsewhere.example"}
        assert (await request(address, "GET", "/web/", headers=foreign)).status_code == 403
        assert (await request(address, "GET", "/web/page.json", headers=bearer(TOKENS[1]))).status_code == 200
        async with socket_to(address, subprotocols=named(TOKENS[0])) as socket:
            assert socket.subprotocol == "ropewalk.v1"
            assert (await ask(socket, {"id": 1, "op": "open"}))["members"] == [0]
        for wrong in (named("a-token-of-nobody"), ["ropewalk.v1", "ropewalk.token.%%"], ["ropewalk.v1"]):
            with pytest.raises(InvalidStatus) as refused:
                async with socket_to(address, subprotocols=wrong):
                    pass
            assert refused.value.response.status_code == 401


async def test_released_web_routes_work(monkeypatch: pytest.MonkeyPatch) -> None:
    app = with_page(Early, {"tokens": TOKENS})
    first, other = (bearer(token) for token in TOKENS)
    async with serving(app) as address:

        async def web(name: str, body: Any = None, headers: dict[str, str] = first) -> Any:
            method = "GET" if name in ("state", "metadata") else "POST"
            answer = await request(address, method, f"/web/{name}", body, headers)
            return answer.json() if answer.status_code == 200 else answer

        early = await web("state")
        assert (early.status_code, early.json()) == (409, {"detail": "Call reset() first"})
        assert (await web("metadata"))["name"] == "Early"
        assert (await web("reset"))["observation"]["total"] == 0
        assert (await web("reset", {"seed": 3, "unused": "value"}))["observation"]["total"] == 3
        stepped = await web("step", {"action": {"amount": 2}})
        assert (stepped["observation"]["total"], stepped["reward"], stepped["done"]) == (5, 1, False)
        assert (await web("state"))["total"] == 5
        wrong = await web("step", {"action": {"wrong": 2}})
        assert (wrong.status_code, wrong.json()["detail"][0]["loc"]) == (422, ["amount"])
        assert (await web("step", {"message": "hi"})).status_code == 422
        # Each caller has a session of his own, and whoever names one has that.
        assert (await web("reset", headers=other))["observation"]["total"] == 0
        named_one = {**first, "x-openenv-session": "another"}
        assert (await web("reset", {"seed": 9}, named_one))["observation"]["total"] == 9
        assert (await web("state"))["total"] == 5
        assert app.sessions.active == 3
        async with socket_to(address, path="/ws/ui", additional_headers=first) as watching:
            frame = await ask(watching, "keep alive")
            assert frame["type"] == "state_update"
            episode = frame["episode_state"]
            assert (episode["step_count"], episode["is_reset"]) == (1, False)
            assert episode["action_logs"][0]["action"] == {"amount": 2}
            await web("step", {"action": {"amount": 1}}, other)  # which is not told
            await web("step", {"action": {"amount": 4}})
            frame = await _next(watching)
            assert [log["observation"]["total"] for log in frame["episode_state"]["action_logs"]] == [5, 9]
            monkeypatch.setattr(manager, "_MAX_SENT_LOGS", 2)
            last_step = await web("step", {"action": {"amount": 1}})
            frame = await _next(watching)
            assert [log["observation"]["total"] for log in frame["episode_state"]["action_logs"]] == [9, 10]
            assert last_step["done"] is True
            assert (await web("step", {"action": {"amount": 1}})).status_code == 500


async def test_history_has_actions_as_they_were_sent() -> None:
    class Using(Counter):
        def step(self, action: Add) -> Count:
            seen = super().step(action)
            action.amount = 0
            return seen

    app = with_page(Using)
    async with serving(app) as address:
        await request(address, "POST", "/web/reset")
        await request(address, "POST", "/web/step", {"action": {"amount": 2}})
        async with socket_to(address, path="/ws/ui") as watching:
            frame = await ask(watching, "keep alive")
    assert [log["action"] for log in frame["episode_state"]["action_logs"]] == [{"amount": 2}]


async def _next(socket: Any) -> Any:
    return json.loads(await asyncio.wait_for(socket.recv(), WAIT_TIMEOUT_S))


def test_gradio_pages_need_gradio_and_a_blocks_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ConfigurationError, match=r"this environment's page.*ropewalk\[gradio\]"):
        with_page(gradio_builder=lambda *_: None)
    fake, context = ModuleType("gradio"), ModuleType("gradio.context")
    fake.Blocks, context.LocalContext = type("Blocks", (), {}), None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gradio", fake)
    monkeypatch.setitem(sys.modules, "gradio.context", context)
    with pytest.raises(TypeError, match=r"gradio\.Blocks, got NoneType"):
        with_page(gradio_builder=lambda *_: None)
    fields = action_fields(
        {"properties": {"code": {"type": "string"}, "n": {"type": "integer", "minimum": 1}}}
    )
    assert [(one["type"], one["min_value"], one["required"]) for one in fields] == [
        ("textarea", None, False),
        ("number", 1, False),
    ]

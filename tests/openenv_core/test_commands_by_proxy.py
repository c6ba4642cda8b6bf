"""Commands that ask a server over plain HTTP: by the environment's proxy, and never for one on this machine."""

from collections.abc import Callable

import pytest
from forward_proxy import answering, proxy_everything

from openenv_core.checker.subject.subject import Subject
from openenv_core.cli.play import _schema
from openenv_core.targets import target_of
from servers.cli.list import _ask

ANSWER = {"action": {}, "name": "far"}


def check(url: str) -> None:
    with Subject(target_of(url)).http(url) as http:
        assert http.get("/schema").json() == ANSWER


def play(url: str) -> None:
    assert _schema(url, None) == ANSWER


def listed(url: str) -> None:
    assert [one.name for one in _ask(url, None)] == ["far"]


@pytest.mark.parametrize("ask", [check, play, listed])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_a_proxy_is_asked_for_another_host_alone(
    ask: Callable[[str], None], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(ANSWER) as (port, asked):
        proxy_everything(monkeypatch, port, variable)
        ask("http://far.example")
        assert asked
        assert all(one.startswith("http://far.example/") for one in asked)
        asked.clear()
        for host in ("127.0.0.1", "localhost"):
            ask(f"http://{host}:{port}")
        assert asked
        assert all(one.startswith("/") for one in asked)

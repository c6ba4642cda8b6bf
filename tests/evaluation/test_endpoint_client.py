"""The client of a model's endpoint against hostile servers, over a fake transport: errors, secrets, retries."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from forward_proxy import proxy_everything, recording_proxy

from openenv_core.errors import ConfigurationError
from openenv_core.evaluation import endpoint as endpoint_client
from openenv_core.evaluation.endpoint import EndpointClient

KEY = "sk-0123456789"
LONGEST = 1000
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", f"{KEY}\n")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it waits before it asks again; nobody waits."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return pauses


def client(answer: Answer) -> EndpointClient:
    one = EndpointClient("http://host/v1", "KEY_OF_THE_TEST", connections=2, max_bytes=LONGEST)
    one._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), headers=one._http.headers)
    return one


def ask(answer: Answer) -> bytes:
    return asyncio.run(client(answer).request("GET", "/there"))


@pytest.mark.parametrize("bad", [" \n", "two words"])
def test_key_that_cannot_be_sent_is_refused_and_not_repeated(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", bad)
    with pytest.raises(ConfigurationError, match=r"KEY_OF_THE_TEST \(--key-variable\) to hold") as refused:
        client(lambda _: httpx.Response(200))
    assert not bad.strip() or bad not in str(refused.value)


@pytest.mark.parametrize("number", [401, 503])
def test_server_error_is_shown_without_key_and_control_characters(number: int, waits: list[float]) -> None:
    said = f"\x1b[31mnot with\n{KEY}\x1b]0;title\x07 \u202e".encode() + b"\xff" + b"x" * (1 << 20)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404 if waits else number, content=said)

    with pytest.raises(ConfigurationError) as refused:
        ask(answer)
    assert "not with *** ]0;title" in str(refused.value)
    assert str(refused.value).isprintable()
    assert KEY not in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(("number", "reason"), [(200, "more than 1000 bytes"), (404, "404")])
def test_endless_answer_is_not_read_to_its_end(number: int, reason: str) -> None:
    read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 100

    with pytest.raises(ConfigurationError, match=reason):
        ask(lambda request: httpx.Response(number, content=parts()))
    assert read <= (endpoint_client.MAX_COMPLAINT_BYTES // 100) + 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ssl.SSLCertVerificationError(1, "self-signed"), "SSL_CERT_FILE"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "must begin with http:"),
    ],
)
def test_tls_errors_are_not_tried_again(fault: ssl.SSLError, words: str, waits: list[float]) -> None:
    if "WRONG" in str(fault):
        fault.reason = "WRONG_VERSION_NUMBER"

    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(str(fault)) from fault

    with pytest.raises(ConfigurationError, match=words):
        ask(answer)
    assert waits == []


def test_lost_connections_are_logged_once_and_tried_again(
    waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if len(waits) < 4:
            raise httpx.ConnectError("nobody there")
        return httpx.Response(200, content=b"yes")

    one = client(answer)
    assert asyncio.run(one.request("GET", "/there")) == b"yes"
    (line,) = caplog.messages
    assert "ConnectError: nobody there" in line
    assert one.trouble == "no answer"


def test_pauses_double_and_respect_retry_after(waits: list[float]) -> None:
    wanted = ["0.001", "9", "never", "-1", "nan", None, None, None]

    def answer(request: httpx.Request) -> httpx.Response:
        if len(waits) == len(wanted):
            return httpx.Response(200)
        when = wanted[len(waits)]
        return httpx.Response(429, headers={} if when is None else {"Retry-After": when})

    ask(answer)
    assert waits == pytest.approx([0.1, 9.0, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_proxy_is_used_for_other_hosts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask_all(urls: list[str]) -> None:
        for url in urls:
            one = EndpointClient(url, None, connections=2, max_bytes=LONGEST)
            assert await one.request("GET", "/models") == b'"yes"'
            await one.close()

    with recording_proxy("yes") as (port, requested):
        proxy_everything(monkeypatch, port, "HTTP_PROXY")
        hosts = (f"127.0.0.1:{port}", f"localhost:{port}", "far")
        asyncio.run(ask_all([f"http://{host}/v1" for host in hosts]))
    assert requested == ["/v1/models", "/v1/models", "http://far/v1/models"]

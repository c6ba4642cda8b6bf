"""A stand-in for an OpenAI-compatible server: the completions protocol over a toy policy, with the faults of others."""

import json
import math
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 48
MODEL = "toy"
BUSY = 503


def logits(context: Sequence[int]) -> list[float]:
    """Of the token after `context`; a function of its last two."""
    source = random.Random(str(context[-2:]))
    return [source.uniform(-2.0, 2.0) for _ in range(VOCABULARY)]


def distribution(context: Sequence[int], temperature: float) -> list[float]:
    """Natural-log probabilities of the token after `context`."""
    scaled = [value / temperature for value in logits(context)]
    total = math.log(sum(math.exp(value) for value in scaled))
    return [value - total for value in scaled]


@dataclass
class Served:
    """What the server answered to one prompt."""

    body: dict[str, Any]
    tokens: list[int]


@dataclass
class Behaviour:
    """How the server differs from what is wanted; as it is here, in nothing."""

    processed: bool = True
    """Log-probabilities have the temperature in them."""
    top_k: int = VOCABULARY
    """Forced on every request."""
    content: bytes | None = None
    """Sent instead of an answer."""
    busy: int = 0
    """Requests that are turned away first, each with a Retry-After."""
    key: str | None = None
    max_model_len: int | None = 64


@dataclass
class StandIn:
    """What a test sees of the server."""

    url: str = ""
    behaviour: Behaviour = field(default_factory=Behaviour)
    served: list[Served] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """One answer, in the protocol's words."""
        how = self.behaviour
        prompt = list(body["prompt"])
        temperature = body["temperature"]
        source = random.Random(body.get("seed"))
        tokens: list[int] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        reason = "length"
        for _ in range(body["max_tokens"]):
            context = [*prompt, *tokens]
            plain = distribution(context, 1.0)
            sampled = _cut(distribution(context, temperature or 1.0), how.top_k)
            token = (
                source.choices(range(VOCABULARY), [math.exp(value) for value in sampled])[0]
                if temperature
                else plain.index(max(plain))
            )
            reported = sampled if how.processed else plain
            tokens.append(token)
            logprobs.append(reported[token])
            best = sorted(range(VOCABULARY), key=lambda one: -reported[one])[: body["logprobs"]]
            tops.append({f"token_id:{one}": max(reported[one], -9999.0) for one in {*best, token}})
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
        with self.lock:
            self.served.append(Served(body, list(tokens)))
        choice: dict[str, Any] = {
            "index": 0,
            "text": "some text",
            "finish_reason": reason,
            "stop_reason": tokens[-1] if reason == "stop" else None,
        }
        if body.get("return_token_ids"):
            choice |= {"token_ids": tokens, "prompt_token_ids": prompt}
        if body["logprobs"]:
            choice["logprobs"] = {"token_logprobs": logprobs, "top_logprobs": tops}
        return {
            "object": "text_completion",
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)},
        }


def _cut(logprobs: Sequence[float], top_k: int) -> list[float]:
    least = sorted(logprobs, reverse=True)[top_k - 1]
    log_total = math.log(sum(math.exp(value) for value in logprobs if value >= least))
    return [value - log_total if value >= least else -math.inf for value in logprobs]


@contextmanager
def completions_server() -> Iterator[StandIn]:
    """Serve on a free port of this machine."""
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if content:  # none comes from a client that has given up
                self.answer(json.loads(content))

        def answer(self, body: dict[str, Any] | None) -> None:
            with stand_in.lock:
                stand_in.at_once += 1
                stand_in.most_at_once = max(stand_in.most_at_once, stand_in.at_once)
            status, reply = self.reply(body)
            with stand_in.lock:
                stand_in.at_once -= 1
            content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            if status == BUSY:
                self.send_header("Retry-After", "0.01")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def reply(self, body: dict[str, Any] | None) -> tuple[int, Any]:
            how = stand_in.behaviour
            if how.key is not None and self.headers["Authorization"] != f"Bearer {how.key}":
                return 401, {"error": {"message": "who are you"}}
            with stand_in.lock:
                if how.busy > 0:
                    how.busy -= 1
                    return BUSY, {"error": {"message": "later"}}
            if how.content is not None:
                return 200, how.content
            if body is None and self.path == "/v1/models":
                return 200, {"data": [{"id": MODEL, "max_model_len": how.max_model_len}]}
            if body is None or self.path != "/v1/completions":
                return 404, {"error": {"message": "not here"}}
            if not all(0 <= token < VOCABULARY for token in body["prompt"]):
                return 400, {"error": {"message": "a token out of the vocabulary"}}
            if len(body["prompt"]) + body["max_tokens"] > (how.max_model_len or math.inf):
                return 400, {"error": {"message": "the prompt and max_tokens are longer than the context"}}
            return 200, stand_in.completion(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class says so
            return

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # clients may give up
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)

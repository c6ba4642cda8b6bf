"""A server of OpenAI's chat completions with scripted answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event
from typing import Any, TypeAlias

from local_http import QuietHandler, running

Answer: TypeAlias = str | dict[str, Any] | bytes | int | Event
"""A message's text, its fields, a whole body, a status, or an event to wait for before closing the connection."""


class ChatServer:
    """The server's answers in order, of which the last is repeated, and the requests it received."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.port = 0

    def next(self) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def chat_server(*answers: Answer) -> Iterator[ChatServer]:
    server_state = ChatServer(*answers)

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self) -> None:
            server_state.requests.append({"path": self.path, **json.loads(self.read_body())})
            server_state.keys.append(self.headers["Authorization"])
            answer = server_state.next()
            if isinstance(answer, Event):
                answer.wait(60)
                return
            status = answer if isinstance(answer, int) else 200
            message = answer if isinstance(answer, dict) else {"content": str(answer)}
            body_bytes = json.dumps({"choices": [{"message": {"role": "assistant", **message}}]}).encode()
            self.reply(status, answer if isinstance(answer, bytes) else body_bytes)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server_state.port = server.server_port
    with running(server):
        yield server_state

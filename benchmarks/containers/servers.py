"""The server that is measured by default: /health on the standard library, in the plain image."""

from dataclasses import dataclass
from typing import Final

PLAIN: Final = "python:3.11-slim"

PORT: Final = 8000

_CODE: Final = """
import http.server
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "healthy"}')
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("", %d), Health).serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """An image and the command that runs in it.

    Attributes:
        image: The image.
        command: Command to run; None runs the image's own.
        port: Port that the server listens on.
    """

    image: str
    command: tuple[str, ...] | None = None
    port: int = PORT

    @property
    def name(self) -> str:
        """The name in tables."""
        return self.image if self.command is None else f"{self.image}, /health alone"


PLAIN_SUBJECT: Final = Subject(PLAIN, ("python3", "-c", _CODE % PORT))

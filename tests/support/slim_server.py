"""A server of /health in the plain Python image, so that no image has to be built."""

from openenv_core.providers.docker import ContainerOptions

IMAGE = "python:3.11-slim"

CODE = """
import http.server, os, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("dying as told", flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "healthy"}')
    def log_message(self, *_):
        pass
print("slim says", os.environ.get("GREETING", "nothing"), flush=True)
http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Health).serve_forever()
"""


def command(port: int | str = 8000) -> tuple[str, ...]:
    return ("python3", "-c", CODE, str(port))


def options(**fields: object) -> ContainerOptions:
    return ContainerOptions(**{"command": command(), "user": "65534", "stop_timeout_s": 0.0, **fields})  # type: ignore[arg-type]

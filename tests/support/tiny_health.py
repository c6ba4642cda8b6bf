"""A server of /health on the standard library, which starts in a tenth of a second.

    python tiny_health.py PORT [STATUS]

A GET of /die ends it with exit status 3.
"""

import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STATUS = sys.argv[2] if len(sys.argv) > 2 else "healthy"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            sys.stdout.write("dying as told\n")
            sys.stdout.flush()
            os._exit(3)
        body = f'{{"status": "{STATUS}"}}'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    sys.stdout.write(f"tiny says hello with {os.environ.get('GREETING', 'no greeting')}\n")
    sys.stdout.flush()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()

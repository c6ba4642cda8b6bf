#!/opt/ropewalk/bin/python -IS
"""Check whether the server in this container is healthy; the exit status is 0 or 1.

Few imports, and only of the standard library: the engine runs this frequently.
"""

import json
import os
import socket
import sys


def token() -> str:
    """Return the first of the server's tokens; "" if it has none."""
    tokens = os.environ.get("ROPEWALK_TOKENS", "").replace(",", " ").split()
    if path := os.environ.get("ROPEWALK_TOKEN_FILE", "").strip():
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
        tokens += [line for line in lines if line and not line.startswith("#")]
    return tokens[0] if tokens else ""


def main() -> int:
    """Return 0 if `GET /health` reports healthy, else 1."""
    port = int(os.environ.get("PORT") or 8000)
    try:
        lines = ["GET /health HTTP/1.1", "Host: localhost", "Connection: close"]
        if key := token():
            lines.append(f"Authorization: Bearer {key}")
        request = "\r\n".join([*lines, "", ""])
        with socket.create_connection(("127.0.0.1", port), timeout=4) as connection:
            connection.sendall(request.encode())
            reply = b""
            while len(reply) < 65536 and (chunk := connection.recv(65536)):
                reply += chunk
        head, _, body = reply.partition(b"\r\n\r\n")
        status = head.split(None, 2)[1]
        status_document = json.loads(body)
    except (OSError, ValueError, IndexError) as error:
        sys.stdout.write(f"expected a healthy server on port {port}, got {type(error).__name__}: {error}\n")
        return 1
    if status == b"200" and isinstance(status_document, dict) and status_document.get("status") == "healthy":
        return 0
    sys.stdout.write(f"expected a healthy server on port {port}, got {status.decode()} {body[:200]!r}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())

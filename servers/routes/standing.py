"""How a plain HTTP request names its session: a header, or a cookie for those who keep them."""

from typing import Any

from fastapi import Request

from openenv_core.protocol.codes import VALIDATION_ERROR, Refusal
from openenv_core.protocol.http import SESSION_COOKIE, SESSION_HEADER, SESSION_ID

NEW = "new"
"""The value that asks for a session under an id of the server's choice."""


def session_named_by(request: Request) -> str | None:
    """Return the id of the session that a request names, the header before the cookie; None where it names none.

    Raises:
        Refusal: VALIDATION_ERROR: it is no id.
    """
    named: str | None = None
    for place, name, value in (
        ("cookie", SESSION_COOKIE, request.cookies.get(SESSION_COOKIE)),
        ("header", SESSION_HEADER, request.headers.get(SESSION_HEADER)),
    ):
        if value is None:
            continue
        if place == "header" and len(request.headers.getlist(name)) > 1:
            value = ", ".join(request.headers.getlist(name))  # which is no id
        if SESSION_ID.fullmatch(value) is None:
            text = "String should be 1 to 128 of the characters A-Z a-z 0-9 . _ -"
            fault = {
                "type": "string_pattern_mismatch",
                "loc": [place, name.lower()],
                "msg": text,
                "input": value,
            }
            raise Refusal(VALIDATION_ERROR, "Invalid session id", {"errors": [fault]})
        named = value
    return named


def naming(request: Request, session_id: str, keep: bool = False) -> dict[str, str]:
    """Return the headers of a reply that tell its session.

    Args:
        request: What is replied to.
        session_id: The session.
        keep: Ask the caller to keep it as a cookie, for as much of the address space as this app has.
    """
    headers = {SESSION_HEADER: session_id}
    if keep:
        path = request.scope.get("root_path") or "/"
        secure = "; Secure" if _encrypted(request) else ""
        headers["Set-Cookie"] = (
            f"{SESSION_COOKIE}={session_id}; HttpOnly; SameSite=Strict; Path={path}{secure}"
        )
    return headers


def _encrypted(request: Request) -> bool:
    """Whether the caller speaks TLS, to this server or to a proxy before it: to say so falsely only hides a cookie."""
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return request.url.scheme == "https" or forwarded == "https"


PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": place_name,
            "in": place,
            "required": False,
            "description": text,
            "schema": {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"},
        }
        for place_name, place, text in (
            (SESSION_HEADER, "header", "The session to speak to; without it each call stands alone."),
            (SESSION_COOKIE, "cookie", "The same; the header goes first."),
        )
    ]
}
"""What the routes that take a session say of it in the OpenAPI document."""

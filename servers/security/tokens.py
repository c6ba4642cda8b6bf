"""Bearer tokens: whether a caller has one, and a name for whoever has it."""

import hashlib
import hmac
from collections.abc import Sequence

from servers.security.refusal import TurnedAwayError

_CHALLENGE = ((b"www-authenticate", b"Bearer"),)
_SCHEME = b"bearer"


class Tokens:
    """The tokens of a server, kept as digests.

    Args:
        tokens: Any of them lets a caller in; none: everybody may come in.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [(_digest(token.encode()), _name(token.encode())) for token in tokens]

    def principal(self, authorizations: Sequence[bytes]) -> str:
        """Return the name of the caller's token; empty where no token is asked for.

        Every digest is compared, whole, whichever fits: the time tells nothing.

        Args:
            authorizations: The values of the header Authorization.

        Raises:
            TurnedAwayError: 401, no token or not one of them.
        """
        if not self._digests:
            return ""
        presented = _bearer(authorizations)
        digest = _digest(presented)
        found = ""
        for known, name in self._digests:
            if hmac.compare_digest(known, digest):
                found = name
        if not found:
            raise _unauthorized("one that it does not know")
        return found


def principals(tokens: Sequence[str]) -> list[str]:
    """Return the names of the callers that there can be where tokens are asked for."""
    return [_name(token.encode()) for token in tokens]


def _bearer(authorizations: Sequence[bytes]) -> bytes:
    if not authorizations:
        raise _unauthorized("none")
    scheme, _, token = authorizations[0].strip().partition(b" ")
    if len(authorizations) > 1 or scheme.lower() != _SCHEME or not token.strip():
        raise _unauthorized("something else")
    return token.strip()


def _unauthorized(got: str) -> TurnedAwayError:
    text = f"expected the header 'Authorization: Bearer TOKEN' with one of this server's tokens, got {got}"
    return TurnedAwayError(401, text, _CHALLENGE)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _name(token: bytes) -> str:
    # Keyed apart from the digest that is compared: the name travels through the server.
    return hashlib.blake2b(token, digest_size=16, person=b"rw-principal").hexdigest()

"""What the arguments of a call may be at all, whatever a tool's schema says.

A policy writes them. What no JSON can carry, or what makes the parser of a tool server give up, would end the
connection or the server, and look like a failure of the infrastructure that the policy is not to be blamed for.
"""

from collections.abc import Mapping
from typing import Any, Final

from openenv_core.protocol.jsonio import dumps

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
MAX_NUMBER: Final = 1 << 1023
"""Beyond it a whole number is none that every parser reads; it has 308 digits."""


def unfit(arguments: Mapping[str, Any]) -> str | None:
    """Return why arguments cannot be sent to any tool; None where they can."""
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
            elif isinstance(value, int) and abs(value) > MAX_NUMBER:
                return f"expected numbers of at most {MAX_NUMBER.bit_length()} bits, got one of {value.bit_length()}"
        level = below
        if not level:
            break
    else:
        return f"expected arguments of at most {MAX_DEPTH} levels, got more"
    try:
        size = len(dumps(arguments))
    except ValueError as error:
        return f"expected arguments that JSON can carry, got: {str(error)[:200]}"
    return None if size <= MAX_BYTES else f"expected arguments of at most {MAX_BYTES} bytes, got {size}"

"""Addresses of one form: which of them is meant, and with what values."""

import re
from typing import Final
from urllib.parse import unquote

_VALUE: Final = re.compile(r"\{(\+?)(\w+)(\*?)\}")


class AddressForm:
    """The form of a resource's addresses, as in RFC 6570: `{name}` is a value without slashes, `{+name}` one with.

    Args:
        template: The form. One without values is a single address.

    Attributes:
        names: Of the values.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        self.names: list[str] = []
        pattern, end = "", 0
        for found in _VALUE.finditer(template):
            pattern += re.escape(template[end : found.start()])
            pattern += f"(?P<{found[2]}>{'.+' if found[1] or found[3] else '[^/]+'})"
            self.names.append(found[2])
            end = found.end()
        self._pattern = re.compile(pattern + re.escape(template[end:]), re.DOTALL)

    def match(self, uri: str) -> dict[str, str] | None:
        """Return the values in an address; None where it is of another form."""
        found = self._pattern.fullmatch(uri)
        return None if found is None else {name: unquote(value) for name, value in found.groupdict().items()}

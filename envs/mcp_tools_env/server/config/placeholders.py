"""`${...}` in a configuration: the session's folder, and variables of the environment's server."""

import re
from collections.abc import Mapping
from typing import Final

SESSION_DIR: Final = "SESSION_DIR"
"""The name of the folder that a session has to itself, and which is removed with it."""

_PLACEHOLDER: Final = re.compile(r"(\$?)\$\{([^}]*)\}")
_VARIABLE: Final = "env:"


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """Put in the variables that `${env:NAME}` names; `${SESSION_DIR}` stays for the session.

    Raises:
        ValueError: Another placeholder, or a variable that is not set.
    """

    def value(found: re.Match[str]) -> str:
        name = found[2]
        if found[1] or name == SESSION_DIR:
            return found[0]
        if not name.startswith(_VARIABLE):
            raise ValueError(
                f"expected ${{{SESSION_DIR}}} or ${{{_VARIABLE}NAME}}, got ${{{name}}}; write $${{{name}}} where it "
                "is meant as it stands"
            )
        variable = name.removeprefix(_VARIABLE)
        if variable not in environ:
            raise ValueError(
                f"expected the variable {variable} to be set, for {found[0]}; set it for the environment's server"
            )
        return environ[variable].replace("${", "$${")

    return _PLACEHOLDER.sub(value, text)


def placed(text: str, folder: str) -> str:
    """Put in the session's folder, and take the second dollar of `$${` away."""
    return _PLACEHOLDER.sub(lambda found: found[0][1:] if found[1] else folder, text)


def needs_folder(text: str) -> bool:
    """Whether a session's folder is named."""
    return any(not found[1] and found[2] == SESSION_DIR for found in _PLACEHOLDER.finditer(text))

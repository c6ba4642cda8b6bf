"""The token by which a run is let in by the servers of its environment."""

from pathlib import Path

from rl_bridge.errors import ConfigError


def read_token(file: str | None) -> str | None:
    """The token in `env.token_file`: its first line that is no comment, as `ropewalk serve --token-file` reads them.

    Raises:
        ConfigError: The file cannot be read, or has none.
    """
    if file is None:
        return None
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"env.token_file: cannot read {file!r}: {reason}") from error
    for line in lines:
        if (token := line.strip()) and not token.startswith("#"):
            return token
    raise ConfigError(f"env.token_file: expected a token in {file!r}, got none")

"""The token for an environment's servers, from a file."""

from pathlib import Path

import pytest

from rl_bridge.environments.token import read_token
from rl_bridge.errors import ConfigError


def test_the_first_line_that_says_something_is_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("# of the rollout workers\n\n  first-0123456789  \nsecond-0123456789\n")
    assert read_token(str(file)) == "first-0123456789"
    assert read_token(None) is None


def test_what_is_wrong_is_said_without_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"env\.token_file: cannot read .*/token': No such file"):
        read_token(str(file))
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match=r"env\.token_file: expected a token in .*/token', got none"):
        read_token(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"env\.token_file: cannot read"):
        read_token(str(file))

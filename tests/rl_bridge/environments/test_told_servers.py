"""What a run tells of servers: addresses of those that run code, and the token for an environment's."""

from pathlib import Path

import pytest

from rl_bridge.environments.servers import (
    CODER_URLS_VARIABLE,
    coder_urls,
    coder_urls_file,
    read_token,
    write_coder_urls,
)
from rl_bridge.errors import ConfigError


def test_newest_addresses_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = coder_urls_file(tmp_path)
    monkeypatch.setenv(CODER_URLS_VARIABLE, str(file))
    write_coder_urls(file, ["http://a:1", "http://b:2"])
    assert coder_urls() == ("http://a:1", "http://b:2")
    write_coder_urls(file, ["http://a:3"])
    assert coder_urls() == ("http://a:3",)
    assert [left.name for left in tmp_path.iterdir()] == [file.name]


def test_run_without_the_role_says_which_key_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CODER_URLS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"monarch\.roles\.coder"):
        coder_urls()


def test_first_line_with_content_is_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("# of the rollout workers\n\n  first-0123456789  \nsecond-0123456789\n")
    assert read_token(str(file)) == "first-0123456789"
    assert read_token(None) is None


def test_unreadable_token_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"env\.token_file: cannot read .*/token': No such file"):
        read_token(str(file))
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match=r"env\.token_file: expected a token in .*/token', got none"):
        read_token(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"env\.token_file: cannot read"):
        read_token(str(file))

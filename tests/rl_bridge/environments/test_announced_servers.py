"""Announcing servers that run code by a file, and reading the token of an environment's servers."""

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
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_run_without_the_role_says_which_key_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CODER_URLS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"monarch\.roles\.coder"):
        coder_urls()


def test_first_line_with_content_is_the_token_and_unreadable_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert read_token(None) is None
    with pytest.raises(ConfigError, match=r"env\.token_file: cannot read .*/token': No such file"):
        read_token(str(file))
    file.write_text("# of the rollout workers\n\n  first-0123456789  \nsecond-0123456789\n")
    assert read_token(str(file)) == "first-0123456789"
    for content, message in (
        (b"# nobody\n", "expected a token in .*/token', got none"),
        (b"\xff", "cannot read"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"env\.token_file: {message}"):
            read_token(str(file))

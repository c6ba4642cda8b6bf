"""The addresses of servers that run code: told by the run, read by whoever needs one."""

from pathlib import Path

import pytest

from rl_bridge.environments.coders import ENVIRONMENT_VARIABLE, coder_urls, coders_file, tell_coders
from rl_bridge.errors import ConfigError


def test_newest_addresses_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = coders_file(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(file))
    tell_coders(file, ["http://a:1", "http://b:2"])
    assert coder_urls() == ("http://a:1", "http://b:2")
    tell_coders(file, ["http://a:3"])
    assert coder_urls() == ("http://a:3",)
    assert [left.name for left in tmp_path.iterdir()] == [file.name]


def test_run_without_the_role_says_which_key_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"monarch\.roles\.coder"):
        coder_urls()

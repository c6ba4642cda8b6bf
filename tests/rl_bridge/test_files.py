"""Files that survive a crash of the machine."""

import os
from pathlib import Path

import pytest

from rl_bridge.files import replace_file


def test_content_is_on_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def record_sync(descriptor: int) -> None:
        synced = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        did.append(f"sync {synced.read_text()}" if synced.is_file() else "sync folder")
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        did.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_rename)
    replace_file(tmp_path / "state.json", b"new")
    assert did == ["sync new", "rename", "sync folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]

"""What is hidden is not to be read, though what lies around it is."""

from pathlib import Path

import pytest

from openenv_core.sandbox import Isolation, Sandbox, SandboxConfig

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LSM])
async def test_hidden_files_and_folders_are_out_of_reach(tmp_path: Path, level: Isolation) -> None:
    for name in ("shown", "tasks/train", "single"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("canary")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    hidden = (tmp_path / "tasks", tmp_path / "single")
    config = SandboxConfig(strongest=level, readable=(tmp_path,), hidden=hidden)
    async with Sandbox(config) as sandbox:
        assert sandbox.isolation == level
        session = await sandbox.open()
        seen = await session.execute(f"open({str(tmp_path / 'shown')!r}).read()")
        assert seen.result == "'canary'", seen
        for path in (tmp_path / "tasks/train", tmp_path / "single"):
            done = await session.execute(f"print(open({str(path)!r}).read())")
            assert "canary" not in done.stdout
        await session.close()


@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LSM])
async def test_a_checkout_below_a_folder_that_is_shown_is_hidden(level: Isolation) -> None:
    async with Sandbox(SandboxConfig(strongest=level, readable=(CHECKOUT,))) as sandbox:
        assert sandbox.isolation == level
        session = await sandbox.open()
        beside = await session.execute(f"len(open({str(CHECKOUT / 'pyproject.toml')!r}).read())")
        assert beside.status == "ok", beside
        for path in ("envs/code_interpreter_env/tasks/train.jsonl", "tests/sandbox/test_hidden.py"):
            assert (CHECKOUT / path).is_file()
            done = await session.execute(f"open({str(CHECKOUT / path)!r}).read()")
            assert done.status == "error", path
        await session.close()

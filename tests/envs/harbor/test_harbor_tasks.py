"""Reading a folder of Harbor tasks, and the features of the format that are refused."""

import shutil
from pathlib import Path

import pytest
from harbor_tasks import TASKS

from envs.harbor_env.server.app import app
from envs.harbor_env.server.environment import shared_tasks
from envs.harbor_env.tasks import HarborTask, HarborTasks, InvalidTaskError, compute_digest
from openenv_core.errors import ConfigurationError


def with_config(folder: Path, text: str, task: str = "count-lines") -> Path:
    """Copy one of our tasks, and give it another task.toml."""
    place = folder / task
    shutil.copytree(TASKS / task, place, dirs_exist_ok=True)
    (place / "task.toml").write_text(text)
    return place


NO_NETWORK = '[environment]\nnetwork_mode = "no-network"\n'
IMAGE = '[environment]\ndocker_image = "x"\n'


def test_a_task_is_what_its_folder_says() -> None:
    tasks = HarborTasks(TASKS)
    assert tasks.splits == ["train"]
    assert tasks.num_tasks("train") == 5
    task_row = tasks.get_task("train", 0)
    assert (task_row["id"], task_row["kind"]) == ("ropewalk/count-lines", "process")
    assert task_row["metadata"] == {"difficulty": "easy"}
    assert task_row["task"].startswith("Write into `count.txt`")  # without the canary above it
    assert "expected" not in str(task_row)
    assert tasks.find("sort-table") == ("train", 4)
    report = tasks.task(*tasks.find("ropewalk/report"))
    assert (report.kind, report.image, report.separate) == ("container", "python:3.11-slim", True)
    assert report.collect_paths("/srv") == ["/tmp/report", "/logs/artifacts"]
    assert tasks.task("train", 4).collect_paths("/app") == ["/app", "/logs/artifacts"]
    for split, index in (("test", 0), ("train", 5), ("train", True)):
        with pytest.raises((KeyError, IndexError)):
            tasks.task(split, index)


def test_folders_of_splits_are_splits_and_one_task_is_a_folder_of_one(tmp_path: Path) -> None:
    for split, task in (("train", "count-lines"), ("test", "make-tool")):
        shutil.copytree(TASKS / task, tmp_path / split / task)
    for name in ("task.toml", "instruction.md"):
        marked = tmp_path / "test" / "make-tool" / name
        marked.write_text("\ufeff" + marked.read_text("utf-8"), "utf-8")
    tasks = HarborTasks(tmp_path)
    assert not tasks.task("test", 0).instruction.startswith("\ufeff")
    assert tasks.list_splits() == [{"name": split, "type": split} for split in ("train", "test")]
    assert tasks.find("make-tool") == ("test", 0)
    assert HarborTasks(TASKS / "make-tool").find("make-tool") == ("train", 0)
    shutil.copytree(TASKS / "make-tool", tmp_path / "train" / "make-tool")
    with pytest.raises(InvalidTaskError, match="make-tool twice"):
        HarborTasks(tmp_path)


@pytest.mark.parametrize(
    ("folder", "got"), [("gone", "gone, which is no folder"), (".", "which holds none"), ("", "got nothing")]
)
async def test_a_server_without_tasks_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, got: str
) -> None:
    monkeypatch.setenv("HARBOR_TASKS", folder and str(tmp_path / folder))
    shared_tasks.cache_clear()
    with pytest.raises(ConfigurationError, match=f"{got}.*serve harbor PATH"):
        async with app.running():
            pass


def test_older_spellings_are_read(tmp_path: Path) -> None:
    text = '[environment]\nallow_internet = false\nmemory = "2G"\nstorage = "512M"\n'
    found = HarborTask.read(with_config(tmp_path, text)).config.environment
    assert (found.network_mode, found.memory_mb, found.storage_mb) == ("no-network", 2048, 512)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "network_mode no-network"),
        (NO_NETWORK + "gpus = 1", "GPUs"),
        (NO_NETWORK + 'workdir = "/root"', "workdir /app"),
        (NO_NETWORK + '[verifier.environment]\ndocker_image = "x"', "image for the verifier"),
        (IMAGE + 'os = "windows"', "os"),
        (IMAGE + 'network_mode = "allowlist"\nallowed_hosts = ["a.org"]', "network_mode"),
        (IMAGE + '[environment.healthcheck]\ncommand = "true"', "healthcheck"),
        (IMAGE + '[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"', "mcp_servers"),
        (IMAGE + '[[verifier.collect]]\ncommand = "x"', "collect"),
        (IMAGE + '[[steps]]\nname = "first"', "steps"),
        ('artifacts = [{source = "/x", service = "db"}]\n' + IMAGE, "service"),
        (IMAGE + '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "got both"),
        (IMAGE + "cpus = 0", "cpus"),
        ("[environment", "task.toml"),
    ],
)
def test_unsupported_features_are_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InvalidTaskError, match=why) as refused:
        HarborTask.read(with_config(tmp_path, text))
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh", "environment"])
def test_required_fields_are_demanded(tmp_path: Path, missing: str) -> None:
    place = with_config(tmp_path, NO_NETWORK)
    shutil.rmtree(place / missing) if (place / missing).is_dir() else (place / missing).unlink()
    with pytest.raises(InvalidTaskError, match=missing.partition("/")[0]):
        HarborTask.read(place)


@pytest.mark.parametrize(
    "path", ["/tests", "/tests/x", "/", "/logs", "../tests", "/logs/verifier/reward.txt"]
)
def test_policy_files_never_overwrite_the_verifier(tmp_path: Path, path: str) -> None:
    place = with_config(tmp_path, f'artifacts = ["{path}"]\n{IMAGE}')
    with pytest.raises(InvalidTaskError, match="apart from"):
        HarborTask.read(place).collect_paths("/app")
    with pytest.raises(InvalidTaskError, match="workdir"):
        HarborTask.read(with_config(tmp_path, IMAGE)).collect_paths("/")


def test_variables_are_filled_in_and_missing_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARBOR_TEST_SET", "set")
    task = HarborTask.read(with_config(tmp_path, NO_NETWORK))
    values = {"A": "${HARBOR_TEST_SET}", "B": "${HARBOR_TEST_UNSET:-else}", "C": "plain ${X}"}
    assert task.variables(values) == {"A": "set", "B": "else", "C": "plain ${X}"}
    with pytest.raises(InvalidTaskError, match="HARBOR_TEST_UNSET"):
        task.variables({"A": "${HARBOR_TEST_UNSET}"})


def test_an_image_is_built_anew_when_what_it_is_built_of_changes(tmp_path: Path) -> None:
    original, folder = TASKS / "sort-table" / "environment", tmp_path / "environment"
    shutil.copytree(original, folder)
    before = compute_digest(folder)
    assert compute_digest(original) == before
    (folder / "people.csv").write_text("name,age\n")
    changed = compute_digest(folder)
    (folder / "people.csv").chmod(0o755)
    assert len({before, changed, compute_digest(folder)}) == 3

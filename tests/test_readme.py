"""What the README says is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_six_lines_of_python_play_a_hand() -> None:
    code, _, _ = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"You hold .* The dealer holds .* (-1|0|1)\.0\n", done.stdout), done.stdout
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nassert 'torch' not in sys.modules"],
        cwd=ROOT,
        check=False,
    )
    assert loaded.returncode == 0


def test_code_that_nobody_has_read_runs_as_shown() -> None:
    _, code, _ = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"21 (namespaces|lsm)\n(PermissionError|FileNotFoundError)\ntimeout\n", done.stdout
    ), done.stdout


def test_tools_are_listed_and_called_as_shown() -> None:
    _, _, code = blocks("python")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Question:" in done.stdout, done.stderr
    assert "['list_tables', 'describe_table', 'query', 'submit_answer']\n[{'name':" in done.stdout


def test_every_file_that_is_named_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
    for script in re.findall(r"\./(scripts/[\w-]+)", text):
        assert (ROOT / script).is_file(), script


def test_every_override_that_is_shown_is_a_key() -> None:
    from rl_bridge.config import load_config

    shown = re.findall(r"(?:^|\s)([a-z_]+\.[a-z_]+=\S+)", "\n".join(blocks("bash")))
    assert len(shown) > 5
    for override in shown:
        load_config(ROOT / "examples/grpo_blackjack/config.yaml", [override])


def test_every_extra_that_is_listed_is_one() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = re.findall(
        r"^\| `([\w-]+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert set(listed) == set(project["optional-dependencies"]) - {"rl-common"}

"""Which files of a folder are sent, compared with the tools whose ignore files are read."""

import subprocess
from pathlib import Path

from docker.utils.build import exclude_paths

from openenv_core.images.ignore_rules import secret_in, walk

TREE = (
    *("a.py", "b.txt", "two.log", "with space.txt", "s/[odd].txt", "logs/one.log", "docs/a.md", "docs/b.md"),
    *("data/x.bin", "data/keep.txt", "data/deep/y.bin", "deep/data/z.bin"),
)


def make(folder: Path, *paths: str) -> Path:
    for path in paths:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    return folder


def gone(folder: Path) -> set[str]:
    return {found.path for found in walk(folder) if found.reason is None}


DOCKER_RULES = (
    *("*.txt", "**/*.txt", "data", "/data/*.bin", "**/data", "docs/?.md", "d*/x.bin", "data/**/y.bin"),
    *("./two.log", "with space.txt", "[a-b].*", "[!a]*", "data/\n!data/keep.txt", "*\n!a.py"),
    *("**\n!docs/*.md", "logs\n# data\n\n!logs/one.log", "*.log\n!two.log\ntwo*"),
)


def test_dockerignore_rules_match_those_of_docker(tmp_path: Path) -> None:
    make(tmp_path, *TREE)
    for rules in DOCKER_RULES:
        (tmp_path / ".dockerignore").write_text(rules)
        lines = [line.strip() for line in rules.splitlines() if line.strip() and not line.startswith("#")]
        expected = {path for path in exclude_paths(str(tmp_path), lines) if (tmp_path / path).is_file()}
        assert gone(tmp_path) - {".dockerignore"} == expected - {".dockerignore", "Dockerfile"}, rules


GIT_RULES = (
    *("*.txt", "data", "data/", "/data", "deep/data", "docs/*.md", "**/deep", "data/**", "a.py/", "[ab].*"),
    *("data/\n!data/keep.txt", "data/*\n!data/keep.txt", "*.log\n!two.log"),
)


def test_gitignore_rules_match_those_of_git(tmp_path: Path) -> None:
    make(tmp_path, *TREE)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True, timeout=60)
    command = ["git", "-c", "core.quotePath=false", "-c", "core.excludesFile=/dev/null"]
    command += ["ls-files", "-z", "--others", "--exclude-standard"]
    for rules in GIT_RULES:
        (tmp_path / ".gitignore").write_text(rules)
        ignored = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=60)
        assert gone(tmp_path) == set(ignored.split("\0")) - {""}, rules


def test_either_ignore_file_excludes_a_path(tmp_path: Path) -> None:
    make(tmp_path, *TREE)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / ".dockerignore").write_text("docs\n!two.log\n")
    assert gone(tmp_path) & {"two.log", "docs/a.md"} == set()
    reasons = {found.path: found.reason for found in walk(tmp_path) if found.reason}
    assert (reasons["two.log"], reasons["docs/"]) == (".gitignore", ".dockerignore")


SECRETS = (
    *(".env", ".env.local", "prod.env", "server/.env", "key.pem", "ID_RSA", "hf_token", "token.txt"),
    *("server/credentials.json", ".netrc", ".ssh/config", ".git/config", ".venv/lib/x.py"),
    *("server/__pycache__/a.pyc", ".pytest_cache/x", "build/lib/a.py", "my.egg-info/PKG-INFO"),
)


def test_secrets_and_tool_output_are_excluded_but_similar_names_are_not(tmp_path: Path) -> None:
    ordinary = ("token.py", "tokens/__init__.py", "server/build/__init__.py", "environment.py", "keys.py")
    make(tmp_path, *ordinary, *SECRETS)
    # Not even where an ignore file asks for it.
    (tmp_path / ".dockerignore").write_text("".join(f"!{path}\n" for path in SECRETS))
    assert gone(tmp_path) == {".dockerignore", *ordinary}


def test_links_are_excluded(tmp_path: Path) -> None:
    make(tmp_path / "folder", "a.py")
    make(tmp_path, "outside.txt")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside.txt")
    (tmp_path / "folder" / "loop").symlink_to(tmp_path / "folder")
    assert gone(tmp_path / "folder") == {"a.py"}


def test_token_like_text_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    for text, secret in (
        ("token = 'hf_" + "a1B2" * 9 + "'", True),
        ("ghp_" + "a" * 36, True),
        ("AKIA" + "ABCDEFGH12345678", True),
        ("-----BEGIN RSA " + "PRIVATE KEY-----", True),
        ("hf_hub_download(repo)", False),
        ("sk-learn and a task-force", False),
        ("-----BEGIN CERTIFICATE-----", False),
    ):
        file.write_text(text)
        assert secret_in(file) is secret, text

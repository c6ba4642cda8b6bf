"""The released client of a Gitea server: clones its repositories into a folder and runs git commands there."""

import os
import shlex
import shutil
import subprocess
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx

from openenv_core.errors import ConfigurationError, ServerStartError
from openenv_core.providers.base import REMOTE_POLL_FACTOR, wait_healthy
from openenv_core.proxies import client_for

GIT_TIMEOUT_S: Final = 300.0
REQUEST_TIMEOUT_S: Final = 10.0
PAGE_SIZE: Final = 50


@dataclass
class RepoInfo:
    """A repository on the server."""

    name: str
    url: str
    commit: str
    clone_url: str


class GitServerClient:
    """Clones, resets and runs git in a workspace. The credentials are in a separate file outside the workspace.

    Args:
        gitea_url: The server's URL, such as `http://gitea:3000`.
        username: The owner of the repositories.
        password: The user's password.
        workspace_dir: Folder of the clones; created if it is missing.

    Attributes:
        is_ready: Whether the server has answered.
    """

    def __init__(
        self, gitea_url: str, username: str, password: str, workspace_dir: str = "/workspace"
    ) -> None:
        parts = urlsplit(gitea_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"expected a Gitea URL as http://host:3000, got {gitea_url!r}")
        self.gitea_url = gitea_url.rstrip("/")
        self.username = username
        self.password = password
        self.workspace_dir = Path(workspace_dir)
        self.workspace_dir.mkdir(parents=True, exist_ok=True)
        self.is_ready = False
        folder = tempfile.mkdtemp(prefix="ropewalk-git-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        credentials = Path(folder, "credentials")
        login = f"{quote(username, safe='')}:{quote(password, safe='')}"
        credentials.touch(mode=0o600)
        credentials.write_text(f"{parts.scheme}://{login}@{parts.netloc.rpartition('@')[2]}\n")
        config = Path(folder, "config")
        config.write_text(
            f'[user]\n\tname = "{username}"\n\temail = "{username}@local.env"\n[init]\n\tdefaultBranch = main\n'
            f'[credential]\n\thelper = "store --file {credentials}"\n'
        )
        self._environ = {**os.environ, "GIT_CONFIG_GLOBAL": str(config), "GIT_TERMINAL_PROMPT": "0"}

    def wait_for_ready(self, timeout: float = 30) -> bool:
        """Wait up to `timeout` seconds for the server; return whether it answers."""

        def probe(left_s: float) -> str | None:
            try:
                reply = client.get(f"{self.gitea_url}/", timeout=min(left_s, REQUEST_TIMEOUT_S))
            except httpx.HTTPError as error:
                return str(error)
            return None if reply.status_code < 400 else f"HTTP {reply.status_code}"

        if not self.is_ready:
            with client_for(self.gitea_url) as client, suppress(ServerStartError):
                wait_healthy(self.gitea_url, probe, timeout, factor=REMOTE_POLL_FACTOR)
                self.is_ready = True
        return self.is_ready

    def list_repositories(self) -> list[dict[str, str]]:
        """Return name, full_name, clone_url and description of each repository of the user.

        Raises:
            RuntimeError: The server is not ready, or refuses the request.
        """
        self._check_ready()
        repositories: list[Any] = []
        with client_for(self.gitea_url) as client:
            for page in range(1, 1000):
                try:
                    reply = client.get(
                        f"{self.gitea_url}/api/v1/user/repos",
                        params={"page": page, "limit": PAGE_SIZE},
                        auth=(self.username, self.password),
                        timeout=REQUEST_TIMEOUT_S,
                    ).raise_for_status()
                    listed = reply.json()
                except (httpx.HTTPError, ValueError) as error:
                    raise RuntimeError(f"{self.gitea_url} did not list its repositories: {error}") from error
                repositories += listed
                if len(listed) < PAGE_SIZE:
                    break
        keys = ("name", "full_name", "clone_url", "description")
        return [{key: repo.get(key) or "" for key in keys} for repo in repositories]

    def clone_to_workspace(self, repo_name: str, target_dir: str | None = None, commit: str = "main") -> str:
        """Clone a repository afresh and check out a commit.

        Args:
            repo_name: The repository's name.
            target_dir: Folder in the workspace; the repository's name by default.
            commit: A commit or branch; "main" means the server's default branch.

        Returns:
            The clone's path.

        Raises:
            RuntimeError: The server is not ready, or git failed.
        """
        self._check_ready()
        path = self._clone_folder(target_dir or repo_name)
        if path.exists():
            shutil.rmtree(path)
        url = f"{self.gitea_url}/{quote(self.username)}/{quote(repo_name)}.git"
        self._git("clone", url, str(path), cwd=self.workspace_dir)
        if commit != "main":
            self._git("checkout", commit, cwd=path)
        return str(path)

    def reset_workspace(self, repo_name: str, commit: str = "main") -> bool:
        """Reset a clone to a commit and remove all untracked files, ignored ones too.

        Raises:
            RuntimeError: There is no such clone, or git failed.
        """
        path = self._clone(repo_name)
        self._run(["git", "fetch", "--all"], path)  # may fail: the local commits may suffice
        self._git("checkout", "--force", commit, cwd=path)
        on_branch = self._run(["git", "symbolic-ref", "-q", "HEAD"], path).returncode == 0
        remote = self._run(["git", "rev-parse", "-q", "--verify", f"origin/{commit}"], path).returncode == 0
        self._git("reset", "--hard", f"origin/{commit}" if on_branch and remote else commit, cwd=path)
        self._git("clean", "-fdx", cwd=path)
        return True

    def execute_git_command(self, command: str, working_dir: str = "") -> tuple[int, str, str]:
        """Run git in the workspace. Some of its subcommands run other programs.

        Args:
            command: A subcommand of git with its arguments, as one string. Options before it are refused: they
                redefine subcommands as shell commands (`-c`), and leave the workspace (`-C`).
            working_dir: Folder below the workspace.

        Returns:
            Exit code, stdout and stderr.
        """
        try:
            path = self._folder(working_dir)
            if not path.is_dir():
                return 1, "", f"Working directory does not exist: {path}"
            arguments = shlex.split(command)
            if arguments and arguments[0].startswith("-"):
                return 1, "", f"expected a subcommand of git first, got the option {arguments[0]}"
            done = self._run(["git", *arguments], path)
        except (RuntimeError, ValueError) as error:
            return 1, "", str(error)
        return done.returncode, done.stdout, done.stderr

    def get_current_commit(self, repo_name: str) -> str:
        """Return the hash of a clone's current commit.

        Raises:
            RuntimeError: There is no such clone, or git failed.
        """
        return self._git("rev-parse", "HEAD", cwd=self._clone(repo_name)).strip()

    def workspace_exists(self, repo_name: str) -> bool:
        """Whether a repository has been cloned."""
        return self._folder(repo_name).exists()

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise RuntimeError("Gitea server is not ready; call wait_for_ready()")

    def _folder(self, name: str) -> Path:
        path = (self.workspace_dir / name).resolve()
        if not path.is_relative_to(self.workspace_dir.resolve()):
            raise RuntimeError(f"expected a folder below {self.workspace_dir}, got {name!r}")
        return path

    def _clone_folder(self, name: str) -> Path:
        """Return the folder of a clone, which is not the workspace itself: that has the others."""
        if (path := self._folder(name)) == self.workspace_dir.resolve():
            raise RuntimeError(f"expected a folder below {self.workspace_dir}, got the workspace: {name!r}")
        return path

    def _clone(self, name: str) -> Path:
        path = self._clone_folder(name)
        if not path.exists():
            raise RuntimeError(f"Repository not found in workspace: {name}")
        return path

    def _run(self, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                cwd=cwd,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=GIT_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise RuntimeError("git is not installed") from error
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"git {command[1]} took longer than {GIT_TIMEOUT_S:g} s") from error

    def _git(self, *arguments: str, cwd: Path) -> str:
        done = self._run(["git", *arguments], cwd)
        if done.returncode != 0:
            raise RuntimeError(f"git {arguments[0]} failed: {done.stderr.strip()}")
        return done.stdout

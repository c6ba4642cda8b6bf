"""Runs Harbor's own trials over task folders, with Harbor's oracle and its agent that does nothing, and prints rewards.

    python harbor_trials.py OUTPUT_FOLDER TASK_FOLDER ...

Everything is Harbor's but what carries commands: its Docker environment needs Docker Compose, which not every machine
has. This one takes the plain `docker` command, and for tasks that name no image the usual one.
"""

import asyncio
import hashlib
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.lint import lint_task
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

IMAGE = "python:3.11-slim"
WAIT_TIMEOUT_S = 300


async def docker(*words: str, timeout_s: float = WAIT_TIMEOUT_S, check: bool = True) -> ExecResult:
    process = await asyncio.create_subprocess_exec(
        "docker", *words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    if check and process.returncode:
        raise RuntimeError(f"docker {' '.join(words)}: {err.decode()}")
    return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)


class PlainDocker(BaseEnvironment):
    """A container by the command `docker`."""

    container = ""

    @staticmethod
    def type() -> str:
        return "plain-docker"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        config = self.task_env_config
        image, workdir = config.docker_image, config.workdir
        if (self.environment_dir / "Dockerfile").exists():
            image = (
                f"ropewalk-test-harbor:{hashlib.sha256(str(self.environment_dir).encode()).hexdigest()[:12]}"
            )
            await docker("build", "--quiet", "--tag", image, str(self.environment_dir))
        elif image is None:
            workdir = "/app"
        given = [word for name, value in config.env.items() for word in ("--env", f"{name}={value}")]
        given += ["--workdir", workdir] if workdir else []
        words = ("run", "--detach", "--network", "none", *given, image or IMAGE, "sleep", "600")
        self.container = (await docker(*words)).stdout.strip()
        await self.exec(
            "mkdir -p /logs/agent /logs/verifier /logs/artifacts; chmod -R 777 /logs", user="root"
        )
        if config.docker_image is None and not (self.environment_dir / "Dockerfile").exists():
            await self.upload_dir(self.environment_dir, "/app")
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        await docker("rm", "--force", self.container)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        user = self.default_user if user is None else user
        words = ["--user", str(user)] if user is not None else []
        words += ["--workdir", cwd] if cwd else []
        words += [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        words += [self.container, "bash", "-c", command]
        return await docker("exec", *words, timeout_s=timeout_sec or WAIT_TIMEOUT_S, check=False)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await docker("cp", str(source_path), f"{self.container}:{target_path}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.exec(f"mkdir -p {target_dir}", user="root")
        await docker("cp", f"{source_dir}/.", f"{self.container}:{target_dir}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await docker("cp", f"{self.container}:{source_path}", str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await docker("cp", f"{self.container}:{source_dir}/.", str(target_dir))


async def rewards(folder: Path, agent: str, output: Path) -> dict[str, Any]:
    trial = await Trial.create(
        TrialConfig(
            task=TaskConfig(path=folder),
            trials_dir=output,
            agent=AgentConfig(name=agent),
            environment=EnvironmentConfig(import_path="harbor_trials:PlainDocker"),
        )
    )
    result = await trial.run()
    found = result.verifier_result
    failure = result.exception_info
    return {
        "rewards": None if found is None else found.rewards,
        "failure": None if failure is None else f"{failure.exception_type}: {failure.exception_message}",
    }


async def main(output: str, *folders: str) -> None:
    told = {}
    for folder in map(Path, folders):
        told[folder.name] = {
            "valid": Task.is_valid_dir(folder),
            "faults": [str(one) for one in lint_task(folder) if one.rule.value.startswith("invalid")],
            "oracle": await rewards(folder, "oracle", Path(output)),
            "nop": await rewards(folder, "nop", Path(output)),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    warnings.simplefilter("ignore")
    asyncio.run(main(*sys.argv[1:]))

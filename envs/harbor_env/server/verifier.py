"""Verification of a policy's work, in a separate machine in which none of its code has run.

Once nothing runs in the policy's machine any more, its working directory and the task's artifacts are copied over as
plain files. The tests are added afterwards.
"""

import io
import json
import posixpath
import sys
import tarfile
from dataclasses import dataclass, field
from typing import Any, Final

from ..tasks import HarborTask
from .machines import ARCHIVE_BYTES, Machine, Machines, TransferError, pack_folder, read_packed_file

_TESTS: Final = "/tests"
_REWARDS: Final = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""The reward files, in order of precedence."""

_STDOUT: Final = "/logs/verifier/test-stdout.txt"
_SHOWN_CHARS: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborVerdict:
    """The result of verifying an episode.

    Attributes:
        reward: The reward; None if it is unknown.
        rewards: All rewards that the verifier wrote, by name.
        reason: Why there is no reward, or why it is 0 without running the tests.
        output: The end of the tests' output.
    """

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    output: str = ""


class UnscoredError(Exception):
    """The verifier wrote no readable reward."""


async def verify(machines: Machines, task: HarborTask, policy: Machine) -> HarborVerdict:
    """Verify the contents of the policy's machine, and close that machine.

    Raises:
        OpenEnvError: The infrastructure failed.
        OSError: Likewise.
    """
    archives = {}
    try:
        await policy.end()
        for path in task.collect_paths(policy.workdir):
            if (file_archive := await policy.pack(path)) is not None:
                archives[path] = make_plain_archive(
                    file_archive, posixpath.basename(path), folder=path == policy.workdir
                )
    except TransferError as error:
        return HarborVerdict(reward=0.0, reason=str(error))
    finally:
        await policy.close()
    machine = await machines.open(task, verifier=True)
    try:
        for path, archive in archives.items():
            await machine.unpack(path, archive)
        if task.verifier_image is None:
            await machine.unpack(_TESTS, pack_folder(task.folder / "tests", _TESTS))
        return await _judge(machine, task)
    except (TransferError, UnscoredError) as error:
        return HarborVerdict(reason=str(error))
    finally:
        await machine.close()


async def _judge(machine: Machine, task: HarborTask) -> HarborVerdict:
    verifier = task.config.verifier
    command = f"(chmod +x {_TESTS}/test.sh; {_TESTS}/test.sh) > {_STDOUT} 2>&1"
    result = await machine.run(command, verifier.timeout_sec, task.variables(verifier.env))
    if result.status == "killed":
        raise UnscoredError(f"the tests took down what they ran in: {result.reason}")
    await machine.end()
    output = (await _read_file(machine, _STDOUT) or b"").decode(errors="replace")[-_SHOWN_CHARS:]
    reason = f"the tests wrote neither {' nor '.join(_REWARDS)}"
    if result.status != "ok":
        return HarborVerdict(reason=f"the tests did not end: {result.reason}", output=output)
    try:
        for path in _REWARDS:
            if (data := await _read_file(machine, path)) is not None:
                rewards = read_rewards(data, path)
                return HarborVerdict(reward=_main_reward(rewards), rewards=rewards, output=output)
    except UnscoredError as error:
        reason = str(error)
    return HarborVerdict(reason=reason, output=output)


async def _read_file(machine: Machine, path: str) -> bytes | None:
    file_archive = await machine.pack(path)
    return None if file_archive is None else read_packed_file(file_archive)


def read_rewards(data: bytes, path: str) -> dict[str, float]:
    """Parse a reward file: an object of numbers if its name ends in `.json`, else one number.

    Raises:
        UnscoredError: The file is malformed, or contains numbers that are not finite.
    """
    try:
        rewards: Any = json.loads(data) if path.endswith(".json") else {"reward": float(data)}
    except (ValueError, RecursionError):
        rewards = None
    if not isinstance(rewards, dict) or not all(
        isinstance(value, int | float) and abs(value) <= sys.float_info.max for value in rewards.values()
    ):
        raise UnscoredError(f"expected finite numbers in {path}, got {data[:80]!r}")
    return {str(name): float(value) for name, value in rewards.items()}


def _main_reward(rewards: dict[str, float]) -> float:
    if "reward" not in rewards and len(rewards) != 1:
        raise UnscoredError(
            f"expected a reward called reward, or only one, got {', '.join(rewards) or 'none'}"
        )
    return rewards.get("reward", next(iter(rewards.values())))


def make_plain_archive(data: bytes, name: str, *, folder: bool = False) -> bytes:
    """Return a tar archive reduced to its regular files, folders, and links that cannot lead out of it.

    A symbolic link is kept only if its target is below its own folder: any other could point to files that are added
    later, such as the tests.

    Args:
        data: An untrusted tar archive.
        name: The name of the file or folder to keep; everything else is dropped.
        folder: Whether it must be a folder, so that a file of that name is dropped.

    Raises:
        TransferError: The content is too large, or `data` is not a tar archive.
        OSError: The end of the archive is missing. No policy can cause that.
    """
    if not data.endswith(bytes(2 * tarfile.BLOCKSIZE)):  # `tarfile` takes a header that is cut for the end
        raise OSError(f"{name} was copied only in part: its archive ends too early")
    buffer, links, files = io.BytesIO(), set[str](), dict[str, tarfile.TarInfo]()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(data), mode="r:") as source,
            tarfile.open(fileobj=buffer, mode="w") as target,
        ):
            for member in source:
                path = posixpath.normpath(member.name)
                parents = [path.rsplit("/", depth)[0] for depth in range(1, path.count("/") + 1)]
                if (path != name and not path.startswith(f"{name}/")) or links.intersection(parents):
                    continue
                if folder and path == name and not member.isdir():
                    continue
                entry = tarfile.TarInfo(path)
                entry.mode, entry.mtime = member.mode & 0o777, member.mtime
                entry.uid, entry.gid = member.uid, member.gid
                content: io.BytesIO | None = None
                if member.isdir():
                    entry.type = tarfile.DIRTYPE
                elif member.issym() and path != name and _points_below(member.linkname):
                    links.add(path)
                    entry.type, entry.linkname = tarfile.SYMTYPE, member.linkname
                elif member.isreg() or (member.islnk() and posixpath.normpath(member.linkname) in files):
                    # A hard link becomes a copy of the file; one to a link is left out.
                    files[path] = member if member.isreg() else files[posixpath.normpath(member.linkname)]
                    file = source.extractfile(files[path])
                    assert file is not None
                    content = io.BytesIO(file.read(max(0, ARCHIVE_BYTES - buffer.tell() + 1)))
                    entry.size = len(content.getbuffer())
                    if buffer.tell() + entry.size > ARCHIVE_BYTES:
                        raise TransferError(f"{name} has more than {ARCHIVE_BYTES >> 20} MiB")
                else:
                    continue
                target.addfile(entry, content)
    except (tarfile.TarError, EOFError, KeyError) as error:
        raise TransferError(f"{name} could not be taken over: {error}") from None
    return buffer.getvalue()


def _points_below(target: str) -> bool:
    return bool(target) and not target.startswith("/") and ".." not in target.split("/")

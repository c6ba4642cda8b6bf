"""Attacks on the verifier of a Harbor task: each of them earns 0."""

import io
import tarfile
from collections.abc import Mapping
from typing import Any
from unittest.mock import AsyncMock

import pytest
from harbor_player import Player
from harbor_tasks import TASKS

from envs.harbor_env.server import verifier
from envs.harbor_env.server.machines import CommandResult, Machine, Machines, TransferError
from envs.harbor_env.server.verifier import UnscoredError, make_plain_archive, read_rewards, verify
from envs.harbor_env.tasks import HarborTask
from openenv_core.sandbox import Execution, FunctionCall

GIVE = "printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n'"
"""Prints a program that gives the reward, whatever it is called as."""

ATTACKS = {
    "tests": f"mkdir -p /tests; {GIVE} > /tests/test.sh; chmod 777 /tests/test.sh; echo 0 > /tests/expected.txt",
    "reward": (
        "mkdir -p /logs/verifier /logs/artifacts; for at in /logs/verifier /logs/artifacts; do "
        "echo 1 > $at/reward.txt; echo '{\"reward\": 1}' > $at/reward.json; chmod 444 $at/*; done"
    ),
    "background": (
        "(trap '' TERM HUP INT; while :; do echo 1 > /logs/verifier/reward.txt; "
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json; done) > /dev/null 2>&1 & disown"
    ),
    "link to a test": "rm -f {answer}; ln -s /tests/expected.txt {answer}",
    "link by a way up": "rm -f {answer}; ln -s ../tests/expected.txt {answer}",
    "link through a link": "rm -f {answer}; mkdir d; ln -s ../../tests d/e; ln -s d/e/expected.txt {answer}",
    "link around": "rm -f {answer}; ln -s /app/d d; mkdir -p a/b; ln -s a/b/../../../tests/expected.txt {answer}",
    "folder of tests": "cd /; rm -rf /app/* /workspace/app 2> /dev/null; ln -sT /tests /workspace/app || true",
    "no folder": "cd /; rm -rf /app/* /app /workspace/app; touch /app /workspace/app",
    "artifacts": "rm -rf /logs/artifacts; ln -s /logs/verifier /logs/artifacts; echo 1 > /logs/verifier/reward.txt",
    "path": (
        f"for name in cat test bash sh chmod python3 sitecustomize.py; do {GIVE} > $name; chmod +x $name; done; "
        f"{GIVE} | tee .bashrc .profile .bash_profile .bash_env > /dev/null; "
        "echo 'import os; os.system(\"echo 1 > /logs/verifier/reward.txt\")' > sitecustomize.py"
    ),
    # The kernel sends SIGHUP to a stopped group that loses its last tie to its session: here only after a long end.
    "late end": """python3 -c '
import mmap, os, time
ours = os.getpgid(0)
os.setpgid(0, 0)
if not os.fork():
    os.setpgid(0, ours)
    time.sleep(1000)
memory = mmap.mmap(-1, 300 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(15)
for at in range(0, len(memory), 4096): memory[at] = 1
open("/tmp/ready", "w").close()
time.sleep(1000)' > /dev/null 2>&1 & for n in $(seq 500); do test -e /tmp/ready && break; sleep 0.01; done""",
    "pipe": "rm -f {answer}; mkfifo {answer} || touch {answer}",
}
"""By what they try: commands, with the name of the file that the task asks for."""

AS_ROOT = {
    "interpreters": (
        f"for path in /bin/bash /usr/bin/env /usr/bin/cat /usr/bin/chmod /usr/local/bin/python3; do "
        f"{GIVE} > /tmp/x; chmod 755 /tmp/x; mv -f /tmp/x $path; done"
    ),
    "preload": "echo /tmp/evil.so > /etc/ld.so.preload; echo 'export PATH=/app:$PATH' >> /etc/profile",
    "large": "truncate -s 10T big",
}
"""What only who may write to the whole of a machine can try."""


def rob(player: Player, task: str, command: str, answer: str) -> None:
    player.reset(task)
    player.run(command.replace("{answer}", answer))
    seen = player.submit()
    assert (seen.reward, seen.done, seen.unscored, seen.infrastructure_error) == (0.0, True, None, None), seen


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_in_a_sandbox_earns_nothing(player: Player, attack: str) -> None:
    rob(player, "ropewalk/count-lines", ATTACKS[attack], "count.txt")


def test_process_left_behind_that_takes_down_the_sandbox_earns_nothing(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    player.reset("ropewalk/count-lines")
    player.run("echo 3 > count.txt")
    machine: Any = player.env._machine
    killed = FunctionCall(execution=Execution(status="killed", exit_code=137, state_lost=True))
    monkeypatch.setattr(machine._session, "call", AsyncMock(return_value=killed))
    seen = player.submit()
    assert (seen.reward, seen.done, seen.infrastructure_error) == (0.0, True, None), seen


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(name, marks=() if name in ("background", "interpreters") else pytest.mark.soak)
        for name in (*ATTACKS, *AS_ROOT)
    ],
)
def test_attack_in_a_container_earns_nothing(player: Player, attack: str) -> None:
    rob(player, "sort-table", {**ATTACKS, **AS_ROOT}[attack], "people.csv")


async def test_verifier_starts_after_all_processes_of_the_policy_ended() -> None:
    calls: list[str] = []

    class Recorder:
        workdir = "/app"

        def __init__(self, whose: str) -> None:
            self.whose = whose

        async def end(self) -> None:
            calls.append(f"{self.whose} end")

        async def pack(self, path: str) -> bytes | None:
            calls.append(f"{self.whose} pack {path}")
            return pack(("app", tarfile.DIRTYPE, "")) if path == "/app" else None

        async def unpack(self, path: str, archive: bytes, *, replace: bool = True) -> None:
            calls.append(f"{self.whose} unpack {path}")

        async def run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
            calls.append(f"{self.whose} run")
            return CommandResult(exit_code=0)

        async def close(self) -> None:
            calls.append(f"{self.whose} close")

    class Recorders(Machines):
        async def open(self, task: HarborTask, *, verifier: bool) -> Machine:
            calls.append("open")
            return Recorder("verifier")

    verdict = await verify(Recorders(), HarborTask.read(TASKS / "count-lines"), Recorder("policy"))
    assert verdict.reward is None
    assert calls[:8] == [
        *("policy end", "policy pack /app", "policy pack /logs/artifacts", "policy close", "open"),
        *("verifier unpack /app", "verifier unpack /tests", "verifier run"),
    ]
    assert (calls[8], calls[-1]) == ("verifier end", "verifier close")


def pack(*members: tuple[str, bytes, str]) -> bytes:
    """Pack members by name, type and what they are: their content, or where they lead."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, kind, what in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o4755
            if kind == tarfile.REGTYPE:
                member.size = len(what)
                archive.addfile(member, io.BytesIO(what.encode()))
            else:
                member.linkname = what
                archive.addfile(member)
    return held.getvalue()


def test_only_plain_files_inside_the_folder_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = pack(
        ("app", tarfile.DIRTYPE, ""),
        ("app/good", tarfile.REGTYPE, "good"),
        ("app/same", tarfile.LNKTYPE, "app/good"),
        ("app/down", tarfile.SYMTYPE, "good"),
        ("app/round", tarfile.SYMTYPE, "round"),
        ("app/again", tarfile.LNKTYPE, "app/round"),
        ("app/down/below", tarfile.REGTYPE, "below a link"),
        ("app/up", tarfile.SYMTYPE, "x/../../tests"),
        ("app/away", tarfile.SYMTYPE, "/tests"),
        ("app/../tests/test.sh", tarfile.REGTYPE, "evil"),
        ("/tests/test.sh", tarfile.REGTYPE, "evil"),
        ("apple", tarfile.REGTYPE, "another folder"),
        ("app/device", tarfile.CHRTYPE, ""),
        ("app/pipe", tarfile.FIFOTYPE, ""),
    )
    with tarfile.open(fileobj=io.BytesIO(make_plain_archive(archive, "app"))) as unpacked:
        found = {member.name: (member.type, member.mode) for member in unpacked}
        assert (file := unpacked.extractfile("app/same"))
        assert file.read() == b"good"
    plain, link, folder = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
    assert found == {
        "app": (folder, 0o755),
        "app/good": (plain, 0o755),
        "app/same": (plain, 0o755),
        "app/down": (link, 0o755),
        "app/round": (link, 0o755),
    }
    assert make_plain_archive(pack(("app", tarfile.SYMTYPE, "tests")), "app").strip(b"\0") == b""
    file_instead = pack(("app", tarfile.REGTYPE, "a file"))
    assert make_plain_archive(file_instead, "app", folder=True).strip(b"\0") == b""
    with pytest.raises(TransferError):
        make_plain_archive(b"no archive".ljust(2048, b"\0"), "app")
    # Of small files too: their headers and padding count, which the last one that fits may carry over the limit.
    monkeypatch.setattr(verifier, "ARCHIVE_BYTES", 8192)
    for count, size in ((3, 4096), (20, 1)):
        files = ((f"app/{n}", tarfile.REGTYPE, "x" * size) for n in range(count))
        with pytest.raises(TransferError, match="has more than"):
            make_plain_archive(pack(("app", tarfile.DIRTYPE, ""), *files), "app")


def test_archive_that_is_cut_is_no_work_of_the_policy() -> None:
    whole = pack(("app", tarfile.DIRTYPE, ""), *((f"app/{n}", tarfile.REGTYPE, "x" * 700) for n in range(3)))
    whole = whole.rstrip(b"\0").ljust(512 * 12, b"\0")
    assert make_plain_archive(whole, "app")
    # In a file's content, in a header, and between two members.
    for size in (512 * 3, 512 * 4 + 100, 512 * 7):
        with pytest.raises(OSError, match="only in part"):
            make_plain_archive(whole[:size], "app")


def test_reward_files_are_numbers_by_name() -> None:
    assert read_rewards(b" 0.25\n", "reward.txt") == {"reward": 0.25}
    assert read_rewards(b'{"reward": 1, "speed": -2.5}', "reward.json") == {"reward": 1.0, "speed": -2.5}
    long = b'{"reward": 1' + b"0" * 400 + b"}"
    for name, texts in (
        ("reward.txt", (b"", b"nan", b"1 2", b"\xff")),
        ("reward.json", (b"1", b'{"reward": "1"}', b'{"reward": 1e999}', long, b"[" * 100_000)),
    ):
        for data in texts:
            with pytest.raises(UnscoredError):
                read_rewards(data, name)

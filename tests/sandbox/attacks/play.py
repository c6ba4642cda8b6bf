"""Plays attacks on a sandbox and judges them from outside."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from openenv_core.sandbox import Execution, Isolation, Limits, Sandbox, SandboxSession

from .model import MARK, Attack, Stage
from .surroundings import SECRET, Surroundings, descendants
from .watch import COARSE_S, FINE_S, Felt, Watch

THOROUGH: Final = 10
SLACK_S: Final = 8.0
"""Beyond its time-outs an attack may take so long on a busy machine before it counts as a hang."""


@dataclass(kw_only=True)
class Outcome:
    """What became of one attack, and why it was not contained where it was not."""

    attack: Attack
    breaches: list[str]
    took_s: float


@dataclass(kw_only=True)
class Report:
    """What became of all; what others felt; and what was there afterwards and should not have been."""

    isolation: Isolation
    outcomes: list[Outcome] = field(default_factory=list)
    felt: Felt = field(default_factory=Felt)
    left: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """What was not contained, in words."""
        breaches = [f"{each.attack.title}: {breach}" for each in self.outcomes for breach in each.breaches]
        return [*breaches, *self.left, *self.felt.wrong]


async def play(
    sandbox: Sandbox,
    attacks: Sequence[Attack],
    *,
    together: int = 1,
    thorough: bool = False,
    at_least_s: float = 0.0,
) -> Report:
    """Play attacks on a running sandbox.

    Args:
        sandbox: It has no other sessions.
        attacks: Which.
        together: How many at a time, apart from those that are played alone.
        thorough: Gives those the time to go all the way that may also be ended by the clock.
        at_least_s: Seconds that others are watched for, whatever is played.
    """
    report = Report(isolation=sandbox.isolation)
    async with Surroundings() as around:
        zygote = sandbox.zygote_pid
        neighbour = await sandbox.open(Limits(timeout_s=30.0))
        before = await asyncio.to_thread(_settled, sandbox)
        async with Watch(neighbour, period_s=FINE_S if thorough else COARSE_S) as watch:
            gate = asyncio.Semaphore(together)

            async def one(attack: Attack) -> None:
                async with gate:
                    report.outcomes.append(await _play_one(sandbox, attack, around, thorough=thorough))

            side_by_side = [attack for attack in attacks if not attack.alone]
            await asyncio.gather(asyncio.sleep(at_least_s), *map(one, side_by_side))
            for attack in attacks:
                if attack.alone:
                    await one(attack)
        report.felt = watch.felt
        if sandbox.zygote_pid != zygote:
            report.left.append(f"the zygote was {zygote}, is {sandbox.zygote_pid}")
        after = await asyncio.to_thread(_settled, sandbox)
        if len(after) > len(before):
            report.left.append(f"processes are left: {sorted(set(after) - set(before))}")
        if sandbox.sessions != 1:
            report.left.append(f"{sandbox.sessions - 1} sessions are left")
        report.left += await asyncio.to_thread(around.damage)
        await neighbour.close()
    report.left += [f"files are left: {name}" for name in _left_in(sandbox)]
    return report


async def _play_one(sandbox: Sandbox, attack: Attack, around: Surroundings, *, thorough: bool) -> Outcome:
    opened: list[SandboxSession] = []

    async def open_session() -> SandboxSession:
        opened.append(await sandbox.open(attack.limits, snapshot=attack.snapshot))
        return opened[-1]

    began = time.perf_counter()
    try:
        host = {**around.host(sandbox.zygote_pid), "isolation": str(sandbox.isolation)}
        stage = Stage(await open_session(), open_session, host)
        try:
            async with asyncio.timeout(_patience(attack)):
                await _attack(stage, attack, thorough=thorough)
                await _aftermath(stage, attack)
        except TimeoutError:
            stage.breaches.append("it was not ended in time")
    finally:
        await asyncio.gather(*(session.close() for session in opened))
    if thorough:  # otherwise all together are looked at, once at the end
        stage.breaches += await asyncio.to_thread(around.damage)
    return Outcome(attack=attack, breaches=stage.breaches, took_s=time.perf_counter() - began)


def _patience(attack: Attack) -> float:
    return (THOROUGH * attack.timeout_s + attack.limits.grace_s) * max(1, len(attack.cells)) + 3 * SLACK_S


async def _attack(stage: Stage, attack: Attack, *, thorough: bool) -> None:
    if attack.act is not None:
        await attack.act(stage)
    # Those that may as well be stopped are quick to be so, or get the time to go all the way.
    long = thorough and "timeout" in attack.ends and len(attack.ends) > 1
    for cell in attack.cells:
        await stage.run(cell, timeout_s=attack.timeout_s * (THOROUGH if long else 1))
    for number, done in enumerate(stage.executions, 1):
        _judge(stage, attack, done, last=number == len(stage.executions) or attack.act is not None)


def _judge(stage: Stage, attack: Attack, done: Execution, *, last: bool) -> None:
    output = _everything(done)
    if MARK in output:
        stage.breaches += [line for line in output.splitlines() if line.startswith(MARK)][:5]
    if SECRET in output:
        stage.breaches.append("the secret came out")
    if done.status not in attack.ends and (last or done.status != "ok"):
        error = done.error and f"{done.error.ename}: {done.error.evalue[:300]}"
        stage.breaches.append(f"it ended with {done.status} ({error or done.reason}), not with {attack.ends}")
    if last and attack.survives is not None and done.state_lost == attack.survives:
        stage.breaches.append(f"the state was {'lost' if done.state_lost else 'kept'} ({done.reason})")
    limits = stage.session.limits
    if max(len(done.stdout), len(done.stderr)) > limits.output_bytes:
        stage.breaches.append("more output was kept than the limit says")
    shown_chars = len(done.result or "") + sum(
        len(text) for each in done.outputs for text in each.data.values()
    )
    if shown_chars > 2 * limits.outputs_bytes + (1 << 20):
        stage.breaches.append(f"{shown_chars} characters were shown")
    if len("".join(done.error.traceback) if done.error else "") > (1 << 19):
        stage.breaches.append("the traceback is not cut")


def _everything(done: Execution) -> str:
    parts = [done.stdout, done.stderr, done.result or "", done.reason or ""]
    if done.error is not None:
        parts += [done.error.ename, done.error.evalue, *done.error.traceback]
    return "\n".join([*parts, *(text for each in done.outputs for text in each.data.values())])


async def _aftermath(stage: Stage, attack: Attack) -> None:
    """The session answers, by its old life or by a new one: the first execution may still belong to the attack."""
    for _ in range(3):
        done = await stage.session.execute("6 * 7", timeout_s=5.0)
        if done.status == "ok" and done.result == "42":
            return
        await stage.session.restart()
    stage.breaches.append(f"no session could be had afterwards: {done.status} {done.reason} {done.error}")


def _settled(sandbox: Sandbox) -> dict[int, str]:
    """What was killed takes a moment to be buried."""
    running_pids = descendants(sandbox.zygote_pid)
    for _ in range(50):
        time.sleep(0.05)
        now = descendants(sandbox.zygote_pid)
        if len(now) >= len(running_pids):
            return now
        running_pids = now
    return running_pids


def _left_in(sandbox: Sandbox) -> list[str]:
    scratch = sandbox._scratch
    return (
        []
        if scratch is None
        else sorted(path.name for path in scratch.path.iterdir() if path.name.isdecimal())
    )

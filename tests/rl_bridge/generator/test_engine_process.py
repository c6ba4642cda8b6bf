"""The process of an asynchronous engine: it belongs to the one that started it, and its death reaches whoever waits."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generator_fixtures import (
    WAIT_S,
    be_patient,
    engine_config,
    perturbed,
    policy_service,
    process_of,
    prompts,
    runs,
    wait_until,
)

from rl_bridge.errors import GeneratorError
from rl_bridge.generator.vllm_api import OWNER_VARIABLE
from rl_bridge.types import SamplingSettings

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

REPOSITORY = str(Path(__file__).parents[3])
WARM = SamplingSettings(temperature=0.8, max_new_tokens=200)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=4)
MANY = prompts(64, length=300)

# Stands for the engine: it does what vLLM does before it loads anything of ours.
ENGINE = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: os._exit(3))
import rl_bridge.generator.vllm_worker
print("loads", flush=True)
sys.stdin.read()
"""
OWNER = f"""
import os, subprocess, sys
os.environ["{OWNER_VARIABLE}"] = str(os.getpid())
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(engine.pid, engine.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


def begin(*command: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": REPOSITORY, **environment},
    )


def test_process_ends_when_its_owner_is_killed_before_it_has_loaded() -> None:
    with begin("-c", OWNER) as owner:
        assert owner.stdout is not None
        pid, word = owner.stdout.readline().split()
        assert word == "loads"
        assert runs(int(pid))
        owner.kill()
    wait_until(lambda: not runs(int(pid)))


def test_process_whose_owner_has_ended_already_ends_at_once() -> None:
    with begin("-c", ENGINE, **{OWNER_VARIABLE: "1"}) as orphan:  # as if another had started it
        told, _ = orphan.communicate("", timeout=WAIT_S)
    assert (orphan.returncode, told) == (-signal.SIGKILL, "")


@pytest.fixture(scope="module")
def engine(long_policy: Path, engine_environment: None) -> Iterator[Any]:
    from rl_bridge.generator.engine import VllmEngine

    one = VllmEngine(engine_config(max_length=512), str(long_policy), seed=0, own_process=True)
    one.start().result(200)
    yield one
    one.close()


def healthy(engine: Any) -> bool:
    try:
        engine.check()
    except GeneratorError:
        return False
    return True


@pytest.mark.heavy
def test_engine_that_stands_still_is_not_healthy(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.check()
    pid = process_of(engine)
    os.kill(pid, signal.SIGSTOP)
    try:
        be_patient(engine, monkeypatch, 1.5)
        wait_until(lambda: not healthy(engine))
        with pytest.raises(GeneratorError, match=r"expected the engine to make a step within 1.5 s"):
            engine.check()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: healthy(engine))


# The last of this engine, which does not live on.
@pytest.mark.heavy
def test_engine_whose_process_dies_tells_whoever_waits(engine: Any) -> None:
    waiting = [engine.generate(MANY, WARM) for _ in range(3)]
    wait_until(lambda: engine._activity_counts["generate"])
    os.kill(process_of(engine), signal.SIGKILL)
    for future in waiting:
        with pytest.raises(GeneratorError, match="the engine has failed"):
            future.result(WAIT_S)
    assert engine.ended.exception(WAIT_S) is not None
    assert engine._llm.engine_core.resources.ctx.closed
    for use in (engine.check, lambda: engine.generate(MANY, WARM), lambda: engine.load(1, {})):
        with pytest.raises(GeneratorError, match="the engine has failed"):
            use()


def engine_below(pid: int) -> int:
    """The process of the engine that another one has started."""
    children = [
        int(word)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for word in (task / "children").read_text().split()
    ]
    (found,) = [child for child in children if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found


@pytest.mark.heavy
async def test_killed_service_comes_back_with_the_current_weights(long_policy: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"generator": {"engine": "vllm_async"}, "max_length": 512}
    async with policy_service(long_policy, tmp_path, **how) as (policy, store):
        first = await policy.generate_many.route(MANY[:4], GREEDY)
        assert {answer.version for answer in first} == {0}
        await store.put(1, perturbed(long_policy, seed=1))
        assert not (await policy.update_weights.fanout(1)).failed
        second = await policy.generate_many.route(MANY[:4], GREEDY)
        assert {answer.version for answer in second} == {1}
        engine = engine_below(policy.replicas[0].pids[0])
        os.kill(policy.replicas[0].pids[0], signal.SIGKILL)
        assert await policy.generate_many.route(MANY[:4], GREEDY) == second  # by the one that came after it
        assert not runs(engine)
        engine = engine_below(policy.replicas[0].pids[0])
        await policy.update_weights.fanout(0)
        assert await policy.generate_many.route(MANY[:4], GREEDY) == first
    wait_until(lambda: not runs(engine))

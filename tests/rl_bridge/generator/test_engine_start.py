"""The start of the engine in this process, and who waits for it; vLLM is played."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from generator_fixtures import engine_settings

from rl_bridge.errors import GeneratorError
from rl_bridge.generator import engine as engine_module
from rl_bridge.generator.engine import VllmEngine
from rl_bridge.types import SamplingSettings

WAIT_S = 20.0


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the engine may be there."""
    event = threading.Event()

    def build(settings: Any) -> Any:
        assert event.wait(WAIT_S)
        return SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: 10),
            set_weight_version=lambda version: None,
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    monkeypatch.setattr(engine_module, "build_engine", build)
    return event


async def test_who_gives_up_waiting_for_it_leaves_an_engine_that_can_be_closed(
    loaded: threading.Event,
) -> None:
    engine = VllmEngine(engine_settings(Path("nowhere")))
    waiting = asyncio.wrap_future(engine.start())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 0.001)
    ending = asyncio.wrap_future(engine.ended)
    ending.cancel()
    loaded.set()
    asked = engine.generate([], SamplingSettings(temperature=1.0, max_new_tokens=1))
    assert asked.result(WAIT_S) == []
    engine.close()
    assert engine.ended.result(WAIT_S) is None
    with pytest.raises(GeneratorError, match="closed"):
        engine.check()

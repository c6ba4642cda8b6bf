"""What a replica asks of its engine, and which engine the settings mean."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from rl_bridge.generator.async_engine import AsyncVllmEngine
from rl_bridge.generator.endpoint import EndpointEngine
from rl_bridge.generator.engine import LoadFigures, VllmEngine
from rl_bridge.generator.settings import EngineSettings
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings


class Engine(Protocol):
    """Answers prompts on threads or in processes of its own; see `VllmEngine` for what each method promises."""

    @property
    def version(self) -> PolicyVersion:
        """The weights that it samples from."""

    @property
    def ended(self) -> "Future[None]":
        """Done when it is no more: with None after `close`, otherwise with what it died of."""

    def start(self) -> "Future[None]":
        """Begin loading; the future is done when it can answer, or has failed."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, seeds: Sequence[int] | None = None
    ) -> "Future[list[Completion]]":
        """Answer prompts, in order. Cancelling the future ends the work on them."""

    def load(self, version: PolicyVersion, state: dict[str, Tensor]) -> "Future[LoadFigures]":
        """Take new weights."""

    def check(self) -> None:
        """Look whether it works; raises GeneratorError where it does not."""

    def close(self) -> None:
        """End it. What is under way fails."""


def make_engine(settings: EngineSettings) -> Engine:
    """An engine of the kind that the settings name, not started yet."""
    if settings.engine == "openai":
        return EndpointEngine(settings)
    if settings.engine == "vllm_async":
        return AsyncVllmEngine(settings)
    return VllmEngine(settings)

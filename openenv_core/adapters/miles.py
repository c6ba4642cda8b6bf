"""Adapter for Miles: an agent function that plays any served environment, and a filter for failed episodes.

--custom-agent-function-path openenv_core.adapters.miles.run
--custom-rm-path openenv_core.adapters.miles.reward_func
--dynamic-sampling-filter-path openenv_core.adapters.miles.keep_group
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from openai import AsyncOpenAI

from openenv_core.adapters.episode import TextEpisode

MAX_TURNS: Final = 16
_KEY: Final = "openenv"


async def run(
    base_url: str,
    prompt: Any,
    request_kwargs: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Play one episode: the policy answers in text, with one tool call each turn.

    Args:
        base_url: URL of Miles' session server, which records the policy's tokens.
        prompt: Chat messages, or text.
        request_kwargs: Extra arguments of the requests to the policy.
        metadata: The data set's row. `metadata["openenv"]` has `base_url`, and may have `reset` (options of the reset,
            such as `seed`), `max_turns`, and arguments of `TextEpisode`.

    Returns:
        Additions to the sample's metadata: `reward`, or None if the episode failed for a reason other than the policy
        or was not scored, and `failure`, the reason.

    Raises:
        ClientError: The episode could not be started; Miles goes on without a reward.
    """
    options = dict((metadata or {})[_KEY])
    reset, max_turns = options.pop("reset", None) or {}, options.pop("max_turns", MAX_TURNS)
    episode = TextEpisode(options.pop("base_url"), **options)
    try:
        observation = await episode.reset(**reset)
        chat: list[Any] = list(prompt) if not isinstance(prompt, str) else [_user(prompt)]
        chat.append(_user(f"{episode.instructions}\n\n{observation}"))
        async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="EMPTY") as policy:
            for _turn in range(max_turns):
                completion = await policy.chat.completions.create(
                    model=os.environ.get("AGENT_MODEL_NAME", "model"),
                    messages=chat,
                    extra_body=dict(request_kwargs or {}),
                )
                answer = completion.choices[0].message
                chat.append(answer.model_dump(exclude_none=True))  # unchanged: the recorder looks for it
                reply = await episode.answer(answer.content or "")
                if episode.done or episode.failure is not None:
                    break
                chat.append(_user(reply))
        failure = episode.failure or episode.unscored
        return {"reward": episode.reward, "failure": failure}
    finally:
        await episode.close()


async def reward_func(args: Any, samples: Any, **_: Any) -> float | list[float]:
    """Return the rewards that `run` put into the samples; 0 without one, whose group `keep_group` drops."""
    rewards = [float(sample.metadata.get("reward") or 0.0) for sample in _flatten([samples])]
    return rewards if isinstance(samples, list) else rewards[0]


def keep_group(args: Any, samples: Sequence[Any], **_: Any) -> bool:
    """Whether every sample of a group has a reward; Miles replaces other groups."""
    return all(sample.metadata.get("reward") is not None for sample in _flatten(samples))


def _flatten(samples: Sequence[Any]) -> Iterator[Any]:
    for sample in samples:
        yield from sample if isinstance(sample, list) else (sample,)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}

"""Adapter for verl: any served environment as an agent loop.

# agent_loops.yaml, for actor_rollout_ref.rollout.agent.agent_loop_config_path
- name: ropewalk
  _target_: openenv_core.adapters.verl.ServedAgentLoop
  base_url: http://localhost:8000
  unfinished_reward: -1.0
"""

from typing import Any, Final
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from openenv_core.adapters.episode import TextEpisode

MAX_TURNS: Final = 16


class ServedAgentLoop(AgentLoopBase):  # type: ignore[misc]  # the package has no types
    """Plays one episode of a served environment: the policy answers in text, with one tool call each turn.

    The data set's row has the options of the reset in `extra_info["reset"]`. If the environment fails, or does not
    score the episode, `run` raises: verl marks the prompt's group as failed, and replaces it.

    Args:
        args: Arguments that verl passes to every agent loop.
        base_url: URL of the server.
        max_turns: Most answers of the policy.
        token: As in `TextEpisode`.
        reset_timeout_s: As in `TextEpisode`.
        step_timeout_s: As in `TextEpisode`.
        unfinished_reward: As in `TextEpisode`.
        tools: verl's own tools; not used.
        options: Arguments that verl passes to every agent loop.
    """

    def __init__(
        self,
        *args: Any,
        base_url: str,
        max_turns: int = MAX_TURNS,
        token: str | None = None,
        reset_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
        unfinished_reward: float | None = None,
        tools: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._max_turns = max_turns
        self._episode = TextEpisode(
            base_url,
            token=token,
            reset_timeout_s=reset_timeout_s,
            step_timeout_s=step_timeout_s,
            unfinished_reward=unfinished_reward,
        )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play an episode.

        Args:
            sampling_params: Sampling parameters of the policy.
            row: The data set's row, with `raw_prompt`.

        Raises:
            ClientError: The episode could not be started.
            EnvironmentFailureError: The environment failed, or did not score the episode.
        """
        try:
            return await self._play(sampling_params, **row)
        finally:
            await self._episode.close()

    async def _play(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        episode, max_tokens = self._episode, self.rollout_config.response_length
        observation = await episode.reset(**((row.get("extra_info") or {}).get("reset") or {}))
        first = _user(f"{episode.instructions}\n\n{observation}")
        messages = [*row["raw_prompt"], first]
        ids = prompt = await self.ct_build_initial_tokens(messages)
        mask: list[int] = []
        logprobs: list[float] | None = None
        turns, request_id = 0, uuid4().hex
        while True:
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=ids, sampling_params=sampling_params
            )
            if not turns and output.log_probs:
                logprobs = []
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs or None
            )
            ids, turns = merged.token_ids, turns + 1
            if len(mask) >= max_tokens:
                break
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            reply = await episode.answer(text)
            if episode.done or episode.failure is not None or turns == self._max_turns:
                break
            history = [*messages, {"role": "assistant", "content": text}]
            messages = [*history, _user(reply)]
            merged, mask, logprobs = await self.ct_merge_context_msg(history, messages, ids, mask, logprobs)
            ids = merged.token_ids
            if len(mask) >= max_tokens:
                break
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids[len(prompt) :][:max_tokens],
            response_mask=mask[:max_tokens],
            response_logprobs=None if logprobs is None else logprobs[:max_tokens],
            reward_score=episode.require_reward(),
            num_turns=2 * turns,
            metrics=AgentLoopMetrics(),
        )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}

"""`rollout.*`: how trajectories are collected."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_bridge.config.agent import AgentConfig
from rl_bridge.config.monarch import ReplicaRange, min_of
from rl_bridge.config.sections import Count, Seconds, Section


class RolloutConfig(Section):
    """`rollout.*`: how trajectories are collected."""

    task: str | None = None
    """The class that ties the run to its environment, as `package.module:Class`: a subclass of rl_bridge.rollout.Task.
    Not needed for an environment in a Python file, which is shown with the schema of its actions, nor for a world of
    tools whose first observation states its task in words."""
    agent: AgentConfig | None = None
    """An agent that plays in place of our own dialogue, and calls the policy as its model; None for none."""
    num_workers: Count | ReplicaRange = 1
    """Processes that play episodes, or `{min, max}`, which adds one for each host that joins. The first have equal
    shares of `env.sessions`, and each further one brings as many more. If generators have GPUs, the default is one per
    generator."""
    batch_size: Count = 512
    """Trajectories per iteration; a multiple of `group_size`."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Siblings that share a seed."""
    num_turns: Count = 32
    """The most exchanges per episode, and the most steps: an answer with several tool calls takes several."""
    episode_timeout_s: Seconds | None = None
    """How long after its reset an episode may begin another exchange; then it is truncated."""
    max_new_tokens: Count = 16
    """The most tokens of an answer; fewer where `max_length` leaves less."""
    cut_answer: Literal["illegal", "truncated"] | None = None
    """How an answer ends its episode that was cut at `max_new_tokens` and means no action: as any other that means none
    (illegal), or as `truncated_length` with the same reward (truncated). None is truncated if `max_new_tokens` is above
    64, else illegal. An answer that means an action counts however it ended."""
    max_length: Annotated[int, Field(ge=2)] = 4096
    """The most tokens of prompt and answer together."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """The sampling temperature, which the trainer applies to its logits too. vLLM raises lower values to 0.01."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 0
    """How many updates old the weights behind a training sample may be. 0 is the synchronous loop: collect, train,
    synchronise. Above 0, episodes are played while the trainer works, up to so many steps ahead."""
    weight_update: Literal["drain", "continue", "keep_cache"] = "drain"
    """How generators take new weights: after finishing their requests (drain), or by continuing them under the new
    weights, with keys and values recomputed (continue) or those of the old weights (keep_cache). With `max_staleness`
    above 0 the default is continue; then answers finish with the adapters (`model.lora.push`) that they began with."""
    min_group_size: Annotated[int, Field(ge=2)] = 2
    """The least siblings with which a group is trained if others were lost or late. With fewer it is dropped."""
    straggler_timeout_s: Seconds | None = None
    """How long a batch waits for a group that would be too stale for the next one. After that the group is trained with
    the siblings that have ended, or is dropped: quick episodes are then trained more often than slow ones. None waits
    for all of them."""
    concurrency: Literal["fixed", "adaptive"] = "fixed"
    """How many groups are in flight, within `max_staleness`: enough for all of `env.sessions` (fixed), or, up to that,
    as many as keep the generators busy (adaptive): more while environments are slow, fewer while prompts wait at the
    generators or their key-value caches are too small."""
    max_attempts: Count = 3
    """How often an episode is tried if failures not the policy's end it, and how often a group may lose its worker."""
    max_lost_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """The run ends if more than this share of the latest episodes was dropped because their environment or engine
    failed, over eight groups, or as many as a step takes. 1 never ends it."""
    spot_eligible: bool = False
    """Rollout workers may be preempted at any time: a group is played again however often its worker is lost. The
    workers' own restarts are bounded by `monarch.restarts` either way."""
    checkpoint_on_preemption: bool = False
    """On SIGTERM, a worker returns the episodes that it has finished, and a run writes a checkpoint before it ends."""
    generate_timeout_s: Seconds = 300.0
    """How long a generator may go without sampling any token before its requests fail."""
    timeout_s: Seconds = 1200.0
    """How long an episode may make no progress, as without an answer or a step, before it is lost and played again; not
    how long it may take. The longest answer has to fit. The run ends if nothing makes progress for twice as long."""
    max_num_seqs: Count = 256
    """Prompts that the engine processes at once."""
    kv_cache_mb: Count = 256
    """Memory for the engine's key-value cache, in MiB, on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    """The share of its GPU's memory for the engine, which has the GPU to itself; a toy model needs less
    (docs/gpus.md)."""

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.batch_size % self.group_size:
            raise ValueError(
                f"expected rollout.batch_size to be a multiple of rollout.group_size, "
                f"got {self.batch_size} and {self.group_size}"
            )
        if self.max_new_tokens >= self.max_length:
            raise ValueError(
                f"expected rollout.max_new_tokens below rollout.max_length, "
                f"got {self.max_new_tokens} and {self.max_length}"
            )
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"expected rollout.min_group_size of at most rollout.group_size, "
                f"got {self.min_group_size} and {self.group_size}"
            )
        return self

    @property
    def min_workers(self) -> int:
        """The number of workers with which a run starts, and can go on."""
        return min_of(self.num_workers)

    @property
    def groups_per_step(self) -> int:
        """Groups per iteration."""
        return self.batch_size // self.group_size

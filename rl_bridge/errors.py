"""Every error that the bridge raises, as one tree."""

from openenv_core.errors import former_names


class BridgeError(Exception):
    """The root: catch this to catch everything that the bridge raises on purpose."""


class ConfigError(BridgeError):
    """The configuration is wrong. The message names the key, what was expected and what came."""


class MissingDependencyError(BridgeError):
    """A package of the heavy stack is not installed; the message says what to do about it."""

    def __init__(
        self,
        package: str,
        remedy: str = "install ropewalk[rl-cpu] on a machine without a GPU, ropewalk[rl] on one with CUDA",
    ) -> None:
        self.package = package
        self.remedy = remedy
        super().__init__(f"expected the package {package!r} to be installed, it is not; {remedy}")

    def __reduce__(self) -> tuple[type["MissingDependencyError"], tuple[str, str]]:
        return type(self), (self.package, self.remedy)  # it travels between processes


class ModelError(BridgeError):
    """A checkpoint cannot be loaded, or its architecture is not supported."""


class GeneratorError(BridgeError):
    """The inference engine failed, or was used after it was closed."""


class EngineFailedError(GeneratorError):
    """The inference engine has ended by itself; the message says why."""


class PromptRefusedError(GeneratorError):
    """The inference engine does not take one of the prompts it was given; it has begun with none of them."""

    def __init__(self, prompt: int, reason: str) -> None:
        self.prompt = prompt
        self.reason = reason
        super().__init__(f"the engine refused a prompt: {reason}")

    def __reduce__(self) -> tuple[type["PromptRefusedError"], tuple[int, str]]:
        return type(self), (self.prompt, self.reason)  # it travels between processes


class StateUnavailableError(BridgeError):
    """The state that a fan-out refers to is unavailable. The replica is not at fault and unchanged."""


class WeightsError(StateUnavailableError):
    """A snapshot of weights cannot be published or read."""


class SnapshotOverwrittenError(WeightsError):
    """The snapshot's segment has been reused for a newer version while it was being read."""


class RolloutError(BridgeError):
    """No usable trajectory could be collected."""


class EpisodeLostError(RolloutError):
    """An environment reported a failure that is not the policy's. The episode is played again, or dropped."""


class SessionUnavailableError(EpisodeLostError):
    """No environment server had a session within the deadline. The episode has not begun."""


class EpisodeUnscoredError(RolloutError):
    """An environment reported an episode as unscored. It is left out, and counted."""


class TrainingError(BridgeError):
    """The optimisation went wrong."""


class NonFiniteLossError(TrainingError):
    """The loss or the gradient norm is NaN or infinite. The weights were not changed by that step."""


class RoleError(BridgeError):
    """A process of the run died, or could not be started."""


class ReplicaLostError(RoleError):
    """The process behind a call is gone or unreachable. The call may have been executed."""


class RankLostError(ReplicaLostError):
    """A rank of the trainer is gone, or did not come to a collective in time; the others cannot go on without it."""


class NoReplicaError(RoleError):
    """No replica of a service was there to serve within the deadline."""


class RemoteError(RoleError):
    """An actor raised something that is no `BridgeError`; the message has its type and its traceback."""


class TrainerWentBackError(TrainingError):
    """The trainer is at another version than it is asked for: it has been started again from a checkpoint."""


class CheckpointError(TrainingError):
    """A checkpoint could not be written. Those before it are as they were."""


class RewardError(BridgeError):
    """A reward function raised, or returned something else than a number or None."""


class RunInUseError(BridgeError):
    """Another process writes to the run's folder. The message says which, and what to do."""


class NoRecordsError(BridgeError):
    """Of a run no rollouts are there to be read."""


class StatusError(BridgeError):
    """A run cannot be asked how it stands, or does not answer as a run does."""


__getattr__ = former_names(
    globals(),
    {
        "EngineFailed": "EngineFailedError",
        "PromptRefused": "PromptRefusedError",
        "StateUnavailable": "StateUnavailableError",
        "SnapshotOverwritten": "SnapshotOverwrittenError",
        "EpisodeLost": "EpisodeLostError",
        "SessionUnavailable": "SessionUnavailableError",
        "EpisodeUnscored": "EpisodeUnscoredError",
        "NonFiniteLoss": "NonFiniteLossError",
        "ReplicaLost": "ReplicaLostError",
        "RankLost": "RankLostError",
        "NoReplica": "NoReplicaError",
        "TrainerWentBack": "TrainerWentBackError",
        "RunInUse": "RunInUseError",
        "NoRecords": "NoRecordsError",
        "MissingStack": "MissingDependencyError",
        "RoleFailed": "RoleError",
        "RewardFailed": "RewardError",
    },
)

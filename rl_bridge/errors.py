"""The tree of errors that the bridge raises."""

import importlib.util
from types import TracebackType

from openenv_core.errors import PicklableError

OPTIONAL_SIBLINGS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that nothing here uses, but that break transformers and vLLM if they do not match torch."""
_DISTRIBUTIONS = {"monarch": "torchmonarch"}
"""Distributions with another name than the package that they install."""
_INSTALL = "in a checkout, `python3.11 scripts/bootstrap.py train` installs what training needs, `train-gpu` for CUDA"


class BridgeError(PicklableError):
    """The base class of every error that the bridge raises on purpose."""


class ConfigError(BridgeError):
    """The configuration is wrong. The message names the key, the expected value and the value it got."""


class MissingDependencyError(BridgeError):
    """A package of the heavy stack is not installed or cannot be imported; the message says what to do about it.

    Args:
        package: The package to install, or the one that cannot be imported.
        remedy: What to do.
        failure: What its import raised, as text; empty if it is not installed.
    """

    def __init__(self, package: str, remedy: str = _INSTALL, failure: str = "") -> None:
        self.package = package
        self.remedy = remedy
        self.failure = failure
        if failure:
            message = f"the package {package!r} is installed, but its import raised {failure}; {remedy}"
        else:
            message = f"expected the package {package!r} to be installed, it is not; {remedy}"
        super().__init__(message)

    @classmethod
    def of_import(cls, error: BaseException) -> "MissingDependencyError":
        """Return the error for a failed import: which package is missing, or which one does not fit the others.

        Only the first cause tells: transformers raises a ModuleNotFoundError without a name for any failure.
        """
        while error.__cause__ is not None:
            error = error.__cause__
        named = ((error.name or "") if isinstance(error, ImportError) else "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and named and not _is_installed(named):
            return cls(_DISTRIBUTIONS.get(named, named))
        package = _find_importing_package(error.__traceback__) or named or "unknown"
        if package in OPTIONAL_SIBLINGS:
            remedy = f"it does not match torch, and nothing here uses it: pip uninstall {package}"
        else:
            remedy = "`ropewalk doctor` compares its version with what is expected"
        return cls(_DISTRIBUTIONS.get(package, package), remedy, f"{type(error).__name__}: {error}")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a module in sys.modules that has no spec
        return False


def _find_importing_package(traceback: TracebackType | None) -> str | None:
    """Return the package whose module was being imported last when an error was raised; None if it is this one."""
    package = None
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "<module>":
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        traceback = traceback.tb_next
    return None if package in (__package__, "__main__") else package


class ModelError(BridgeError):
    """A checkpoint cannot be loaded, or its architecture is not supported."""


class GeneratorError(BridgeError):
    """The inference engine failed, or was used after it was closed."""


class EngineFailedError(GeneratorError):
    """The inference engine ended unexpectedly; the message says why."""


class PromptRefusedError(GeneratorError):
    """The inference engine refused one of the prompts of a call and started none of them."""

    def __init__(self, prompt: int, reason: str) -> None:
        self.prompt = prompt
        self.reason = reason
        super().__init__(f"the engine refused a prompt: {reason}")


class StateUnavailableError(BridgeError):
    """The state that a fan-out refers to is unavailable. The replica is unchanged and not at fault."""


class WeightsError(StateUnavailableError):
    """A snapshot of weights cannot be published or read."""


class SnapshotOverwrittenError(WeightsError):
    """The snapshot's segment was reused for a newer version while being read."""


class RolloutError(BridgeError):
    """No usable trajectory could be collected."""


class EpisodeLostError(RolloutError):
    """An environment failed through no fault of the policy's. The episode is retried, or dropped."""


class SessionUnavailableError(EpisodeLostError):
    """No environment server had a free session within the deadline. The episode has not begun."""


class EpisodeUnscoredError(RolloutError):
    """An environment reported an episode as unscored. It is left out, and counted."""


class TrainingError(BridgeError):
    """The optimisation went wrong."""


class NonFiniteLossError(TrainingError):
    """The loss or the gradient norm is NaN or infinite. The step left the weights unchanged."""


class RoleError(BridgeError):
    """A process of the run died, or could not be started."""


class ReplicaLostError(RoleError):
    """The process behind a call is gone or unreachable. The call may have been executed."""


class RankLostError(ReplicaLostError):
    """A rank of the trainer is gone, or missed a collective's deadline; the others cannot go on without it."""


class NoReplicaError(RoleError):
    """No replica of a service was available within the deadline."""


class RemoteError(RoleError):
    """An actor raised an exception other than a `BridgeError`; the message has its type and traceback."""


class TrainerWentBackError(TrainingError):
    """The trainer is at another version than the call expects: it was restarted from a checkpoint."""


class CheckpointError(TrainingError):
    """A checkpoint could not be written. Earlier ones are unchanged."""


class RewardError(BridgeError):
    """A reward function raised, or returned neither a number nor None."""


class RunInUseError(BridgeError):
    """Another process is writing to the run's folder. The message says which, and what to do."""


class NoRecordsError(BridgeError):
    """A run has no recorded rollouts."""


class StatusError(BridgeError):
    """A run's status cannot be read, or the response is not that of a run."""

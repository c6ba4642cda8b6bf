"""`algorithm.*`: the loss. A name sets defaults; every key can be overridden."""

from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rl_bridge.config.sections import Count, Fraction, NonNegative, Positive, Section

GROUP_ADVANTAGES = "rl_bridge.algorithms.advantages:group_advantages"
WITHOUT_VARIANCE = "rl_bridge.algorithms.advantages:without_variance"
_PATH = r"[\w.]+:\w+"
DottedPath = Annotated[str, Field(pattern=f"^{_PATH}$")]
"""A function as `package.module:function`; rl_bridge.algorithms.functions has the signatures."""

_GRPO: dict[str, Any] = {
    "advantage": "group",
    "normalize_std": True,
    "objective": "clip",
    "ratio": "token",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregation": "sequence_mean",
    "dynamic_sampling": False,
    "overlong": "train",
}

PRESETS = MappingProxyType(
    {
        "grpo": _GRPO,
        "dr_grpo": _GRPO | {"normalize_std": False, "aggregation": "fixed_length"},
        "dapo": _GRPO
        | {"clip_high": 0.28, "aggregation": "token_mean", "dynamic_sampling": True, "overlong": "penalty"},
        "gspo": _GRPO | {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        # No lower bound: a ratio is never below 0.
        "cispo": _GRPO
        | {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.28, "aggregation": "token_mean"},
        "ppo": _GRPO | {"advantage": "gae", "aggregation": "token_mean", "value_clip": 0.2},
    }
)
"""The settings behind each name, as in its paper, except for the KL term, which is 0 everywhere, and the dual clip.

arXiv 2402.03300 (grpo; the paper has a `kl_coef` of 0.04), 2503.20783 (dr_grpo), 2503.14476 (dapo), 2507.18071 (gspo;
its clip range is meant for long answers), 2506.13585 (cispo; the paper does not give its upper cap, and also uses
dapo's dynamic sampling and length penalty, both off here), 1707.06347 (ppo).
"""


class AlgorithmConfig(Section):
    """`algorithm.*`: the loss. `algorithm: dapo` is short for `algorithm: {name: dapo}`.

    The defaults below are those of `grpo`; for other names see `PRESETS`.
    """

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo"] = "grpo"
    advantage: Annotated[str, Field(pattern=f"^(group|gae|{_PATH})$")] = "group"
    """How advantages are computed: relative to an answer's siblings (group), by a function `package.module:function` of
    their rewards, or by a critic that is trained too (gae)."""
    normalize_std: bool = True
    """Divide advantages by their standard deviation: that of the group (GRPO; false is Dr. GRPO), or with `gae` that of
    the batch, whose mean is subtracted too."""
    loss: DottedPath = "rl_bridge.algorithms.policy_loss:policy_loss"
    """The function that computes the loss of each token, as `package.module:function`. The built-in one is composed by
    the keys below, which another one gets too."""
    objective: Literal["clip", "cispo", "reinforce"] = "clip"
    """The clipped surrogate; the log-probability, weighted by the capped ratio; or weighted by the advantage alone."""
    ratio: Literal["token", "sequence"] = "token"
    """The probability ratio of each token, or the geometric mean over the trajectory (GSPO)."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """How far below 1 a probability ratio may fall before its gradient stops, or with `cispo` its weight."""
    clip_high: Positive = 0.2
    """How far above 1 it may rise; above `clip_low` it is "clip-higher"."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bounds the loss of a token with a negative advantage by this multiple of the advantage; None sets no bound. It
    needs the objective `clip`."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "sequence_mean"
    """How token losses are aggregated; see rl_bridge.algorithms.policy_loss."""
    entropy_coef: NonNegative = 0.0
    """Bonus for the policy's entropy, in units of advantage per nat."""
    entropy_top_k: Annotated[int, Field(ge=2)] | None = None
    """Take the entropy over this many most likely tokens only, with their probabilities scaled to a sum of 1 (AEnt's
    clamped entropy). Over a large vocabulary the whole entropy rewards unlikely tokens, which are mostly errors."""
    entropy_hold: Fraction = 1.0
    """The share of the run for which the bonus is constant; afterwards it falls linearly."""
    entropy_final_factor: Fraction = 1.0
    """The bonus at the end of the run, as a share of `entropy_coef`."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the initial policy; above 0 a reference model is started."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the divergence is estimated; see rl_bridge.algorithms.policy_loss."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether it is added to the loss, or subtracted from the rewards before advantages are computed."""
    correction: Literal["none", "truncated", "icepop", "decoupled"] = "none"
    """How differences between the engine's and the trainer's probabilities are corrected. With all but `none`, ratios
    are relative to the trainer's own probabilities before the first update, and each token is weighted by the
    difference; see rl_bridge.algorithms.policy_loss."""
    correction_cap: Positive = 2.0
    """The largest weight of `truncated`."""
    correction_low: Positive = 0.5
    """`icepop` drops tokens with a lower weight."""
    correction_high: Positive = 5.0
    """`icepop` and `decoupled` drop tokens with a higher weight."""
    sequence_rejection: Positive | None = None
    """Leave a trajectory out of the loss if the mean over its tokens of log(pi_old / mu), the trainer's probabilities
    before the first update over the engine's, is below minus this or above it. It takes a forward pass of its own; see
    rl_bridge.algorithms.policy_loss. None leaves none out."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and play others instead."""
    group_filter: DottedPath | None = None
    """A function `package.module:function` that decides which groups are dropped, in place of dynamic sampling."""
    max_refills: Count = 2
    """How many groups dynamic sampling, or the filter, may drop for each that a step trains; beyond that, groups are
    trained as they are. Unused refills do not carry over to later steps."""
    overlong: Literal["train", "mask", "penalty"] = "train"
    """How trajectories cut off by a limit are treated: trained, left out of the loss, or (penalty) by lowering the
    reward of every trajectory near the limit."""
    overlong_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The last share of the maximum length, over which the penalty grows from 0 to 1."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount of `gae`, per token of the policy."""
    gae_lambda: Fraction = 0.95
    """How far `gae` looks ahead: 0 trusts the critic, 1 the rewards."""
    value_clip: Positive | None = None
    """How far the critic's value of a token may move in one iteration before its gradient stops; None sets no limit."""
    critic_learning_rate: Positive | None = None
    """The critic's learning rate; None takes the policy's. It follows the policy's schedule."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("name", "grpo")
        return {**PRESETS.get(name, {}), **data} if isinstance(name, str) else data

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.objective == "reinforce" and self.ratio == "sequence":
            raise ValueError(
                "expected algorithm.ratio=token with algorithm.objective=reinforce, which uses no ratio, got sequence"
            )
        if self.kl_in == "reward" and self.overlong == "mask" and self.advantage != "gae":
            raise ValueError(
                "expected algorithm.kl_in=loss with algorithm.overlong=mask, got reward: the divergence of what is "
                "masked is not known, and so neither is its group's baseline"
            )
        if self.dynamic_sampling and self.group_filter is not None:
            raise ValueError(
                "expected algorithm.dynamic_sampling=false with algorithm.group_filter, got true; a filter may call "
                f"{WITHOUT_VARIANCE} itself"
            )
        if self.correction_low >= self.correction_high:
            raise ValueError(
                "expected algorithm.correction_low below algorithm.correction_high, "
                f"got {self.correction_low} and {self.correction_high}"
            )
        return self

    @property
    def recomputes_old(self) -> bool:
        """Whether ratios are relative to what the trainer itself computes before the first update."""
        return self.correction != "none"

    @property
    def advantage_function(self) -> str:
        """The dotted path of the function of a group's rewards; with a critic, training does not use its advantages."""
        return GROUP_ADVANTAGES if self.advantage in ("group", "gae") else self.advantage

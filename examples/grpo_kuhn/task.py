"""Kuhn poker as a task of self-play: the prompt, the parser, the exact exploitability, and the plot."""

import json
from collections.abc import Mapping
from pathlib import Path

from envs.kuhn_env import KuhnAction, KuhnEnv, KuhnObservation
from envs.kuhn_env.models import CARDS
from envs.kuhn_env.oracle import INFORMATION_SETS, nash_conv, uniform, value
from rl_bridge.rollout import EvaluationResult, Policy, Task
from rl_bridge.tiny_policy import make_tiny_policy
from rl_bridge.tokens.chat import ChatMessage

SAMPLES = 256
"""Answers that a probe samples at each decision, to meet both words; a word that is not met counts as never said."""


def write_prompt(card: int, history: str) -> list[ChatMessage]:
    """Return the chat for one decision, by card (0 for J to 2 for K) and moves so far.

    The decision is one word, as information sets are written ("Jpb": a jack, after a pass and a bet), and so one token:
    what is learned at one of them then hardly changes the others.
    """
    return [{"role": "user", "content": f"kuhn {CARDS[card]}{history} answer pass or bet"}]


class KuhnTask(Task):
    """A task whose answers are pass or bet, for the tiny policy that it makes. Both seats have the same policy."""

    client_type = KuhnEnv

    def messages(self, observation: KuhnObservation) -> list[ChatMessage]:
        """Return a prompt with the card and the moves, which tell the seat."""
        return write_prompt(CARDS.index(observation.card), observation.history)

    def parse(self, text: str) -> KuhnAction | None:
        """Return the action of an answer, the bare word; None if it is none."""
        word = text.strip().lower()
        return KuhnAction.model_validate({"action": word}) if word in ("pass", "bet") else None

    def make_policy(self) -> Path:
        """Make a tiny policy with random weights, determined by the run's seed."""
        texts = (write_prompt(*decision)[0]["content"] for decision in INFORMATION_SETS)
        return make_tiny_policy(self.folder / "initial_policy", texts, seed=self.config.seed)

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Return the exact exploitability (NashConv / 2) of the policy as it is sampled, and what its first seat wins.

        An answer that is no action counts as a pass. `legal` is the smallest probability of an action at any decision,
        `bet` the mean probability of a bet.
        """
        prompts = [write_prompt(*decision) for decision in INFORMATION_SETS]
        answers = await policy.answer_probabilities(prompts, samples=SAMPLES)
        bets = dict(zip(INFORMATION_SETS, (each.get("bet", 0.0) for each in answers), strict=True))

        def bet(card: int, history: str) -> float:
            return min(1.0, bets[card, history])

        return {
            "exploitability": nash_conv(bet) / 2,
            "first_wins": value(bet, bet),
            "legal": min(each.get("bet", 0.0) + each.get("pass", 0.0) for each in answers),
            "bet": sum(bets.values()) / len(bets),
        }

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write report.json, with the exploitability and the held-out games, and exploitability.png."""
        await super().report(policy, result)
        path = self.folder / "report.json"
        report = json.loads(path.read_text(encoding="utf-8")) | dict(await self.probe(policy))
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        draw_exploitability(self.folder / "metrics.jsonl", self.folder / "exploitability.png")


def draw_exploitability(metrics: Path, picture: Path) -> None:
    """Plot the exploitability that a run has logged against its iterations, beside that of the uniform policy."""
    # Every process of a run imports the task; only the controller, at the end, needs matplotlib.
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    probed = [row for row in rows if "probe/exploitability" in row]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [row["iteration"] for row in probed],
        [row["probe/exploitability"] for row in probed],
        marker="o",
        markersize=3,
        label="policy, exact",
    )
    axes.axhline(nash_conv(uniform) / 2, color="grey", linestyle="--", label="uniform policy")
    axes.set(
        xlabel="iteration", ylabel="exploitability (NashConv / 2), antes", title="Kuhn poker by self-play"
    )
    axes.set_ylim(bottom=0.0)
    axes.legend()
    figure.savefig(picture, dpi=120)

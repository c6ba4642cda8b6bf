# place_holder.py
from openenv_core import Action, Environment, Observation


class Guess(Action):
    number: int


class Face(Observation):
    hint: str = ""


class PlaceHolder(Environment[Guess, Face]):
    """Guess the die."""

    def reset(self) -> Face:
        self.secret = self.rng.randint(1, 6)
        return Face(hint="1 to 6")

    def step(self, action: Guess) -> Face:
        won = action.number == self.secret
        return Face(hint=f"it was {self.secret}", reward=float(won), terminated=True)

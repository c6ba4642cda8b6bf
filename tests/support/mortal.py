"""BlackJack whose server is killed in the middle of a hand when the file named by MORTAL_ORDER exists."""

import os
import signal
from pathlib import Path
from typing import Any

from envs.blackjack_env.models import BlackjackAction, BlackjackObservation, BlackjackState
from envs.blackjack_env.server.environment import BlackjackEnvironment
from servers import create_app


class Mortal(BlackjackEnvironment):
    DETERMINISTIC = False  # otherwise its hands would be replayed on another worker

    def step(self, action: BlackjackAction, **options: Any) -> BlackjackObservation:
        order = Path(os.environ["MORTAL_ORDER"])
        if order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action, **options)


app = create_app(
    Mortal, BlackjackAction, BlackjackObservation, state_cls=BlackjackState, max_concurrent_envs=64
)

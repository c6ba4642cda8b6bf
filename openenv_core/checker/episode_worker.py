"""Plays episodes in an interpreter of its own: `python -m openenv_core.checker.episode_worker TARGET JOB OUT`.

The job is a file of JSON, `{"reset_options": {}, "episodes": [[seed, [action, ...]], ...]}`, and a list of episodes
is what comes out, in a file too: what the author's code prints cannot get in between.
"""

import json
import sys
from pathlib import Path

from openenv_core.apps import load_app
from openenv_core.checker.playing import LocalSession, play_here


def main(target: str, job: str, out: str) -> None:
    """Play each episode in an instance of its own."""
    served = load_app(target).served
    episodes = []
    told = json.loads(Path(job).read_text(encoding="utf-8"))
    for seed, actions in told["episodes"]:
        with LocalSession(served, told["reset_options"]) as session:
            episodes.append(play_here(session, seed, actions))
    Path(out).write_text(json.dumps(episodes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

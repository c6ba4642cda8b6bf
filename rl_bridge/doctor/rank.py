"""`python -m rl_bridge.doctor.rank JSON FD`: one process of a meeting.

It writes two lines of JSON to that descriptor: who is there, and what it measured. Standard output is for libraries,
which log there, NCCL above all.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import IO

from openenv_core.sandbox.kernel.libc import die_with_parent
from rl_bridge.doctor.roll_call import SAID, MeetingError, RankPlace


def main(place: RankPlace, answers: IO[str]) -> int:
    """Measure and write; returns 0, or 1 where the hosts are not those that were asked for."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != place.owner:
        return 1
    from rl_bridge.doctor.measuring import measure  # torch takes seconds, in which the owner may go

    def tell(**what: object) -> None:
        answers.write(json.dumps({"rank": place.rank, **what}) + "\n")
        answers.flush()

    try:
        measured = measure(place, heard=lambda hosts: tell(hosts=[asdict(facts) for facts in hosts]))
        tell(measured=measured)
    except MeetingError as error:
        sys.stderr.write(f"{SAID}{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w") as answers:
        sys.exit(main(RankPlace(**json.loads(sys.argv[1])), answers))

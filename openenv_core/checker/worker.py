"""Runs checks in a process of their own, for `isolation`: `python -m openenv_core.checker.worker FD`.

Checks import the environment and play it in their own process, so whatever it does to that process, it does here.
What to do comes as one line of JSON on standard input, what became of it goes as lines of JSON to FD. The end of
standard input is the end of whoever asked.
"""

import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NoReturn

from openenv_core.checker.catalogue import checks
from openenv_core.checker.runner import run_check
from openenv_core.checker.subject import CheckLimits, Subject
from openenv_core.targets import Target, TargetKind

TERMINATED: Final = 143

ORPHAN_CLEANUP_TIMEOUT_S: Final = 20.0
"""How long, in seconds, cleaning up may take once nobody waits for it."""


REMOVALS: Final = 5
"""How often temporary files are removed, at most: threads that were left behind may add to them meanwhile."""


def main() -> NoReturn:
    """Run the checks that standard input asks for."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal; whoever asked decides
    signal.signal(signal.SIGTERM, _terminated)
    told = json.loads(sys.stdin.buffer.readline())
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as out:
        threading.Thread(target=_watch, args=(told["temporary"],), name="openenv-owner", daemon=True).start()
        known = {one.name: one for one in checks()}
        folder = Path(told["folder"]) if told["folder"] else None
        target = Target(TargetKind(told["kind"]), told["text"], folder)
        try:
            with Subject(target, CheckLimits(**told["limits"]), token=told["token"]) as subject:
                for name in told["checks"]:
                    _say(out, begin=name)
                    _say(out, end=asdict(run_check(subject, known[name])))
        except BaseException:
            # What the check that was broken off kept there; whoever asked may be gone, and cannot remove it.
            _remove(told["temporary"])
            raise
        _say(out, finished=True)
    os._exit(0)  # threads that the environment left behind are nobody's to wait for


def _say(out: Any, **event: Any) -> None:
    out.write(json.dumps(event) + "\n")


def _terminated(*_: object) -> NoReturn:
    raise KeyboardInterrupt  # what no check and no environment is allowed to swallow


def _remove(temporary: str) -> None:
    for _ in range(REMOVALS):
        shutil.rmtree(temporary, ignore_errors=True)
        if not os.path.exists(temporary):
            return


def _watch(temporary: str) -> None:
    """End this process in order when whoever asked has gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ORPHAN_CLEANUP_TIMEOUT_S)
    _remove(temporary)
    os._exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(TERMINATED)

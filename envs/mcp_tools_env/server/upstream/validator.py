"""Validates arguments by JSON schemas, as a program: `validator.py CPU_S`.

Each line of standard input is the JSON `[schema, arguments]`. Each line of output is a list of messages, or null if the
arguments cannot be validated. A validation that takes more than CPU_S seconds of CPU time ends the process. The program
imports nothing of this package, so that it starts quickly.
"""

import json
import resource
import signal
import sys
from itertools import islice
from typing import Any, Final

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry

MAX_FAULTS: Final = 3
MAX_FAULT_CHARS: Final = 300
MAX_MEMORY_BYTES: Final = 1 << 30


def find_faults(schema: Any, arguments: Any) -> list[str]:
    """Return messages on what is wrong with the arguments; raises if the schema is invalid."""
    # An empty registry, so that nothing is fetched to resolve a reference.
    validator = validator_for(schema, Draft202012Validator)(schema, registry=Registry())
    return [_describe(error) for error in islice(validator.iter_errors(arguments), MAX_FAULTS)]


def _describe(error: ValidationError) -> str:
    place = ".".join(str(key) for key in error.absolute_path)
    text = error.message
    if len(text) > MAX_FAULT_CHARS:
        text = f"{text[:MAX_FAULT_CHARS]}..."
    return f"{place}: {text}" if place else text


def main() -> None:
    """Validate until standard input ends."""
    cpu_s = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
        try:
            faults = find_faults(*json.loads(line))
        except Exception:  # anything that a schema can cause: recursion, references elsewhere, no memory
            faults = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(faults) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

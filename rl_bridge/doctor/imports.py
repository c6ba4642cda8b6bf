"""Imports modules and reports failures: `python -m rl_bridge.doctor.imports PACKAGE=MODULE ...`.

Prints a line of JSON for each package that is installed.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence

from rl_bridge.errors import MissingDependencyError


def main(argv: Sequence[str]) -> None:
    """Import one after the other, in this process."""
    # The packages print to standard output while they are imported.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for argument in argv:
        package, _, module = argument.partition("=")
        if importlib.util.find_spec(package) is None:
            continue
        failure = ""
        try:
            importlib.import_module(module)
        except MissingDependencyError as error:  # from one of our modules
            failure = str(error)
        except Exception as error:  # a package that does not match another raises anything
            failure = str(MissingDependencyError.of_import(error))
        print(json.dumps({"package": package, "failure": failure}), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Prints the public members of the released names' classes, and the parameters of methods; the plan lists the names.

    class_members.py [hook] < {"MODULE": ["NAME", ...], ...}

With `hook` the names are those that Ropewalk provides. Modules that cannot be imported are left out.
"""

import inspect
import json
import sys
from enum import Enum
from importlib import import_module

from pydantic import BaseModel

if "hook" in sys.argv:
    from openenv_core import compat

    compat.install()


def parameters(function):
    try:
        return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    except (TypeError, ValueError):
        return []


members = {}
for module, names in json.load(sys.stdin).items():
    try:
        imported = import_module(module)
    except ImportError:
        continue
    for name in names:
        kind = getattr(imported, name, None)
        if isinstance(kind, type):
            inherited = {*dir(BaseModel), *dir(Enum), *dir(str)}
            members[f"{module}:{name}"] = {
                member: parameters(getattr(kind, member))
                for member in dir(kind)
                if member == "__init__" or not (member.startswith("_") or member in inherited)
            }
print(json.dumps(members))

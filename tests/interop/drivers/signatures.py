"""Says what functions and classes take and need: `signatures.py PATH ...`, where their package is installed."""

import inspect
import json
import sys
from functools import reduce
from importlib import import_module


def signature_of(path: str) -> dict[str, list[str]]:
    names = path.split(".")
    first = next(place for place, name in enumerate(names) if name[0].isupper())
    real = reduce(getattr, names[first:], import_module(".".join(names[:first])))
    plain = isinstance(real, type) and real.__init__ is Exception.__init__
    takes = {} if plain else inspect.signature(real).parameters
    fields = getattr(real, "model_fields", None) or getattr(real, "__dataclass_fields__", None) or {}
    return {
        "takes": [*takes, *fields],
        "needs": [
            key for key, each in takes.items() if each.default is each.empty and each.kind != each.VAR_KEYWORD
        ],
    }


print(json.dumps({path: signature_of(path) for path in sys.argv[1:]}))

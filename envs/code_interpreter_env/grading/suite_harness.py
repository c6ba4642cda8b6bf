"""The test harness that runs in the sandbox, next to the submission. `kinds` reads it as text; it is never imported.

All names begin with an underscore. Everything it uses is imported before the submission can replace it.
"""

# mypy: ignore-errors

import builtins as _builtins
import importlib as _importlib
import sys as _sys
import threading as _threading

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_HOLDERS = (list, tuple, set, frozenset)


def _require_plain(value, kind_of=type, items=dict.items, error=AssertionError):
    kind = kind_of(value)
    for plain in _PLAIN:
        if kind is plain:
            return value
    for holder in _HOLDERS:
        if kind is holder:
            for item in value:
                _require_plain(item)
            return value
    if kind is dict:
        for key, item in items(value):
            _require_plain(key)
            _require_plain(item)
        return value
    raise error("expected a value of builtin types, got an instance of another class")


def _import_submission(module, needed):
    _sys.path.insert(0, "")
    for name in needed:
        _importlib.import_module(name)
    modules_before = {
        name: (loaded, dict(vars(loaded)))
        for name, loaded in list(_sys.modules.items())
        if _has_names(loaded)
    }
    meta_path, path_hooks = list(_sys.meta_path), list(_sys.path_hooks)
    try:
        _importlib.import_module(module)
    except SystemExit as error:
        raise RuntimeError("the submission ended the interpreter while it was imported") from error
    finally:
        _sys.settrace(None)
        _sys.setprofile(None)
        _threading.settrace(None)
        _threading.setprofile(None)
        _sys.meta_path[:], _sys.path_hooks[:] = meta_path, path_hooks
        for name, (loaded, names) in modules_before.items():
            _restore_module(name, loaded, names)


def _has_names(module):
    # Skip this namespace, which is also the submission's, and sys, whose streams change with every call.
    return type(module) is type(_sys) and module is not _sys and vars(module) is not globals()


def _restore_module(name, module, names):
    _sys.modules[name] = module
    current = vars(module)
    for key, value in names.items():
        if current.get(key) is not value and not (module is _builtins and key == "_"):
            current[key] = value


def _run_one_test(source, name, token):
    namespace = {"__name__": "tests", "__builtins__": _builtins, "plain": _require_plain}
    exec(compile(source, "<tests>", "exec"), namespace)
    outcome = namespace[name]()
    if type(outcome).__name__ == "coroutine":
        import asyncio

        asyncio.run(outcome)
    return token[::-1]

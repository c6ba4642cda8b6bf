"""The wire protocol: the only package that knows its JSON keys.

`frames` has requests and replies of the released dialect, `batch` those that `ropewalk.v1` adds, `errors` the released
error codes and `jsonio` the JSON encoder. `http`, `jsonrpc` and `toolcalls` are other encodings of them.
"""

"""The wire protocol: the only package that knows its JSON keys.

`requests` encodes and decodes frames of clients, `replies` those of servers, `errors` has the released error codes and
`jsonio` the JSON encoder. `http`, `jsonrpc` and `toolcalls` are other encodings of requests and replies.
"""

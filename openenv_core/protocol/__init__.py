"""The wire: the only place that knows the keys of its JSON.

`requests` writes and reads what clients send, `replies` what servers send, `errors` names the released error codes,
`jsonio` says what may be inside. `http`, `jsonrpc` and `toolcalls` are the wire's other dialects.
"""

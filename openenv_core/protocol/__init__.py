"""The wire: the only place that knows the keys of its JSON.

`requests` writes and reads what clients send, `replies` what servers send, `codes` names the released
error codes, `jsonio` says what may be inside. Whatever speaks another dialect stands beside these files.
"""

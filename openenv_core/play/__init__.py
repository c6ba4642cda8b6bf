"""Stepping any environment from a terminal: nothing is known of it but its server's JSON schemas.

- `form`, `values`: what an action is made of, and text turned into it;
- `show`: observations as lines;
- `game`: episodes and their return, over a client;
- `prompts`, `loop`: a person, or lines on standard input; `unattended`: actions that are known before.
"""

"""The policy as a service: vLLM in an actor's process or beside it, or a server; and the caller's side of it."""

"""The policy as a service: vLLM in an actor's process or its own, or a remote server; and the client."""

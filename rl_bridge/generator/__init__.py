"""The policy as a service: vLLM inside an actor, and the caller's side that batches prompts for it."""

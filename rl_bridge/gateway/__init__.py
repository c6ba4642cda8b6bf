"""An endpoint for agents: they call the policy as a language model, and every token is recorded for training."""

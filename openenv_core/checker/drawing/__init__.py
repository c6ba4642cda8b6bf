"""Valid actions, and values that a JSON schema allows."""

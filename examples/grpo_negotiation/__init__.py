"""GRPO on the negotiation: a published chat model learns to reach agreements with a frozen copy of itself."""

"""A published chat model learns to answer questions of reasoning-gym."""

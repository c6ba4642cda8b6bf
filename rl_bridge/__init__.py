"""The bridge from environments to reinforcement learning of language models.

Logic lives in plain classes that run without Monarch; the actors are thin shells around them. Nothing
heavy is imported here: torch, vllm, monarch and torchtitan load in the files that use them.
"""

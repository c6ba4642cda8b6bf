"""The bridge from environments to reinforcement learning of language models.

The logic lives in plain classes that run without Monarch; actors are thin wrappers around them. Nothing
heavy is imported here: torch, vllm, monarch and torchtitan are imported by the files that use them.
"""

"""What the tests of containers share: an engine, and an image that misbehaves."""

from docker_engine import engine, hostile_image

__all__ = ["engine", "hostile_image"]

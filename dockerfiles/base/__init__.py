"""The base image; `ropewalk build base` makes it."""

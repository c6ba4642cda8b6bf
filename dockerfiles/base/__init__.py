"""The base image, built by `ropewalk build base`."""

"""Dockerfiles as package data, for `ropewalk build`."""

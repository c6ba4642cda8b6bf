"""Measurements that are run by hand; each is one command."""

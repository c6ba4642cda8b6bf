"""Tests: a package, so that relative imports find the environment wherever its folder is."""

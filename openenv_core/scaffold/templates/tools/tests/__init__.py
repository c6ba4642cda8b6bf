"""Tests: a package, so that they can name the environment by relative imports wherever its folder is."""

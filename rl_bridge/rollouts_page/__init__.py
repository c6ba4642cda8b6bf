"""The page that rollouts are read on: one file of HTML, which asks nobody for anything."""

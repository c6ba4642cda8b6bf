"""A language model learns to query a database with tools; the run is `config.yaml` in this folder."""

"""A language model learns to write small programs; the run is `config.yaml` in this folder."""

"""A language-model policy learns to write small programs, by `config.yaml` in this folder."""
